// The core loop: the one thread that owns the expert tables, leases and policies. Each turn it takes finished
// reads, the lanes' records, and what other threads posted; feeds the brain; carries out the brain's
// commands; waits. The waiting ends by a doorbell of a client, a finished read, a posted call, or a tick.
// Thread: start, stop and call() from any thread but its own; everything else runs on the loop.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <future>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "daemon/base/ids.h"
#include "daemon/base/result.h"
#include "daemon/config/config.h"
#include "daemon/ipc/comparison.h"
#include "daemon/ipc/daemon_control.h"
#include "daemon/ipc/gpu_service.h"
#include "daemon/ipc/grace.h"
#include "daemon/ipc/reads.h"
#include "daemon/ipc/ring_reader.h"
#include "daemon/ipc/routing_tap.h"
#include "daemon/ipc/scrubber.h"
#include "daemon/ipc/session.h"
#include "daemon/ipc/shadows.h"
#include "daemon/ipc/shared_model.h"
#include "daemon/ipc/use_counts.h"
#include "daemon/ipc/user_limits.h"
#include "daemon/ipc/warm_start.h"
#include "daemon/platform/device.h"
#include "daemon/platform/epoll.h"
#include "daemon/platform/eventfd.h"
#include "daemon/policy/policy_libraries.h"
#include "daemon/residency/brain.h"
#include "daemon/tier/ssd_tier.h"

namespace moecached {

class Core {
 public:
  static Result<std::unique_ptr<Core>> create(const Config& config, std::uint64_t boot_epoch);
  ~Core();
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  void start();
  void stop();  // joins; sessions are dropped, clients go on with what is resident

  // Runs fn on the loop and returns its result.
  template <typename F>
  auto call(F fn) -> decltype(fn(*this)) {
    std::promise<decltype(fn(*this))> promise;
    auto future = promise.get_future();
    post([&] { promise.set_value(fn(*this)); });
    return future.get();
  }

  // -- on the loop only, through call()
  // Shards of a model as descriptors: finds a registered model with the same files, or adds the files. The
  // caller then reads the layout (slow, off the loop) and calls finish_model.
  struct ModelFiles {
    std::shared_ptr<SharedModel> existing;
    std::vector<FileIdentity> identity;
    std::vector<FileId> files;
    std::uint32_t direct_alignment = 0;
    std::uint64_t bytes_max = std::numeric_limits<std::uint64_t>::max();  // what the user may still take
    Gpu* gpu = nullptr;                                                   // of a spill model
  };
  // session: who asks, whose user's limits count; 0: the control plane, here and below. gpu: of a spill
  // model; a model in RAM alone is another one.
  Result<ModelFiles> begin_model(std::vector<UniqueFd> shards, SessionId session, Gpu* gpu = nullptr);
  Result<std::shared_ptr<SharedModel>> finish_model(ModelFiles files, Result<ModelLayout> layout,
                                                    std::string name, WarmStart warm);
  // A spill model that these two have returned is not dropped until now, though no session has opened it:
  // preparing it takes seconds. One that could not be prepared goes.
  void spill_prepared(SharedModel& model);
  // Returns the stream segment of this model in this session: `stream`, or the one of an earlier open.
  Result<std::shared_ptr<Memfd>> open_in_session(SessionId session, const std::shared_ptr<SharedModel>& model,
                                                 std::shared_ptr<Memfd> stream);
  // The same for a model on a GPU; in between, GpuModel::create allocates.
  struct GpuModelFiles {
    std::shared_ptr<GpuModel> existing;
    std::shared_ptr<ExpertRam> ram;  // of the same model on another GPU; or null
    ModelFiles files;
    ModelId id;  // for the model to be made
  };
  Result<GpuModelFiles> begin_gpu_model(std::vector<UniqueFd> shards, const GpuId& gpu, SessionId session);
  // Whether the session's user may have a model with so much pinned memory, or with `shared` if there is
  // that.
  [[nodiscard]] Status may_pin(SessionId session, std::uint64_t bytes, const ExpertRam* shared) const;
  // Takes the model, or the fault that kept it from being made.
  Result<std::shared_ptr<GpuModel>> finish_gpu_model(const ModelFiles& files,
                                                     Result<std::shared_ptr<GpuModel>> model, WarmStart warm);
  bool drop_idle_gpu_model();  // that no session uses; the one idle for longest
  Result<std::shared_ptr<Memfd>> open_gpu_in_session(SessionId session, Session::OpenedGpu opened);
  // The model, if the session has opened it.
  [[nodiscard]] std::shared_ptr<GpuModel> gpu_model_of(SessionId session, std::uint32_t model) const;
  [[nodiscard]] GpuService& gpu() { return gpu_; }
  // The same for a spill model.
  [[nodiscard]] std::shared_ptr<SharedModel> spill_model_of(SessionId session, std::uint32_t model) const;
  [[nodiscard]] SessionId new_session_id() { return SessionId(next_session_id_.fetch_add(1)); }  // any thread
  Status add_session(const std::shared_ptr<Session>& session);
  // The model that a stream is to route to; one of the two. 0: the only one there is. kNotFound, kInvalid.
  struct RouteModel {
    std::shared_ptr<SharedModel> ram;
    std::shared_ptr<GpuModel> gpu;
  };
  [[nodiscard]] Result<RouteModel> find_route_model(std::uint32_t model) const;
  void session_hung_up(SessionId session);

