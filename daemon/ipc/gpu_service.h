// Models on GPUs, as part of the core loop: loads them into pinned RAM, adds device slots once a client's
// graphs have run, reads the logs of lanes, and promotes experts to device slots in the background, so that
// no token waits.
//
// A promotion: Brain::promote -> kUnpublish: flip the victim's entry to its host slot -> the flip is done on
// the GPU -> grace period of the lanes -> kRead: copy -> kPublish: flip the newcomer's entry to the slot.
// Covered mode: every entry is valid all the time, misses are read over the link by clients' kernels.
//
// Thread: core loop, unless said. Memory: bounded by limits.models, limits.sessions and the queue's room.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "daemon/config/config.h"
#include "daemon/ipc/daemon_control.h"
#include "daemon/ipc/gpu_model.h"
#include "daemon/ipc/grace.h"
#include "daemon/ipc/reads.h"
#include "daemon/ipc/routing_tap.h"
#include "daemon/ipc/session.h"
#include "daemon/ipc/shadows.h"
#include "daemon/ipc/upload_budget.h"
#include "daemon/ipc/use_counts.h"
#include "daemon/ipc/warm_start.h"
#include "daemon/platform/gpu.h"
#include "daemon/residency/brain.h"

namespace moecached {

class GpuService {
 public:
  // gpus: of list_gpus; those that config leaves out are dropped. `no_gpu_reason`: why there is none.
  GpuService(const Config& config, std::vector<std::unique_ptr<Gpu>> gpus, std::string no_gpu_reason,
             ReadTable& reads, RoutingTaps& taps, const PolicyLibraries& libraries, UseCounts& uses,
             Shadows& shadows);
  ~GpuService();
  GpuService(const GpuService&) = delete;
  GpuService& operator=(const GpuService&) = delete;

  // Any thread; the objects live as long as the service. kNotFound: the text names the GPUs there are.
  Result<Gpu*> find_gpu(const GpuId& id) const;
  // The GPU's place among those that can read each other's memory. Any thread.
  [[nodiscard]] GpuSections place_of(const Gpu& gpu) const;
  // Memory of each of them, for a client to try to map. Any thread.
  Result<std::vector<UniqueFd>> share_probes(const GpuId& id) const;

  // -- models
  [[nodiscard]] std::shared_ptr<GpuModel> find_model(std::span<const FileIdentity> identity,
                                                     const GpuId& gpu) const;
  // The same model's RAM on any other GPU; null if there is none.
  [[nodiscard]] std::shared_ptr<ExpertRam> find_ram(std::span<const FileIdentity> identity) const;
  [[nodiscard]] std::shared_ptr<GpuModel> find_model(std::uint32_t id) const;
  [[nodiscard]] std::size_t n_models() const { return models_.size(); }
  [[nodiscard]] bool has_devices() const { return !devices_.empty(); }
  // Starts to load it. kSystem: no queue for its GPU.
  Status add_model(const std::shared_ptr<GpuModel>& model, const WarmStart& warm);
  // As Core::prewarm; before there are device slots the list is kept for them, and 0 returned.
  Result<std::uint64_t> prewarm(ModelId model, const UseList& list);
  // kNotFound, kInvalid (in use). files: to be removed from the SSD tier.
  Status drop_model(std::uint32_t id, std::vector<FileId>* files);
  // Device slots by layer, and the policy; no layers: there are none yet.
  [[nodiscard]] ModelShape shape(ModelId model) const;
  [[nodiscard]] Brain& brain() { return brain_; }
  [[nodiscard]] const Brain& brain() const { return brain_; }
  bool drop_idle_model(std::vector<FileId>* files);
  void load_done(const ReadTable::BulkDone& done);
  // All of them or none.
  Status set_policy(std::span<const ModelId> models, const std::string& spec);

  // -- sessions
  void open_in_session(Session& session, Session::OpenedGpu opened);
  void release_session(Session& session);

  // -- the loop
  [[nodiscard]] std::vector<int> event_fds() const;  // readable: a turn has something to do
  void turn(std::uint64_t now_ns, std::span<Session* const> sessions);
  // Milliseconds until the next turn is wanted at the latest; -1: no wish.
  [[nodiscard]] int wanted_tick_ms() const;

  void report(std::vector<ModelReport>* models) const;
  void report(Session& session, SessionReport* out) const;
  void report_devices(std::vector<std::string>* devices) const;
  void findings(std::vector<Finding>* out) const;

  // -- device memory, of which spill models have some as well: each side counts what the other has, and one
  // allocates at a time.
  [[nodiscard]] std::uint64_t device_bytes(const Gpu& gpu) const;  // of all its models
  [[nodiscard]] bool is_allocating(const Gpu& gpu) const;
  struct SpillUse {
    std::uint64_t bytes = 0;
    bool is_allocating = false;
  };
  void set_spill_use(const Gpu& gpu, SpillUse use);
  // Tests that compare must notice that slots are reused while they are read.
  [[nodiscard]] bool tests_without_grace() const { return test_no_grace_; }

