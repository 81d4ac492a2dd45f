// Pinned RAM with every expert of one model, at the places that windows on GPUs have for it. Held once,
// however many GPUs the model is on: the first one allocates it, the others' copies and clients read the same
// memory. Made off the core loop (allocating takes seconds); what it has loaded is the core loop's; share()
// any thread. Memory: goes with the last model that uses it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "daemon/base/result.h"
#include "daemon/ipc/gpu_layout.h"
#include "daemon/platform/gpu.h"
#include "proto/shm/layout.h"

namespace moecached {

class ExpertRam {
 public:
  // By part over all layers. kLimit: the machine has not as much.
  static Result<std::shared_ptr<ExpertRam>> create(Gpu& gpu, std::span<const GpuLayerPlan> plans);

  // Whether windows that are laid out so have every expert at the same place.
  [[nodiscard]] bool fits(std::span<const GpuLayerPlan> plans) const;
  // Makes it readable for copies of another GPU.
  Status open_to(Gpu& gpu);

  [[nodiscard]] std::uint32_t n_parts() const { return static_cast<std::uint32_t>(memory_.size()); }
  [[nodiscard]] std::byte* part(std::uint32_t part) const { return memory_[part]->bytes().data(); }
  [[nodiscard]] moecached_host_memory kind() const { return memory_.front()->kind(); }
  [[nodiscard]] std::uint64_t bytes() const { return bytes_; }
  [[nodiscard]] Result<UniqueFd> share(std::uint32_t part) const { return memory_[part]->share(); }

  // Core loop.
  moecached_load_state state = MOECACHED_LOADING;
  std::uint64_t loads_left = 0;
  bool load_begun = false;

 private:
  explicit ExpertRam(std::span<const GpuLayerPlan> plans) : plans_(plans.begin(), plans.end()) {}

  const std::vector<GpuLayerPlan> plans_;
  std::vector<std::unique_ptr<GpuHostMemory>> memory_;
  std::uint64_t bytes_ = 0;
};

}  // namespace moecached
