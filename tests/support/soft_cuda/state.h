// What the soft CUDA driver knows, for its source files alone: memory, contexts, and what tests have asked
// for. Thread: any; `mutex` guards all of it.
#pragma once

#include <cuda.h>
#include <sys/mman.h>

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tests/support/soft_cuda/entry.h"

namespace soft_cuda {

inline constexpr std::size_t kGranularity = std::size_t{2} << 20;
inline constexpr int kFresh = 0xa5;
inline constexpr int kDevicesMax = 8;

struct Allocation {
  int fd = -1;
  std::size_t bytes = 0;
  std::size_t counted = 0;  // against the VRAM of a device, in this process
  int device = -1;          // -1: host memory
  ~Allocation();
};

struct Piece {  // of a reservation
  std::size_t bytes = 0;
  std::shared_ptr<Allocation> allocation;
  int protection = PROT_NONE;
};

struct State {
  std::mutex mutex;
  std::array<std::size_t, kDevicesMax> vram_used{};
  std::map<CUmemGenericAllocationHandle, std::shared_ptr<Allocation>> handles;
  CUmemGenericAllocationHandle next_handle = 1;
  std::map<std::uintptr_t, std::size_t> reservations, registered;
  struct Linear {
    std::size_t bytes = 0;
    int device = 0;
    int fd = -1;  // of memory that has an IPC handle
  };
  std::map<std::uintptr_t, Linear> linear;
  std::map<std::uintptr_t, std::size_t> opened;  // by IPC handle
  std::map<std::uintptr_t, Piece> pieces;
  std::array<unsigned, kDevicesMax> contexts{};  // references to the primary context of each
  bool tracing = false;
  std::string trace;
  std::map<std::string, CUresult> failures;
  std::array<bool, kDevicesMax> lost{};
  struct {
    unsigned long long k = 0, seen = 0, failed = 0;
    bool each = false;
    CUresult result = CUDA_SUCCESS;
  } every;
  std::string held_function;  // whose next call waits
  bool holds = false;         // one waits
  std::condition_variable released;
};

State& state();

// What the environment says.
int n_devices();
std::size_t vram_total();
bool no_host_numa();
bool no_peers();

bool device_ok(CUdevice device);
CUcontext primary_context(CUdevice device);
bool is_context(CUcontext context);
extern thread_local std::vector<CUcontext> current;  // the last one is
// REQUIRES: a context is current.
std::size_t current_device();

// Whether [at, at + bytes) lies within one entry.
template <typename Map, typename Size>
bool within(const Map& ranges, std::uintptr_t at, std::size_t bytes, Size size) {
  auto next = ranges.upper_bound(at);
  if (next == ranges.begin()) return false;
  const auto& found = *std::prev(next);
  return at - found.first <= size(found.second) && bytes <= size(found.second) - (at - found.first);
}
inline std::size_t plain_size(std::size_t bytes) { return bytes; }

}  // namespace soft_cuda
