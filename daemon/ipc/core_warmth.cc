// The core loop's part in warm starts: policies begin with what is known of a model, and its hottest experts
// are loaded into free slots while nobody waits for anything else.
#include "daemon/ipc/core.h"

namespace moecached {
namespace {

// Of one model, at once: a queue that a disk still serves in a few milliseconds, so that a client's miss is
// never behind much. What clients load counts as well: they come first.
constexpr std::uint32_t kPrewarmReadsMax = 8;
constexpr int kStepsPerTurn = 64;

}  // namespace

std::vector<BlockShape> Core::block_shapes(std::uint32_t model) const {
  const std::span<const BlockShape> shapes = uses_.shapes(ModelId(model));
  return {shapes.begin(), shapes.end()};
}

Result<std::uint64_t> Core::prewarm(std::uint32_t id, const UseList& list) {
  if (gpu_.find_model(id)) return gpu_.prewarm(ModelId(id), list);
  const auto model = find_model(ModelId(id));
  if (model == nullptr) return Fault{FaultCode::kNotFound, "no model " + std::to_string(id)};
  if (Status seeded = brain_.seed(model->id(), rates_of(list, model->layout().n_expert_used)); !seeded)
    return std::move(seeded).error();
  PrewarmPlan plan(list, brain_, model->id());
  const std::uint64_t n = plan.size();
  plans_.erase(id);
  if (n > 0) plans_.emplace(id, std::move(plan));
  return n;
}

// What sessions of this label used comes before what others did, as far as that is not loaded yet.
void Core::prewarm_for_label(ModelId id, const std::string& label) {
  const auto plan = plans_.find(id.value);
  if (plan == plans_.end()) return;
  const std::shared_ptr<LabelUses> uses = uses_.of_label(id, label);
  if (uses == nullptr || uses->is_empty()) return;
  const PrewarmPlan of_all = std::move(plan->second);
  plan->second = PrewarmPlan(uses->list(uses_.shapes(id)), brain_, id);
  plan->second.append(of_all);
}

void Core::load_planned() {
  for (auto it = plans_.begin(); it != plans_.end();) {
    PrewarmPlan& plan = it->second;
    const ModelId id(it->first);
    for (int i = 0; i < kStepsPerTurn && !plan.is_done(); ++i) {
      if (brain_.coming(id) >= kPrewarmReadsMax) break;
      const PrewarmPlan::Step step = plan.take();
      // Never in the place of another: who is there was asked for.
      if (brain_.free_slots(id, step.layer) > 0) brain_.promote(id, step.layer, step.expert);
    }
    it = plan.is_done() ? plans_.erase(it) : std::next(it);
  }
  carry_out_commands();
}

}  // namespace moecached
