#include "client/src/gpu_scratch.h"

#include <algorithm>

#include "client/src/error.h"
#include "client/src/fetch_ptx.h"  // made from fetch.ptx

namespace moecached::client {
namespace {

constexpr unsigned kThreads = 256;
// Blocks that share one copy. Any number from 8 to 64 reaches the same speed, down to one expert.
constexpr unsigned kBlocks = 32;

// As fetch.ptx declares them.
struct FetchPart {
  CUdeviceptr window = 0;
  std::uint64_t stride = 0;
};
struct FetchParts {
  FetchPart part[MOECACHED_MAX_PARTS];
};
static_assert(sizeof(FetchParts) == 128);

}  // namespace

moecached_status GpuScratch::open(const CudaContext& context, const GpuLayout& layout,
                                  const ScratchPlan& plan, const std::vector<CUdeviceptr>& windows,
                                  std::unique_ptr<GpuScratch>* out) {
  const ScopedContext current(context);  // also where what was begun is taken back
  if (const auto status = current.status()) return status;
  std::unique_ptr<GpuScratch> scratch(new GpuScratch(layout, plan, windows));
  if (const auto status = scratch->load_kernel()) return status;
  if (const auto status = scratch->map_memory(context)) return status;
  if (const auto status = scratch->first_launch()) return status;
  *out = std::move(scratch);
  return MOECACHED_OK;
}

moecached_status GpuScratch::load_kernel() {
  if (const auto status = check_cuda(cuda().cuModuleLoadData(&module_, kFetchPtx), "load the fetch kernel")) {
    return status;
  }
  return check_cuda(cuda().cuModuleGetFunction(&kernel_, module_, "moecached_fetch"),
                    "find the fetch kernel");
}

moecached_status GpuScratch::map_memory(const CudaContext& context) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = context.device();
  CUmemAccessDesc access{};
  access.location = properties.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  pieces_.reserve(layout_.windows.size());
  for (std::uint32_t p = 0; p < MOECACHED_MAX_PARTS; ++p) {
    const std::uint64_t bytes = plan_.memory_bytes[p];
    if (bytes == 0) continue;
    CUmemGenericAllocationHandle memory = 0;
    if (const auto status =
            check_cuda(cuda().cuMemCreate(&memory, bytes, &properties, 0), "allocate scratch slots")) {
      return status;
    }
    CUresult result = CUDA_SUCCESS;
    for (std::uint32_t l = 0; l < layout_.model.layers.size() && result == CUDA_SUCCESS; ++l) {
      if (p >= layout_.model.layers[l].parts.size()) continue;
      const std::uint32_t part = layout_.part_index(l, p);
      const CUdeviceptr address = windows_[part] + plan_.offset[part];
      result = cuda().cuMemMap(address, bytes, 0, memory, 0);
      if (result != CUDA_SUCCESS) break;
      pieces_.push_back({address, bytes});
      result = cuda().cuMemSetAccess(address, bytes, &access, 1);
    }
    cuda().cuMemRelease(memory);  // it lives as long as it is mapped
    if (const auto status = check_cuda(result, "map scratch slots")) return status;
  }
  return MOECACHED_OK;
}

// The driver may finish loading a kernel when it is first launched, which it must not do while a graph is
// being captured. Nothing is copied: the only id is that of slot 0.
moecached_status GpuScratch::first_launch() const {
  if (layout_.model.layers.empty()) return MOECACHED_OK;
  const std::uint32_t part = layout_.part_index(0, 0);
  // The first words of the scratch memory, as ids.
  const CUdeviceptr ids = windows_[part] + plan_.offset[part];
  if (const auto status = check_cuda(cuda().cuMemsetD32_v2(ids, 0, 2), "clear scratch slots")) return status;
  FetchParts parts{};
  CUdeviceptr slots = ids, fetched = ids + sizeof(std::int32_t);
  std::uint32_t host_first = 1, scratch_first = 1;
  void* arguments[] = {&slots, &fetched, &host_first, &scratch_first, &parts};
  if (const auto status =
          check_cuda(cuda().cuLaunchKernel(kernel_, 1, 1, 1, kThreads, 1, 1, 0, nullptr, arguments, nullptr),
                     "launch the fetch kernel")) {
    return status;
  }
  return check_cuda(cuda().cuCtxSynchronize(), "run the fetch kernel");
}

moecached_status GpuScratch::fetch(const moecached_gpu_fetch& request) const {
  const std::uint32_t layer = request.layer & ~std::uint32_t{MOECACHED_GPU_BY_EXPERT};
  if (request.n_ids == 0 || request.n_ids > plan_.n_slots || layer >= layout_.model.layers.size()) {
    return fail(MOECACHED_E_ARGUMENT, "%u ids of layer %u: there are %u scratch slots and %zu layers",
                request.n_ids, layer, plan_.n_slots, layout_.model.layers.size());
  }
  const LayerLayout& facts = layout_.model.layers[layer];
  // Counted from where the window begins for the caller.
  const std::uint32_t begin = (request.layer & MOECACHED_GPU_BY_EXPERT) != 0 ? facts.layer.host_first : 0;
  FetchParts parts{};
  for (std::uint32_t p = 0; p < facts.parts.size(); ++p) {
    const std::uint64_t stride = facts.parts[p].expert_bytes;
    parts.part[p] = {windows_[layout_.part_index(layer, p)] + begin * stride, stride};
  }
  CUdeviceptr slots = request.slots, fetched = request.fetched;
  std::uint32_t host_first = facts.layer.host_first - begin, scratch_first = plan_.first[layer] - begin;
  void* arguments[] = {&slots, &fetched, &host_first, &scratch_first, &parts};
  return check_cuda(
      cuda().cuLaunchKernel(kernel_, kBlocks, request.n_ids, static_cast<unsigned>(facts.parts.size()),
                            kThreads, 1, 1, 0, static_cast<CUstream>(request.stream), arguments, nullptr),
      "launch the fetch kernel");
}

// Results are not looked at: at the end of a process the driver may be gone already.
GpuScratch::~GpuScratch() {
  for (const Piece& piece : pieces_) cuda().cuMemUnmap(piece.address, piece.bytes);
  if (module_ != nullptr) cuda().cuModuleUnload(module_);
}

}  // namespace moecached::client