  [[nodiscard]] std::vector<ModelReport> model_reports() const;
  [[nodiscard]] std::vector<SessionReport> session_reports() const;
  [[nodiscard]] StatusReport status_report() const;
  [[nodiscard]] std::vector<Finding> findings() const;
  // In one step, between two turns: no event is decided by half of it.
  Result<std::string> set_policy(const PolicyTarget& target, const std::string& spec);
  [[nodiscard]] Status check_policy(const std::string& spec) const;  // whether it can be made
  [[nodiscard]] std::vector<PolicyReport> policy_reports() const;
  [[nodiscard]] PolicyLibraries& policy_libraries() { return policy_libraries_; }
  [[nodiscard]] std::string default_policy() const { return config_.policy; }
  Status drop_model(std::uint32_t model);
  // Use counts that are to be saved.
  [[nodiscard]] std::vector<UseCounts::Saved> take_uses() { return uses_.take_changed(); }
  // Any thread.
  [[nodiscard]] WarmthStore& warmth() { return warmth_; }
  // The one that is meant: 0 the only one there is. `what`: that is to be done to it. kNotFound, kInvalid.
  [[nodiscard]] Result<std::uint32_t> resolve_model(std::uint32_t wanted, const std::string& what) const;
  // The layers that a list for this model must fit; empty: no such model.
  [[nodiscard]] std::vector<BlockShape> block_shapes(std::uint32_t model) const;
  // Seeds the policy and loads the hottest into free slots, in the background. Experts to be loaded.
  // REQUIRES: the list fits. kNotFound.
  Result<std::uint64_t> prewarm(std::uint32_t model, const UseList& list);
  // -- challengers. What ShadowSet::make needs; kInvalid: no slots yet. In between, it allocates.
  struct ShadowBasis {
    ModelShape shape;
    MissMode mode = MissMode::kPool;
  };
  Result<ShadowBasis> shadow_basis(std::uint32_t model) const;
  Status start_shadows(std::unique_ptr<ShadowSet> set);
  void stop_shadows(std::uint32_t model) { shadows_.stop(ModelId(model)); }
  Result<ShadowSnapshot> shadow_snapshot(std::uint32_t model) const;
  // model 0: the only one there is. kNotFound, kInvalid (several), kLimit (recordings).
  Result<RoutingRecording> open_recording(std::uint32_t model);
  void close_recording(const std::shared_ptr<RoutingTap>& tap) { taps_.close(tap); }
  // -- what the scrubber asks and tells
  [[nodiscard]] std::vector<std::shared_ptr<SharedModel>> pools() const;
  // Reads the expert's parts from the model's files into `to`, one behind the other, behind all reads that
  // somebody waits for. False: the model is gone, or its files are not what they were.
  bool read_again(const std::shared_ptr<SharedModel>& model, LayerIndex layer, ExpertIndex expert,
                  const std::shared_ptr<FileCopy>& to);
  void slot_is_wrong(const std::shared_ptr<SharedModel>& model, WrongSlot wrong);
  void file_is_unsteady(const std::shared_ptr<SharedModel>& model, LayerIndex layer, ExpertIndex expert);

