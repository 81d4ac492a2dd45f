// A model's segment as its clients have it: mapped for reading, and read word by word while the core loop
// writes. What a lane of a stream knows of its model. Thread: any.
#pragma once

#include <cstdint>

#include "daemon/base/result.h"
#include "daemon/ipc/route_lane.h"
#include "daemon/platform/memfd.h"
#include "proto/shm/layout.h"

namespace moecached {

class RouteSegment {
 public:
  static Result<RouteSegment> map(int fd, std::uint64_t bytes);

  [[nodiscard]] RouteGeometry describe(std::uint64_t boot_epoch) const;
  [[nodiscard]] const moecached_shm_layer& layer(std::uint32_t index) const { return layers_[index]; }
  [[nodiscard]] std::uint32_t n_experts_max() const;
  // Sequentially consistent, like the barrier of LaneWriter::begin. By builtin: C++20 has no atomic_ref of a
  // const.
  [[nodiscard]] std::int32_t entry(std::uint32_t layer, std::uint32_t expert) const {
    return __atomic_load_n(table_ + layers_[layer].table_first + expert, __ATOMIC_SEQ_CST);
  }
  [[nodiscard]] std::uint32_t n_slots_open(std::uint32_t layer) const {
    return __atomic_load_n(&layers_[layer].n_slots_open, __ATOMIC_RELAXED);
  }

 private:
  explicit RouteSegment(Mapping mapping);
  Mapping mapping_;
  const moecached_shm_model* model_;
  const moecached_shm_layer* layers_;
  const moecached_shm_part* parts_;
  const std::int32_t* table_;
};

}  // namespace moecached
