// One lane of a client that has no shared memory, as the control plane sees it: decisions in, slots out. The
// lane behind it (remote_lane.h) does what a client's own lane would do. Thread: one at a time, that of the
// stream.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "daemon/base/result.h"

namespace moecached {

inline constexpr std::uint32_t kRouteIdsMax = 65536;    // of one decision: 8192 tokens of top 8
inline constexpr std::uint32_t kRouteChangesMax = 256;  // entries told with one answer

// How the client reads slots.
enum class RouteMemory : std::uint8_t {
  kNone,
  kPool,     // maps the pool by a path in /proc
  kCudaIpc,  // opens device memory by a CUDA IPC handle: of models on a GPU
};

struct RouteOpen {
  std::uint32_t model = 0;  // 0: the only one there is
  std::string label;        // any bytes
  RouteMemory memory = RouteMemory::kNone;
  std::uint32_t experts =
      0;  // kCudaIpc: distinct experts of one decision that there is to be room for; 0: of a token
};

struct RoutePart {
  std::string name;  // of the tensor
  std::uint32_t ggml_type = 0;
  std::uint64_t ne0 = 0, ne1 = 0;
  std::uint64_t expert_bytes = 0;
  std::uint64_t slot_offset = 0;
  std::uint32_t file = 0;
  std::uint64_t file_offset = 0;
};

// Part p of slot s lies at window_offset + s * slot_stride + parts[p].slot_offset.
struct RouteLayer {
  std::uint32_t block = 0;
  std::uint32_t n_experts = 0, n_slots = 0;
  std::uint64_t window_offset = 0, slot_stride = 0;
  std::vector<RoutePart> parts;
};

struct RoutePool {
  std::string path;
  std::uint64_t bytes = 0;
  std::uint64_t device = 0, inode = 0;  // what fstat says of it
};

struct RouteCudaIpc {
  std::string handle;  // 64 bytes
  std::uint64_t bytes = 0;
  std::string uuid;  // of the GPU
};

struct RouteGeometry {
  std::uint32_t model = 0;
  std::string name;
  std::uint64_t boot_epoch = 0;
  std::uint32_t n_expert_used = 0;
  std::vector<RouteLayer> layers;
  RoutePool pool;     // kPool
  RouteCudaIpc cuda;  // kCudaIpc
};

struct RouteDecision {  // every field as a client wrote it
  std::uint32_t layer = 0;
  std::span<const std::uint32_t> experts;  // of all tokens
  std::uint32_t n_tokens = 0;              // 0: 1
  bool prefill = false;
};

struct RouteChange {
  std::uint32_t expert = 0;
  std::int32_t slot = 0;  // or MOECACHED_ABSENT
};

struct RouteAnswer {
  std::vector<std::uint32_t> slots;  // parallel to the decision's experts
  std::uint32_t n_distinct = 0;
  std::uint32_t n_absent = 0;        // of them: not in a slot, so waited for, or on a GPU copied from RAM
  std::vector<RouteChange> changed;  // entries of the layer, since the lane last told of them
  bool has_more = false;
};

class RouteLane {
 public:
  virtual ~RouteLane() = default;  // nothing is used any more
  [[nodiscard]] virtual const RouteGeometry& geometry() const = 0;
  // Ends the use of what the last answer named. Returns when all experts are in their slots, where they stay
  // until the next call; or when `gone` says that nobody waits any more. kInvalid, kLimit (more than the
  // layer can hold now), kChanged, kSystem: nothing is held.
  [[nodiscard]] virtual Status decide(const RouteDecision& decision, const std::function<bool()>& gone,
                                      RouteAnswer* out) = 0;
  virtual void release() = 0;
  // The daemon stops, and ends the stream of a client that may still be reading slots: the destructor takes
  // nothing away from it. Nothing is moved any more once the core loop has stopped.
  virtual void leave_open() = 0;
};

}  // namespace moecached
