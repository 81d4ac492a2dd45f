#include "client/src/gpu_mapping.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>

#include "client/src/error.h"
#include "client/src/shared_words.h"

namespace moecached::client {
namespace {

// Another thread may take an address between the look for a free one and its reservation.
constexpr int kAdjacencyAttempts = 8;
// To which CUDA (driver 580) rounds a reservation among the addresses that the kernel gives out.
constexpr std::uint64_t kReservationAlignment = std::uint64_t{32} << 20;

std::uint64_t rounded_up(std::uint64_t bytes, std::uint64_t granularity) {
  return (bytes + granularity - 1) / granularity * granularity;
}

CUdeviceptr as_address(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

}  // namespace

moecached_status GpuMapping::open(Connection& connection, const ModelFiles& files, const GpuUuid& uuid,
                                  std::unique_ptr<GpuMapping>* out) {
  std::unique_ptr<GpuMapping> mapping(new GpuMapping);
  if (const auto status = CudaContext::open(uuid, &mapping->context_)) return status;
  if (const auto status = mapping->check_device()) return status;

  std::vector<UniqueFd> for_daemon;
  if (const auto status = files.reopen(&for_daemon)) return status;
  const std::string name = files.name();
  std::string no_peers_reason;
  if (const auto status = mapping->probe_peers(connection, uuid, &no_peers_reason)) return status;
  Connection::OpenedGpuModel opened;
  if (const auto status =
          connection.gpu_open({.name = name.c_str(),
                               .uuid = uuid,
                               .flags = mapping->reads_peers_ ? std::uint32_t{MOECACHED_GPU_OPEN_PEERS} : 0u,
                               .no_peers_reason = no_peers_reason.c_str()},
                              for_daemon, &opened)) {
    return status;
  }
  for_daemon.clear();

  if (const auto status =
          map_segment(opened.model, opened.model_bytes, PROT_READ, "model segment", &mapping->segment_)) {
    return status;
  }
  if (const auto status =
          map_segment(opened.log, opened.log_bytes, PROT_READ | PROT_WRITE, "log segment", &mapping->log_)) {
    return status;
  }
  GpuSegmentFacts facts;
  facts.boot_epoch = connection.boot_epoch();
  facts.model_id = opened.model_id;
  facts.n_lanes = connection.n_lanes();
  facts.log_bytes = opened.log_bytes;
  facts.uuid = uuid;
  facts.file_bytes = files.sizes();
  if (const auto status = check_gpu_segment(mapping->segment_, facts, &mapping->layout_, &mapping->words_)) {
    return status;
  }

  const ScopedContext current(*mapping->context_);
  if (const auto status = current.status()) return status;
  if (const auto status = mapping->register_lanes(connection)) return status;
  if (const auto status = mapping->map_table(std::move(opened.table))) return status;
  if (const auto status = mapping->map_host_parts(connection, opened.host_memory)) return status;
  if (const auto status = mapping->map_chunks(connection)) return status;
  *out = std::move(mapping);
  return MOECACHED_OK;
}

moecached_status GpuMapping::check_device() const {
  constexpr struct {
    CUdevice_attribute attribute;
    const char* what;
  } kNeeded[] = {
      {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "virtual memory management"},
      {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, "memory shared by file descriptors"},
      {CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, "64-bit writes in stream order"},
  };
  for (const auto& needed : kNeeded) {
    if (context_->attribute(needed.attribute) == 0) {
      return fail(MOECACHED_E_UNAVAILABLE, "this GPU or its driver has no %s", needed.what);
    }
  }
  return MOECACHED_OK;
}

// Whether this process can map memory of the GPUs whose slots its table may come to name: the driver may have
// no way between the two, or a container hide the other one.
moecached_status GpuMapping::probe_peers(Connection& connection, const GpuUuid& uuid, std::string* why_not) {
  if (const char* text = std::getenv("MOECACHED_PEERS"); text != nullptr && std::strcmp(text, "0") == 0) {
    *why_not = "MOECACHED_PEERS is 0";
    return MOECACHED_OK;
  }
  std::vector<UniqueFd> probes;
  if (const auto status = connection.gpu_probe(uuid, &probes)) {
    if (status != MOECACHED_E_REFUSED) return status;
    *why_not = last_error();  // what else is wrong, opening says
    return MOECACHED_OK;
  }
  const ScopedContext current(*context_);
  if (const auto status = current.status()) return status;
  Range range;
  reads_peers_ = true;
  for (UniqueFd& probe : probes) {
    auto status = check_cuda(
        cuda().cuMemAddressReserve(&range.address, MOECACHED_PROBE_BYTES, MOECACHED_PROBE_BYTES, 0, 0),
        "reserve addresses");
    if (status == MOECACHED_OK) {
      range.reserved = range.address;
      range.reserved_bytes = MOECACHED_PROBE_BYTES;
      status = import(&range, 0, MOECACHED_PROBE_BYTES, std::move(probe));
    }
    if (status != MOECACHED_OK) {
      reads_peers_ = false;
      *why_not = last_error();
    }
    release(range);
    range = Range();
  }
  return MOECACHED_OK;
}

// The GPU writes `completed` into the session segment and slots into the log segment.
moecached_status GpuMapping::register_lanes(Connection& connection) {
  // Portable: the session's lanes may be on several GPUs.
  constexpr unsigned kFlags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
  lanes_registration_ = connection.registration().lock();
  if (lanes_registration_ == nullptr) {
    if (const auto status =
            HostRegistration::open(context_, connection.segment(), kFlags, &lanes_registration_)) {
      return status;
    }
    connection.registration() = lanes_registration_;
  }
  return HostRegistration::open(context_, log_, kFlags, &log_registration_);
}

// Maps the memory behind a descriptor at range->address + offset. The handle is released and the descriptor
// closed at once: either would keep the memory allocated after the daemon has freed it.
moecached_status GpuMapping::import(Range* range, std::uint64_t offset, std::uint64_t bytes,
                                    UniqueFd memory) {
  CUmemGenericAllocationHandle handle = 0;
  if (const auto status =
          check_cuda(cuda().cuMemImportFromShareableHandle(
                         &handle, reinterpret_cast<void*>(static_cast<std::uintptr_t>(memory.get())),
                         CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
                     "import memory of the daemon")) {
    return status;
  }
  const CUdeviceptr address = range->address + offset;
  range->pieces.reserve(range->pieces.size() + 1);
  const CUresult mapped = cuda().cuMemMap(address, bytes, 0, handle, 0);
  cuda().cuMemRelease(handle);
  if (const auto status = check_cuda(mapped, "map memory of the daemon")) return status;
  range->pieces.push_back({address, bytes});
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = context_->device();
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READ;
  const CUresult readable = cuda().cuMemSetAccess(address, bytes, &access, 1);
  if (readable != CUDA_SUCCESS) {  // as before, so that it may be tried again
    cuda().cuMemUnmap(address, bytes);
    range->pieces.pop_back();
  }
  return check_cuda(readable, "read memory of the daemon");
}

moecached_status GpuMapping::map_table(UniqueFd memory) {
  const std::uint64_t bytes = rounded_up(layout_.gpu.table_bytes, layout_.gpu.granularity);
  if (const auto status =
          check_cuda(cuda().cuMemAddressReserve(&table_.address, bytes, layout_.gpu.granularity, 0, 0),
                     "reserve addresses for the slot table")) {
    return status;
  }
  table_.reserved = table_.address;
  table_.reserved_bytes = bytes;
  return import(&table_, 0, bytes, std::move(memory));
}

moecached_status GpuMapping::map_host_parts(Connection& connection, std::uint32_t host_memory) {
  if (host_memory != MOECACHED_HOST_MEMORY_VMM && host_memory != MOECACHED_HOST_MEMORY_MEMFD) {
    return layout_mismatch("kind of host memory");
  }
  const std::uint32_t n_parts = layout_.model.model.n_parts;
  windows_.resize(n_parts);
  scratch_plan_ = plan_scratch(layout_);
  // CUDA gives no memory behind addresses that are the kernel's.
  if (host_memory == MOECACHED_HOST_MEMORY_MEMFD) scratch_plan_.n_slots = 0;
  for (std::uint32_t part = 0; part < n_parts;) {
    std::vector<UniqueFd> fds;
    if (const auto status =
            connection.gpu_fetch({model_id(), MOECACHED_GPU_MEMORY_HOST, part, n_parts - part}, &fds)) {
      return status;
    }
    for (UniqueFd& fd : fds) {
      if (const auto status = host_memory == MOECACHED_HOST_MEMORY_VMM
                                  ? map_host_allocation(part, std::move(fd))
                                  : map_host_memfd(part, fd)) {
        return status;
      }
      fd = UniqueFd();
      ++part;
    }
  }
  return MOECACHED_OK;
}

moecached_status GpuMapping::map_host_allocation(std::uint32_t part, UniqueFd memory) {
  const moecached_shm_window& window = layout_.windows[part];
  Range& range = windows_[part];
  const std::uint64_t bytes = scratch_plan_.window_bytes[part];
  if (const auto status =
          check_cuda(cuda().cuMemAddressReserve(&range.address, bytes, layout_.gpu.granularity, 0, 0),
                     "reserve addresses for a window")) {
    return status;
  }
  range.reserved = range.address;
  range.reserved_bytes = bytes;
  return import(&range, window.device_bytes, window.host_bytes, std::move(memory));
}

// CUDA maps a memfd only where the CPU sees it, so the addresses come from the kernel: a free range for the
// whole window. CUDA reserves its front. Among those addresses it does so in whole multiples of 32 MiB, at
// multiples of 32 MiB, so the device part lies at the end of its reservation and the memfd right behind.
// *taken: somebody else was faster.
//
//   |  reserved by CUDA: ... | device slots |  memfd: host slots  |
//   begin                                   middle, a multiple of 32 MiB
moecached_status GpuMapping::map_memfd_behind(const moecached_shm_window& window, const UniqueFd& memory,
                                              int protection, Range* range, bool* taken) {
  const std::uint64_t front = rounded_up(window.device_bytes, kReservationAlignment);
  const std::uint64_t bytes = front + window.host_bytes + kReservationAlignment;
  void* const free = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (free == MAP_FAILED) {
    return fail(MOECACHED_E_SYSTEM, "no %llu bytes of addresses for a window: %s",
                static_cast<unsigned long long>(bytes), error_name(errno));
  }
  const CUdeviceptr begin = rounded_up(as_address(free), kReservationAlignment);
  ::munmap(free, bytes);
  if (front > 0) {
    CUdeviceptr got = 0;
    if (const auto status =
            check_cuda(cuda().cuMemAddressReserve(&got, front, layout_.gpu.granularity, begin, 0),
                       "reserve addresses for a window")) {
      return status;
    }
    range->reserved = got;
    range->reserved_bytes = front;
    *taken = got != begin;
    if (*taken) return MOECACHED_OK;
  }
  range->address = begin + front - window.device_bytes;
  void* const behind =
      reinterpret_cast<void*>(static_cast<std::uintptr_t>(range->address + window.device_bytes));
  void* const mapped =
      ::mmap(behind, window.host_bytes, protection, MAP_SHARED | MAP_FIXED_NOREPLACE, memory.get(), 0);
  *taken =
      mapped == MAP_FAILED ? errno == EEXIST : mapped != behind;  // kernels before 4.17 take it for a hint
  if (mapped != MAP_FAILED) range->memory = Mapping(mapped, window.host_bytes);
  if (mapped != MAP_FAILED || *taken) return MOECACHED_OK;
  return fail(MOECACHED_E_SYSTEM, "cannot map %llu bytes of the daemon's RAM: %s",
              static_cast<unsigned long long>(window.host_bytes), error_name(errno));
}

moecached_status GpuMapping::map_host_memfd(std::uint32_t part, const UniqueFd& memory) {
  const moecached_shm_window& window = layout_.windows[part];
  Range& range = windows_[part];
  if (const auto status = check_size(memory, window.host_bytes, "host part of a window")) return status;
  const bool read_only = context_->attribute(CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED) != 0;
  const int protection = read_only ? PROT_READ : PROT_READ | PROT_WRITE;
  std::vector<Range> elsewhere;  // kept until the end, so that CUDA does not answer with them again
  moecached_status found = MOECACHED_OK;
  bool taken = true;
  for (int attempt = 0; attempt < kAdjacencyAttempts && taken && found == MOECACHED_OK; ++attempt) {
    Range candidate;
    found = map_memfd_behind(window, memory, protection, &candidate, &taken);
    if (found == MOECACHED_OK && !taken) {
      range = std::move(candidate);
    } else {
      elsewhere.push_back(std::move(candidate));
    }
  }
  for (Range& candidate : elsewhere) release(candidate);
  if (found != MOECACHED_OK) return found;
  if (taken) {
    return fail(MOECACHED_E_SYSTEM, "CUDA gives no addresses in front of %llu bytes of RAM for a window",
                static_cast<unsigned long long>(window.host_bytes));
  }
  std::byte* const host = range.memory.data();
  (void)::madvise(host, window.host_bytes, MADV_DONTDUMP);  // advice only
  const unsigned flags = CU_MEMHOSTREGISTER_DEVICEMAP | (read_only ? CU_MEMHOSTREGISTER_READ_ONLY : 0u);
  if (const auto status = HostRegistration::open(context_, range.memory, flags, &range.registration)) {
    return status;
  }
  CUdeviceptr seen_at = 0;
  if (const auto status =
          check_cuda(cuda().cuMemHostGetDevicePointer_v2(&seen_at, host, 0), "find RAM on the GPU")) {
    return status;
  }
  if (seen_at != as_address(host)) {
    return fail(MOECACHED_E_SYSTEM, "this GPU sees page-locked RAM at other addresses than the CPU");
  }
  return MOECACHED_OK;
}

moecached_status GpuMapping::map_chunks(Connection& connection) {
  const std::uint32_t wanted = load_acquire(&words_.gpu->n_chunks);
  std::uint32_t next = chunks_mapped();
  if (wanted <= next) return MOECACHED_OK;
  if (wanted > layout_.gpu.n_chunks_max) return layout_mismatch("number of chunks");
  const ScopedContext current(*context_);
  if (const auto status = current.status()) return status;
  while (next < wanted) {
    std::vector<UniqueFd> fds;
    if (const auto status =
            connection.gpu_fetch({model_id(), MOECACHED_GPU_MEMORY_CHUNK, next, wanted - next}, &fds)) {
      return status;
    }
    for (UniqueFd& fd : fds) {
      moecached_shm_chunk chunk{};
      if (const auto status = take_chunk(layout_, words_, next, &chunk)) return status;
      const bool is_wanted = (chunk.flags & MOECACHED_CHUNK_GONE) == 0 &&
                             ((chunk.flags & MOECACHED_CHUNK_PEER) == 0 || reads_peers_);
      if (is_wanted) {
        if (const auto status = import(&windows_[chunk.part], chunk.offset, chunk.bytes, std::move(fd))) {
          return status;
        }
      }
      fd = UniqueFd();
      chunks_mapped_.store(++next, std::memory_order_relaxed);
    }
  }
  return MOECACHED_OK;
}

moecached_status GpuMapping::open_scratch() {
  if (scratch_ != nullptr || scratch_plan_.n_slots == 0) return MOECACHED_OK;
  std::vector<CUdeviceptr> windows;
  for (const Range& range : windows_) windows.push_back(range.address);
  return GpuScratch::open(*context_, layout_, scratch_plan_, windows, &scratch_);
}

CUdeviceptr GpuMapping::identity_table() const {
  return table_.address + layout_.gpu.identity_first * sizeof(std::int32_t);
}

CUdeviceptr GpuMapping::table(std::uint32_t layer) const {
  return table_.address + std::uint64_t{layout_.model.layers[layer].layer.table_first} * sizeof(std::int32_t);
}

moecached_status GpuMapping::synchronize() const noexcept {
  const ScopedContext current(*context_);
  if (const auto status = current.status()) return status;
  return check_cuda(cuda().cuCtxSynchronize(), "wait for the GPU");
}

void GpuMapping::release(Range& range) noexcept {
  range.registration.reset();
  for (const Range::Piece& piece : range.pieces) cuda().cuMemUnmap(piece.address, piece.bytes);
  if (range.reserved_bytes > 0) cuda().cuMemAddressFree(range.reserved, range.reserved_bytes);
}

// Results are not looked at: at the end of a process the driver may be gone already.
GpuMapping::~GpuMapping() {
  if (context_ == nullptr) return;
  const ScopedContext current(*context_);
  cuda().cuCtxSynchronize();
  scratch_.reset();
  for (Range& window : windows_) release(window);
  release(table_);
  log_registration_.reset();
  lanes_registration_.reset();
}

}  // namespace moecached::client
