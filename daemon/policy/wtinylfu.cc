#include "daemon/policy/wtinylfu.h"

#include <algorithm>
#include <cmath>

#include "daemon/policy/candidate_marks.h"
#include "daemon/policy/policy_options.h"

namespace moecached {
namespace {

RecencyList::Key key_of(Step step) { return static_cast<RecencyList::Key>(step); }

std::uint32_t share_of(std::uint32_t n, std::uint32_t percent) {
  return static_cast<std::uint32_t>((std::uint64_t{n} * percent + 50) / 100);
}

}  // namespace

Result<std::unique_ptr<EvictionPolicy>> WTinyLfuPolicy::make(std::string_view options, PolicyShape shape) {
  Result<PolicyOptions> parsed = PolicyOptions::parse(kName, options);
  if (!parsed) return std::move(parsed).error();
  const Result<std::uint32_t> percent = parsed->number("window", {.low = 1, .high = 90}, 10);
  if (!percent) return percent.error();
  if (Status known = parsed->all_known(); !known) return std::move(known).error();
  return std::unique_ptr<EvictionPolicy>(std::make_unique<WTinyLfuPolicy>(shape, *percent));
}

WTinyLfuPolicy::WTinyLfuPolicy(PolicyShape shape, std::uint32_t window_percent)
    : window_percent_(window_percent),
      window_(shape.n_experts),
      probation_(shape.n_experts),
      protected_(shape.n_experts),
      counts_(shape.n_experts),
      placed_(shape.n_experts),
      marks_(shape.n_experts) {
  set_slots(shape.n_slots);
}

// What is over a smaller share gives way as victims are chosen and experts used.
void WTinyLfuPolicy::set_slots(std::uint32_t n_slots) noexcept {
  main_slots_ = n_slots - std::max(1u, share_of(n_slots, window_percent_));
  protected_slots_ = share_of(main_slots_, 80);
  window_slots_ = n_slots - main_slots_;
  n_uses_until_halved_ = std::uint64_t{n_slots} * 10;
}

// Counts are halved, and free places of the main segment filled without a contest, when a step begins, never
// within one: what happens to the experts of a step must not depend on the order in which they are reported.
void WTinyLfuPolicy::begin(Step step) noexcept {
  if (step <= now_) return;
  n_steps_ += static_cast<double>(step - now_);
  while (window_.size() > window_slots_ && main_size() < main_slots_) move_on(window_.front());
  now_ = step;
  if (n_uses_ < n_uses_until_halved_) return;
  n_uses_ /= 2;
  n_steps_ /= 2;
  for (Count& each : counts_) each.uses /= 2;
}

void WTinyLfuPolicy::use(ExpertIndex expert, Step step) noexcept {
  begin(step);
  Count& count = counts_[expert.value];
  if (count.last_step >= step && count.last_step != 0) return;
  count.last_step = step;
  count.uses = std::min<std::uint8_t>(count.uses + 1, kCountMax);
  ++n_uses_;
}

void WTinyLfuPolicy::seed(std::span<const PastUse> past, Step now) noexcept {
  // As many steps as it takes to reach half of what is counted before a halving.
  double uses_per_step = 0;
  for (const PastUse& each : past) uses_per_step += each.uses_per_step;
  if (uses_per_step <= 0) return;
  now_ = std::max(now_, now);
  n_uses_ = n_uses_until_halved_ / 2;
  n_steps_ = static_cast<double>(n_uses_) / uses_per_step;
  const std::size_t n = std::min(past.size(), counts_.size());
  for (std::size_t i = 0; i < n; ++i) {
    const double uses = std::min<double>(kCountMax, std::round(past[i].uses_per_step * n_steps_));
    counts_[i] = {.uses = static_cast<std::uint8_t>(uses), .last_step = now};
  }
}

void WTinyLfuPolicy::move_on(ExpertIndex expert) noexcept {
  window_.erase(expert);
  probation_.insert_from_back(expert, key_of(now_));
}

void WTinyLfuPolicy::on_miss(ExpertIndex expert, Step step) noexcept { use(expert, step); }

void WTinyLfuPolicy::on_insert(ExpertIndex expert, Step step) noexcept {
  CHECK(!window_.contains(expert) && !probation_.contains(expert) && !protected_.contains(expert));
  begin(step);
  // The miss that led to it has been counted, unless this policy has only just taken over.
  if (counts_[expert.value].last_step == 0) use(expert, step);
  placed_[expert.value] = step;
  window_.insert_from_back(expert, key_of(step));
}

void WTinyLfuPolicy::on_access(ExpertIndex expert, Step step) noexcept {
  use(expert, step);
  if (placed_[expert.value] == step) {
    CHECK(window_.contains(expert) || probation_.contains(expert) || protected_.contains(expert));
    return;
  }
  placed_[expert.value] = step;
  if (window_.contains(expert)) {
    window_.erase(expert);
    window_.insert_from_back(expert, key_of(step));
    return;
  }
  const bool was_protected = protected_.contains(expert);
  (was_protected ? protected_ : probation_).erase(expert);
  protected_.insert_from_back(expert, key_of(step));
  while (protected_.size() > protected_slots_) {
    const ExpertIndex demoted = protected_.front();
    protected_.erase(demoted);
    probation_.insert_from_back(demoted, key_of(step));
  }
}

void WTinyLfuPolicy::on_remove(ExpertIndex expert) noexcept {
  if (window_.contains(expert)) {
    window_.erase(expert);
    return;
  }
  // The place goes to the one that it contended with. A main segment above its share gives it up for good.
  const bool contended = main_size() <= main_slots_;
  (probation_.contains(expert) ? probation_ : protected_).erase(expert);
  if (contended && window_.size() > 0 && count(window_.front()) > count(expert)) move_on(window_.front());
}

double WTinyLfuPolicy::gain(ExpertIndex newcomer, ExpertIndex victim) const noexcept {
  return (static_cast<double>(count(newcomer)) - count(victim)) / std::max(1.0, n_steps_);
}

std::size_t WTinyLfuPolicy::rank(std::span<const ExpertIndex> candidates,
                                 std::span<ExpertIndex> victims_out) noexcept {
  const CandidateMarks marks(marks_, candidates);
  const auto skip = [this](const RecencyList& list, ExpertIndex at) {
    while (at != RecencyList::kEnd && marks_[at.value] == 0) at = list.next(at);
    return at;
  };
  ExpertIndex window = skip(window_, window_.first());
  ExpertIndex probation = skip(probation_, probation_.first());
  ExpertIndex guarded = skip(protected_, protected_.first());
  std::size_t n = 0;
  const auto take_main = [&] {
    if (probation != RecencyList::kEnd) {
      victims_out[n++] = probation;
      probation = skip(probation_, probation_.next(probation));
    } else {
      victims_out[n++] = guarded;
      guarded = skip(protected_, protected_.next(guarded));
    }
  };
  std::uint32_t main_now = main_size();
  const std::size_t n_wanted = std::min(candidates.size(), victims_out.size());
  // Winners of contests are in probation afterwards, behind all that are there now.
  ExpertIndex winner = window;
  while (n < n_wanted) {
    const ExpertIndex rival = probation != RecencyList::kEnd ? probation : guarded;
    if (rival == RecencyList::kEnd && window == RecencyList::kEnd) {
      // Nobody but winners is left.
      for (; n < n_wanted; winner = skip(window_, window_.next(winner))) {
        if (std::find(victims_out.begin(), victims_out.begin() + static_cast<std::ptrdiff_t>(n), winner) ==
            victims_out.begin() + static_cast<std::ptrdiff_t>(n))
          victims_out[n++] = winner;
      }
      break;
    }
    if (window == RecencyList::kEnd) {
      take_main();
      continue;
    }
    if (rival == RecencyList::kEnd) {
      victims_out[n++] = window;
      window = skip(window_, window_.next(window));
      continue;
    }
    if (main_now > main_slots_) {
      take_main();
      --main_now;
    } else if (count(window) > count(rival)) {
      take_main();
      window = skip(window_, window_.next(window));
    } else {
      victims_out[n++] = window;
      window = skip(window_, window_.next(window));
    }
  }
  return n;
}

}  // namespace moecached
