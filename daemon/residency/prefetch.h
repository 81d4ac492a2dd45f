// What one model remembers in order to prefetch: for every layer what the layer before it says about it
// (policy/next_layer.h), and whether that pays (prefetch_switch.h). A lane's token goes through the layers in
// order, so each decode event teaches the layer it is of, from the lane's event before, and predicts the next
// layer; behind the last one comes the first one of the next token. What is started, Brain::State::look_ahead
// decides.
//
// Cost of a decode event, measured with moecache-sim: 0.4 us for 32 experts, top 4; 0.7 us for 128, top 6.
// Nothing while it is paused or every expert of the layers is resident. Private to this folder. Thread: core
// loop. Memory: sized at construction; 256 KiB a layer at most.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "daemon/policy/next_layer.h"
#include "daemon/residency/brain.h"
#include "daemon/residency/prefetch_switch.h"

namespace moecached {

class Prefetch {
 public:
  // What is less likely than this is not read: as often wasted as used it costs more than it brings, since
  // it takes the place of something.
  static constexpr float kLikelihoodMin = 0.5F;
  // Loads under way, of any kind, with which nothing more is started.
  static constexpr std::uint32_t kComingMax = 16;
  static constexpr std::uint32_t kComingOfLayerMax = 4;

  // The latest decode event of one lane.
  class Latest {
   public:
    void set(LayerIndex layer, std::span<const ExpertIndex> experts) noexcept;
    void clear() noexcept { n_ = 0; }
    [[nodiscard]] LayerIndex layer() const { return layer_; }
    // Empty: none, or a batch too wide to say anything.
    [[nodiscard]] std::span<const ExpertIndex> experts() const { return std::span(experts_).first(n_); }

   private:
    LayerIndex layer_;
    std::uint32_t n_ = 0;
    std::array<ExpertIndex, NextLayerPredictor::kEventExpertsMax> experts_{};
  };

  Prefetch(std::span<const LayerShape> layers, const PrefetchPace& pace);

  [[nodiscard]] LayerIndex behind(LayerIndex layer) const {
    return LayerIndex((layer.value + 1) % static_cast<std::uint32_t>(predictors_.size()));
  }
  // The token went from `before` to these experts.
  void teach(const Latest& before, LayerIndex layer, std::span<const ExpertIndex> experts) noexcept;
  // Of the layer behind that event's, by expert; valid until the next call for that layer.
  [[nodiscard]] std::span<const float> predict(const Latest& event) noexcept {
    return predictors_[behind(event.layer()).value].predict(event.experts());
  }

  PrefetchSwitch pays;
  std::vector<ExpertIndex> candidates;  // scratch

 private:
  std::vector<NextLayerPredictor> predictors_;  // by the layer that they predict
};

}  // namespace moecached
