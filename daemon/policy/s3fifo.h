// S3-FIFO: a small queue, a main queue and the names of what was evicted from the small one. An expert enters
// the small queue; if it was used more than once there it moves on to the main queue, else it goes and only
// its name stays. One whose name is still known enters the main queue at once. The main queue gives those
// that were used another round, at the price of one of their uses (three are remembered).
//
//     insert -> [newest  small  oldest] -- used once at most --> out, name noted
//                               \--- used twice
//     name known -> [newest      main      oldest] -- not used --> out
//                      ^---- used: one use less ----/
//
// Source: J. Yang, Y. Zhang, Z. Qiu, Y. Yue, K. V. Rashmi, "FIFO queues are all you need for cache eviction",
// SOSP 2023. What differs here: experts of one step count as simultaneous, so queues are ordered by (step,
// index); and what an eviction does to those in front of the victim is done when it is removed, not when it
// is asked for.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "daemon/base/result.h"
#include "daemon/policy/eviction_policy.h"
#include "daemon/policy/recency_list.h"
#include "daemon/policy/registry.h"

namespace moecached {

class S3FifoPolicy final : public EvictionPolicy {
 public:
  static constexpr std::string_view kName = "s3fifo";
  // `options`: "small=10", the small queue's percent of the slots, 1 to 90, at least one slot.
  [[nodiscard]] static Result<std::unique_ptr<EvictionPolicy>> make(std::string_view options,
                                                                    PolicyShape shape);

  S3FifoPolicy(PolicyShape shape, std::uint32_t small_percent);
  [[nodiscard]] std::string_view name() const noexcept override { return kName; }
  void on_insert(ExpertIndex expert, Step step) noexcept override;
  void on_access(ExpertIndex expert, Step step) noexcept override;
  void on_miss(ExpertIndex expert, Step step) noexcept override;
  void on_remove(ExpertIndex expert) noexcept override;
  void set_slots(std::uint32_t n_slots) noexcept override;
  [[nodiscard]] std::size_t rank(std::span<const ExpertIndex> candidates,
                                 std::span<ExpertIndex> victims_out) noexcept override;

 private:
  static constexpr std::uint8_t kUsesMax = 3;
  static constexpr std::uint8_t kUsesToStay = 2;  // in the small queue, without the one it was inserted for
  void begin(Step step) noexcept;
  // Keys of the queues: the experts of one step that enter share one, those that move on or round follow each
  // other.
  [[nodiscard]] RecencyList::Key enter_key() noexcept;
  [[nodiscard]] RecencyList::Key move_key() noexcept;
  void pass_small(ExpertIndex up_to) noexcept;
  void pass_main(ExpertIndex up_to) noexcept;

  std::uint32_t small_percent_;
  std::uint32_t n_slots_ = 0;
  std::uint32_t small_slots_ = 0;
  Step now_ = 0;
  RecencyList::Key key_ = 0;
  bool has_moved_ = false;  // somebody took key_ for itself
  RecencyList small_, main_, names_;
  std::vector<std::uint8_t> uses_;
  std::vector<Step> last_step_;
  std::vector<std::uint8_t> marks_;

  // What rank() plays through: where it is in the small queue, and the main queue as a ring.
  struct Rehearsal {
    ExpertIndex small_at;
    std::uint32_t n_small = 0;
    std::uint32_t main_first = 0, n_main = 0;
  };
  [[nodiscard]] ExpertIndex rehearse_small(Rehearsal& play) noexcept;  // the victim; kEnd: none
  [[nodiscard]] ExpertIndex rehearse_main(Rehearsal& play) noexcept;
  void push_main(Rehearsal& play, ExpertIndex expert) noexcept;
  std::vector<ExpertIndex> ring_;         // scratch
  std::vector<std::uint8_t> uses_ahead_;  // scratch
};

}  // namespace moecached
