#include "daemon/ipc/expert_ram.h"

#include <algorithm>
#include <utility>

namespace moecached {

Result<std::shared_ptr<ExpertRam>> ExpertRam::create(Gpu& gpu, std::span<const GpuLayerPlan> plans) {
  std::shared_ptr<ExpertRam> ram(new ExpertRam(plans));
  for (const GpuLayerPlan& layer : plans) {
    for (const GpuPartPlan& part : layer.parts) {
      auto memory = gpu.create_host_memory(part.host_bytes);
      if (!memory) return std::move(memory).error();
      if (!ram->memory_.empty() && (*memory)->kind() != ram->kind()) {
        return Fault{FaultCode::kSystem,
                     "shareable pinned memory ran out half-way: " + gpu.host_memory_fallback()};
      }
      ram->bytes_ += (*memory)->bytes().size();
      // What no expert covers is read past the ends of rows: the driver clears its memory, a memfd is zero.
      ram->memory_.push_back(*std::move(memory));
    }
  }
  return ram;
}

bool ExpertRam::fits(std::span<const GpuLayerPlan> plans) const {
  return std::ranges::equal(plans, plans_, [](const GpuLayerPlan& a, const GpuLayerPlan& b) {
    return a.host_first == b.host_first &&
           std::ranges::equal(a.parts, b.parts, [](const GpuPartPlan& x, const GpuPartPlan& y) {
             return x.device_bytes == y.device_bytes && x.host_bytes == y.host_bytes;
           });
  });
}

Status ExpertRam::open_to(Gpu& gpu) {
  for (const auto& memory : memory_) {
    if (Status opened = gpu.open_host_memory(*memory); !opened) return opened;
  }
  return ok();
}

}  // namespace moecached
