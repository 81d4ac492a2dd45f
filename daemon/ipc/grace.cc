#include "daemon/ipc/grace.h"

#include <algorithm>
#include <atomic>

namespace moecached {

namespace {

std::uint64_t load(std::uint64_t& word) { return std::atomic_ref(word).load(std::memory_order_acquire); }

// completed >= epoch, also when the counter was restarted by a client that lies: then only its own slots are
// at risk.
bool finished(moecached_shm_lane& lane, std::uint64_t epoch) { return load(lane.completed) >= epoch; }

}  // namespace

void GraceTracker::begin(std::span<const GraceTicket> tickets, std::span<const GraceLane> lanes,
                         std::vector<GraceTicket>* done) {
  for (const GraceTicket& ticket : tickets) {
    Entry entry{ticket, {}};
    for (const GraceLane& lane : lanes) {
      // Sequentially consistent, like the store of the entry before it: a load may pass an older store
      // otherwise, and then a lane that began in between would be missed. The lane stores `begun` and loads
      // the entry the same way.
      const std::uint64_t begun = std::atomic_ref(lane.words->begun).load(std::memory_order_seq_cst);
      const std::uint64_t layer = begun & 0xffff;
      const std::uint64_t epoch = begun >> 16;
      if (layer != ticket.layer.value && layer != MOECACHED_LAYER_ALL) continue;
      if (!finished(*lane.words, epoch)) entry.waits.push_back({lane.key, lane.words, epoch});
    }
    if (entry.waits.empty()) {
      done->push_back(ticket);
    } else {
      waiting_.push_back(std::move(entry));
    }
  }
}

void GraceTracker::poll(const KnownUnused& known_unused, std::vector<GraceTicket>* done) {
  std::erase_if(waiting_, [&](Entry& entry) {
    std::erase_if(entry.waits, [&](const Wait& wait) {
      return finished(*wait.words, wait.epoch) ||
             known_unused(wait.lane_key, wait.epoch, entry.ticket.layer, entry.ticket.expert);
    });
    if (!entry.waits.empty()) return false;
    done->push_back(entry.ticket);
    return true;
  });
}

void GraceTracker::lane_gone(std::uint64_t lane_key) {
  for (Entry& entry : waiting_) {
    std::erase_if(entry.waits, [&](const Wait& wait) { return wait.lane_key == lane_key; });
  }
}

void GraceTracker::model_gone(ModelId model) {
  std::erase_if(waiting_, [&](const Entry& entry) { return entry.ticket.model == model; });
}

void GraceTracker::forget(const GraceTicket& ticket) {
  std::erase_if(waiting_, [&](const Entry& entry) {
    return entry.ticket.model == ticket.model && entry.ticket.layer == ticket.layer &&
           entry.ticket.slot == ticket.slot;
  });
}

void GraceTracker::for_each_wait(const std::function<void(std::uint64_t, const GraceTicket&)>& visit) const {
  for (const Entry& entry : waiting_) {
    for (const Wait& wait : entry.waits) visit(wait.lane_key, entry.ticket);
  }
}

}  // namespace moecached
