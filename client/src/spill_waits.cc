#include "client/src/spill_waits.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <system_error>

#include "client/src/error.h"
#include "client/src/shared_words.h"
#include "client/src/wait_ptx.h"  // made from wait.ptx

namespace moecached::client {
namespace {

using std::chrono::steady_clock;

constexpr unsigned kThreads = 256;
constexpr unsigned kBlocks = 32;  // that share one copy
// Room for experts that come from no page-locked slot: of a token always, of more as long as they fit.
constexpr std::uint64_t kBounceBytes = std::uint64_t{64} << 20;
// Between two graphs of decode lie the sampling and the next graph's inputs; waking a thread takes 50 us.
constexpr std::chrono::microseconds kAwakeAfterGraph{500};
// Looks at a word before others get the core: more than the time between two layers of most models.
constexpr int kLooksBeforeYield = 4000;

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

moecached_status page_locked(const std::shared_ptr<CudaContext>& context, std::uint64_t bytes,
                             Mapping* memory, std::shared_ptr<HostRegistration>* pin, CUdeviceptr* address) {
  *memory =
      Mapping(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), bytes);
  if (!memory->valid()) return fail(MOECACHED_E_SYSTEM, "no memory for waits on the GPU");
  // After a fork a write here would go to a copy, and the GPU go on looking at the page of before.
  ::madvise(memory->data(), bytes, MADV_DONTFORK);
  constexpr unsigned kFlags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
  if (const auto status = HostRegistration::open(context, *memory, kFlags, pin)) return status;
  return check_cuda(cuda().cuMemHostGetDevicePointer_v2(address, memory->data(), 0), "reach pinned memory");
}

// As wait.ptx declares them.
struct BringPart {
  CUdeviceptr window = 0;
  std::uint64_t stride = 0;
  std::uint64_t offset = 0;
};
struct BringParts {
  BringPart part[MOECACHED_MAX_PARTS];
};
static_assert(sizeof(BringParts) == 192);

}  // namespace

// One layer's. The GPU writes n and ids, each once a graph, and reads the rest when `answered` is 1.
struct SpillWaits::Box {
  std::uint32_t n;             // 0: it has not asked yet
  std::uint32_t ids[kIdsMax];  // id + 1; 0: not yet come
  alignas(64) std::uint32_t answered;
  alignas(64) SpillDevice::Place places[kIdsMax];
};

SpillWaits::Box& SpillWaits::box(std::uint32_t layer) const {
  return reinterpret_cast<Box*>(boxes_.data())[layer];
}
CUdeviceptr SpillWaits::box_address(std::uint32_t layer) const {
  return boxes_address_ + std::uint64_t{layer} * sizeof(Box);
}

moecached_status SpillWaits::open(SpillDevice& device, std::unique_ptr<SpillWaits>* out) {
  if (const auto status = device.can_be_waited_for()) return status;
  std::unique_ptr<SpillWaits> waits(new SpillWaits(device));
  const ScopedContext current(*device.context());
  if (const auto status = current.status()) return status;
  if (const auto status = waits->load_kernels()) return status;
  if (const auto status = waits->allocate()) return status;
  if (const auto status = waits->try_out()) return status;
  // Signals of the host are for its own threads.
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    waits->thread_ = std::thread([raw = waits.get()] { raw->run(); });
  } catch (const std::system_error&) {
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (!waits->thread_.joinable()) return fail(MOECACHED_E_SYSTEM, "no thread to answer a waiting GPU");
  ::pthread_setname_np(waits->thread_.native_handle(), "moecached-wait");
  *out = std::move(waits);
  return MOECACHED_OK;
}

SpillWaits::~SpillWaits() {
  if (thread_.joinable()) {
    stop_.store(true);
    begun_.fetch_add(1);
    begun_.notify_one();
    thread_.join();
  }
  const ScopedContext current(*device_.context());
  if (taken_ != 0) cuda().cuMemFree_v2(taken_);
  if (module_ != nullptr) cuda().cuModuleUnload(module_);
}

moecached_status SpillWaits::load_kernels() {
  if (const auto status = check_cuda(cuda().cuModuleLoadData(&module_, kWaitPtx), "load the waiting kernels"))
    return status;
  const auto find = [&](CUfunction* function, const char* name) {
    return check_cuda(cuda().cuModuleGetFunction(function, module_, name), "find a waiting kernel");
  };
  if (const auto status = find(&ask_, "moecached_ask")) return status;
  if (const auto status = find(&take_, "moecached_take")) return status;
  return find(&bring_, "moecached_bring");
}