 private:
  struct Device;
  struct Entry;
  struct Lane;
  struct Pending;
  struct Peer;
  struct Path;

  [[nodiscard]] Device& device_of(const GpuModel& model);
  [[nodiscard]] Entry* find_entry(ModelId id);
  std::uint64_t add_pending(Pending pending);
  void drain_queues();
  void queue_done(Pending& pending, bool ok);
  void sync_lanes(std::span<Session* const> sessions);
  void close_lane(std::uint64_t key);
  void drain_lane(Lane& lane, std::uint64_t now_ns);
  void drain_log(Lane& lane, std::uint64_t epoch);
  [[nodiscard]] static bool wants_growth(const Entry& entry, std::uint64_t now_ns);
  [[nodiscard]] static std::vector<std::uint32_t> wanted_of(const Entry& entry);
  void start_growth(Entry& entry, std::uint64_t now_ns);
  struct Growth;
  void growth_done(Entry& entry, const Growth& growth);
  void slots_mapped();  // of the tickets in grown_
  void open_slots(Entry& entry);
  void promote(Entry& entry, std::uint64_t now_ns);
  void tell_costs(Entry& entry, std::uint64_t now_ns);
  void churn(Entry& entry);
  void start_prewarm(Entry& entry);
  [[nodiscard]] static ModelShape shape_of(const Entry& entry);
  void check_all_resident(Entry& entry);
  void find_groups();
  [[nodiscard]] bool may_read(const Entry& reader, const Entry& peer) const;
  [[nodiscard]] std::vector<Entry*> readers_of(const Entry& peer) const;
  double peer_rate(Entry& reader, const Entry& peer, std::uint64_t now_ns);
  void look_for_peers(std::uint64_t now_ns);
  void map_peer(Entry& reader, Entry& peer);
  void peer_mapped(Entry& reader, std::size_t index);
  void tell_brain_of_peers(const Entry& reader);
  void forget_peer(Entry& reader, const Entry& peer);
  [[nodiscard]] static std::int32_t best_entry(const Entry& entry, LayerIndex layer, ExpertIndex expert);
  struct Found {
    enum class Tier : std::uint8_t { kOwn, kPeer, kRam } tier = Tier::kRam;
    std::uint32_t expert = GpuModel::kNowhere;  // that a lane used when it reports the slot
  };
  [[nodiscard]] static Found find_slot(const Entry& entry, LayerIndex layer, std::int32_t slot);
  void repoint(Entry& entry, LayerIndex layer, ExpertIndex expert);
  void repoint_all(Entry& entry);
  void submit_repoints(Entry& entry);
  void repointed(Entry& entry);
  void hold_until_repointed(Entry& entry);
  void end_hold(Entry& entry);
  void unpublish(Entry& entry, const Command& command);
  void session_without_peers(Entry& entry, const std::string& reason);
  void session_without_peers_gone(Entry& entry);
  [[nodiscard]] bool has_stalled_lane(const Entry& entry, std::uint64_t now_ns) const;
  void watch_stalls(std::uint64_t now_ns);
  void carry_out_commands();
  void begin_grace(GraceTracker& tracker, const GraceTicket& ticket, std::vector<GraceTicket>* done);
  void submit(const GpuModel& model, GpuQueue::Job job, Pending pending);
  void lose(Device& device);

  const Config& config_;
  const std::string no_gpu_reason_;
  ReadTable& reads_;
  RoutingTaps& taps_;
  UseCounts& uses_;
  Shadows& shadows_;
  std::vector<std::unique_ptr<Device>> devices_;
  std::map<std::uint32_t, std::unique_ptr<Entry>> models_;
  std::map<std::uint64_t, std::unique_ptr<Lane>> lanes_;  // by key: session id * lanes + index
  std::vector<Session*> sessions_;                        // of this turn
  Brain brain_;
  GraceTracker grace_;
  GraceTracker growth_grace_;  // of models whose new slots some lane may not have mapped
  std::vector<std::unique_ptr<Pending>> pending_;
  std::vector<std::uint32_t> free_pending_;
  std::vector<std::uint32_t> free_lane_ids_;
  std::uint32_t next_lane_id_ = 0;
  std::uint64_t last_active_ns_ = 0;
  // For the stress test that shows what grace periods are for, and for the one that swaps as fast as it can.
  const bool test_no_grace_, test_churn_, test_spoil_;
  std::uint64_t churn_state_ = 88172645463325252u;
  // Scratch.
  std::vector<GpuQueue::Done> done_;
  std::vector<GraceTicket> grace_done_, grown_;
  std::vector<GraceLane> grace_lanes_;
  std::vector<ExpertIndex> experts_;
  std::vector<std::uint8_t> marks_;  // one per expert of the widest layer
};

// The log segment of a session for one model.
[[nodiscard]] Result<std::shared_ptr<Memfd>> make_log_segment(const GpuModel& model);

}  // namespace moecached
