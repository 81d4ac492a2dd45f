// One connection to one daemon start: handle socket, session segment, doorbell, and the lane blocks in the
// segment. A reconnect makes a new Connection; this one then goes away with its mappings. Thread:
// connected(), check_alive(), ring_doorbell() from any; everything else under the session's lock. Memory:
// owns descriptors and the session segment; lane blocks stay valid as long as the connection.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "client/include/moecached/moecached.h"
#include "client/src/handle_socket.h"
#include "client/src/resources.h"
#include "client/src/segments.h"

namespace moecached::client {

class HostRegistration;

// What a lane's `tail` counts, records or epochs. A block keeps its meaning for good: the daemon's word
// outlasts the lane.
enum class LaneUse { kNone, kRing, kGpuLog };

// One lane's place in the session segment, with the numbers that must go on from one lane using it to the
// next: the daemon may still answer a request of the lane before.
struct LaneBlock {
  moecached_shm_lane* words = nullptr;
  std::uint32_t index = 0;
  bool in_use = false;
  LaneUse use = LaneUse::kNone;
  std::uint64_t epoch = 0;        // the last one begun
  std::uint64_t head = 0;         // records published
  bool lease_unanswered = false;  // the last LEASE was given up
  std::uint32_t lease_seq = 0;    // of the last LEASE posted
  std::uint32_t stream_seq[2] = {0, 0};
  std::uint64_t stuck_tail = UINT64_MAX;  // `tail` when the daemon was last given up with the ring full
};

class Connection {
 public:
  struct Options {
    std::string socket_path;
    std::string label;                   // for people
    std::chrono::milliseconds patience;  // how long a live daemon may leave a request unanswered
  };
  [[nodiscard]] static moecached_status open(const Options& options, std::unique_ptr<Connection>* out);

  struct OpenedModel {
    std::uint32_t model_id = 0;
    std::uint64_t model_bytes = 0, pool_bytes = 0, stream_bytes = 0;
    UniqueFd model, pool, stream;
  };
  // `name` is for people. The daemon reads the files' headers meanwhile, so this may take seconds.
  [[nodiscard]] moecached_status open_model(const char* name, std::span<const UniqueFd> files,
                                            OpenedModel* out);
  // The same for a model that spills from a GPU. The daemon pins its pool meanwhile, so this may take a minute.
  [[nodiscard]] moecached_status open_spill_model(const char* name, std::span<const std::uint8_t> uuid,
                                                  std::span<const UniqueFd> files, OpenedModel* out);

  struct OpenedGpuModel {
    std::uint32_t model_id = 0;
    std::uint32_t host_memory = 0;  // moecached_host_memory, not checked
    std::uint64_t model_bytes = 0, log_bytes = 0;
    UniqueFd model, log, table;
  };
  struct GpuOpen {
    const char* name = "";
    std::span<const std::uint8_t> uuid;
    std::uint32_t flags = 0;  // moecached_gpu_open_flags
    const char* no_peers_reason = "";
  };
  // As open_model. The daemon allocates pinned memory for all experts meanwhile, so this may take a minute.
  [[nodiscard]] moecached_status gpu_open(const GpuOpen& wanted, std::span<const UniqueFd> files,
                                          OpenedGpuModel* out);
  // A little memory of each GPU whose slots the one with this UUID may come to read.
  [[nodiscard]] moecached_status gpu_probe(std::span<const std::uint8_t> uuid, std::vector<UniqueFd>* out);

  struct GpuFetch {
    std::uint32_t model_id = 0;
    moecached_gpu_memory memory = MOECACHED_GPU_MEMORY_HOST;
    std::uint32_t first = 0;
    std::uint32_t count = 0;
  };
  // The descriptors of handles `first` up to at most `count` more: one reply, at least one descriptor. The
  // caller comes again for the rest, so that no more than MOECACHED_FETCH_MAX are open at a time.
  [[nodiscard]] moecached_status gpu_fetch(const GpuFetch& wanted, std::vector<UniqueFd>* out);

  // Takes a free lane block and opens it for the model. MOECACHED_E_REFUSED: all are in use.
  [[nodiscard]] moecached_status take_lane(std::uint32_t model_id, LaneBlock** out) {
    return take_lane(model_id, LaneUse::kRing, out);
  }
  [[nodiscard]] moecached_status take_lane(std::uint32_t model_id, LaneUse use, LaneBlock** out);
  // Ends the lane's epoch and frees its block.
  void give_back_lane(LaneBlock* block) noexcept;

  [[nodiscard]] std::uint64_t boot_epoch() const noexcept { return boot_epoch_; }
  [[nodiscard]] std::uint32_t n_lanes() const noexcept { return static_cast<std::uint32_t>(lanes_.size()); }
  [[nodiscard]] std::chrono::milliseconds patience() const noexcept { return patience_; }

  // What is known, without asking: one load.
  [[nodiscard]] bool connected() const noexcept { return connected_.load(std::memory_order_relaxed); }
  // Asks the kernel; once the daemon is gone the answer stays false. One system call.
  bool check_alive() noexcept;
  void ring_doorbell() noexcept;

  // The session segment as GPUs see it, shared by the models on GPUs that are open in this session, and gone
  // with the last of them. CUDA registers a range of memory once, however many models need it.
  [[nodiscard]] const Mapping& segment() const noexcept { return segment_; }
  [[nodiscard]] std::weak_ptr<HostRegistration>& registration() noexcept { return registration_; }

 private:
  Connection() = default;
  [[nodiscard]] moecached_status receive_opened(int timeout_ms, OpenedModel* out);

  HandleSocket socket_;
  UniqueFd doorbell_;
  Mapping segment_;
  std::weak_ptr<HostRegistration> registration_;
  std::vector<LaneBlock> lanes_;
  std::uint64_t boot_epoch_ = 0;
  std::chrono::milliseconds patience_{0};
  std::atomic<bool> connected_{true};
};

}  // namespace moecached::client