moecached_status SpillWaits::allocate() {
  n_layers_ = device_.n_layers();
  if (const auto status = page_locked(device_.context(), std::uint64_t{n_layers_} * sizeof(Box), &boxes_,
                                      &boxes_pin_, &boxes_address_)) {
    return status;
  }
  return check_cuda(cuda().cuMemAlloc_v2(&taken_, (kIdsMax + 1) * sizeof(SpillDevice::Place)),
                    "allocate for waits");
}

// The driver may finish loading a kernel when it is first launched, which it must not do while a graph is
// being captured.
moecached_status SpillWaits::try_out() {
  Box& first = box(0);
  first.places[0] = {.slot = 0, .reserved = 0, .source = 0};
  store_release(&first.answered, 1u);
  n_ids_max_ = 1;
  if (const auto status =
          check_cuda(cuda().cuMemsetD32_v2(taken_, 0, kIdsMax * sizeof(SpillDevice::Place) / 4),
                     "clear what is taken")) {
    return status;
  }
  // It may end after the call, and the lane's stream does not wait for the default one.
  if (const auto status = check_cuda(cuda().cuStreamSynchronize(nullptr), "clear what is taken"))
    return status;
  const CUdeviceptr ids = taken_, slots = taken_ + kIdsMax * sizeof(SpillDevice::Place);
  if (const auto status = enqueue({device_.stream(), ids, slots, 1, 0})) return status;
  if (const auto status = check_cuda(cuda().cuStreamSynchronize(device_.stream()), "try a wait"))
    return status;
  n_ids_max_ = 0;
  if (load_acquire(&first.n) != 1 || load_acquire(&first.ids[0]) != 1)
    return fail(MOECACHED_E_UNAVAILABLE, "the GPU's words do not reach this process");
  return MOECACHED_OK;
}

moecached_status SpillWaits::reserve(std::uint32_t n_ids) {
  const std::uint64_t bytes = n_ids * device_.record_bytes_max();  // of today's daemon
  if (n_ids <= n_ids_max_ && bytes <= bounce_.bytes()) return MOECACHED_OK;
  if (n_ids > std::min(kIdsMax, device_.n_scratch()) ||
      (bytes > kBounceBytes && n_ids > device_.n_expert_used()))
    return fail(MOECACHED_E_TOO_MANY, "%u experts of a layer are more than can be waited for at once", n_ids);
  const ScopedContext current(*device_.context());
  if (const auto status = current.status()) return status;
  bounce_pin_.reset();
  n_ids_max_ = 0;
  if (const auto status = page_locked(device_.context(), bytes, &bounce_, &bounce_pin_, &bounce_address_))
    return status;
  n_ids_max_ = n_ids;
  return MOECACHED_OK;
}

moecached_status SpillWaits::begin(std::span<const std::uint32_t> layers, Width width) {
  // Again: the lane may have moved to another daemon since it was looked.
  if (const auto status = device_.can_be_waited_for()) return status;
  if (const auto status = reserve(width.n_ids)) return status;
  const std::uint32_t n_ids = width.n_ids;
  for (const std::uint32_t layer : layers) {
    if (layer >= n_layers_)
      return fail(MOECACHED_E_ARGUMENT, "the model has %u MoE layers, there is none with index %u", n_layers_,
                  layer);
    const std::uint32_t n_slots = device_.n_slots_open(layer);
    if (n_ids > n_slots)
      return fail(MOECACHED_E_TOO_MANY, "%u experts of a layer with %u slots in RAM", n_ids, n_slots);
    Box& clean = box(layer);
    store_relaxed(&clean.n, 0u);
    for (std::uint32_t& id : clean.ids) store_relaxed(&id, 0u);
    store_relaxed(&clean.answered, 0u);
  }
  layers_.assign(layers.begin(), layers.end());
  n_ids_of_token_ = std::max(width.n_ids_of_token, 1u);
  failed_ = MOECACHED_OK;
  over_.store(false, std::memory_order_relaxed);
  begun_.fetch_add(1, std::memory_order_release);
  begun_.notify_one();
  return MOECACHED_OK;
}

