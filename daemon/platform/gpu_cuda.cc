// GPUs by the CUDA driver API: primary contexts (the ones that llama.cpp's process would get too), memory by
// cuMemCreate with POSIX descriptors. Every call pushes the context and pops it, since callers are threads of
// all kinds. Facts that this relies on, measured: descriptors of device and of HOST_NUMA memory can be
// imported elsewhere; a mapping starts at offset 0 of its allocation and is whole; an exported descriptor
// that stays open pins the memory.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <mutex>

#include "daemon/base/check.h"
#include "daemon/platform/cuda_context.h"
#include "daemon/platform/cuda_ipc.h"
#include "daemon/platform/cuda_queue.h"
#include "daemon/platform/gpu.h"
#include "daemon/platform/memfd.h"

namespace moecached {
namespace {

std::uint64_t round_up(std::uint64_t value, std::uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

CUmemAllocationProp properties(CUmemLocationType type, int id) {
  CUmemAllocationProp out{};
  out.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  out.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  out.location.type = type;
  out.location.id = id;
  return out;
}

CUmemAccessDesc read_write(CUmemLocationType type, int id) {
  CUmemAccessDesc out{};
  out.location.type = type;
  out.location.id = id;
  out.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return out;
}

Result<UniqueFd> export_handle(const CudaContext& context, CUmemGenericAllocationHandle handle) {
  const CudaContext::Use use(context);
  int fd = -1;
  const CUresult result =
      context.cu.cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  if (result != CUDA_SUCCESS) return context.cu.fault("sharing GPU memory", result);
  return UniqueFd(fd);
}

// A reserved range of addresses and the allocations mapped into it.
class CudaRange final : public GpuRange {
 public:
  static Result<std::unique_ptr<CudaRange>> reserve(CudaContextPtr context, std::uint64_t bytes,
                                                    std::uint64_t granularity) {
    const CudaContext::Use use(*context);
    CUdeviceptr address = 0;
    const CUresult result = context->cu.cuMemAddressReserve(&address, bytes, granularity, 0, 0);
    if (result != CUDA_SUCCESS) {
      return context->cu.fault("reserving " + std::to_string(bytes) + " bytes of GPU addresses", result);
    }
    return std::unique_ptr<CudaRange>(new CudaRange(std::move(context), address, bytes));
  }

  ~CudaRange() override {
    const CudaContext::Use use(*context_);
    while (!chunks_.empty()) give_back_last();
    context_->cu.cuMemAddressFree(address_, bytes_);
  }

  std::uint64_t address() const override { return address_; }
  std::uint64_t bytes() const override { return bytes_; }
  std::size_t chunks() const override { return chunks_.size(); }
  Result<UniqueFd> share(std::size_t chunk) const override {
    CHECK(chunk < chunks_.size());
    return export_handle(*context_, chunks_[chunk].handle);
  }

  Status grow(std::uint64_t offset, std::uint64_t bytes) override {
    CHECK(offset + bytes <= bytes_);
    const CUmemAllocationProp wanted = properties(CU_MEM_LOCATION_TYPE_DEVICE, context_->device);
    const CUmemAccessDesc access = read_write(CU_MEM_LOCATION_TYPE_DEVICE, context_->device);
    if (Status mapped = map(offset, bytes, wanted, {&access, 1}); !mapped) return mapped;
    const CudaContext::Use use(*context_);
    // Kernels read past the last row of an expert: what is there must not be a leftover that decodes to NaN.
    // It returns before it is done, and the copies that follow are on streams that do not wait for this one.
    CUresult result = context_->cu.cuMemsetD8(address_ + offset, 0, bytes);
    if (result == CUDA_SUCCESS) result = context_->cu.cuStreamSynchronize(nullptr);
    if (result != CUDA_SUCCESS) {
      give_back_last();
      return context_->cu.fault("clearing GPU memory", result);
    }
    return ok();
  }

  Status map(std::uint64_t offset, std::uint64_t bytes, const CUmemAllocationProp& wanted,
             std::span<const CUmemAccessDesc> access) {
    const CudaContext::Use use(*context_);
    CUmemGenericAllocationHandle handle = 0;
    CUresult result = context_->cu.cuMemCreate(&handle, bytes, &wanted, 0);
    if (result != CUDA_SUCCESS)
      return context_->cu.fault("allocating " + std::to_string(bytes) + " bytes", result);
    result = context_->cu.cuMemMap(address_ + offset, bytes, 0, handle, 0);
    if (result != CUDA_SUCCESS) {
      context_->cu.cuMemRelease(handle);
      return context_->cu.fault("mapping GPU memory", result);
    }
    chunks_.push_back({handle, offset, bytes});
    for (const CUmemAccessDesc& who : access) {
      result = context_->cu.cuMemSetAccess(address_ + offset, bytes, &who, 1);
      if (result != CUDA_SUCCESS) {
        give_back_last();
        return context_->cu.fault("making GPU memory accessible", result);
      }
    }
    return ok();
  }

 private:
  struct Chunk {
    CUmemGenericAllocationHandle handle;
    std::uint64_t offset, bytes;
  };
  CudaRange(CudaContextPtr context, CUdeviceptr address, std::uint64_t bytes)
      : context_(std::move(context)), address_(address), bytes_(bytes) {}

  // REQUIRES: the context is current.
  void give_back_last() {
    const Chunk chunk = chunks_.back();
    chunks_.pop_back();
    context_->cu.cuMemUnmap(address_ + chunk.offset, chunk.bytes);
    context_->cu.cuMemRelease(chunk.handle);
  }

  CudaContextPtr context_;
  const CUdeviceptr address_;
  const std::uint64_t bytes_;
  std::vector<Chunk> chunks_;
};

class VmmHostMemory final : public GpuHostMemory {
 public:
  explicit VmmHostMemory(std::unique_ptr<CudaRange> range) : range_(std::move(range)) {}
  std::span<std::byte> bytes() const override {
    // One address for both: the range was made accessible to the CPU as well.
    return {reinterpret_cast<std::byte*>(range_->address()), range_->bytes()};  // NOLINT
  }
  moecached_host_memory kind() const override { return MOECACHED_HOST_MEMORY_VMM; }
  Result<UniqueFd> share() const override { return range_->share(0); }

 private:
  std::unique_ptr<CudaRange> range_;
};

class CudaPin final : public PinnedMemory {
 public:
  static Result<std::unique_ptr<CudaPin>> pin(CudaContextPtr context, std::span<std::byte> memory) {
    const CudaContext::Use use(*context);
    const CUresult result =
        context->cu.cuMemHostRegister(memory.data(), memory.size(), CU_MEMHOSTREGISTER_PORTABLE);
    if (result != CUDA_SUCCESS)
      return context->cu.fault("pinning " + std::to_string(memory.size()) + " bytes of memory", result);
    return std::unique_ptr<CudaPin>(new CudaPin(std::move(context), memory.data()));
  }
  ~CudaPin() override {
    const CudaContext::Use use(*context_);
    context_->cu.cuMemHostUnregister(address_);
  }

 private:
  CudaPin(CudaContextPtr context, std::byte* address) : context_(std::move(context)), address_(address) {}
  CudaContextPtr context_;
  std::byte* const address_;
};

class RegisteredMemfd final : public GpuHostMemory {
 public:
  static Result<std::unique_ptr<RegisteredMemfd>> create(CudaContextPtr context, Memfd memory) {
    auto pin = CudaPin::pin(std::move(context), memory.bytes());
    if (!pin) return std::move(pin).error();
    return std::unique_ptr<RegisteredMemfd>(new RegisteredMemfd(std::move(memory), *std::move(pin)));
  }
  std::span<std::byte> bytes() const override { return memory_.bytes(); }
  moecached_host_memory kind() const override { return MOECACHED_HOST_MEMORY_MEMFD; }
  Result<UniqueFd> share() const override {
    UniqueFd copy(::dup(memory_.fd()));
    if (!copy) return system_fault("duplicating a descriptor", errno);
    return copy;
  }

 private:
  RegisteredMemfd(Memfd memory, std::unique_ptr<CudaPin> pin)
      : memory_(std::move(memory)), pin_(std::move(pin)) {}
  Memfd memory_;
  std::unique_ptr<CudaPin> pin_;  // goes before the memory
};

class CudaGpu final : public Gpu {
 public:
  static Result<std::unique_ptr<Gpu>> open(const CudaDriver& cu, int ordinal) {
    CUdevice device = 0;
    if (const CUresult r = cu.cuDeviceGet(&device, ordinal); r != CUDA_SUCCESS) return cu.fault("GPU", r);
    CUuuid uuid{};
    if (const CUresult r = cu.cuDeviceGetUuid(&uuid, device); r != CUDA_SUCCESS) return cu.fault("UUID", r);
    GpuId id;
    std::memcpy(id.uuid.data(), uuid.bytes, id.uuid.size());
    char name[256] = "";
    cu.cuDeviceGetName(name, sizeof name - 1, device);
    std::unique_ptr<CudaGpu> gpu(new CudaGpu(cu, device, id, name));
    return std::unique_ptr<Gpu>(std::move(gpu));
  }

  const GpuId& id() const override { return id_; }
  const std::string& name() const override { return name_; }
  std::uint64_t granularity() const override { return kGranularity; }
  std::string host_memory_fallback() const override {
    const std::lock_guard lock(mutex_);
    return host_memory_fallback_;
  }

  Result<GpuMemoryInfo> memory_info() override {
    auto context = use_context();
    if (!context) return std::move(context).error();
    const CudaContext::Use use(**context);
    std::size_t free = 0, total = 0;
    const CUresult result = cu_.cuMemGetInfo(&free, &total);
    if (result != CUDA_SUCCESS) return cu_.fault("asking how much GPU memory is free", result);
    return GpuMemoryInfo{free, total};
  }

  Result<std::unique_ptr<GpuHostMemory>> create_host_memory(std::uint64_t bytes) override {
    auto context = use_context();
    if (!context) return std::move(context).error();
    bytes = round_up(bytes, kGranularity);
    if (host_memory_fallback().empty()) {
      auto memory = create_vmm_host_memory(*context, bytes);
      if (memory || memory.error().code == FaultCode::kLimit) return memory;
      const std::lock_guard lock(mutex_);
      host_memory_fallback_ = memory.error().text;
    }
    auto memory = Memfd::create("experts", bytes, ClientAccess::kReadOnly);
    if (!memory) return std::move(memory).error();
    auto pinned = RegisteredMemfd::create(*context, *std::move(memory));
    if (!pinned) return std::move(pinned).error();
    return std::unique_ptr<GpuHostMemory>(*std::move(pinned));
  }

  Result<std::unique_ptr<PinnedMemory>> pin(std::span<std::byte> memory) override {
    auto context = use_context();
    if (!context) return std::move(context).error();
    auto pin = CudaPin::pin(*context, memory);
    if (!pin) return std::move(pin).error();
    return std::unique_ptr<PinnedMemory>(*std::move(pin));
  }

  Status open_host_memory(const GpuHostMemory& memory) override {
    if (memory.kind() != MOECACHED_HOST_MEMORY_VMM) return ok();  // registered as portable: for all contexts
    auto context = use_context();
    if (!context) return std::move(context).error();
    const CudaContext::Use use(**context);
    const CUmemAccessDesc access = read_write(CU_MEM_LOCATION_TYPE_DEVICE, device_);
    const CUresult result = cu_.cuMemSetAccess(reinterpret_cast<CUdeviceptr>(memory.bytes().data()),
                                               memory.bytes().size(), &access, 1);
    if (result != CUDA_SUCCESS) return cu_.fault("reading another GPU's pinned memory", result);
    return ok();
  }

  Result<std::unique_ptr<GpuRange>> reserve(std::uint64_t bytes) override {
    auto context = use_context();
    if (!context) return std::move(context).error();
    auto range = CudaRange::reserve(*context, bytes, kGranularity);
    if (!range) return std::move(range).error();
    return std::unique_ptr<GpuRange>(*std::move(range));
  }

  Result<std::unique_ptr<GpuIpcBuffer>> create_ipc_buffer(std::uint64_t bytes) override {
    auto context = use_context();
    if (!context) return std::move(context).error();
    return create_cuda_ipc_buffer(*context, bytes);
  }

  Status write(std::uint64_t address, std::span<const std::byte> source) override {
    auto context = use_context();
    if (!context) return std::move(context).error();
    const CudaContext::Use use(**context);
    CUresult result = cu_.cuMemcpyHtoD(address, source.data(), source.size());
    // From memory that is not pinned it returns when the source may be used again, which is earlier.
    if (result == CUDA_SUCCESS) result = cu_.cuStreamSynchronize(nullptr);
    if (result != CUDA_SUCCESS) return cu_.fault("writing GPU memory", result);
    return ok();
  }

  Result<std::unique_ptr<GpuQueue>> create_queue() override {
    auto context = use_context();
    if (!context) return std::move(context).error();
    return create_cuda_queue(*context);
  }

  Result<double> measure_copy_rate() override {
    auto host = create_host_memory(kMeasuredBytes);
    if (!host) return std::move(host).error();
    return measure(kMeasuredBytes, [&](CUdeviceptr to, CUstream stream) {
      return cu_.cuMemcpyHtoDAsync(to, (*host)->bytes().data(), kMeasuredBytes, stream);
    });
  }

  Result<double> measure_peer_rate(Gpu& other) override {
    const auto& peer = dynamic_cast<CudaGpu&>(other);
    if (!can_read(other)) {
      return Fault{FaultCode::kUnsupported,
                   "the driver lets " + to_string(id_) + " not read the memory of " + to_string(peer.id_)};
    }
    auto context = dynamic_cast<CudaGpu&>(other).use_context();
    if (!context) return std::move(context).error();
    auto memory = CudaRange::reserve(*context, kMeasuredPeerBytes, kGranularity);
    if (!memory) return std::move(memory).error();
    const CUmemAccessDesc access[] = {read_write(CU_MEM_LOCATION_TYPE_DEVICE, peer.device_),
                                      read_write(CU_MEM_LOCATION_TYPE_DEVICE, device_)};
    if (Status mapped = (*memory)->map(0, kMeasuredPeerBytes,
                                       properties(CU_MEM_LOCATION_TYPE_DEVICE, peer.device_), access);
        !mapped) {
      return std::move(mapped).error();
    }
    return measure(kMeasuredPeerBytes, [&](CUdeviceptr to, CUstream stream) {
      return cu_.cuMemcpyDtoDAsync(to, (*memory)->address(), kMeasuredPeerBytes, stream);
    });
  }

  bool can_read(const Gpu& other) const override {
    int can = 0;
    return cu_.cuDeviceCanAccessPeer(&can, device_, dynamic_cast<const CudaGpu&>(other).device_) ==
               CUDA_SUCCESS &&
           can != 0;
  }

  // No context on the other GPU is needed, which would take memory there.
  Result<UniqueFd> share_probe(const Gpu& other) override {
    auto context = use_context();
    if (!context) return std::move(context).error();
    const auto& peer = dynamic_cast<const CudaGpu&>(other);
    const std::lock_guard lock(peer.mutex_);
    if (peer.probe_ == 0) {
      const CudaContext::Use use(**context);
      const CUmemAllocationProp wanted = properties(CU_MEM_LOCATION_TYPE_DEVICE, peer.device_);
      const CUresult result = cu_.cuMemCreate(&peer.probe_, MOECACHED_PROBE_BYTES, &wanted, 0);
      if (result != CUDA_SUCCESS) return cu_.fault("allocating on " + to_string(other.id()), result);
    }
    return export_handle(**context, peer.probe_);
  }

  ~CudaGpu() override {
    if (probe_ != 0) cu_.cuMemRelease(probe_);
  }
  CudaGpu(const CudaGpu&) = delete;
  CudaGpu& operator=(const CudaGpu&) = delete;

 private:
  // Of every GPU that can map memory today; asked for all the same before the first allocation.
  static constexpr std::uint64_t kGranularity = 2u << 20;
  static_assert(MOECACHED_PROBE_BYTES % kGranularity == 0);
  static constexpr std::uint64_t kMeasuredBytes = 64u << 20;
  // Of a GPU on which experts may have left little memory.
  static constexpr std::uint64_t kMeasuredPeerBytes = 16u << 20;

  // The best of a few copies into this GPU, bytes per second.
  template <typename Copy>
  Result<double> measure(std::uint64_t bytes, Copy copy) {
    constexpr int kRounds = 3;
    auto context = use_context();
    if (!context) return std::move(context).error();
    const CudaContext::Use use(**context);
    CUdeviceptr device = 0;
    if (const CUresult r = cu_.cuMemAlloc(&device, bytes); r != CUDA_SUCCESS)
      return cu_.fault("allocating", r);
    CUstream stream = nullptr;
    CUresult result = cu_.cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0);
    double best = 0;
    for (int i = 0; i <= kRounds && result == CUDA_SUCCESS; ++i) {  // the first one warms up
      const auto begin = std::chrono::steady_clock::now();
      result = copy(device, stream);
      if (result == CUDA_SUCCESS) result = cu_.cuStreamSynchronize(stream);
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
      if (i > 0 && took.count() > 0) best = std::max(best, static_cast<double>(bytes) / took.count());
    }
    if (stream != nullptr) cu_.cuStreamDestroy(stream);
    cu_.cuMemFree(device);
    if (result != CUDA_SUCCESS) return cu_.fault("measuring the link", result);
    return best;
  }

  CudaGpu(const CudaDriver& cu, CUdevice device, GpuId id, std::string name)
      : cu_(cu), device_(device), id_(id), name_(std::move(name)) {}

  // The context is made when first needed: a daemon that serves no model on this GPU takes none of its
  // memory.
  Result<CudaContextPtr> use_context() {
    const std::lock_guard lock(mutex_);
    if (context_) return context_;
    const CUmemAllocationProp wanted = properties(CU_MEM_LOCATION_TYPE_DEVICE, device_);
    std::size_t granularity = 0;
    CUresult result =
        cu_.cuMemGetAllocationGranularity(&granularity, &wanted, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
    if (result != CUDA_SUCCESS) return cu_.fault(name_ + ": memory that can be shared", result);
    if (kGranularity % granularity != 0) {
      return Fault{FaultCode::kUnsupported, name_ + " allocates in pieces of " + std::to_string(granularity) +
                                                " bytes; 2 MiB is expected"};
    }
    CUcontext context = nullptr;
    result = cu_.cuDevicePrimaryCtxRetain(&context, device_);
    if (result != CUDA_SUCCESS) return cu_.fault(name_ + ": context", result);
    context_ = std::make_shared<CudaContext>(cu_, device_, context);
    return context_;
  }

  Result<std::unique_ptr<GpuHostMemory>> create_vmm_host_memory(const CudaContextPtr& context,
                                                                std::uint64_t bytes) {
    int node = 0;
    {
      const CudaContext::Use use(*context);
      if (cu_.cuDeviceGetAttribute(&node, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, device_) != CUDA_SUCCESS ||
          node < 0)
        node = 0;
    }
    auto range = CudaRange::reserve(context, bytes, kGranularity);
    if (!range) return std::move(range).error();
    const CUmemAccessDesc access[] = {read_write(CU_MEM_LOCATION_TYPE_DEVICE, device_),
                                      read_write(CU_MEM_LOCATION_TYPE_HOST_NUMA, node)};
    if (Status mapped = (*range)->map(0, bytes, properties(CU_MEM_LOCATION_TYPE_HOST_NUMA, node), access);
        !mapped) {
      return std::move(mapped).error();
    }
    return std::unique_ptr<GpuHostMemory>(std::make_unique<VmmHostMemory>(*std::move(range)));
  }

  const CudaDriver& cu_;
  const CUdevice device_;
  const GpuId id_;
  const std::string name_;
  mutable std::mutex mutex_;
  CudaContextPtr context_;
  mutable CUmemGenericAllocationHandle probe_ = 0;  // of this GPU; made by others
  std::string host_memory_fallback_;
};

}  // namespace

std::vector<std::unique_ptr<Gpu>> list_gpus(std::string* reason) {
  std::vector<std::unique_ptr<Gpu>> gpus;
  const Result<const CudaDriver*> driver = CudaDriver::load();
  if (!driver) {
    *reason = driver.error().text;
    return gpus;
  }
  int count = 0;
  if (const CUresult result = (*driver)->cuDeviceGetCount(&count); result != CUDA_SUCCESS) {
    *reason = (*driver)->fault("counting GPUs", result).text;
    return gpus;
  }
  for (int i = 0; i < count; ++i) {
    auto gpu = CudaGpu::open(**driver, i);
    if (!gpu) {
      *reason = "GPU " + std::to_string(i) + ": " + gpu.error().text;
      continue;
    }
    gpus.push_back(*std::move(gpu));
  }
  if (gpus.empty() && reason->empty()) *reason = "the NVIDIA driver sees no GPU";
  return gpus;
}

}  // namespace moecached
