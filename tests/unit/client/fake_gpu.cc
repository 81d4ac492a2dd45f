#include "tests/unit/client/fake_gpu.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "tests/unit/client/fake_segments.h"

namespace moecached::client::test {
namespace {

constexpr std::uint64_t kDeviceBytes = 2 * kGranularity;  // two chunks

std::uint64_t rounded_up(std::uint64_t bytes, std::uint64_t to) { return (bytes + to - 1) / to * to; }

}  // namespace

FakeGpu::FakeGpu(const TestModel& model, FakeGpuOptions options, std::uint64_t boot_epoch,
                 std::uint32_t n_lanes)
    : model_(model), options_(std::move(options)) {
  const TestModel::Shape& shape = model_.shape();
  const std::uint32_t all_parts = shape.n_layers * n_parts();
  const std::uint64_t gpu_at = sizeof(moecached_shm_header) + sizeof(moecached_shm_model);
  const std::uint64_t layers_at = rounded_up(gpu_at + sizeof(moecached_shm_gpu), 64);
  const std::uint64_t parts_at = layers_at + shape.n_layers * sizeof(moecached_shm_layer);
  const std::uint64_t windows_at = parts_at + all_parts * sizeof(moecached_shm_part);
  const std::uint64_t chunks_at = windows_at + all_parts * sizeof(moecached_shm_window);
  const std::uint32_t n_chunks_max = 2 * all_parts;
  segment_ = make_segment(chunks_at + n_chunks_max * sizeof(moecached_shm_chunk), &segment_fd_);
  std::byte* const base = segment_.data();
  view_.header = reinterpret_cast<moecached_shm_header*>(base);
  view_.model = reinterpret_cast<moecached_shm_model*>(view_.header + 1);
  view_.gpu = reinterpret_cast<moecached_shm_gpu*>(base + gpu_at);
  view_.layers = reinterpret_cast<moecached_shm_layer*>(base + layers_at);
  view_.parts = reinterpret_cast<moecached_shm_part*>(base + parts_at);
  view_.windows = reinterpret_cast<moecached_shm_window*>(base + windows_at);
  view_.chunks = reinterpret_cast<moecached_shm_chunk*>(base + chunks_at);

  *view_.header = {MOECACHED_SHM_MAGIC,
                   MOECACHED_SHM_VERSION,
                   MOECACHED_SEGMENT_GPU_MODEL,
                   segment_.bytes(),
                   boot_epoch,
                   {}};
  view_.model->model_id = kGpuModelId;
  view_.model->n_layers = shape.n_layers;
  view_.model->n_parts = all_parts;
  view_.model->n_files = shape.n_files;
  view_.model->n_expert_used = shape.n_expert_used;
  view_.model->layers_offset = layers_at;
  view_.model->parts_offset = parts_at;

  moecached_shm_gpu& gpu = *view_.gpu;
  std::copy(options_.uuid.begin(), options_.uuid.end(), gpu.uuid);
  gpu.granularity = kGranularity;
  gpu.table_bytes = kGranularity;
  gpu.windows_offset = windows_at;
  gpu.chunks_offset = chunks_at;
  gpu.log_entries = options_.log_entries;
  gpu.log_layer_bytes = MOECACHED_LOG_TOKENS * shape.n_expert_used * 4;
  gpu.log_slots_offset = static_cast<std::uint32_t>(rounded_up(64 + 2 * shape.n_layers, 64));
  gpu.log_entry_bytes =
      static_cast<std::uint32_t>(rounded_up(gpu.log_slots_offset + shape.n_layers * gpu.log_layer_bytes, 64));
  gpu.log_bytes_per_lane = rounded_up(std::uint64_t{gpu.log_entries} * gpu.log_entry_bytes, 4096);
  gpu.n_chunks_max = n_chunks_max;
  gpu.load_state = options_.load_state;
  log_ = make_segment(n_lanes * gpu.log_bytes_per_lane, &log_fd_);
  table_ = make_segment(gpu.table_bytes, &table_fd_);

  for (const std::uint64_t bytes : shape.part_bytes) {
    host_first_ = std::max(host_first_, static_cast<std::uint32_t>((kDeviceBytes + bytes - 1) / bytes));
  }
  for (std::uint32_t l = 0; l < shape.n_layers; ++l) {
    moecached_shm_layer& layer = view_.layers[l];
    layer.block = l + 1;
    layer.n_experts = shape.n_experts;
    layer.n_parts = n_parts();
    layer.first_part = l * n_parts();
    layer.n_slots = shape.n_slots;
    layer.table_first = l * shape.n_experts;
    layer.host_first = host_first_;
    for (std::uint32_t p = 0; p < n_parts(); ++p) {
      const std::uint32_t index = l * n_parts() + p;
      moecached_shm_part& part = view_.parts[index];
      part.kind = p;
      part.file = model_.file_of(l);
      part.ne0 = shape.part_bytes[p];
      part.ne1 = 1;
      part.file_offset = model_.file_offset(l, p);
      part.expert_bytes = shape.part_bytes[p];
      const std::string name = TestModel::part_name(l, p);
      std::copy(name.begin(), name.end(), part.name);
      moecached_shm_window& window = view_.windows[index];
      window.device_bytes = kDeviceBytes;
      window.host_bytes = rounded_up(
          (std::uint64_t{host_first_} + shape.n_experts) * part.expert_bytes - kDeviceBytes, kGranularity);
      Memory& host = host_.emplace_back();
      host.bytes = make_segment(window.host_bytes, &host.fd);
      for (std::uint32_t e = 0; e < shape.n_experts; ++e) {
        model_.fill_part(l, p, e, host.bytes.data() + (host_first_ + e) * part.expert_bytes - kDeviceBytes);
      }
      view_.chunks[index] = {index, 0, 0, kGranularity};
      Memory& chunk = chunks_.emplace_back();
      chunk.bytes = make_segment(kGranularity, &chunk.fd);
      std::memset(chunk.bytes.data(), 0xa5, kGranularity);
    }
    for (std::uint32_t e = 0; e < shape.n_experts; ++e)
      set_entry(l, e, static_cast<std::int32_t>(host_first_ + e));
  }
  n_chunks_ = all_parts;
  gpu.n_chunks = n_chunks_;
  if (options_.spoil) options_.spoil(view_);
}

void FakeGpu::put(std::uint32_t layer, std::uint32_t slot, std::uint32_t expert) {
  for (std::uint32_t p = 0; p < n_parts(); ++p) {
    const std::uint32_t index = layer * n_parts() + p;
    std::vector<std::byte> bytes(model_.shape().part_bytes[p]);
    model_.fill_part(layer, p, expert, bytes.data());
    // A slot may cross from one chunk into the next.
    for (std::uint64_t i = 0; i < bytes.size(); ++i) {
      const std::uint64_t at = slot * bytes.size() + i;
      for (std::uint32_t c = 0; c < chunks_.size(); ++c) {
        const moecached_shm_chunk& chunk = view_.chunks[c];
        if (chunk.part != index || at < chunk.offset || at >= chunk.offset + chunk.bytes) continue;
        chunks_[c].bytes.data()[at - chunk.offset] = bytes[i];
      }
    }
  }
}

void FakeGpu::set_entry(std::uint32_t layer, std::uint32_t expert, std::int32_t slot) {
  auto* const table = reinterpret_cast<std::int32_t*>(table_.data());
  std::atomic_ref(table[layer * model_.shape().n_experts + expert]).store(slot);
}

std::uint32_t FakeGpu::add_chunk(std::uint32_t layer, std::uint32_t part) {
  view_.chunks[n_chunks_] = {layer * n_parts() + part, 0, kGranularity, kGranularity};
  Memory& chunk = chunks_.emplace_back();
  chunk.bytes = make_segment(kGranularity, &chunk.fd);
  ++n_chunks_;
  return static_cast<std::uint32_t>((kGranularity + model_.shape().part_bytes[part] - 1) /
                                    model_.shape().part_bytes[part]);
}

void FakeGpu::publish_chunks() { std::atomic_ref(view_.gpu->n_chunks).store(n_chunks_); }

void FakeGpu::set_all_resident(std::uint32_t layer, std::uint32_t value) {
  std::atomic_ref(view_.layers[layer].shape).store(value);
  std::atomic_ref(view_.gpu->shapes).fetch_add(1);
}

void FakeGpu::set_load_state(std::uint32_t value) {
  std::atomic_ref(view_.gpu->load_state).store(value);
  ::syscall(SYS_futex, &view_.gpu->load_state, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

SeenLogEntry FakeGpu::log_entry(std::uint32_t lane, std::uint64_t epoch) const {
  const moecached_shm_gpu& gpu = *view_.gpu;
  const std::byte* const at =
      log_.data() + lane * gpu.log_bytes_per_lane + epoch % gpu.log_entries * gpu.log_entry_bytes;
  SeenLogEntry seen;
  std::memcpy(&seen.header, at, sizeof seen.header);
  seen.layers.resize(std::min(seen.header.n_layers, model_.shape().n_layers));
  std::memcpy(seen.layers.data(), at + sizeof seen.header, seen.layers.size() * sizeof(std::uint16_t));
  for (std::uint32_t i = 0; i < seen.layers.size(); ++i) {
    auto& row = seen.slots.emplace_back(std::min<std::uint32_t>(seen.header.n_tokens, MOECACHED_LOG_TOKENS) *
                                        model_.shape().n_expert_used);
    std::memcpy(row.data(), at + gpu.log_slots_offset + i * gpu.log_layer_bytes,
                row.size() * sizeof(std::int32_t));
  }
  return seen;
}

moecached_handle_gpu_opened FakeGpu::opened() const {
  moecached_handle_gpu_opened message{};
  message.header = frame(MOECACHED_HANDLE_GPU_OPENED, sizeof message, 3);
  message.model_id = kGpuModelId;
  message.host_memory = options_.memfd ? MOECACHED_HOST_MEMORY_MEMFD : MOECACHED_HOST_MEMORY_VMM;
  message.model_bytes = segment_.bytes();
  message.log_bytes = log_.bytes();
  if (options_.spoil_opened) options_.spoil_opened(message);
  return message;
}

std::vector<int> FakeGpu::opened_fds() const { return {segment_fd_.get(), log_fd_.get(), table_fd_.get()}; }

std::vector<int> FakeGpu::handles(const moecached_handle_gpu_fetch& wanted) const {
  const std::vector<Memory>& from = wanted.memory == MOECACHED_GPU_MEMORY_HOST ? host_ : chunks_;
  std::vector<int> fds;
  for (std::uint32_t i = wanted.first;
       i < from.size() && fds.size() < std::min(wanted.count, options_.fetch_max); ++i) {
    fds.push_back(from[i].fd.get());
  }
  return fds;
}

}  // namespace moecached::client::test
