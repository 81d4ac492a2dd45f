#include "daemon/ipc/scrubber.h"

#include <pthread.h>
#include <xxhash.h>

#include <algorithm>
#include <chrono>
#include <span>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/ipc/core.h"
#include "daemon/platform/clock.h"

namespace moecached {
namespace {

constexpr std::uint64_t kSecond = 1'000'000'000;
constexpr std::size_t kPieceBytes = 256u << 10;  // stays in a core's own cache between the copy and the hash

std::int64_t seconds_since_1970() {
  return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

}  // namespace

void Scrubber::HashDeleter::operator()(XXH3_state_s* state) const { XXH3_freeState(state); }

Scrubber::Scrubber(Core& core, Pace pace)
    : core_(core), pace_(pace), hash_(XXH3_createState()), piece_(kPieceBytes), round_ns_(pace.period_ns) {
  CHECK(hash_);
  thread_ = std::thread([this] { run(); });
}

Scrubber::~Scrubber() {
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
  }
  wakes_.notify_all();
  thread_.join();
}

void Scrubber::run() {
  ::pthread_setname_np(::pthread_self(), "moecached-scrub");
  // Often enough that a pool's first round does not begin late.
  const std::uint64_t look_ns = std::clamp<std::uint64_t>(pace_.period_ns / 16, 1'000'000, kSecond);
  std::uint64_t looked_ns = 0;
  std::unique_lock lock(mutex_);
  while (!stops_) {
    lock.unlock();
    if (monotonic_ns() - looked_ns >= look_ns) {
      look_for_pools();
      looked_ns = monotonic_ns();
    }
    const auto first =
        std::ranges::min_element(rounds_, {}, [this](const auto& entry) { return due_ns(entry.second); });
    std::uint64_t wake_ns = looked_ns + look_ns;
    if (first != rounds_.end()) {
      const std::uint64_t due = std::max(due_ns(first->second), busy_until_ns_);
      if (due <= monotonic_ns()) {
        step(first->second);
        wake_ns = 0;
      } else {
        wake_ns = std::min(wake_ns, due);
      }
    }
    lock.lock();
    const std::uint64_t now = monotonic_ns();
    if (wake_ns > now)
      wakes_.wait_for(lock, std::chrono::nanoseconds(wake_ns - now), [this] { return stops_; });
  }
}

void Scrubber::look_for_pools() {
  std::erase_if(rounds_, [](const auto& entry) { return entry.second.model.expired(); });
  for (const auto& model : core_.call([](Core& core) { return core.pools(); })) {
    if (rounds_.contains(model->id().value)) continue;
    Round& round = rounds_[model->id().value];
    round.model = model;
    round.began_ns = monotonic_ns();
    for (std::uint32_t l = 0; l < model->layout().layers.size(); ++l) {
      for (std::uint32_t s = 0; s < model->room(LayerIndex(l)); ++s)
        round.places.push_back({LayerIndex(l), SlotIndex(s)});
    }
    round.known.assign(round.places.size(), Known{.right_at_s = seconds_since_1970()});
  }
  std::uint64_t slowest = pace_.period_ns;
  for (const auto& [id, round] : rounds_) slowest = std::max(slowest, round.round_ns);
  round_ns_.store(slowest, std::memory_order_relaxed);
}

std::uint64_t Scrubber::due_ns(const Round& round) const {
  return round.began_ns + pace_.period_ns / round.places.size() * round.next;
}

void Scrubber::step(Round& round) {
  const std::size_t at = round.next++;
  if (const auto model = round.model.lock()) visit(model, round.places[at], round.known[at]);
  if (round.next < round.places.size()) return;
  const std::uint64_t now = monotonic_ns();
  round.round_ns = now - round.began_ns;
  round.next = 0;
  round.began_ns = std::max(round.began_ns + pace_.period_ns, now);
}

void Scrubber::visit(const std::shared_ptr<SharedModel>& model, Place place, Known& known) {
  const SharedModel::Residence residence = model->residence(place.layer, place.slot);
  const auto is_still_there = [&] { return model->residence(place.layer, place.slot) == residence; };
  const std::int64_t now = seconds_since_1970();
  if (residence.is_empty()) {
    known = {.right_at_s = now};
    return;
  }
  if (known.stays != residence.stays) known = {.stays = residence.stays, .right_at_s = known.right_at_s};
  if (!known.has_checksum) {
    const auto checksum = checksum_of_file(model, place.layer, residence.expert());
    if (!checksum) return;
    known.checksum = *checksum;
    known.has_checksum = true;
  }
  const auto found = checksum_of_slot(*model, place);
  // Evicted meanwhile, what was read is half of another expert.
  if (!found || !is_still_there()) return;
  ++model->slots_checked;
  if (*found == known.checksum) {
    known.right_at_s = now;
    return;
  }
  // Which of the two is wrong: a file that is written, or a disk that answers differently, must not be taken
  // for a stray write, nor read into slots.
  const auto again = checksum_of_file(model, place.layer, residence.expert());
  if (!again) return;
  if (*again != known.checksum) {
    core_.call([&](Core& core) {
      core.file_is_unsteady(model, place.layer, residence.expert());
      return true;
    });
    return;
  }
  if (!is_still_there()) return;
  core_.call([&](Core& core) {
    core.slot_is_wrong(model, {.layer = place.layer,
                               .slot = place.slot,
                               .expert = residence.expert(),
                               .stays = residence.stays,
                               .right_at_s = known.right_at_s,
                               .found_at_s = now});
    return true;
  });
}

std::optional<std::uint64_t> Scrubber::checksum_of_slot(SharedModel& model, Place place) {
  XXH3_64bits_reset(hash_.get());
  std::uint64_t bytes = 0;
  for (const PartLayout& part : model.layout().layers[place.layer.value].parts) {
    const std::uint64_t begin = model.slot_offset(place.layer, place.slot) + part.slot_offset;
    for (std::uint64_t at = 0; at < part.expert_bytes; at += piece_.size()) {
      const auto piece =
          std::span(piece_).first(std::min<std::uint64_t>(piece_.size(), part.expert_bytes - at));
      if (!model.pool().read(begin + at, piece)) return std::nullopt;
      XXH3_64bits_update(hash_.get(), piece.data(), piece.size());
    }
    bytes += part.expert_bytes;
  }
  if (pace_.bytes_per_second > 0) {
    busy_until_ns_ = std::max(busy_until_ns_, monotonic_ns()) + bytes * kSecond / pace_.bytes_per_second;
  }
  return XXH3_64bits_digest(hash_.get());
}

std::optional<std::uint64_t> Scrubber::checksum_of_file(const std::shared_ptr<SharedModel>& model,
                                                        LayerIndex layer, ExpertIndex expert) {
  auto copy = std::make_shared<FileCopy>();
  auto done = copy->done.get_future();
  if (!core_.call([&](Core& core) { return core.read_again(model, layer, expert, copy); }))
    return std::nullopt;
  if (done.get() != ReadResult::kOk) return std::nullopt;
  if (pace_.bytes_per_second > 0) {
    busy_until_ns_ =
        std::max(busy_until_ns_, monotonic_ns()) + copy->bytes.size() * kSecond / pace_.bytes_per_second;
  }
  return XXH3_64bits(copy->bytes.data(), copy->bytes.size());
}

}  // namespace moecached
