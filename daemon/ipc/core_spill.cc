// The core loop's part in spill models: device slots are added when clients have computed for a while, and
// the experts that decode uses most move up into them. The brain decides (Brain::rise) and says step by step
// what is to be done; here it becomes copies on the GPU's queue, and what is done goes back to the brain.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <memory>

#include "daemon/ipc/core.h"
#include "daemon/ipc/gpu_layout.h"
#include "daemon/residency/promotion.h"

namespace moecached {
namespace {

// After a model's first record: a host has computed its graphs by then, and has what memory it needs.
constexpr std::uint64_t kFirstPassNs = 1'000'000'000;
constexpr std::uint64_t kAgainAfterNs = 10'000'000'000;
// Between the word that there are device slots and the first expert in one. A lane looks for the word and
// then at entries: one that met a device slot which it does not know would read the file, rightly, but for
// nothing.
constexpr std::uint64_t kToldBeforeNs = 50'000'000;

}  // namespace

std::shared_ptr<SharedModel> Core::spill_model_of(SessionId session, std::uint32_t model) const {
  const auto it = sessions_.find(session.value);
  if (it == sessions_.end()) return nullptr;
  const auto opened = it->second.session->models.find(model);
  if (opened == it->second.session->models.end() || opened->second.model->device() == nullptr) return nullptr;
  return opened->second.model;
}

void Core::spill_prepared(SharedModel& model) {
  model.being_prepared = false;
  if (!model.device()->is_prepared()) (void)drop_model(model.id().value);
}

void Core::turn_device_slots(std::uint64_t now) {
  for (const auto& [id, model] : models_) {
    VramSlots* const device = model->device();
    if (device == nullptr) continue;
    device_done_.clear();
    device->poll(&device_done_);
    for (const VramSlots::Done& done : device_done_) device_work_done(*model, done, now);
    if (device->told_ns != 0 && now - device->told_ns > kToldBeforeNs) open_device_slots(*model);
    add_device_slots(*model, now);
  }
}

void Core::device_work_done(SharedModel& model, const VramSlots::Done& done, std::uint64_t now) {
  VramSlots& device = *model.device();
  if (!done.ok && !device.is_lost) {
    device.is_lost = true;
    spdlog::error("gpu {} ({}) is lost: a copy failed. Restart the daemon once it is back",
                  to_string(device.gpu().id()), device.gpu().name());
  }
  switch (done.work) {
    case VramSlots::Work::kAllocate:
      device_slots_added(model, now);
      return;
    case VramSlots::Work::kUp:
    case VramSlots::Work::kAside:
      // On a lost GPU the expert stays where it was last; the one that waits for its place is read by clients
      // themselves.
      if (done.ok) brain_.moved(model.id(), done.place.layer, done.place.slot);
      break;
    case VramSlots::Work::kDown:
      brain_.read_done(model.id(), done.place.layer, done.place.slot,
                       done.ok ? ReadOutcome::kOk : ReadOutcome::kIoError);
      break;
  }
  carry_out_commands();
}

GpuService::SpillUse Core::spill_use(const Gpu& gpu) const {
  GpuService::SpillUse use;
  for (const auto& [id, model] : models_) {
    const VramSlots* const device = model->device();
    if (device == nullptr || &device->gpu() != &gpu) continue;
    use.bytes += device->bytes();
    use.is_allocating = use.is_allocating || device->is_allocating;
  }
  return use;
}

// Memory comes last: clients have their own by the time that they have computed for a second.
void Core::add_device_slots(SharedModel& model, std::uint64_t now) {
  VramSlots& device = *model.device();
  if (device.n_slots() > 0 || device.is_allocating || device.is_lost || device.first_record_ns == 0) return;
  if (now - device.first_record_ns < kFirstPassNs) return;
  if (device.tried_ns != 0 && now - device.tried_ns < kAgainAfterNs) return;
  // Of models on one GPU one allocates at a time, so that each sees what the others have taken.
  const GpuService::SpillUse use = spill_use(device.gpu());
  if (model.sessions == 0 || use.is_allocating || gpu_.is_allocating(device.gpu())) return;
  device.tried_ns = now;
  device.is_allocating = true;
  gpu_.set_spill_use(device.gpu(), {.bytes = use.bytes, .is_allocating = true});
  const std::vector<std::uint32_t> each = gpu_slots_wanted(model.layout(), config_.gpu.slots);
  const std::uint32_t wanted = std::ranges::min(each);
  const std::uint64_t taken = gpu_.device_bytes(device.gpu()) + use.bytes;
  // Not a share of the model: were it the last one, the queue's thread would have to end itself. The queue
  // ends before what its calls use.
  device.run([&slots = device, wanted, taken, options = config_.gpu] {
    auto memory = slots.gpu().memory_info();
    if (!memory) {
      slots.note = memory.error().text;
      return;
    }
    std::uint64_t budget = memory->free > options.keep_free ? memory->free - options.keep_free : 0;
    if (options.bytes > 0) budget = std::min(budget, options.bytes > taken ? options.bytes - taken : 0);
    std::uint32_t n = std::min(wanted, slots.n_slots_max());
    while (n > 0 && slots.bytes_for(n) > budget) --n;
    slots.note = n == wanted ? ""
                             : "fewer device slots than gpu.slots asks for fit into device memory, or can be "
                               "told apart by kernels";
    if (n == 0) {
      slots.note = "no device memory within gpu.bytes and gpu.keep_free";
      return;
    }
    if (Status done = slots.allocate(n); !done) slots.note = done.error().text;
  });
}

void Core::device_slots_added(SharedModel& model, std::uint64_t now) {
  VramSlots& device = *model.device();
  device.is_allocating = false;
  gpu_.set_spill_use(device.gpu(), spill_use(device.gpu()));
  if (device.n_slots() == 0) {
    spdlog::warn("model {}: no device slots: {}; trying again in 10 s", model.id().value, device.note);
    return;
  }
  model.tell_device_slots();
  device.told_ns = now;
  spdlog::info("model {}: {} device slots in each layer, {} MiB{}{}", model.id().value, device.n_slots(),
               device.bytes() >> 20, device.note.empty() ? "" : ": ", device.note);
}

void Core::open_device_slots(SharedModel& model) {
  VramSlots& device = *model.device();
  device.told_ns = 0;
  device.is_open = true;
  for (std::uint32_t l = 0; l < model.layout().layers.size(); ++l)
    brain_.open_device_slots(model.id(), LayerIndex(l), device.n_slots());
}

void Core::rise(Lane& lane, const LaneMessage& message, Phase phase) {
  VramSlots* const device = lane.model->device();
  if (device == nullptr) return;
  if (device->first_record_ns == 0) device->first_record_ns = last_record_ns_;
  if (phase != Phase::kDecode || !device->is_open || device->is_lost) return;
  const std::optional<std::uint32_t> spare = device->take_spare();
  if (!spare) return;
  if (!brain_.rise(lane.model->id(), message.layer, message.ids, kPromotionGainMin, *spare))
    device->give_back_spare(*spare);
  carry_out_commands();
}

void Core::start_device_copy(SharedModel& model, const Command& command) {
  VramSlots& device = *model.device();
  const VramSlots::Place place{command.layer, command.expert, command.slot};
  switch (command.kind) {
    case CommandKind::kCopyUp:
      device.copy_up(place, model.slot(command.layer, command.from), command.slot.value - kDeviceSlot);
      return;
    case CommandKind::kCopyAside:
      device.copy_aside(place, command.slot.value - kDeviceSlot, static_cast<std::uint32_t>(command.spare));
      return;
    default:
      device.copy_down(place, static_cast<std::uint32_t>(command.spare),
                       model.slot(command.layer, command.slot));
      return;
  }
}

}  // namespace moecached
