#include "daemon/policy/s3fifo.h"

#include <algorithm>

#include "daemon/policy/candidate_marks.h"
#include "daemon/policy/policy_options.h"

namespace moecached {

Result<std::unique_ptr<EvictionPolicy>> S3FifoPolicy::make(std::string_view options, PolicyShape shape) {
  Result<PolicyOptions> parsed = PolicyOptions::parse(kName, options);
  if (!parsed) return std::move(parsed).error();
  const Result<std::uint32_t> percent = parsed->number("small", {.low = 1, .high = 90}, 10);
  if (!percent) return percent.error();
  if (Status known = parsed->all_known(); !known) return std::move(known).error();
  return std::unique_ptr<EvictionPolicy>(std::make_unique<S3FifoPolicy>(shape, *percent));
}

S3FifoPolicy::S3FifoPolicy(PolicyShape shape, std::uint32_t small_percent)
    : small_percent_(small_percent),
      small_(shape.n_experts),
      main_(shape.n_experts),
      names_(shape.n_experts),
      uses_(shape.n_experts),
      last_step_(shape.n_experts),
      marks_(shape.n_experts),
      ring_(shape.n_experts),
      uses_ahead_(shape.n_experts) {
  set_slots(shape.n_slots);
}

void S3FifoPolicy::set_slots(std::uint32_t n_slots) noexcept {
  n_slots_ = n_slots;
  small_slots_ = static_cast<std::uint32_t>(
      std::max<std::uint64_t>(1, (std::uint64_t{n_slots} * small_percent_ + 50) / 100));
}

// Names are dropped when a step begins, never within one: which experts of a step are known must not depend
// on the order in which they are reported.
void S3FifoPolicy::begin(Step step) noexcept {
  if (step <= now_) return;
  now_ = step;
  ++key_;
  has_moved_ = false;
  while (names_.size() > n_slots_) names_.erase(names_.front());
}

RecencyList::Key S3FifoPolicy::enter_key() noexcept {
  if (has_moved_) ++key_;
  has_moved_ = false;
  return key_;
}

RecencyList::Key S3FifoPolicy::move_key() noexcept {
  has_moved_ = true;
  return ++key_;
}

void S3FifoPolicy::on_insert(ExpertIndex expert, Step step) noexcept {
  CHECK(!small_.contains(expert) && !main_.contains(expert));
  begin(step);
  uses_[expert.value] = 0;
  last_step_[expert.value] = step;
  if (names_.contains(expert)) {
    names_.erase(expert);
    main_.insert_from_back(expert, enter_key());
  } else {
    small_.insert_from_back(expert, enter_key());
  }
}

void S3FifoPolicy::on_access(ExpertIndex expert, Step step) noexcept {
  CHECK(small_.contains(expert) || main_.contains(expert));
  begin(step);
  if (last_step_[expert.value] == step) return;
  last_step_[expert.value] = step;
  uses_[expert.value] = std::min<std::uint8_t>(uses_[expert.value] + 1, kUsesMax);
}

void S3FifoPolicy::on_miss(ExpertIndex, Step step) noexcept { begin(step); }

// Those in front of it that may stay move on to the main queue.
void S3FifoPolicy::pass_small(ExpertIndex up_to) noexcept {
  for (ExpertIndex at = small_.first(); at != up_to;) {
    const ExpertIndex next = small_.next(at);
    if (uses_[at.value] >= kUsesToStay) {
      small_.erase(at);
      uses_[at.value] = 0;
      main_.insert_from_back(at, move_key());
    }
    at = next;
  }
}

// Each use of its own that the expert had left cost the whole queue a round, and those in front of it one
// more.
void S3FifoPolicy::pass_main(ExpertIndex up_to) noexcept {
  const std::uint8_t rounds = uses_[up_to.value];
  for (ExpertIndex at = main_.first(); at != RecencyList::kEnd; at = main_.next(at))
    uses_[at.value] = uses_[at.value] > rounds ? static_cast<std::uint8_t>(uses_[at.value] - rounds) : 0;
  while (main_.front() != up_to) {
    const ExpertIndex passed = main_.front();
    if (uses_[passed.value] > 0) --uses_[passed.value];
    main_.erase(passed);
    main_.insert_from_back(passed, move_key());
  }
}

void S3FifoPolicy::on_remove(ExpertIndex expert) noexcept {
  if (small_.contains(expert) && uses_[expert.value] < kUsesToStay) {
    pass_small(expert);
    small_.erase(expert);
    names_.insert_from_back(expert, move_key());
    return;
  }
  // The small queue had nobody to give, so all that may stay have moved on, the expert itself perhaps among
  // them.
  if (small_.size() >= small_slots_ || small_.contains(expert)) pass_small(RecencyList::kEnd);
  CHECK(main_.contains(expert));
  pass_main(expert);
  main_.erase(expert);
}

void S3FifoPolicy::push_main(Rehearsal& play, ExpertIndex expert) noexcept {
  ring_[(play.main_first + play.n_main++) % ring_.size()] = expert;
}

ExpertIndex S3FifoPolicy::rehearse_small(Rehearsal& play) noexcept {
  while (play.small_at != RecencyList::kEnd) {
    const ExpertIndex at = play.small_at;
    play.small_at = small_.next(at);
    if (uses_[at.value] >= kUsesToStay) {
      uses_ahead_[at.value] = 0;
      push_main(play, at);
      --play.n_small;
    } else if (marks_[at.value] != 0) {
      --play.n_small;
      return at;
    }
  }
  return RecencyList::kEnd;
}

ExpertIndex S3FifoPolicy::rehearse_main(Rehearsal& play) noexcept {
  // After as many rounds as uses are remembered every candidate has none left.
  for (std::uint32_t tries = play.n_main * (kUsesMax + 1u); tries > 0; --tries) {
    const ExpertIndex at = ring_[play.main_first];
    play.main_first = (play.main_first + 1) % static_cast<std::uint32_t>(ring_.size());
    --play.n_main;
    if (uses_ahead_[at.value] == 0 && marks_[at.value] != 0) return at;
    if (uses_ahead_[at.value] > 0) --uses_ahead_[at.value];
    push_main(play, at);
  }
  return RecencyList::kEnd;
}

std::size_t S3FifoPolicy::rank(std::span<const ExpertIndex> candidates,
                               std::span<ExpertIndex> victims_out) noexcept {
  const CandidateMarks marks(marks_, candidates);
  Rehearsal play{.small_at = small_.first(), .n_small = small_.size()};
  for (ExpertIndex at = main_.first(); at != RecencyList::kEnd; at = main_.next(at)) {
    uses_ahead_[at.value] = uses_[at.value];
    push_main(play, at);
  }
  const std::size_t n_wanted = std::min(candidates.size(), victims_out.size());
  for (std::size_t n = 0; n < n_wanted; ++n) {
    ExpertIndex victim = RecencyList::kEnd;
    if (play.n_small >= small_slots_) victim = rehearse_small(play);
    if (victim == RecencyList::kEnd) victim = rehearse_main(play);
    if (victim == RecencyList::kEnd) victim = rehearse_small(play);
    if (victim == RecencyList::kEnd) victim = rehearse_main(play);  // of those that have just moved on
    CHECK(victim != RecencyList::kEnd);
    victims_out[n] = victim;
  }
  return n_wanted;
}

}  // namespace moecached
