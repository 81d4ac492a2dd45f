// A CUDA driver made of host memory, for machines without a GPU: enough of libcuda.so.1 for daemon and client
// to run end to end, through the same calls in the same order. "Device memory" is a memfd, streams execute at
// once in the caller, events have always fired. It is stricter than it is clever: what the real driver
// refuses (a mapping of half an allocation, a call without a current context, memory registered twice) it
// refuses too, new device memory holds 0xA5, and access rights are those of mprotect, so that a write through
// a read-only mapping ends the process as it would on a GPU.
//
// Environment: SOFT_CUDA_DEVICES (1 to 8, 1), SOFT_CUDA_UUID (32 hex digits, dashes allowed: that of the
// first device, the last digit counts up), SOFT_CUDA_VRAM (bytes of each, 256 MiB), SOFT_CUDA_NO_HOST_NUMA=1
// (no cuMemCreate of HOST_NUMA memory), SOFT_CUDA_NO_PEERS=1 (no GPU reads another's memory). Thread: any;
// one lock guards the tables.
#include "tests/support/soft_cuda/soft_cuda.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "tests/support/soft_cuda/state.h"

namespace soft_cuda {
namespace {

struct Context {
} primary[kDevicesMax];

// Without the version that cuda.h's macros add.
std::string base_name(const char* function) {
  std::string name(function);
  const std::size_t suffix = name.rfind("_v");
  if (suffix != std::string::npos && suffix + 3 == name.size()) name.resize(suffix);
  return name;
}

}  // namespace

thread_local std::vector<CUcontext> current;

State& state() {
  static State* const forever = new State;  // threads may outlive static destructors
  return *forever;
}

Allocation::~Allocation() {
  if (fd >= 0) ::close(fd);
  if (counted > 0) state().vram_used[static_cast<std::size_t>(device)] -= counted;
}

int n_devices() {
  const char* text = std::getenv("SOFT_CUDA_DEVICES");
  return text == nullptr ? 1 : std::clamp(std::atoi(text), 1, kDevicesMax);
}

CUcontext primary_context(CUdevice device) { return reinterpret_cast<CUcontext>(&primary[device]); }

std::size_t vram_total() {
  const char* text = std::getenv("SOFT_CUDA_VRAM");
  const unsigned long long bytes = text != nullptr ? std::strtoull(text, nullptr, 0) : 0;
  return bytes > 0 ? bytes : std::size_t{256} << 20;
}

bool no_host_numa() {
  const char* text = std::getenv("SOFT_CUDA_NO_HOST_NUMA");
  return text != nullptr && std::strcmp(text, "1") == 0;
}

bool no_peers() {
  const char* text = std::getenv("SOFT_CUDA_NO_PEERS");
  return text != nullptr && std::strcmp(text, "1") == 0;
}

bool device_ok(CUdevice device) { return device >= 0 && device < n_devices(); }

bool is_context(CUcontext context) {
  const auto* given = reinterpret_cast<Context*>(context);
  return given >= primary && given < primary + n_devices();
}

std::size_t current_device() {
  return static_cast<std::size_t>(reinterpret_cast<Context*>(current.back()) - primary);
}

}  // namespace soft_cuda

using namespace soft_cuda;

// Notes the call; what a test has asked to fail, fails.
CUresult soft_cuda_enter(const char* function) {
  State& s = state();
  std::unique_lock lock(s.mutex);
  if (!s.held_function.empty() && s.held_function == base_name(function)) {
    s.held_function.clear();
    s.holds = true;
    s.released.wait(lock, [&s] { return !s.holds; });
  }
  if (s.tracing) s.trace.append(base_name(function)).push_back('\n');
  if (s.every.k > 0) {
    const unsigned long long n = ++s.every.seen;
    if (s.every.each ? n % s.every.k == 0 : n == s.every.k) {
      ++s.every.failed;
      return s.every.result;
    }
  }
  const auto failure = s.failures.find(base_name(function));
  if (failure == s.failures.end()) return CUDA_SUCCESS;
  const CUresult result = failure->second;
  s.failures.erase(failure);
  return result;
}

CUresult soft_cuda_enter_with_context(const char* function) {
  const CUresult result = soft_cuda_enter(function);
  if (result != CUDA_SUCCESS) return result;
  if (current.empty() || current.back() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  const std::lock_guard lock(state().mutex);
  return state().lost[current_device()] ? CUDA_ERROR_ECC_UNCORRECTABLE : CUDA_SUCCESS;
}

// -- for tests
void soft_cuda_trace_start(void) {
  const std::lock_guard lock(state().mutex);
  state().trace.clear();
  state().tracing = true;
}

const char* soft_cuda_trace_stop(void) {
  const std::lock_guard lock(state().mutex);
  state().tracing = false;
  return state().trace.c_str();
}

void soft_cuda_fail_next(const char* function, int result) {
  const std::lock_guard lock(state().mutex);
  state().failures[function] = static_cast<CUresult>(result);
}

void soft_cuda_fail_each(unsigned long long k, int each, int result) {
  const std::lock_guard lock(state().mutex);
  state().every = {
      .k = k, .seen = 0, .failed = 0, .each = each != 0, .result = static_cast<CUresult>(result)};
}

void soft_cuda_fail_counts(unsigned long long* seen, unsigned long long* failed) {
  const std::lock_guard lock(state().mutex);
  *seen = state().every.seen;
  *failed = state().every.failed;
}

void soft_cuda_hold_next(const char* function) {
  const std::lock_guard lock(state().mutex);
  state().held_function = function;
}

int soft_cuda_holds(void) {
  const std::lock_guard lock(state().mutex);
  return state().holds ? 1 : 0;
}

void soft_cuda_release(void) {
  const std::lock_guard lock(state().mutex);
  state().held_function.clear();
  state().holds = false;
  state().released.notify_all();
}

void soft_cuda_lose(int device) {
  const std::lock_guard lock(state().mutex);
  if (device < 0) {
    state().lost.fill(false);
  } else {
    state().lost.at(static_cast<std::size_t>(device)) = true;
  }
}

unsigned long long soft_cuda_vram_used(void) {
  const std::lock_guard lock(state().mutex);
  return std::accumulate(state().vram_used.begin(), state().vram_used.end(), std::size_t{0});
}

unsigned long long soft_cuda_objects(void) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  return s.handles.size() + s.reservations.size() + s.pieces.size() + s.registered.size() + s.linear.size() +
         s.opened.size() + std::accumulate(s.contexts.begin(), s.contexts.end(), 0u);
}
