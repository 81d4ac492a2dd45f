#include "client/src/spill_stream.h"

#include <algorithm>
#include <utility>

#include "client/src/cuda_driver.h"
#include "client/src/error.h"
#include "proto/shm/stream_place.h"

namespace moecached::client {

moecached_status SpillStream::open(CUstream stream) {
  stream_ = stream;
  for (CUevent& event : copied_) {
    if (const auto status =
            check_cuda(cuda().cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), "make an event"))
      return status;
  }
  for (std::uint32_t p = 0; p < behind_.size(); ++p) behind_[p] = p + 1;
  const ModelLayout& model = lane_.mapping()->layout;
  in_vain_.assign(model.layers.size(), 0);
  wanted_.assign(model.n_experts_max, 0);
  comes_.assign(model.n_experts_max, 0);
  return MOECACHED_OK;
}

void SpillStream::close() noexcept {
  for (const CUevent event : copied_) {
    if (event != nullptr) cuda().cuEventDestroy_v2(event);
  }
}

void SpillStream::begin_layer(std::uint32_t layer, std::size_t n_used) {
  if (guessed_ != layer) give_up();
  const bool was_guessed = std::exchange(guessed_, kNone) == layer;
  if (now_.part != kNone) behind_[now_.part] = kNone;  // the last one of its layer
  now_ = {.layer = layer, .part = kNone};
  uses_most_ = n_used * 4 >= std::size_t{layout(layer).layer.n_experts} * 3;
  if (uses_most_ || was_guessed) in_vain_[layer] = uses_most_ ? 0 : 1;
}

void SpillStream::give_up() noexcept {
  if (guessed_ == kNone) return;
  for (Wave& wave : waves_) {
    if (wave.place.layer == guessed_) wave.place = {};
  }
  in_vain_[guessed_] = 1;
  guessed_ = kNone;
}

void SpillStream::reset() {
  guessed_ = kNone;
  while (n_open_ > 0) drop_first();
}

moecached_status SpillStream::load(std::uint32_t part, std::span<const std::int32_t> absent,
                                   CUdeviceptr destination) {
  (now_.part == kNone ? first_part_ : behind_[now_.part]) = part;
  now_.part = part;
  absent_.assign(absent.begin(), absent.end());
  std::ranges::fill(wanted_, std::uint8_t{0});  // also of a part that was not finished
  for (const std::int32_t expert : absent) wanted_[static_cast<std::size_t>(expert)] = 1;
  n_wanted_ = absent.size();
  // A layer is streamed part by part; one of them stands for the lookups of all.
  if (part == 0 && n_wanted_ > 0) lane_.note_streamed(n_wanted_);
  while (n_open_ > 0 && waves_[first_].place != now_) drop_first();
  while (n_wanted_ > 0) {
    if (const auto status = fill()) return status;
    if (const auto status = take(destination)) return status;
  }
  return MOECACHED_OK;
}

// Between parts there is no hurry: the next one is asked for at once, and the first wave of it is under way.
// Between layers the GPU computes.
moecached_status SpillStream::read_ahead() { return part_behind(now_.part) == kNone ? fill() : MOECACHED_OK; }

std::uint32_t SpillStream::part_behind(std::uint32_t part) const {
  const std::uint32_t next = behind_[part];
  return next < layout(now_.layer).parts.size() ? next : kNone;
}

// What the next wave should bring, with the experts in rest_; none: there is nothing to be read.
SpillStream::Place SpillStream::find_next() {
  find_rest(now_, absent_);
  if (!rest_.empty()) return now_;
  if (const std::uint32_t part = part_behind(now_.part); part != kNone) {
    const Place next{.layer = now_.layer, .part = part};
    find_rest(next, absent_);
    return next;
  }
  const std::uint32_t layer = now_.layer + 1;
  if (!uses_most_ || layer >= in_vain_.size() || in_vain_[layer] != 0 ||
      first_part_ >= layout(layer).parts.size() || !lane_.is_connected()) {
    return {};
  }
  const Place next{.layer = layer, .part = first_part_};
  lane_.find_absent(layer, &guess_);
  find_rest(next, guess_);
  if (!rest_.empty()) guessed_ = layer;
  return next;
}

