// The core loop's part in policies: whose policy is meant, changing it in all of those or in none.
#include <spdlog/spdlog.h>

#include <algorithm>

#include "daemon/ipc/core.h"
#include "daemon/policy/registry.h"

namespace moecached {

namespace {

Fault invalid(std::string text) { return {FaultCode::kInvalid, std::move(text)}; }

// Whether a spec is well-formed does not depend on the shape.
constexpr PolicyShape kAnyShape{.n_experts = 128, .n_slots = 64};

}  // namespace

Result<std::string> Core::set_policy(const PolicyTarget& target, const std::string& given) {
  const std::string spec = canonical_policy(given);
  const std::shared_ptr<GpuModel> gpu_model = gpu_.find_model(target.model);
  if (target.model != 0 && gpu_model == nullptr && !models_.contains(target.model))
    return Fault{FaultCode::kNotFound, "no model " + std::to_string(target.model)};
  const std::string tier = !target.tier.empty() ? canonical_policy(target.tier) : gpu_model ? "gpu" : "ram";
  const bool in_ram = tier == "ram", on_any_gpu = tier == "gpu";
  std::vector<std::string> gpus;
  gpu_.report_devices(&gpus);
  if (!in_ram && !on_any_gpu && std::ranges::find(gpus, target.tier) == gpus.end()) {
    std::string text = "there is no tier '" + target.tier + "': say ram or gpu";
    for (const std::string& gpu : gpus) text += ", " + gpu;
    return invalid(std::move(text));
  }
  const auto is_there = [&](const std::string& device) { return on_any_gpu || device == target.tier; };
  const auto spills = [this](std::uint32_t id) {
    const auto found = models_.find(id);
    return found != models_.end() && found->second->device() != nullptr;
  };
  if (target.model != 0 && in_ram != (gpu_model == nullptr) && !spills(target.model)) {
    return invalid("model " + std::to_string(target.model) + " is " + (gpu_model ? "on a GPU" : "in RAM") +
                   ", not in tier '" + target.tier + "': leave the tier out");
  }
  if (gpu_model && !is_there(to_string(gpu_model->gpu().id()))) {
    return invalid("model " + std::to_string(target.model) + " is on " + to_string(gpu_model->gpu().id()) +
                   ", not on " + target.tier);
  }
  if (Status checked = check_policy(spec); !checked) return std::move(checked).error();

  std::vector<ModelId> meant;
  if (target.model != 0) {
    meant.emplace_back(target.model);
  } else if (in_ram) {
    for (const auto& [id, model] : models_) meant.emplace_back(id);
  } else {
    for (const ModelReport& model : model_reports()) {
      if (model.device != "host" && is_there(model.device)) meant.emplace_back(model.id);
    }
  }
  Status set = ok();
  if (in_ram) {
    set = brain_.set_policy(meant, spec);
  } else {
    // Whether a spec can be made was checked, so neither half can fail behind the other.
    const auto above =
        std::stable_partition(meant.begin(), meant.end(), [&](ModelId id) { return !spills(id.value); });
    set = brain_.set_device_policy(std::span(above, meant.end()), spec);
    if (set) set = gpu_.set_policy(std::span(meant.begin(), above), spec);
  }
  if (!set) return Fault(set.error());
  if (target.model == 0 && in_ram) config_.policy = spec;
  if (target.model == 0 && on_any_gpu) config_.gpu.policy = spec;
  return spec;
}

Status Core::check_policy(const std::string& spec) const {
  if (auto policy = make_policy(spec, kAnyShape, &policy_libraries_); !policy)
    return std::move(policy).error();
  return ok();
}

// Said once each; doctor counts.
void Core::watch_policy_libraries() {
  for (const auto& library : policy_libraries_.all()) {
    if (library->wrong_answers == 0 || library->is_said) continue;
    library->is_said = true;
    spdlog::warn("policy {}: {}; lru decided in its place, as it will whenever this happens", library->name,
                 library->last_wrong_answer);
  }
}

std::vector<PolicyReport> Core::policy_reports() const {
  std::vector<PolicyReport> out;
  out.push_back({.tier = "ram", .model = 0, .name = {}, .device = {}, .spec = config_.policy});
  if (gpu_.has_devices())
    out.push_back({.tier = "gpu", .model = 0, .name = {}, .device = {}, .spec = config_.gpu.policy});
  for (const ModelReport& model : model_reports()) {
    if (model.spills) {
      out.push_back({.tier = "gpu",
                     .model = model.id,
                     .name = model.name,
                     .device = model.device,
                     .spec = brain_.device_policy(ModelId(model.id))});
    }
    out.push_back({.tier = model.device == "host" || model.spills ? "ram" : "gpu",
                   .model = model.id,
                   .name = model.name,
                   .device = model.device,
                   .spec = model.policy});
  }
  return out;
}

}  // namespace moecached
