#include "client/src/gpu_lane.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <ctime>

#include "client/src/error.h"
#include "client/src/gpu_model.h"
#include "client/src/shared_words.h"

namespace moecached::client {
namespace {

// As in lane_channel.cc: nobody wakes the futex of a dead daemon.
constexpr long kWaitSliceNs = 20'000'000;

moecached_status find_completed(const GpuMapping& mapping, const LaneBlock* block, CUdeviceptr* out) {
  const ScopedContext current(mapping.context());
  if (const auto status = current.status()) return status;
  return check_cuda(cuda().cuMemHostGetDevicePointer_v2(out, &block->words->completed, 0),
                    "find the lane's words on the GPU");
}

}  // namespace

moecached_status GpuLane::open(GpuModel& model, const GpuMapping& mapping, std::unique_ptr<GpuLane>* out) {
  std::unique_ptr<GpuLane> lane(new GpuLane(model));
  lane->context_ = mapping.shared_context();
  const ScopedContext current(*lane->context_);
  if (const auto status = current.status()) return status;
  // Non-blocking: not ordered with the legacy default stream, on which an engine may have anything.
  if (const auto status =
          check_cuda(cuda().cuStreamCreate(&lane->stream_, CU_STREAM_NON_BLOCKING), "make a stream")) {
    return status;
  }
  *out = std::move(lane);
  return MOECACHED_OK;
}

GpuLane::~GpuLane() {
  if (stream_ == nullptr) return;
  const ScopedContext current(*context_);
  cuda().cuStreamDestroy_v2(stream_);
}

moecached_status GpuLane::check_attach(const GpuMapping& mapping, LaneBlock* block) {
  CUdeviceptr ignored = 0;
  return find_completed(mapping, block, &ignored);
}

moecached_status GpuLane::attach(const GpuMapping& mapping, Connection& connection, LaneBlock* block) {
  if (const auto status = find_completed(mapping, block, &completed_)) return status;
  mapping_ = &mapping;
  connection_ = &connection;
  block_ = block;
  begun_ = false;
  return MOECACHED_OK;
}

bool GpuLane::memory_is_there(bool new_shapes) const noexcept {
  const moecached_shm_gpu* gpu = mapping_->words().gpu;
  if (load_acquire(&gpu->load_state) != MOECACHED_COVERED) return false;
  // Graphs that read host slots alone need no chunk, also when there is no daemon left to ask for it.
  return load_acquire(&gpu->n_chunks) <= mapping_->chunks_mapped() || (!new_shapes && model_.is_host_only());
}

moecached_status GpuLane::begin() {
  for (;;) {
    const std::uint64_t epoch = ++block_->epoch;
    store_then_fence(&block_->words->begun, epoch << 16 | MOECACHED_LAYER_ALL);
    // `shapes` before `n_chunks`, so that the chunks that a shape needs are seen with it.
    const bool new_shapes = load_acquire(&mapping_->words().gpu->shapes) != model_.shapes_seen();
    if (memory_is_there(new_shapes)) [[likely]] {
      if (new_shapes) [[unlikely]]
        model_.refresh_shapes();
      begun_ = true;
      return MOECACHED_OK;
    }
    if (const auto status = catch_up()) return status;
  }
}

// The epoch has launched nothing, so it ends here; the daemon need not wait for this lane while it waits for
// the daemon.
moecached_status GpuLane::catch_up() {
  if (const auto status = settle()) return status;
  store_then_fence(&block_->words->completed, block_->epoch);
  if (const auto status = wait_until_loaded()) return status;
  if (load_acquire(&mapping_->words().gpu->n_chunks) > mapping_->chunks_mapped()) {
    // Without this memory no graph may run: the table may name its slots from now on.
    if (!connection_->check_alive()) {
      return fail(MOECACHED_E_UNAVAILABLE,
                  "the daemon went away while it was adding memory to the model: reconnect first");
    }
    return model_.map_chunks();
  }
  return MOECACHED_OK;
}

moecached_status GpuLane::wait_until_loaded() {
  const std::uint32_t* const word = &mapping_->words().gpu->load_state;
  for (;;) {
    const std::uint32_t seen = load_acquire(word);
    if (seen == MOECACHED_COVERED) return MOECACHED_OK;
    if (seen == MOECACHED_GPU_LOST) {
      return fail(MOECACHED_E_UNAVAILABLE, "the daemon has lost this GPU; its log says why");
    }
    if (seen != MOECACHED_LOADING) {
      return fail(MOECACHED_E_IO, "the daemon could not read the model's file into RAM; its log says why");
    }
    if (!connection_->check_alive()) {
      if (load_acquire(word) != seen) continue;  // its last act
      return fail(MOECACHED_E_UNAVAILABLE, "the daemon went away before it had loaded the model");
    }
    const timespec slice{0, kWaitSliceNs};
    ::syscall(SYS_futex, word, FUTEX_WAIT, seen, &slice, nullptr, 0);
  }
}

moecached_status GpuLane::settle() noexcept {
  const ScopedContext current(*context_);
  if (const auto status = current.status()) return status;
  const CUresult result = begun_ ? cuda().cuCtxSynchronize() : cuda().cuStreamSynchronize(stream_);
  begun_ = false;
  return check_cuda(result, "wait for the lane's work on the GPU");
}

moecached_status GpuLane::check(const moecached_gpu_submit& submit) const {
  if (!begun_) return fail(MOECACHED_E_ARGUMENT, "no epoch is begun");
  if (submit.done_event == nullptr) return fail(MOECACHED_E_ARGUMENT, "done_event is NULL");
  if (submit.n_layers == 0 && submit.n_whole_layers == 0) return MOECACHED_OK;
  const moecached_shm_model& model = mapping_->layout().model.model;
  if (submit.n_tokens == 0) return fail(MOECACHED_E_ARGUMENT, "n_tokens is 0");
  if (submit.n_whole_layers > model.n_layers || submit.n_layers > model.n_layers - submit.n_whole_layers ||
      (submit.n_whole_layers > 0 && submit.whole_layers == nullptr)) {
    return fail(MOECACHED_E_ARGUMENT,
                "%u and %u layers are told of, the model has %u MoE layers (or an address is NULL)",
                submit.n_layers, submit.n_whole_layers, model.n_layers);
  }
  for (std::uint32_t i = 0; i < submit.n_whole_layers; ++i) {
    if (submit.whole_layers[i] >= model.n_layers) {
      return fail(MOECACHED_E_ARGUMENT, "there is no layer %u, the model has %u", submit.whole_layers[i],
                  model.n_layers);
    }
  }
  if (submit.n_layers == 0) return MOECACHED_OK;
  if (submit.n_layers > model.n_layers || submit.layers == nullptr || submit.slots == 0) {
    return fail(MOECACHED_E_ARGUMENT, "%u rows of slots, the model has %u MoE layers (or an address is NULL)",
                submit.n_layers, model.n_layers);
  }
  const std::uint64_t row_bytes = std::uint64_t{submit.n_tokens} * model.n_expert_used * sizeof(std::int32_t);
  if (submit.n_tokens == 0 || (submit.n_layers > 1 && submit.layer_pitch_bytes < row_bytes)) {
    return fail(MOECACHED_E_ARGUMENT, "a row of %u tokens does not fit a pitch of %llu bytes",
                submit.n_tokens, static_cast<unsigned long long>(submit.layer_pitch_bytes));
  }
  for (std::uint32_t i = 0; i < submit.n_layers; ++i) {
    if ((submit.layers[i] & ~MOECACHED_LOG_BY_EXPERT) >= static_cast<int>(model.n_layers)) {
      return fail(MOECACHED_E_ARGUMENT, "row %u is of layer %u, the model has %u", i,
                  submit.layers[i] & ~MOECACHED_LOG_BY_EXPERT, model.n_layers);
    }
  }
  return MOECACHED_OK;
}

bool GpuLane::log_entry_is_free() const noexcept {
  const std::uint64_t entries = mapping_->layout().gpu.log_entries;
  return block_->epoch <= entries || load_acquire(&block_->words->tail) >= block_->epoch - entries;
}

// Plain stores: the daemon looks at the entry once `completed` has reached the epoch, which the GPU writes
// later than the driver call that these stores precede.
moecached_status GpuLane::log(const moecached_gpu_submit& submit) {
  const moecached_shm_gpu& gpu = mapping_->layout().gpu;
  std::byte* const entry =
      mapping_->log(block_->index) + block_->epoch % gpu.log_entries * gpu.log_entry_bytes;
  const std::uint32_t n_tokens = std::min<std::uint32_t>(submit.n_tokens, MOECACHED_LOG_TOKENS);
  moecached_shm_log_entry header{};
  header.epoch = block_->epoch;
  header.n_layers = submit.n_layers;
  header.n_whole = submit.n_whole_layers;
  header.n_tokens = n_tokens;
  header.n_tokens_all = submit.n_tokens;
  header.flags = submit.is_prefill != 0 ? MOECACHED_FLAG_PREFILL : 0;
  std::memcpy(entry, &header, sizeof header);
  std::byte* const layers = entry + sizeof header;
  if (submit.n_layers > 0) std::memcpy(layers, submit.layers, submit.n_layers * sizeof(std::uint16_t));
  if (submit.n_whole_layers > 0) {
    std::memcpy(layers + submit.n_layers * sizeof(std::uint16_t), submit.whole_layers,
                submit.n_whole_layers * sizeof(std::uint16_t));
  }
  if (submit.n_layers == 0) return MOECACHED_OK;

  const std::uint64_t token_bytes =
      std::uint64_t{mapping_->layout().model.model.n_expert_used} * sizeof(std::int32_t);
  CUDA_MEMCPY2D rows{};
  rows.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  rows.srcDevice = submit.slots + (submit.n_tokens - n_tokens) * token_bytes;
  rows.srcPitch = submit.n_layers > 1 ? submit.layer_pitch_bytes : n_tokens * token_bytes;
  rows.dstMemoryType = CU_MEMORYTYPE_HOST;
  rows.dstHost = entry + gpu.log_slots_offset;
  rows.dstPitch = gpu.log_layer_bytes;
  rows.WidthInBytes = n_tokens * token_bytes;
  rows.Height = submit.n_layers;
  return check_cuda(cuda().cuMemcpy2DAsync_v2(&rows, stream_), "log the slots that a graph used");
}

moecached_status GpuLane::fetch(const moecached_gpu_fetch& request) {
  if (!begun_) return fail(MOECACHED_E_ARGUMENT, "no epoch is begun");
  if (mapping_->scratch() == nullptr) return fail(MOECACHED_E_ARGUMENT, "there are no scratch slots");
  const ScopedContext current(*context_);
  if (const auto status = current.status()) return status;
  return mapping_->scratch()->fetch(request);
}

moecached_status GpuLane::submit(const moecached_gpu_submit& submit) {
  if (const auto status = check(submit)) return status;
  const ScopedContext current(*context_);
  if (const auto status = current.status()) return status;
  const CudaDriver& driver = cuda();
  moecached_shm_lane& words = *block_->words;
  if (const auto status =
          check_cuda(driver.cuStreamWaitEvent(stream_, static_cast<CUevent>(submit.done_event), 0),
                     "wait for the graph in stream order")) {
    return status;
  }
  if (submit.n_layers + submit.n_whole_layers > 0) {
    if (log_entry_is_free()) {
      if (const auto status = log(submit)) return status;
    } else {
      add_to_own_word(&words.dropped, 1);
    }
    add_to_own_word(&words.lookups, std::uint64_t{submit.n_tokens} *
                                        mapping_->layout().model.model.n_expert_used *
                                        (submit.n_layers + submit.n_whole_layers));
  }
  if (submit.logged_event != nullptr) {
    if (const auto status = check_cuda(
            driver.cuEventRecord(static_cast<CUevent>(submit.logged_event), stream_), "record an event")) {
      return status;
    }
  }
  // Without a flag the write waits for, and is fenced behind, everything before it in the stream.
  if (const auto status = check_cuda(
          driver.cuStreamWriteValue64_v2(stream_, completed_, block_->epoch, CU_STREAM_WRITE_VALUE_DEFAULT),
          "end an epoch in stream order")) {
    return status;
  }
  begun_ = false;
  return MOECACHED_OK;
}

}  // namespace moecached::client