// Of these experts those that no wave brings, or has brought.
void SpillStream::find_rest(Place place, std::span<const std::int32_t> experts) {
  std::ranges::fill(comes_, std::uint8_t{0});
  for (std::uint32_t i = 0; i < n_open_; ++i) {
    const Wave& wave = waves_[first_ ^ i];
    if (wave.place != place) continue;
    for (const std::int32_t expert : wave.experts) comes_[static_cast<std::size_t>(expert)] = 1;
  }
  rest_.clear();
  for (const std::int32_t expert : experts) {
    const auto e = static_cast<std::size_t>(expert);
    if (comes_[e] == 0 && (place != now_ || wanted_[e] != 0)) rest_.push_back(expert);
  }
}

moecached_status SpillStream::fill() {
  while (n_open_ < waves_.size()) {
    const Place next = find_next();
    if (next == Place{} || rest_.empty()) return MOECACHED_OK;
    if (const auto status = post(next)) return status;
  }
  return MOECACHED_OK;
}

moecached_status SpillStream::post(Place place) {
  const std::uint32_t half = first_ ^ n_open_;
  // Copies out of the half may still be under way, from this part or one before.
  if (const auto status = check_cuda(cuda().cuEventSynchronize(copied_[half]), "wait for copies"))
    return status;
  const std::span<const std::int32_t> experts =
      std::span<const std::int32_t>(rest_).first(lane_.stream_fit(place.layer, place.part, rest_));
  const LaneChannel::StreamRequest request{
      .layer = place.layer, .part = place.part, .half = half, .in_place = true};
  if (const auto status = lane_.stream_ahead(request, experts)) return status;
  waves_[half].place = place;
  waves_[half].experts.assign(experts.begin(), experts.end());
  ++n_open_;
  return MOECACHED_OK;
}

// REQUIRES: a wave is under way.
moecached_status SpillStream::take(CUdeviceptr destination) {
  const Wave& wave = waves_[first_];
  if (wave.place != now_) {
    drop_first();
    return MOECACHED_OK;
  }
  const std::uint32_t half = first_;
  first_ ^= 1;
  --n_open_;
  const void* data = nullptr;
  if (const auto status = lane_.stream_wait(half, &data)) return status;
  if (const auto status = copy_wanted(wave, static_cast<const std::byte*>(data), destination)) return status;
  return check_cuda(cuda().cuEventRecord(copied_[half], stream_), "record an event");
}

// Experts that follow each other in the file are one copy.
moecached_status SpillStream::copy_wanted(const Wave& wave, const std::byte* data, CUdeviceptr destination) {
  const LayerLayout& facts = layout(wave.place.layer);
  const std::uint64_t expert_bytes = facts.parts[wave.place.part].expert_bytes;
  struct {
    std::uint64_t from = 0, to = 0, bytes = 0;
  } run;
  const auto copy_run = [&] {
    if (run.bytes == 0) return MOECACHED_OK;
    return check_cuda(cuda().cuMemcpyHtoDAsync_v2(destination + run.to, data + run.from, run.bytes, stream_),
                      "copy experts to the GPU");
  };
  moecached_stream_end end{};
  for (const std::int32_t expert : wave.experts) {
    const auto e = static_cast<std::uint32_t>(expert);
    const moecached_shm_extent place = facts.place(wave.place.part, e);
    const std::uint64_t from = moecached_stream_place(&end, place.file, place.offset, expert_bytes);
    if (wanted_[e] == 0) continue;
    wanted_[e] = 0;
    --n_wanted_;
    const std::uint64_t to = e * expert_bytes;
    if (from != run.from + run.bytes || to != run.to + run.bytes) {
      if (const auto status = copy_run()) return status;
      run = {.from = from, .to = to, .bytes = 0};
    }
    run.bytes += expert_bytes;
  }
  return copy_run();
}

void SpillStream::drop_first() {
  lane_.stream_drop(first_);
  first_ ^= 1;
  --n_open_;
}

}  // namespace moecached::client
