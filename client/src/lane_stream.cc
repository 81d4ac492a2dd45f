// Streaming: one part of many experts through the lane's two buffer halves, for batches that need more
// experts than a layer has slots. The daemon reads into its stream segment; without it, this process reads
// into a buffer of its own.
#include <algorithm>
#include <cerrno>

#include "client/src/error.h"
#include "client/src/lane.h"
#include "client/src/shared_words.h"
#include "proto/shm/stream_place.h"

namespace moecached::client {

std::size_t Lane::stream_capacity(std::uint32_t layer, std::uint32_t part) const {
  if (layer >= mapping_->layout.layers.size()) return 0;
  const LayerLayout& layout = mapping_->layout.layers[layer];
  if (part >= layout.parts.size()) return 0;
  const std::uint64_t half_bytes = mapping_->layout.model.stream_bytes_per_lane / 2;
  // Nobody needs more than all experts of a layer at once, and that many always fit into the ring of records.
  return std::min<std::uint64_t>(half_bytes / layout.parts[part].expert_bytes, layout.layer.n_experts);
}

std::size_t Lane::stream_fit(std::uint32_t layer, std::uint32_t part,
                             std::span<const std::int32_t> experts) const {
  const LayerLayout& facts = mapping_->layout.layers[layer];
  const std::uint64_t half_bytes = mapping_->layout.model.stream_bytes_per_lane / 2;
  moecached_stream_end end{};
  for (std::size_t i = 0; i < experts.size(); ++i) {
    const moecached_shm_extent from = facts.place(part, static_cast<std::uint32_t>(experts[i]));
    (void)moecached_stream_place(&end, from.file, from.offset, facts.parts[part].expert_bytes);
    if (moecached_stream_bytes(end) > half_bytes) return i;
  }
  return experts.size();
}

moecached_status Lane::stream_begin(const LaneChannel::StreamRequest& request,
                                    std::span<const std::int32_t> experts) {
  if (const auto status = stream_ahead(request, experts)) return status;
  // A layer is streamed part by part; the first one stands for the lookups of all.
  if (request.part == 0) note_streamed(experts.size());
  return MOECACHED_OK;
}

moecached_status Lane::stream_ahead(const LaneChannel::StreamRequest& request,
                                    std::span<const std::int32_t> experts) {
  std::size_t capacity = stream_capacity(request.layer, request.part);
  if (capacity == 0) {
    return fail(MOECACHED_E_ARGUMENT, "the model has no part %u in MoE layer %u", request.part,
                request.layer);
  }
  const std::uint32_t n_experts = mapping_->views[request.layer].n_experts;
  for (const std::int32_t expert : experts) {
    if (static_cast<std::uint32_t>(expert) >= n_experts) {
      return fail(MOECACHED_E_ARGUMENT, "expert %d is not in [0, %u)", expert, n_experts);
    }
  }
  if (request.in_place) capacity = stream_fit(request.layer, request.part, experts);
  if (request.half > 1 || experts.empty() || experts.size() > capacity) {
    return fail(MOECACHED_E_ARGUMENT,
                "%zu experts into half %u: there are halves 0 and 1, and 1 to %zu experts fit",
                experts.size(), request.half, capacity);
  }

  StreamHalf& half = halves_[request.half];
  half.request = request;
  half.experts.assign(experts.begin(), experts.end());
  half.data = nullptr;
  const Answer posted = channel_.stream_begin(request, half.experts);
  half.state = posted == Answer::kGranted ? StreamHalf::State::kAskedDaemon : StreamHalf::State::kToReadHere;
  return MOECACHED_OK;
}

moecached_status Lane::stream_wait(std::uint32_t index, const void** data_out) {
  if (index > 1 || halves_[index].state == StreamHalf::State::kIdle) {
    return fail(MOECACHED_E_ARGUMENT, "nothing was begun in half %u", index);
  }
  StreamHalf& half = halves_[index];
  if (half.state == StreamHalf::State::kAskedDaemon) {
    const Answer answer = channel_.stream_wait(index);
    if (answer == Answer::kModelChanged) {
      half.state = StreamHalf::State::kIdle;
      return fail(MOECACHED_E_MODEL_CHANGED,
                  "%s has changed since the daemon opened it: restart to use the new file",
                  model_.files.first_path());
    }
    half.state = StreamHalf::State::kToReadHere;
    if (answer == Answer::kGranted) {
      const std::uint64_t lane_bytes = mapping_->layout.model.stream_bytes_per_lane;
      half.data = mapping_->stream.data() + channel_.index() * lane_bytes + index * (lane_bytes / 2);
      half.state = StreamHalf::State::kReady;
      counters_.streamed_experts.add(half.experts.size());
    }
  }
  if (half.state == StreamHalf::State::kToReadHere) {
    if (const auto status = read_stream(half)) return status;
    half.state = StreamHalf::State::kReady;
  }
  *data_out = half.data;
  return MOECACHED_OK;
}

void Lane::stream_drop(std::uint32_t index) {
  StreamHalf& half = halves_[index];
  if (half.state == StreamHalf::State::kAskedDaemon && channel_.stream_wait(index) == Answer::kGranted)
    counters_.streamed_experts.add(half.experts.size());
  half.state = StreamHalf::State::kIdle;
}

void Lane::find_absent(std::uint32_t layer, std::vector<std::int32_t>* out) const {
  const LayerView& view = mapping_->views[layer];
  out->clear();
  for (std::uint32_t e = 0; e < view.n_experts; ++e) {
    if (!is_present(view, load_relaxed(view.entries + e))) out->push_back(static_cast<std::int32_t>(e));
  }
}

void Lane::settle_streams() {
  for (std::uint32_t half = 0; half < 2; ++half) {
    if (!channel_.stream_idle(half)) (void)channel_.stream_wait(half);
  }
}

moecached_status Lane::read_stream(StreamHalf& half) {
  const LayerLayout& layer = mapping_->layout.layers[half.request.layer];
  const moecached_shm_part& part = layer.parts[half.request.part];
  const std::uint64_t bytes = half.experts.size() * part.expert_bytes;
  std::vector<std::uint64_t> places;
  places.reserve(half.experts.size());
  moecached_stream_end end{};
  for (const std::uint16_t expert : half.experts) {
    const moecached_shm_extent from = layer.place(half.request.part, expert);
    places.push_back(half.request.in_place
                         ? moecached_stream_place(&end, from.file, from.offset, part.expert_bytes)
                         : places.size() * part.expert_bytes);
  }
  // What was asked of one daemon may be more than fits into a half of the next one's.
  const std::uint64_t needed = half.request.in_place ? moecached_stream_bytes(end) : bytes;
  const std::uint64_t room = std::max(needed, mapping_->layout.model.stream_bytes_per_lane / 2);
  if (half.buffer.bytes() < needed) {
    half.buffer = Mapping(
        ::mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0),
        room);
    if (!half.buffer.valid()) {
      return fail(MOECACHED_E_SYSTEM, "no memory for a stream buffer of %llu bytes: %s",
                  static_cast<unsigned long long>(room), error_name(errno));
    }
  }
  for (std::size_t i = 0; i < places.size(); ++i) {
    const moecached_shm_extent from = layer.place(half.request.part, half.experts[i]);
    if (const auto status = model_.files.read_part(from, part.expert_bytes, half.buffer.data() + places[i]))
      return status;
  }
  note_fallback(half.experts.size(), bytes);
  half.data = half.buffer.data();
  return MOECACHED_OK;
}

}  // namespace moecached::client
