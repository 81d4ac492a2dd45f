#include "client/src/spill_device.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "client/src/error.h"
#include "client/src/shared_words.h"

namespace moecached::client {
namespace {

constexpr std::uint64_t kGranularity = std::uint64_t{2} << 20;
// Kernels that take a row in steps of 512 elements read up to so many bytes past the last row of an expert.
constexpr std::uint64_t kReadPast = 4096;
// Device memory is what the daemon keeps experts in. Within kScratchBytes as many scratch slots as fit, and
// always those of one token.
constexpr std::uint64_t kScratchBytes = std::uint64_t{192} << 20;
constexpr std::uint32_t kScratchMax = 64;

std::uint64_t rounded_up(std::uint64_t bytes) {
  return (bytes + kGranularity - 1) / kGranularity * kGranularity;
}

}  // namespace

moecached_status SpillDevice::open(Connection& connection, Model& model, Lane& lane,
                                   std::unique_ptr<SpillDevice>* out) {
  std::unique_ptr<SpillDevice> device(new SpillDevice(model, lane));
  if (const auto status = CudaContext::open(*model.gpu, &device->context_)) return status;
  const ScopedContext current(*device->context_);
  if (const auto status = current.status()) return status;
  if (const auto status =
          check_cuda(cuda().cuStreamCreate(&device->stream_, CU_STREAM_NON_BLOCKING), "make a stream")) {
    return status;
  }
  if (const auto status = device->waves_.open(device->stream_)) return status;
  if (const auto status = device->refresh(connection)) return status;
  *out = std::move(device);
  return MOECACHED_OK;
}

SpillDevice::~SpillDevice() {
  if (context_ == nullptr) return;
  const ScopedContext current(*context_);
  if (stream_ != nullptr) cuda().cuStreamSynchronize(stream_);
  unmap_arrays();
  waves_.close();
  if (stream_ != nullptr) cuda().cuStreamDestroy_v2(stream_);
}

bool SpillDevice::is_stale() const noexcept {
  return lane_.attachment() != attachment_ ||
         (!has_slots_ && load_acquire(&layout().spill.spill->has_slots) != 0);
}

moecached_status SpillDevice::refresh(Connection& connection) {
  const ScopedContext current(*context_);
  if (const auto status = current.status()) return status;
  // Copies of a call that failed may still be under way, to what is unmapped below.
  cuda().cuStreamSynchronize(stream_);
  if (lane_.attachment() != attachment_) {
    waves_.reset();
    has_begun_layer_ = false;
    lane_.use_device_slots(0);
    mapping_ = lane_.mapping();
    has_slots_ = false;
    pin_windows();
    look_up_addresses();
    pin_stream();
    if (const auto status = map_arrays(nullptr, 0)) return status;
    attachment_ = lane_.attachment();  // what failed is tried again
  }
  const moecached_shm_spill* const spill = layout().spill.spill;
  if (has_slots_ || load_acquire(&spill->has_slots) == 0) return MOECACHED_OK;
  has_slots_ = true;  // tried once: without them, experts that are there are read from the file
  const std::uint32_t n = load_relaxed(&spill->n_device_slots);
  auto status =
      n < MOECACHED_DEVICE_SLOT ? map_arrays(&connection, n) : layout_mismatch("number of device slots");
  if (status == MOECACHED_OK) {
    lane_.use_device_slots(n);
    return MOECACHED_OK;
  }
  status = map_arrays(nullptr, 0);
  if (status != MOECACHED_OK) attachment_ = 0;
  return status;
}

// Once for all lanes. Without it copies take seven times as long, which is better than none.
void SpillDevice::pin_windows() {
  if (mapping_->pinned != nullptr ||
      context_->attribute(CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED) == 0) {
    return;
  }
  auto pins = std::make_shared<std::vector<std::shared_ptr<HostRegistration>>>();
  for (std::uint32_t l = 0; l < layout().layers.size(); ++l) {
    const std::span memory(mapping_->windows[l].address, layout().layers[l].layer.window_bytes);
    constexpr unsigned kFlags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_READ_ONLY;
    if (HostRegistration::open(context_, memory, kFlags, &pins->emplace_back()) != MOECACHED_OK) return;
  }
  mapping_->pinned = std::move(pins);
}

// Where kernels find the RAM slots.
void SpillDevice::look_up_addresses() {
  window_addresses_.clear();
  if (mapping_->pinned == nullptr) return;
  std::vector<CUdeviceptr> addresses(layout().layers.size());
  for (std::uint32_t l = 0; l < addresses.size(); ++l) {
    const CUresult result =
        cuda().cuMemHostGetDevicePointer_v2(&addresses[l], mapping_->windows[l].address, 0);
    if (result != CUDA_SUCCESS) return;
  }
  window_addresses_ = std::move(addresses);
}

// Kept with the mapping also when the lane is gone, for the next one of its index; all of them together would
// be 16 buffers that mostly no lane has.
void SpillDevice::pin_stream() {
  std::shared_ptr<void>& pinned = mapping_->pinned_streams[lane_.block()->index];
  if (pinned != nullptr) return;
  if (context_->attribute(CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED) == 0) return;
  const std::uint64_t bytes = layout().model.stream_bytes_per_lane;
  constexpr unsigned kFlags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_READ_ONLY;
  const std::span memory(mapping_->stream.data() + lane_.block()->index * bytes, bytes);
  std::shared_ptr<HostRegistration> pin;
  if (HostRegistration::open(context_, memory, kFlags, &pin) == MOECACHED_OK) pinned = std::move(pin);
}

// Where scratch slots lie, and how many there are.
void SpillDevice::plan_scratch(std::uint32_t n_device_slots) {
  const SpillWords& spill = layout().spill;
  arrays_.assign(spill.n_arrays, {});
  scratch_first_.assign(spill.n_arrays, 0);
  std::uint64_t largest = 1;
  for (const LayerLayout& layer : layout().layers) {
    std::uint64_t first = 0, expert_bytes = 0;
    for (std::uint32_t p = 0; p < layer.parts.size(); ++p) {
      Array& array = arrays_[layer.layer.first_array + p];
      array.device_bytes = n_device_slots == 0 ? 0 : spill.arrays[layer.layer.first_array + p].bytes;
      const std::uint64_t stride = layer.parts[p].expert_bytes;
      first = std::max(first, (array.device_bytes + stride - 1) / stride);
      expert_bytes += stride;
    }
    scratch_first_[layer.layer.first_array] = static_cast<std::uint32_t>(first);
    largest = std::max(largest, expert_bytes);
  }
  const std::uint32_t one_token = std::max(layout().model.n_expert_used, 1u);
  n_scratch_ =
      std::clamp(static_cast<std::uint32_t>(std::min<std::uint64_t>(kScratchBytes / largest, kScratchMax)),
                 one_token, std::max(one_token, kScratchMax));
  for (const LayerLayout& layer : layout().layers) {
    for (std::uint32_t p = 0; p < layer.parts.size(); ++p) {
      Array& array = arrays_[layer.layer.first_array + p];
      const std::uint64_t stride = layer.parts[p].expert_bytes;
      const std::uint64_t first = scratch_first_[layer.layer.first_array];
      array.scratch_at = first * stride / kGranularity * kGranularity;
      array.scratch_bytes = rounded_up((first + n_scratch_) * stride + kReadPast) - array.scratch_at;
      array.reserved_bytes = array.scratch_at + array.scratch_bytes;
    }
  }
}

// connection: to fetch the daemon's memory with; null: scratch slots alone.
moecached_status SpillDevice::map_arrays(Connection* connection, std::uint32_t n_device_slots) {
  unmap_arrays();
  ++generation_;
  for (const LayerLayout& layer : layout().layers) {
    if (connection == nullptr) break;
    for (std::uint32_t p = 0; p < layer.parts.size(); ++p) {
      const std::uint64_t slots = (std::uint64_t{layer.layer.class_index} + 1) * n_device_slots;
      const std::uint64_t bytes = layout().spill.arrays[layer.layer.first_array + p].bytes;
      if (bytes % kGranularity != 0 || !fits(0, slots, layer.parts[p].expert_bytes, bytes))
        return layout_mismatch("size of an array");
    }
  }
  plan_scratch(n_device_slots);
  n_device_slots_ = n_device_slots;
  const std::uint32_t n_arrays = layout().spill.n_arrays;
  for (std::uint32_t next = 0; next < n_arrays;) {
    std::vector<UniqueFd> fds(1);
    if (connection != nullptr) {
      if (const auto status = connection->gpu_fetch(
              {mapping_->model_id, MOECACHED_GPU_MEMORY_ARRAY, next, n_arrays - next}, &fds)) {
        return status;
      }
    }
    for (UniqueFd& fd : fds) {
      if (const auto status = map_array(next++, std::move(fd))) return status;
    }
  }
  has_scratch_ = true;
  return MOECACHED_OK;
}

moecached_status SpillDevice::map_array(std::size_t index, UniqueFd memory) {
  Array& array = arrays_[index];
  const std::uint64_t device_bytes = std::exchange(array.device_bytes, 0);
  const std::uint64_t scratch_bytes = std::exchange(array.scratch_bytes, 0);
  if (const auto status =
          check_cuda(cuda().cuMemAddressReserve(&array.address, array.reserved_bytes, kGranularity, 0, 0),
                     "reserve addresses for device slots")) {
    array.reserved_bytes = 0;
    return status;
  }
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = context_->device();
  const auto map = [&](CUmemGenericAllocationHandle handle, std::uint64_t at, std::uint64_t bytes,
                       CUmemAccess_flags flags, std::uint64_t* mapped, const char* what) {
    CUresult result = cuda().cuMemMap(array.address + at, bytes, 0, handle, 0);
    cuda().cuMemRelease(handle);  // it lives as long as it is mapped
    if (result == CUDA_SUCCESS) {
      *mapped = bytes;
      access.flags = flags;
      result = cuda().cuMemSetAccess(array.address + at, bytes, &access, 1);
    }
    return check_cuda(result, what);
  };
  CUmemGenericAllocationHandle handle = 0;
  if (device_bytes > 0) {
    const CUresult imported = cuda().cuMemImportFromShareableHandle(
        &handle, reinterpret_cast<void*>(static_cast<std::uintptr_t>(memory.get())),
        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (const auto status = check_cuda(imported, "import device slots of the daemon")) return status;
    if (const auto status = map(handle, 0, device_bytes, CU_MEM_ACCESS_FLAGS_PROT_READ, &array.device_bytes,
                                "map device slots of the daemon")) {
      return status;
    }
  }
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = access.location;
  if (const auto status =
          check_cuda(cuda().cuMemCreate(&handle, scratch_bytes, &properties, 0), "allocate scratch slots")) {
    return status;
  }
  if (const auto status = map(handle, array.scratch_at, scratch_bytes, CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
                              &array.scratch_bytes, "map scratch slots")) {
    return status;
  }
  // What kernels read past the last expert must be numbers. On the default stream it may end after the call,
  // and the lane's own, which copies experts there next, does not wait for that one.
  if (const auto status = check_cuda(cuda().cuMemsetD8_v2(array.address + array.scratch_at, 0, scratch_bytes),
                                     "clear scratch slots")) {
    return status;
  }
  return check_cuda(cuda().cuStreamSynchronize(nullptr), "clear scratch slots");
}

void SpillDevice::unmap_arrays() noexcept {
  has_scratch_ = false;
  for (const Array& array : arrays_) {
    if (array.device_bytes > 0) cuda().cuMemUnmap(array.address, array.device_bytes);
    if (array.scratch_bytes > 0) cuda().cuMemUnmap(array.address + array.scratch_at, array.scratch_bytes);
    if (array.reserved_bytes > 0 && array.address != 0)
      cuda().cuMemAddressFree(array.address, array.reserved_bytes);
  }
  arrays_.clear();
}

CUdeviceptr SpillDevice::window_of(const LayerLayout& layer, std::uint32_t part) const {
  return arrays_[layer.layer.first_array + part].address +
         std::uint64_t{layer.layer.class_index} * n_device_slots_ * layer.parts[part].expert_bytes;
}

moecached_status SpillDevice::window(std::uint32_t layer, std::uint32_t part, std::uint64_t* address,
                                     std::uint32_t* n_slots) const {
  if (layer >= layout().layers.size() || part >= layout().layers[layer].parts.size())
    return fail(MOECACHED_E_ARGUMENT, "the model has no part %u in MoE layer %u", part, layer);
  const LayerLayout& facts = layout().layers[layer];
  *address = window_of(facts, part);
  *n_slots = scratch_first_[facts.layer.first_array] + n_scratch_ - facts.layer.class_index * n_device_slots_;
  return MOECACHED_OK;
}

const std::byte* SpillDevice::record(std::uint32_t layer, std::int32_t slot) const {
  return mapping_->windows[layer].address +
         static_cast<std::uint64_t>(slot) * layout().layers[layer].layer.slot_stride;
}

moecached_status SpillDevice::copy(CUdeviceptr to, const std::byte* from, std::uint64_t bytes) {
  return check_cuda(cuda().cuMemcpyHtoDAsync_v2(to, from, bytes, stream_), "copy an expert to the GPU");
}

moecached_status SpillDevice::copy_expert(std::uint32_t layer, std::int32_t slot, std::uint32_t scratch) {
  const LayerLayout& facts = layout().layers[layer];
  const std::uint64_t at = std::uint64_t{scratch_first_[facts.layer.first_array]} + scratch;
  for (std::uint32_t p = 0; p < facts.parts.size(); ++p) {
    const moecached_shm_part& part = facts.parts[p];
    if (const auto status = copy(arrays_[facts.layer.first_array + p].address + at * part.expert_bytes,
                                 record(layer, slot) + part.slot_offset, part.expert_bytes)) {
      return status;
    }
  }
  return MOECACHED_OK;
}

// The caller ends the epoch behind a failure: nothing may read its slots then, whatever becomes of it.
moecached_status SpillDevice::settled(moecached_status status) {
  if (status != MOECACHED_OK) cuda().cuStreamSynchronize(stream_);
  return status;
}

std::int32_t SpillDevice::scratch_slot(const LayerLayout& layer, std::size_t scratch) const {
  return static_cast<std::int32_t>(scratch_first_[layer.layer.first_array] + scratch -
                                   layer.layer.class_index * n_device_slots_);
}

// Turns slots of the table into slots of the windows. copied_: the RAM slots that belong into scratch slots
// 0, 1, ..; false: there are more of them than scratch slots.
bool SpillDevice::assign_scratch(const LayerLayout& layer, std::span<std::int32_t> slots) {
  copied_.clear();
  for (std::int32_t& slot : slots) {
    if (slot >= MOECACHED_DEVICE_SLOT) {
      slot -= MOECACHED_DEVICE_SLOT;
      continue;
    }
    const auto known = std::find(copied_.begin(), copied_.end(), slot);
    const auto scratch = static_cast<std::size_t>(known - copied_.begin());
    if (known == copied_.end()) {
      if (scratch == n_scratch_) return false;
      copied_.push_back(slot);
    }
    slot = scratch_slot(layer, scratch);
  }
  return true;
}

moecached_status SpillDevice::resolve(std::uint32_t layer, const Lane::IdMatrix& ids, std::int32_t* slots_out,
                                      const moecached_spill_target& target) {
  waves_.give_up();
  has_begun_layer_ = false;
  if (const auto status = lane_.resolve(layer, ids, slots_out)) return status;
  const ScopedContext current(*context_);
  if (const auto status = current.status()) return status;
  const std::size_t n = ids.rows * ids.cols;
  if (!assign_scratch(layout().layers[layer], {slots_out, n})) {
    lane_.end();
    return fail(MOECACHED_E_TOO_MANY, "more than %u experts of a layer are not in VRAM: load its parts",
                n_scratch_);
  }
  for (std::uint32_t scratch = 0; scratch < copied_.size(); ++scratch) {
    if (const auto status = copy_expert(layer, copied_[scratch], scratch)) return settled(status);
  }
  if (target.slots != 0) {
    if (const auto status = check_cuda(
            cuda().cuMemcpyHtoDAsync_v2(target.slots, slots_out, n * sizeof(std::int32_t), stream_),
            "write slots")) {
      return settled(status);
    }
  }
  return settled(
      check_cuda(cuda().cuEventRecord(static_cast<CUevent>(target.ready), stream_), "record an event"));
}

moecached_status SpillDevice::can_be_waited_for() const {
  if (!has_scratch_) return fail(MOECACHED_E_UNAVAILABLE, "there is no device memory for scratch slots");
  if (window_addresses_.empty())
    return fail(MOECACHED_E_UNAVAILABLE, "the RAM slots cannot be page-locked, so no kernel reads them");
  for (const LayerLayout& layer : layout().layers) {
    for (const moecached_shm_part& part : layer.parts) {
      if (part.expert_bytes % 4 != 0 || part.slot_offset % 4 != 0)
        return fail(MOECACHED_E_UNAVAILABLE, "experts of %llu bytes: not a multiple of 4",
                    static_cast<unsigned long long>(part.expert_bytes));
    }
  }
  return MOECACHED_OK;
}

std::uint64_t SpillDevice::record_bytes_max() const {
  std::uint64_t bytes = 0;
  for (const LayerLayout& layer : layout().layers) bytes = std::max(bytes, layer.layer.slot_stride);
  return bytes;
}

SpillDevice::PartPlace SpillDevice::part_place(std::uint32_t layer, std::uint32_t part) const {
  const LayerLayout& facts = layout().layers[layer];
  return {window_of(facts, part), facts.parts[part].expert_bytes, facts.parts[part].slot_offset};
}

moecached_status SpillDevice::place(std::uint32_t layer, std::span<const std::int32_t> ids, std::size_t rows,
                                    const Bounce& bounce, std::span<Place> out) {
  waves_.give_up();
  has_begun_layer_ = false;
  const LayerLayout& facts = layout().layers[layer];
  const std::uint64_t stride = facts.layer.slot_stride;
  slots_.resize(ids.size());
  if (rows == 0 || ids.size() % rows != 0)
    return fail(MOECACHED_E_ARGUMENT, "%zu ids of %zu tokens", ids.size(), rows);
  const std::size_t columns = ids.size() / rows;
  auto status = lane_.resolve(
      layer, Lane::IdMatrix{ids.data(), rows, columns, columns * sizeof(std::int32_t)}, slots_.data());
  const bool reads_alone = status == MOECACHED_E_TOO_MANY;
  if (status != MOECACHED_OK && !reads_alone) return status;
  // Alone, an expert's id stands for its slot: each comes into a scratch slot.
  if (reads_alone) slots_.assign(ids.begin(), ids.end());
  const bool fit = assign_scratch(facts, slots_);
  for (std::size_t i = 0; i < ids.size(); ++i) out[i] = {slots_[i], 0, 0};
  if (!fit) return fail(MOECACHED_E_TOO_MANY, "more experts of a layer than %u scratch slots", n_scratch_);
  if (reads_alone) status = lane_.read_alone(layer, copied_, {bounce.memory, stride});
  if (reads_alone && status != MOECACHED_OK) return status;
  for (std::size_t scratch = 0; scratch < copied_.size(); ++scratch) {
    const auto slot = static_cast<std::uint32_t>(copied_[scratch]);
    std::uint64_t source = bounce.address + scratch * stride;
    if (!reads_alone && slot < mapping_->views[layer].n_slots) {
      source = window_addresses_[layer] + slot * stride;
    } else if (!reads_alone) {
      std::memcpy(bounce.memory + scratch * stride, record(layer, copied_[scratch]), stride);
    }
    const std::int32_t wanted = scratch_slot(facts, scratch);
    std::find_if(out.begin(), out.end(), [&](const Place& place) { return place.slot == wanted; })->source =
        source;
  }
  return MOECACHED_OK;
}

moecached_status SpillDevice::begin_layer(std::uint32_t layer, std::span<const std::int32_t> experts) {
  has_begun_layer_ = false;
  experts_.assign(experts.begin(), experts.end());
  slots_.resize(experts.size());
  if (const auto status = lane_.resolve_resident(layer, experts_, slots_.data())) return status;
  waves_.begin_layer(layer, experts.size());
  layer_ = layer;
  has_begun_layer_ = true;
  return MOECACHED_OK;
}

moecached_status SpillDevice::load_part(std::uint32_t part, CUdeviceptr destination, CUevent ready) {
  if (!has_begun_layer_) return fail(MOECACHED_E_ARGUMENT, "no layer has begun whose parts could be loaded");
  if (part >= layout().layers[layer_].parts.size())
    return fail(MOECACHED_E_ARGUMENT, "the model has no part %u in MoE layer %u", part, layer_);
  const ScopedContext current(*context_);
  if (const auto status = current.status()) return status;
  if (const auto status = load_resident(part, destination)) return settled(status);
  if (const auto status = waves_.load(part, absent_, destination)) return settled(status);
  if (const auto status = check_cuda(cuda().cuEventRecord(ready, stream_), "record an event"))
    return settled(status);
  return settled(waves_.read_ahead());
}

moecached_status SpillDevice::load_resident(std::uint32_t part, CUdeviceptr destination) {
  const LayerLayout& facts = layout().layers[layer_];
  const std::uint64_t bytes = facts.parts[part].expert_bytes;
  absent_.clear();
  for (std::size_t i = 0; i < experts_.size(); ++i) {
    const CUdeviceptr to = destination + static_cast<std::uint64_t>(experts_[i]) * bytes;
    if (slots_[i] < 0) {
      absent_.push_back(experts_[i]);
    } else if (slots_[i] >= MOECACHED_DEVICE_SLOT) {
      const auto slot = static_cast<std::uint64_t>(slots_[i] - MOECACHED_DEVICE_SLOT);
      if (const auto status = check_cuda(
              cuda().cuMemcpyDtoDAsync_v2(to, window_of(facts, part) + slot * bytes, bytes, stream_),
              "copy an expert on the GPU")) {
        return status;
      }
    } else if (const auto status =
                   copy(to, record(layer_, slots_[i]) + facts.parts[part].slot_offset, bytes)) {
      return status;
    }
  }
  return MOECACHED_OK;
}

}  // namespace moecached::client
