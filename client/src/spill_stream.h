// The stream buffer of one lane of a spill model as a pipeline: experts that are on disk come part by part,
// in waves of half the buffer, and while one wave is waited for and copied to the GPU the next one is under
// way.
//
//   layer l, part 0: | wave | wave | w. |  part 1: | wave | ...  layer l + 1, part 0: | wave |
//                                        ^ posted before part 1  ^ posted before l + 1 is known of
//                                          is asked for
//
// All parts of a layer need the same experts, and come in the order in which the last layer's were asked for.
// What the next layer needs is a guess: where a batch used most experts of this one, those of the next that
// are absent now. A wave is used for what it has of what is wanted; one that nobody wants is waited for
// before its half is used again. Wrong guesses cost reads, and a layer that was guessed for in vain is not
// guessed for again.
//
// Not here: experts that are resident (spill_device.h), and what happens without a daemon (lane_stream.cc).
// Thread: the lane's, in the GPU's context. Memory: owns two events; borrows lane and stream.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "client/include/moecached/moecached.h"
#include "client/src/lane.h"

namespace moecached::client {

class SpillStream {
 public:
  explicit SpillStream(Lane& lane) : lane_(lane) {}
  // stream: copies go there.
  [[nodiscard]] moecached_status open(CUstream stream);
  void close() noexcept;  // REQUIRES: no copy is under way. The lane is closed next, which waits for reads.

  // A batch uses n_used experts of the layer.
  void begin_layer(std::uint32_t layer, std::size_t n_used);
  // Has the part of these experts copied to where the file has them, behind `destination`. Copies may be
  // under way when it returns.
  [[nodiscard]] moecached_status load(std::uint32_t part, std::span<const std::int32_t> absent,
                                      CUdeviceptr destination);
  // Behind load(): has the buffer filled for the next layer if this was the last part.
  [[nodiscard]] moecached_status read_ahead();
  // No layer comes now, but decode: what was read ahead for one was in vain. Waits for nothing.
  void give_up() noexcept;
  // The lane has moved to another daemon, which reads nothing for it.
  void reset();

 private:
  static constexpr std::uint32_t kNone = UINT32_MAX;
  struct Place {
    std::uint32_t layer = kNone, part = kNone;
    bool operator==(const Place&) const = default;
  };
  struct Wave {
    Place place;  // kNone: not wanted any more
    std::vector<std::int32_t> experts;
  };

  [[nodiscard]] const LayerLayout& layout(std::uint32_t layer) const {
    return lane_.mapping()->layout.layers[layer];
  }
  [[nodiscard]] std::uint32_t part_behind(std::uint32_t part) const;
  [[nodiscard]] Place find_next();
  void find_rest(Place place, std::span<const std::int32_t> experts);
  [[nodiscard]] moecached_status fill();
  [[nodiscard]] moecached_status post(Place place);
  [[nodiscard]] moecached_status take(CUdeviceptr destination);
  [[nodiscard]] moecached_status copy_wanted(const Wave& wave, const std::byte* data,
                                             CUdeviceptr destination);
  void drop_first();

  Lane& lane_;
  CUstream stream_ = nullptr;
  std::array<CUevent, 2> copied_{};  // a half has been copied out of

  // Waves under way, by half; the oldest is in half first_, the next one goes behind the last.
  std::array<Wave, 2> waves_;
  std::uint32_t first_ = 0, n_open_ = 0;

  Place now_;
  std::vector<std::int32_t> absent_;  // of now_, all parts
  std::vector<std::uint8_t> wanted_;  // by expert: of now_, not copied yet
  std::size_t n_wanted_ = 0;
  bool uses_most_ = false;             // the layer's batch
  std::uint32_t guessed_ = kNone;      // layer that was read ahead for
  std::vector<std::uint8_t> in_vain_;  // by layer: the last guess was wrong
  // The order of parts, as last seen.
  std::uint32_t first_part_ = 0;
  std::array<std::uint32_t, MOECACHED_MAX_PARTS> behind_{};

  std::vector<std::int32_t> rest_, guess_;  // of find_next()
  std::vector<std::uint8_t> comes_;         // by expert, within find_rest()
};

}  // namespace moecached::client
