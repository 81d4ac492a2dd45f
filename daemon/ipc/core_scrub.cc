// The core loop's part of the scrubber: reads of the files for it, and what becomes of a slot that it found
// wrong.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <ctime>

#include "daemon/ipc/core.h"

namespace moecached {

namespace {
constexpr std::size_t kWrongSlotsKept = 8;  // of a model, for doctor

std::string utc(std::int64_t seconds_since_1970) {
  const auto seconds = static_cast<std::time_t>(seconds_since_1970);
  std::tm parts{};
  ::gmtime_r(&seconds, &parts);
  char text[32];
  return {text, std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts)};
}

std::string describe(const SharedModel& model, const WrongSlot& wrong) {
  return "layer " + std::to_string(model.layout().layers[wrong.layer.value].block) + ", expert " +
         std::to_string(wrong.expert.value) + " in slot " + std::to_string(wrong.slot.value) +
         " did not hold the bytes of the file at " + utc(wrong.found_at_s) + ", since " +
         utc(wrong.right_at_s) + " or later";
}
}  // namespace

std::vector<std::shared_ptr<SharedModel>> Core::pools() const {
  std::vector<std::shared_ptr<SharedModel>> out;
  for (const auto& [id, model] : models_) out.push_back(model);
  return out;
}

bool Core::read_again(const std::shared_ptr<SharedModel>& model, LayerIndex layer_index, ExpertIndex expert,
                      const std::shared_ptr<FileCopy>& to) {
  // Once a model is dropped, its files are others'.
  if (find_model(model->id()) != model || model->changed_on_disk) return false;
  const LayerLayout& layer = model->layout().layers[layer_index.value];
  std::uint64_t bytes = 0;
  for (const PartLayout& part : layer.parts) bytes += part.expert_bytes;
  to->bytes.resize(bytes);
  std::vector<PartRead> parts;
  bytes = 0;
  for (const PartLayout& part : layer.parts) {
    const PartExtent from = part.extent(expert.value);
    parts.push_back(
        {model->file(from.file), from.offset, part.expert_bytes, to->bytes.data() + bytes, false});
    bytes += part.expert_bytes;
  }
  ++model->reads_in_flight;
  reads_.start(BulkRead{.owner = to,
                        .on_done =
                            [model, to](ReadResult result) {
                              --model->reads_in_flight;
                              if (result == ReadResult::kFileChanged) model->changed_on_disk = true;
                              to->done.set_value(result);
                            }},
               parts);
  return true;
}

void Core::slot_is_wrong(const std::shared_ptr<SharedModel>& model, WrongSlot wrong) {
  if (find_model(model->id()) != model) return;
  const auto is_known = [&](const auto& entry) {
    return entry.first == model->id() && entry.second.layer == wrong.layer &&
           entry.second.slot == wrong.slot && entry.second.stays == wrong.stays;
  };
  if (std::ranges::any_of(wrong_slots_, is_known)) return;
  spdlog::error("stray write into the pool of model {} ({}): {}; it is read again", model->id().value,
                model->name(), describe(*model, wrong));
  ++model->slots_corrupt;
  wrong_slots_.emplace_back(model->id(), wrong);
  read_wrong_slots_again();
  wrong.is_pinned = std::ranges::any_of(wrong_slots_, is_known);
  model->wrong_slots.push_back(wrong);
  if (model->wrong_slots.size() > kWrongSlotsKept) model->wrong_slots.pop_front();
}

// Each turn, right behind the epochs that have ended and before anybody leases again: a lease or a hold may
// have kept them until now.
void Core::read_wrong_slots_again() {
  if (wrong_slots_.empty()) return;
  std::erase_if(wrong_slots_, [this](const auto& entry) {
    const auto& [id, wrong] = entry;
    const auto model = find_model(id);
    const bool is_there = model && model->residence(wrong.layer, wrong.slot).stays == wrong.stays;
    const bool is_over =
        !is_there || brain_.slot_corrupt(id, wrong.layer, wrong.slot, wrong.expert) != Brain::Reload::kPinned;
    if (is_over && model) {
      for (WrongSlot& kept : model->wrong_slots) {
        if (kept.layer == wrong.layer && kept.slot == wrong.slot && kept.stays == wrong.stays)
          kept.is_pinned = false;
      }
    }
    return is_over;
  });
  carry_out_commands();
}

void Core::scrub_findings(std::vector<Finding>* out) const {
  for (const auto& [id, model] : models_) {
    const std::string subject = "model " + std::to_string(id) + " (" + model->name() + ")";
    if (model->is_file_unsteady) {
      out->push_back(
          {"error", subject,
           "two reads of its file gave different bytes, with the same size and time: the file was written "
           "through a mapping, or the disk cannot be trusted. What was read before may be wrong"});
    }
    const std::uint64_t n_older = model->slots_corrupt - model->wrong_slots.size();
    for (const WrongSlot& wrong : model->wrong_slots) {
      out->push_back({"error", subject,
                      describe(*model, wrong) + ": something wrote into the pool. " +
                          (wrong.is_pinned ? "A lease or a stopped client keeps it; then it is read again. "
                                           : "It was taken out and is read again from the file. ") +
                          "What clients computed with it since then may be wrong and cannot be mended: "
                          "repeat it. If this comes "
                          "again, look for a program of root's or the daemon's user that maps the pool, and "
                          "test the memory"});
    }
    if (n_older > 0) {
      out->push_back({"error", subject,
                      std::to_string(n_older) + " more slots, earlier, did not hold the bytes of the file"});
    }
  }
}

void Core::file_is_unsteady(const std::shared_ptr<SharedModel>& model, LayerIndex layer, ExpertIndex expert) {
  if (find_model(model->id()) != model || model->is_file_unsteady) return;
  model->is_file_unsteady = true;
  model->changed_on_disk = true;  // nothing more is read from it
  spdlog::error(
      "model {} ({}): two reads of layer {}, expert {} gave different bytes; nothing more is read from it",
      model->id().value, model->name(), model->layout().layers[layer.value].block, expert.value);
}

}  // namespace moecached
