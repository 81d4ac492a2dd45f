// How likely each expert of a MoE layer is used in a token, given the experts that the token used in an
// earlier layer. Learnt online, nothing trained beforehand: a logistic regression for each pair of layers,
//
//     logit(e) = bias + sum_d w_d * log2(rate of e, averaged with decay d) + sum_s pair(s, e)    s: used
//     there
//
// whose two averages stand for the token before (decay 0.5) and for the popular experts (0.97). What a token
// used is compared with what was expected of it: one step of gradient descent. Counting successors and
// multiplying their shares (naive Bayes) found half as many of the absent experts at the same precision,
// because the experts of one token are not independent. That the experts of a layer say much about those of
// the next ones was published for offloaded Mixtral (A. Eliseev, D. Mazur, arXiv:2312.17238, 2023), there by
// computing the next router early; here nobody has the activations, so it is learnt from routing alone.
//
// Says nothing of what is resident and starts no reads: residency/prefetch.cc does. A call costs one pass
// over the experts of the layer for each expert of the source. Thread: core loop. Memory: sized at
// construction, 256 KiB at most for pairs: layers of more than 256 experts do without them, and are
// predicted from the averages alone.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "daemon/base/ids.h"

namespace moecached {

class NextLayerPredictor {
 public:
  // Events of more experts are batches of several tokens, which say less: callers leave them out.
  static constexpr std::size_t kEventExpertsMax = 16;

  NextLayerPredictor(std::uint32_t n_source_experts, std::uint32_t n_experts);

  // By expert, 0..1; valid until the next call. REQUIRES: experts of the source layer.
  [[nodiscard]] std::span<const float> predict(std::span<const ExpertIndex> source) noexcept;
  // The token used `source` there and `used` here.
  void teach(std::span<const ExpertIndex> source, std::span<const ExpertIndex> used) noexcept;

 private:
  static constexpr std::size_t kPairsMax = 256 * 256;
  static constexpr std::array<float, 2> kDecays = {0.5F, 0.97F};
  static constexpr std::size_t kRates = kDecays.size();

  const std::uint32_t n_experts_;
  std::array<float, kRates + 1> weights_{};  // the last one: bias
  std::array<float, kRates + 1> squares_{};  // of the gradients so far (AdaGrad)
  std::array<std::vector<float>, kRates> rates_, features_;
  std::vector<float> pairs_;  // [source][expert]; empty: too many
  std::vector<float> likelihood_;
};

}  // namespace moecached