 private:
  // epoll user data: what woke the loop; the session's id lies above the two bits.
  enum : std::uint64_t { kWakePost = 0, kWakeSsd = 1, kWakeDoorbell = 2, kWakePidfd = 3 };
  // A lane that keeps others waiting for this long, and neither begins nor ends an epoch, counts as stalled.
  static constexpr std::uint64_t kStallAfterNs = 100'000'000;
  struct Lane {
    std::uint64_t key = 0;  // session id * lanes + index
    LaneId id;
    std::shared_ptr<SharedModel> model;
    moecached_shm_lane* words = nullptr;
    std::unique_ptr<RingReader> ring;
    std::shared_ptr<LabelUses> uses;  // of the session's label
    bool lease_pending = false;
    std::uint64_t stalled_since_ns = 0;
    std::uint64_t stalled_begun = 0;
    // What the lane said it uses in its latest epoch.
    std::uint64_t use_epoch = 0;
    LayerIndex use_layer;
    std::vector<ExpertIndex> use_ids;
  };
  struct SessionState {
    std::shared_ptr<Session> session;
    std::array<std::unique_ptr<Lane>, MOECACHED_MAX_LANES> lanes;
    std::uint64_t records_closed = 0;  // of lanes that are closed
  };

  Core(const Config& config, std::uint64_t boot_epoch, std::unique_ptr<SsdTier> ssd,
       std::unique_ptr<Device> device, EventFd wake, Epoll epoll, std::vector<std::unique_ptr<Gpu>> gpus,
       std::string no_gpu_reason);
  void post(std::function<void()> fn);
  void run();
  void wait();
  void run_posts();
  void drain_reads();
  void drain_session(SessionState& state);
  bool sync_lane(SessionState& state, std::uint32_t index);
  void close_lane(SessionState& state, std::uint32_t index);
  void drain_lane(SessionState& state, Lane& lane);
  void handle_message(SessionState& state, Lane& lane, const LaneMessage& message);
  void handle_stream(SessionState& state, Lane& lane, const LaneMessage& message);
  void advance_epochs();
  void watch_stalls();
  void watch_policy_libraries();
  [[nodiscard]] static bool has_stalled(Lane& lane, std::uint64_t now);
  [[nodiscard]] std::span<const ExpertIndex> may_use(const Lane& lane, LayerIndex layer);
  void carry_out_commands();
  void read_wrong_slots_again();
  void scrub_findings(std::vector<Finding>* out) const;
  void trade_slots(SharedModel& model, LayerIndex busy);
  void release(SharedModel& model, LayerIndex layer, SlotIndex slot);
  void tell_open(SharedModel& model) const;
  void load_planned();
  void shadow(const Lane& lane, const LaneMessage& message, Phase phase, std::uint64_t hits_before);
  [[nodiscard]] std::uint64_t hits_of(const Lane& lane, LayerIndex layer) const;
  void prewarm_for_label(ModelId model, const std::string& label);
  void finish_stream(const ReadTable::StreamDone& done);
  // -- spill models (core_spill.cc)
  void turn_device_slots(std::uint64_t now);
  void device_work_done(SharedModel& model, const VramSlots::Done& done, std::uint64_t now);
  [[nodiscard]] GpuService::SpillUse spill_use(const Gpu& gpu) const;  // of all spill models
  void add_device_slots(SharedModel& model, std::uint64_t now);
  void device_slots_added(SharedModel& model, std::uint64_t now);
  void open_device_slots(SharedModel& model);
  void rise(Lane& lane, const LaneMessage& message, Phase phase);
  void start_device_copy(SharedModel& model, const Command& command);
  void spill_findings(const ModelReport& model, const std::string& subject, std::vector<Finding>* out) const;
  static void answer_stream(Lane& lane, std::uint32_t half, std::uint32_t seq, GrantStatus status);
  void grant(Lane& lane, std::uint32_t seq, GrantStatus status);
  [[nodiscard]] UserUse use_of(std::uint32_t uid) const;
  // What this memory adds to the use of a user, who may have it already for another GPU.
  [[nodiscard]] std::uint64_t bytes_more(std::uint32_t uid, const ExpertRam& ram) const;
  // Whether the session's user may open a model, of which `files` and `bytes` count if it has not opened it
  // yet.
  [[nodiscard]] Status may_open(const Session& session, std::uint32_t model, UserUse of_model) const;
  void reap_sessions();
  void release_session(SessionState& state);
  [[nodiscard]] Lane* find_lane(std::uint64_t key);
  [[nodiscard]] std::shared_ptr<SharedModel> find_model(ModelId id) const;
  [[nodiscard]] std::shared_ptr<SharedModel> find_model(const ModelFiles& files) const;  // with these files
  [[nodiscard]] std::uint64_t reserved_bytes() const;
  [[nodiscard]] static bool is_stalled(const Lane& lane);
  Result<ModelFiles> add_files(std::vector<UniqueFd> shards, ModelFiles out);
  void remove_files(const ModelFiles& files);
  bool drop_idle_model(std::uint64_t* freed);
  void erase_model(std::uint32_t id);
  [[nodiscard]] bool waiting_on_lanes() const;
  [[nodiscard]] bool reads_ahead() const;

