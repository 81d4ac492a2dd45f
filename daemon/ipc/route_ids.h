// The experts of one decision that came over gRPC: in range, and each once; or a refusal that says what is
// wrong. Everything in it was written by a client. Pure. Thread: one at a time. Memory: sized at
// construction.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "daemon/base/result.h"
#include "daemon/ipc/ring_reader.h"
#include "daemon/ipc/route_lane.h"

namespace moecached {

class RouteIds {
 public:
  // `limits` outlives it: one entry per layer of the model.
  explicit RouteIds(std::span<const LayerLimits> limits);

  // kInvalid: the text names the layer or expert, and what there is.
  [[nodiscard]] Status take(const RouteDecision& decision);
  // Of the last decision taken, in order of appearance.
  [[nodiscard]] std::span<const std::uint16_t> distinct() const { return distinct_; }

 private:
  const std::span<const LayerLimits> limits_;
  std::vector<std::uint32_t> seen_;  // stamp of the decision that last named the expert
  std::uint32_t stamp_ = 0;
  std::vector<std::uint16_t> distinct_;
};

}  // namespace moecached
