// The brain's commands as work for the GPUs' queues, and what follows when it is done: flip, grace period,
// copy, flip.
#include <spdlog/spdlog.h>

#include <atomic>
#include <utility>

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
    if (commands.empty()) return;
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
          pending.kind = Pending::Kind::kUnpublish;
          job.is_flip = true;
          job.flip = model.to_host(command.layer, command.expert);
          break;
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
          job.flip = model.to_device(command.layer, command.expert, command.slot);
          break;
        case CommandKind::kGrant:
        case CommandKind::kRelease:  // device slots are not traded
          continue;
      }
      submit(model, std::move(job), std::move(pending));
    }
  }
}

void GpuService::begin_grace(GraceTracker& tracker, const GraceTicket& ticket,
                             std::vector<GraceTicket>* done) {
  grace_lanes_.clear();
  for (Session* session : sessions_) {
    if (!session->gpu_models.contains(ticket.model.value)) continue;
    for (std::uint32_t i = 0; i < MOECACHED_MAX_LANES; ++i) {
      // Behind the flip, like the tracker's own look. A lane that is in no epoch now sees the flip in its
      // next one; it says that it is open, and for which model, before its first.
      moecached_shm_lane& words = session->lane(i);
      const std::uint64_t begun = std::atomic_ref(words.begun).load(std::memory_order_seq_cst);
      if (load_word(words.completed) >= begun >> 16) continue;
      if (std::atomic_ref(words.state).load(std::memory_order_acquire) != 1 ||
          std::atomic_ref(words.model_id).load(std::memory_order_relaxed) != ticket.model.value) {
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
  Entry* entry = pending.kind == Pending::Kind::kRelease ? nullptr : find_entry(pending.model->id());
  if (entry == nullptr) return;
  switch (pending.kind) {
    case Pending::Kind::kUnpublish: {
      if (!succeeded) return;
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
    case Pending::Kind::kRelease:
      return;
    case Pending::Kind::kGrow:
      growth_done(*entry, *pending.growth);
      return;
  }
}

// The sessions of a lost GPU lose it as well; nothing more is tried there, everything else goes on.
void GpuService::lose(Device& device) {
  if (std::exchange(device.lost, true)) return;
  spdlog::error("gpu {} ({}) is lost: a copy failed. Restart the daemon once it is back",
                to_string(device.gpu->id()), device.gpu->name());
}

}  // namespace moecached