  Config config_;
  const std::uint64_t boot_epoch_;
  std::unique_ptr<SsdTier> ssd_;
  std::unique_ptr<Device> device_;
  EventFd wake_;
  Epoll epoll_;
  std::thread thread_;
  std::mutex posts_mutex_;
  std::vector<std::function<void()>> posts_;
  std::atomic<bool> stopping_{false};

  PolicyLibraries policy_libraries_;  // outlives the brains
  Brain brain_{&policy_libraries_};
  ReadTable reads_;
  RoutingTaps taps_;
  UseCounts uses_;
  Shadows shadows_;
  WarmthStore warmth_;
  std::map<std::uint32_t, PrewarmPlan> plans_;  // by model; those that are not done
  GpuService gpu_;
  std::vector<int> gpu_fds_;  // of gpu_, in epoll_
  GraceTracker grace_;
  std::map<std::uint64_t, SessionState> sessions_;
  std::map<std::uint32_t, std::shared_ptr<SharedModel>> models_;
  std::map<std::uint32_t, std::pair<std::uint64_t, std::uint32_t>> lane_places_;  // LaneId -> session, index
  std::vector<std::uint32_t> free_lane_ids_;
  std::uint32_t next_lane_id_ = 0;
  std::uint32_t next_model_id_ = 1;
  std::atomic<std::uint64_t> next_session_id_{1};
  std::uint64_t turn_ = 0;
  std::uint64_t last_record_ns_ = 0;
  std::uint64_t last_sweep_ns_ = 0;
  bool release_failed_ = false;                             // and it was said
  std::vector<std::pair<ModelId, WrongSlot>> wrong_slots_;  // that are still to be read again
  std::vector<std::uint64_t> rung_;                         // sessions whose doorbell rang this turn
  // Scratch, reused.
  std::vector<ReadTable::SlotDone> slot_done_;
  std::vector<ReadTable::StreamDone> stream_done_;
  std::vector<ReadTable::BulkDone> bulk_done_;
  std::vector<VramSlots::Done> device_done_;
  std::vector<Session*> session_list_;
  std::vector<GraceTicket> tickets_, grace_done_;
  std::vector<GraceLane> grace_lanes_;
  std::vector<std::pair<std::uint64_t, GraceTicket>> stalled_;
  std::vector<ExpertIndex> all_experts_;
};

}  // namespace moecached