moecached_status SpillWaits::enqueue(const moecached_spill_wait& request) const {
  if (request.n_ids == 0 || request.n_ids > n_ids_max_ || request.layer >= n_layers_) {
    return fail(MOECACHED_E_ARGUMENT, "%u ids of layer %u: there is room for %u ids, and there are %u layers",
                request.n_ids, request.layer, n_ids_max_, n_layers_);
  }
  const auto stream = static_cast<CUstream>(request.stream);
  const CUdeviceptr base = box_address(request.layer);
  CUdeviceptr ids = request.ids, slots = request.slots, asked = base + offsetof(Box, n),
              places = base + offsetof(Box, places), taken = taken_;
  std::uint32_t n = request.n_ids;
  BringParts parts{};
  const std::uint32_t n_parts = device_.n_parts(request.layer);
  for (std::uint32_t p = 0; p < n_parts; ++p) {
    const SpillDevice::PartPlace place = device_.part_place(request.layer, p);
    parts.part[p] = {place.window, place.expert_bytes, place.record_offset};
  }
  const auto launch = [&](CUfunction kernel, unsigned x, unsigned y, unsigned z, unsigned threads,
                          void** arguments) {
    return check_cuda(cuda().cuLaunchKernel(kernel, x, y, z, threads, 1, 1, 0, stream, arguments, nullptr),
                      "launch a waiting kernel");
  };
  void* of_ask[] = {&ids, &asked, &n};
  if (const auto status = launch(ask_, 1, 1, 1, kIdsMax, of_ask)) return status;
  if (const auto status = check_cuda(
          cuda().cuStreamWaitValue32_v2(stream, base + offsetof(Box, answered), 1, CU_STREAM_WAIT_VALUE_EQ),
          "wait for a word in memory"))
    return status;
  void* of_take[] = {&places, &taken, &n};
  if (const auto status = launch(take_, 1, 1, 1, kIdsMax, of_take)) return status;
  void* of_bring[] = {&taken, &slots, &parts};
  return launch(bring_, kBlocks, n, n_parts, kThreads, of_bring);
}

moecached_status SpillWaits::end() {
  over_.store(true, std::memory_order_release);
  const std::uint32_t begun = begun_.load(std::memory_order_relaxed);
  for (std::uint32_t seen = answered_.load(std::memory_order_acquire); seen != begun;
       seen = answered_.load(std::memory_order_acquire))
    answered_.wait(seen, std::memory_order_acquire);
  if (failed_ == MOECACHED_OK) return MOECACHED_OK;
  return fail(failed_, "%s", failure_.c_str());
}

// -- the answering thread
void SpillWaits::run() noexcept {
  std::uint32_t seen = 0;
  for (;;) {
    const auto awake_until = steady_clock::now() + kAwakeAfterGraph;
    while (begun_.load(std::memory_order_acquire) == seen && steady_clock::now() < awake_until) pause_cpu();
    begun_.wait(seen, std::memory_order_acquire);
    if (stop_.load(std::memory_order_relaxed)) return;
    ++seen;
    for (const std::uint32_t layer : layers_) {
      if (wait_for_ask(box(layer))) {
        answer(layer);
        continue;
      }
      // What was computed did not use this thread's answers, so it used something else.
      if (failed_ == MOECACHED_OK) {
        failed_ = MOECACHED_E_SYSTEM;
        failure_ = "the graph has not asked for all its layers";
      }
      break;
    }
    answered_.store(seen, std::memory_order_release);
    answered_.notify_one();
  }
}

// False: the graph is over, the rest of its layers has not been launched.
bool SpillWaits::wait_for_ask(const Box& asked) const noexcept {
  const auto come = [&](const std::uint32_t& word) {
    for (int looks = 0; load_acquire(&word) == 0; ++looks) {
      if (over_.load(std::memory_order_acquire)) return load_acquire(&word) != 0;
      if (looks < kLooksBeforeYield) {
        pause_cpu();
      } else {
        std::this_thread::yield();
      }
    }
    return true;
  };
  if (!come(asked.n)) return false;
  for (std::uint32_t i = 0; i < load_relaxed(&asked.n); ++i) {
    if (!come(asked.ids[i])) return false;
  }
  return true;
}

// After a failure the graph computes on with whatever is in slot 0, and what it computed is thrown away.
void SpillWaits::answer(std::uint32_t layer) {
  Box& asked = box(layer);
  const std::uint32_t n = std::min(load_relaxed(&asked.n), kIdsMax);
  const std::span places(asked.places, n);
  if (failed_ == MOECACHED_OK) {
    try {
      ids_.resize(n);
      // Another number of them than was told: taken for one token's.
      const std::size_t n_tokens = n % n_ids_of_token_ == 0 ? n / n_ids_of_token_ : 1;
      for (std::uint32_t i = 0; i < n; ++i)
        ids_[i] = static_cast<std::int32_t>(load_relaxed(&asked.ids[i]) - 1);
      failed_ = device_.place(layer, ids_, n_tokens, {bounce_.data(), bounce_address_}, places);
      if (failed_ != MOECACHED_OK) failure_ = last_error();
    } catch (const std::exception&) {
      failed_ = MOECACHED_E_SYSTEM;
      failure_.clear();
    }
  }
  if (failed_ != MOECACHED_OK) std::fill(places.begin(), places.end(), SpillDevice::Place{});
  store_release(&asked.answered, 1u);
}

}  // namespace moecached::client
