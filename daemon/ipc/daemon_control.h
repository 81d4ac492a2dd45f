// What the control plane (gRPC handlers, main) may ask of the running daemon. Handlers translate and call
// this, nothing else; the implementation posts to the core loop and waits for its answer. Thread: any.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "daemon/base/result.h"
#include "daemon/ipc/comparison.h"
#include "daemon/ipc/route_lane.h"
#include "daemon/ipc/routing_tap.h"
#include "daemon/tier/ssd_tier.h"

namespace moecached {

struct LayerReport {
  std::uint32_t block = 0;
  std::uint32_t n_experts = 0, n_slots = 0, resident = 0;
  std::uint32_t slot_class = 0;
  std::uint64_t slot_bytes = 0;
  std::uint64_t lookups = 0, hits = 0, misses = 0, insertions = 0, evictions = 0, read_failures = 0;
  std::uint64_t leases = 0, leases_queued = 0;
  // Of a model that spills: resident are those in RAM, hits those in either.
  std::uint32_t device_slots = 0, device_resident = 0;
  std::uint64_t device_hits = 0, rises = 0, swaps = 0;
  std::uint64_t prefetched = 0, prefetch_used = 0, prefetch_late = 0, prefetch_wasted = 0,
                prefetch_regretted = 0;
};

struct LeftOutReport {
  std::string tensor, reason;
};

struct ModelReport {
  std::uint32_t id = 0;
  std::string name;  // general.name or the file name
  std::string architecture;
  std::string policy;
  std::uint32_t sessions = 0;
  std::uint32_t n_expert_used = 0;
  std::uint64_t expert_bytes_total = 0;  // in the file
  std::uint64_t pool_bytes = 0;          // reserved
  std::uint64_t pool_bytes_backed = 0;   // in memory now
  bool changed_on_disk = false;
  std::uint64_t bytes_read = 0;  // into slots
  std::uint64_t streamed_parts = 0, streamed_bytes = 0;
  std::string prefetch = "off";  // or "learning", "probing", "on", "paused" (name_of PrefetchState)
  std::uint32_t coming = 0;      // experts that wait for a slot or are being read
  // On a GPU: pool_bytes is pinned memory, lookups and hits are of device slots that kernels read.
  std::string device = "host";       // or the GPU's UUID
  bool spills = false;               // VRAM and RAM (pool_bytes) hold a part of it
  bool loading = false;              // pinned memory does not hold every expert yet
  std::uint64_t device_bytes = 0;    // device memory for slots
  std::uint64_t bytes_uploaded = 0;  // into device slots
  std::uint64_t bytes_demoted = 0;   // out of device slots into RAM
  std::uint64_t upload_ns = 0;       // time in which copies to this GPU were under way, of all its models
  std::uint64_t bytes_in_place = 0;  // of missing experts, read by kernels over the link
  // Slots on other GPUs that its kernels read; those hits are part of hits.
  std::vector<std::string> peers;  // UUIDs
  std::uint64_t peer_hits = 0, bytes_from_peers = 0;
  std::uint64_t epochs = 0;  // graphs computed
  // By the scrubber: times that a slot was compared with its file, and did not hold its bytes.
  std::uint64_t slots_checked = 0, slots_corrupt = 0;
  std::vector<LayerReport> layers;
  std::vector<LeftOutReport> left_out;
};

struct SessionReport {
  std::uint64_t id = 0;
  std::uint32_t pid = 0;  // as the kernel reports it; 0 across PID namespaces
  std::uint32_t uid = 0;
  std::string label;
  std::uint32_t lanes = 0;
  std::vector<std::uint32_t> models;
  std::uint64_t lookups = 0;  // as the client counts
  std::uint64_t records = 0, records_refused = 0, records_dropped = 0;
  std::uint64_t leases_pending = 0;
  std::uint64_t fallback_reads = 0, fallback_bytes = 0;
  bool stalled = false;  // holds an epoch that others wait for, and does not move
  double connected_seconds = 0;
};

struct StatusReport {
  std::string version;
  std::uint64_t boot_epoch = 0;
  std::uint32_t pid = 0;
  double uptime_seconds = 0;
  std::string control_socket, handle_socket;
  std::uint64_t pool_bytes_limit = 0, pool_bytes_reserved = 0, pool_bytes_backed = 0;
  std::uint32_t sessions = 0, models = 0;
  std::vector<std::string> devices;
  std::string tiers;  // as --tiers takes them
  std::string scrub;  // how often slots are compared with their files, for people
  SsdStats ssd;
};

// Whose policy is meant.
struct PolicyTarget {
  std::uint32_t model = 0;  // 0: all models of the tier, and those to come
  std::string tier =
      {};  // "ram", "gpu", a GPU's UUID (its models, not those to come); "": the model's, or ram
};

struct PolicyReport {
  std::string tier;         // "ram" or "gpu"
  std::uint32_t model = 0;  // 0: the default, for models to come
  std::string name;         // of the model
  std::string device;       // "host" or a GPU's UUID; empty: of a default
  std::string spec;
};

struct Finding {         // for `moecachectl doctor`
  std::string severity;  // "ok", "note", "warning", "error"
  std::string subject;   // "ssd", "memlock", "model 1", "session 3"
  std::string text;      // what was found and what to do
};

// A model as it was when the recording began, and where its routing arrives from then on.
struct RoutingRecording {
  ModelReport model;
  std::shared_ptr<RoutingTap> tap;
};

struct PrewarmReport {
  std::uint32_t model = 0;
  std::uint32_t layers = 0;   // of which the file has counts
  std::uint64_t experts = 0;  // being loaded into free slots
};

class DaemonControl {
 public:
  virtual ~DaemonControl() = default;
  virtual StatusReport status() = 0;
  virtual std::vector<ModelReport> models() = 0;
  virtual std::vector<SessionReport> sessions() = 0;
  virtual std::vector<Finding> doctor() = 0;
  // All models that are meant or none. Returns the policy as parsed. kInvalid, kNotFound: nothing was
  // changed.
  virtual Result<std::string> set_policy(const PolicyTarget& target, const std::string& spec) = 0;
  virtual std::string default_policy() = 0;  // of the RAM tier
  // The defaults of the tiers, then every model's.
  virtual std::vector<PolicyReport> policies() = 0;
  // Opens a model by path, as the daemon's user, so that it is laid out before the first client comes. Shards
  // in order. device: a GPU's UUID; empty: in RAM slots.
  virtual Result<std::uint32_t> register_model(const std::vector<std::string>& paths,
                                               const std::string& device) = 0;
  // Frees a model that no session uses. kNotFound, kInvalid (in use).
  virtual Status drop_model(std::uint32_t model) = 0;
  // Policy and free slots of a model start from the counts of a file (imatrix, moecounts-csv, hot list), read
  // as the daemon's user. model 0: the only one there is. kNotFound, kInvalid, kLimit, kUnsupported.
  virtual Result<PrewarmReport> prewarm(std::uint32_t model, const std::string& path) = 0;
  // Challengers of a model's policy, in place of earlier ones; none: it has no more. model 0: the only one
  // there is; the answer says which. kNotFound, kInvalid.
  virtual Result<std::uint32_t> shadow_policies(std::uint32_t model,
                                                const std::vector<std::string>& specs) = 0;
  virtual Result<PolicyComparison> compare_policies(std::uint32_t model) = 0;
  // Whoever opens a recording reads its tap and closes it. model 0: the only one there is. kNotFound,
  // kInvalid (several), kLimit.
  virtual Result<RoutingRecording> open_recording(std::uint32_t model) = 0;
  virtual void close_recording(const std::shared_ptr<RoutingTap>& tap) = 0;
  // A lane for a stream of decisions. It must be gone before the daemon is. kNotFound, kInvalid (several),
  // kLimit, kUnsupported.
  virtual Result<std::unique_ptr<RouteLane>> open_route(const RouteOpen& open) = 0;
};

}  // namespace moecached
