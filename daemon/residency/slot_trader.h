// Which layer should give a slot to which, so that the same slots serve more uses: of layers of one slot
// class the one that would lose least by having fewer, and the one that would gain most by having more, by
// their hit curves. Slots per layer that are best for a trace need no knowledge of the policy: what decides
// is how concentrated the routing of each layer is.
//
// A trade must be worth more than chance makes of equal layers, and repay within kRepaySteps the two loads
// that it costs. They come one at a time, at most one a token, so that a pool is settled after some thousand
// tokens and follows when the routing changes; equal layers hardly trade at all.
//
// Pure, and deterministic: the daemon, the simulator and replays trade alike. Thread: one. Memory: sized at
// construction. Time: 25 to 60 ns an expert used, 100 us for each of 512; choose() 0.2 us a layer, once a
// token.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "daemon/base/ids.h"
#include "daemon/residency/hit_curve.h"

namespace moecached {

struct ModelShape;

class SlotTrader {
 public:
  // A layer as it is now.
  struct Side {
    std::uint32_t n_slots = 0;
    bool can_give = false, can_take = false;
  };
  struct Trade {
    LayerIndex from, to;
  };

  explicit SlotTrader(const ModelShape& shape);

  // The experts that a step of decode used of the layer.
  void use(LayerIndex layer, std::span<const ExpertIndex> experts) noexcept;
  [[nodiscard]] bool is_due() const noexcept { return n_events_ >= next_; }
  // sides: one a layer. The next answer is due after as many steps as there are layers.
  [[nodiscard]] std::optional<Trade> choose(std::span<const Side> sides) noexcept;
  // As many slots as `even` has of each class, shared out anew by what the curves say; no layer gets fewer
  // than `have`, nor more than `room`. All are one per layer; have <= even. What the curves know nothing of
  // stays as in `even`.
  [[nodiscard]] std::vector<std::uint32_t> share_out(std::span<const std::uint32_t> have,
                                                     std::span<const std::uint32_t> even,
                                                     std::span<const std::uint32_t> room) const;

 private:
  struct Layer {
    HitCurve curve;
    std::uint32_t class_index = 0;  // dense
    std::uint32_t n_slots = 0;      // at first
    // The widest step of late, which it should have slots for, if it had them: a lease that finds too few is
    // streamed.
    std::uint32_t widest = 0, widest_before = 0, n_steps = 0;
  };
  struct Best {  // of a class
    std::uint32_t from = UINT32_MAX, to = UINT32_MAX;
    double loss = 0, gain = 0;  // uses per step, of one slot
  };
  void look_at(std::uint32_t index, const Side& side) noexcept;
  [[nodiscard]] double worth(const Best& best) const noexcept;

  std::vector<Layer> layers_;
  std::vector<Best> best_;  // scratch, by class
  std::uint64_t n_events_ = 0, next_ = 0;
};

}  // namespace moecached
