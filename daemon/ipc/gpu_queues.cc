// The brain's commands as work for the GPUs' queues, and what follows when it is done: flip, grace period,
// copy, flip.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include "daemon/ipc/gpu_service_state.h"

namespace moecached {

void GpuService::submit(const GpuModel& model, GpuQueue::Job job, Pending pending) {
  Device& device = device_of(model);
  job.tag = add_pending(std::move(pending));
  device.queue->submit(std::move(job));
}

void GpuService::carry_out_commands() {
  for (;;) {
    const std::span<const Command> commands = brain_.take_commands();
    if (commands.empty()) break;
    for (const Command& command : commands) {
      Entry* entry = find_entry(command.model);
      if (entry == nullptr || command.kind == CommandKind::kGrant) continue;
      GpuModel& model = *entry->model;
      Pending pending;
      pending.model = entry->model;
      pending.layer = command.layer;
      pending.expert = command.expert;
      pending.slot = command.slot;
      GpuQueue::Job job;
      switch (command.kind) {
        case CommandKind::kUnpublish:
          unpublish(*entry, command);
          continue;
        case CommandKind::kHasten:  // nothing is read ahead
          break;
        case CommandKind::kRead:
          pending.kind = Pending::Kind::kCopy;
          job = model.copy_job(command.layer, command.expert, command.slot);
          break;
        case CommandKind::kPublish:
          pending.kind = Pending::Kind::kPublish;
          ++entry->publishing[command.layer.value];
          job.is_flip = true;
          model.put(command.layer, command.expert, command.slot);
          job.flip = model.flip(command.layer, command.expert,
                                model.device_entry(command.layer, command.slot.value));
          for (Entry* reader : readers_of(*entry)) repoint(*reader, command.layer, command.expert);
          break;
        case CommandKind::kGrant:
        case CommandKind::kRelease:  // device slots are not traded
        case CommandKind::kCopyUp:   // nor are they above others: the slots of this brain are the device's
        case CommandKind::kCopyAside:
        case CommandKind::kMove:
        case CommandKind::kSpareFreed:
          continue;
      }
      submit(model, std::move(job), std::move(pending));
    }
  }
  for (const auto& [id, entry] : models_) submit_repoints(*entry);
}

void GpuService::begin_grace(GraceTracker& tracker, const GraceTicket& ticket,
                             std::vector<GraceTicket>* done) {
  grace_lanes_.clear();
  // Whose lanes may be reading the slot; memory that was added concerns those of the model alone.
  std::vector<std::uint32_t> models{ticket.model.value};
  if (&tracker == &grace_) {
    for (const Entry* reader : readers_of(*find_entry(ticket.model)))
      models.push_back(reader->model->id().value);
  }
  const auto is_meant = [&models](std::uint32_t id) { return std::ranges::find(models, id) != models.end(); };
  for (Session* session : sessions_) {
    if (std::ranges::none_of(session->gpu_models, [&](const auto& opened) { return is_meant(opened.first); }))
      continue;
    for (std::uint32_t i = 0; i < MOECACHED_MAX_LANES; ++i) {
      // Behind the flip, like the tracker's own look. A lane that is in no epoch now sees the flip in its
      // next one; it says that it is open, and for which model, before its first.
      moecached_shm_lane& words = session->lane(i);
      const std::uint64_t begun = std::atomic_ref(words.begun).load(std::memory_order_seq_cst);
      if (load_word(words.completed) >= begun >> 16) continue;
      if (std::atomic_ref(words.state).load(std::memory_order_acquire) != 1 ||
          !is_meant(std::atomic_ref(words.model_id).load(std::memory_order_relaxed))) {
        continue;
      }
      grace_lanes_.push_back({session->id().value * MOECACHED_MAX_LANES + i, &words});
    }
  }
  tracker.begin({&ticket, 1}, grace_lanes_, done);
}

std::uint64_t GpuService::add_pending(Pending pending) {
  if (free_pending_.empty()) {
    pending_.push_back(std::make_unique<Pending>(std::move(pending)));
    return pending_.size() - 1;
  }
  const std::uint32_t index = free_pending_.back();
  free_pending_.pop_back();
  *pending_[index] = std::move(pending);
  return index;
}

void GpuService::drain_queues() {
  for (const auto& device : devices_) {
    if (!device->queue) continue;
    done_.clear();
    device->queue->poll(&done_);
    for (const GpuQueue::Done& done : done_) {
      Pending pending = std::move(*pending_[done.tag]);
      *pending_[done.tag] = Pending{};
      free_pending_.push_back(static_cast<std::uint32_t>(done.tag));
      if (!done.ok) lose(*device);
      queue_done(pending, done.ok);
    }
  }
}

void GpuService::queue_done(Pending& pending, bool succeeded) {
  if (pending.kind == Pending::Kind::kUnpublish && pending.reader != pending.model) {
    if (Entry* reader = find_entry(pending.reader->id())) repointed(*reader);
  }
  if (pending.kind == Pending::Kind::kMeasure) {
    pending.path->state = Path::State::kUnknown;
    pending.path->measured = pending.measured;
  }
  Entry* entry = pending.kind == Pending::Kind::kRelease ? nullptr : find_entry(pending.model->id());
  if (entry == nullptr) return;
  switch (pending.kind) {
    case Pending::Kind::kUnpublish: {
      // Lanes of a lost reader end with it.
      if (!succeeded && pending.reader == pending.model) return;
      if (--*pending.flips_left > 0 || entry->device->lost) return;
      const GraceTicket ticket{pending.model->id(), pending.layer, pending.slot, pending.expert};
      if (test_no_grace_) {
        grace_done_.push_back(ticket);
      } else {
        begin_grace(grace_, ticket, &grace_done_);
      }
      return;
    }
    case Pending::Kind::kCopy:
      if (!succeeded) return;
      entry->model->bytes_uploaded += entry->model->expert_bytes(pending.layer);
      brain_.read_done(pending.model->id(), pending.layer, pending.slot, ReadOutcome::kOk);
      return;
    case Pending::Kind::kPublish:
      --entry->publishing[pending.layer.value];
      if (succeeded && entry->has_slots) check_all_resident(*entry);
      return;
    case Pending::Kind::kRepoint:
      repointed(*entry);
      return;
    case Pending::Kind::kMeasure:
    case Pending::Kind::kRelease:
      return;
    case Pending::Kind::kGrow:
      growth_done(*entry, *pending.growth);
      return;
  }
}

// The sessions of a lost GPU lose it as well; nothing more is tried there, everything else goes on.
void GpuService::lose(Device& device) {
  if (device.lost.exchange(true)) return;
  spdlog::error("gpu {} ({}) is lost: a copy failed. Restart the daemon once it is back",
                to_string(device.gpu->id()), device.gpu->name());
  for (const auto& [id, entry] : models_) {
    if (entry->device != &device) continue;
    // Its table cannot be flipped any more, but its clients may be alive: those that may read slots of other
    // GPUs must not begin again. What they have begun is waited for as before.
    if (!entry->peers.empty()) entry->model->set_load_state(MOECACHED_GPU_LOST);
    for (const auto& [reader_id, reader] : models_) {
      reader->model->give_up_peer_chunks(*entry->model);
      forget_peer(*reader, *entry);
    }
  }
}

}  // namespace moecached
