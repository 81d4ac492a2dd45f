#include "daemon/policy/library_policy.h"

#include <algorithm>
#include <cmath>

#include "daemon/base/text.h"
#include "daemon/policy/candidate_marks.h"

namespace moecached {

Result<std::unique_ptr<EvictionPolicy>> LibraryPolicy::make(PolicyLibrary& library,
                                                            const std::string& options, PolicyShape shape) {
  const moecached_policy_shape given{.n_experts = shape.n_experts, .n_slots = shape.n_slots};
  char error[256] = "";
  void* const policy = library.api->create(&given, options.c_str(), error, sizeof error);
  if (policy == nullptr) {
    error[sizeof error - 1] = '\0';
    std::string text = "policy " + library.name + " refuses '" + options + "'";
    // For people, and through gRPC, which drops a message with bytes that are no UTF-8.
    if (error[0] != '\0') text.append(": ").append(for_people(error));
    if (const char* known = library.api->options; known != nullptr && *known != '\0')
      text.append("; it has ").append(for_people(known));
    return Fault{FaultCode::kInvalid, std::move(text)};
  }
  return std::unique_ptr<EvictionPolicy>(new LibraryPolicy(library, policy, shape));
}

LibraryPolicy::LibraryPolicy(PolicyLibrary& library, void* policy, PolicyShape shape)
    : library_(library),
      policy_(policy),
      lru_(shape),
      marks_(shape.n_experts),
      candidates_(shape.n_experts),
      victims_(shape.n_experts),
      past_(shape.n_experts) {}

LibraryPolicy::~LibraryPolicy() { library_.api->destroy(policy_); }

void LibraryPolicy::on_insert(ExpertIndex expert, Step step) noexcept {
  lru_.on_insert(expert, step);
  library_.api->on_insert(policy_, expert.value, step);
}

void LibraryPolicy::on_access(ExpertIndex expert, Step step) noexcept {
  lru_.on_access(expert, step);
  library_.api->on_access(policy_, expert.value, step);
}

void LibraryPolicy::on_miss(ExpertIndex expert, Step step) noexcept {
  if (library_.api->on_miss != nullptr) library_.api->on_miss(policy_, expert.value, step);
}

void LibraryPolicy::on_remove(ExpertIndex expert) noexcept {
  lru_.on_remove(expert);
  library_.api->on_remove(policy_, expert.value);
}

void LibraryPolicy::seed(std::span<const PastUse> past, Step now) noexcept {
  if (library_.api->seed == nullptr) return;
  CHECK(past.size() == past_.size());
  std::ranges::transform(past, past_.begin(), [](const PastUse& use) {
    return moecached_policy_past{.uses_per_step = use.uses_per_step, .last_step = use.last_step};
  });
  library_.api->seed(policy_, past_.data(), static_cast<std::uint32_t>(past_.size()), now);
}

std::size_t LibraryPolicy::rank(std::span<const ExpertIndex> candidates,
                                std::span<ExpertIndex> victims_out) noexcept {
  const std::size_t n = std::min(candidates.size(), victims_out.size());
  if (n == 0) return 0;
  CHECK(candidates.size() <= candidates_.size());
  std::ranges::transform(candidates, candidates_.begin(), &ExpertIndex::value);
  const std::size_t written =
      library_.api->rank(policy_, candidates_.data(), candidates.size(), victims_.data(), n);
  if (const char* what = what_is_wrong(written, n, candidates)) {
    wrong_answer(what);
    return lru_.rank(candidates, victims_out);
  }
  std::transform(victims_.begin(), victims_.begin() + static_cast<std::ptrdiff_t>(n), victims_out.begin(),
                 [](std::uint32_t victim) { return ExpertIndex(victim); });
  return n;
}

const char* LibraryPolicy::what_is_wrong(std::size_t n_written, std::size_t n_wanted,
                                         std::span<const ExpertIndex> candidates) noexcept {
  constexpr std::uint8_t kSeen = 2;
  if (n_written != n_wanted) return "rank returned another number of victims than it was asked for";
  const CandidateMarks marks(marks_, candidates);  // cleared behind this
  for (std::size_t i = 0; i < n_wanted; ++i) {
    if (victims_[i] >= marks_.size() || marks_[victims_[i]] == 0)
      return "rank named a victim that is no candidate";
    if (marks_[victims_[i]] == kSeen) return "rank named a victim twice";
    marks_[victims_[i]] = kSeen;
  }
  return nullptr;
}

double LibraryPolicy::gain(ExpertIndex newcomer, ExpertIndex victim) const noexcept {
  if (library_.api->gain == nullptr) return lru_.gain(newcomer, victim);
  const double gain = library_.api->gain(policy_, newcomer.value, victim.value);
  if (!std::isnan(gain)) return gain;
  wrong_answer("gain is not a number");
  return lru_.gain(newcomer, victim);
}

void LibraryPolicy::wrong_answer(const char* what) const noexcept {
  ++library_.wrong_answers;
  library_.last_wrong_answer = what;
}

}  // namespace moecached
