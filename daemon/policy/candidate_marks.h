// The candidates of one call of rank(), as a flag per expert, cleared again when the call ends. Thread: core
// loop. Memory: borrows the policy's flag array.
#pragma once

#include <cstdint>
#include <span>

#include "daemon/base/check.h"
#include "daemon/base/ids.h"

namespace moecached {

class CandidateMarks {
 public:
  CandidateMarks(std::span<std::uint8_t> flags, std::span<const ExpertIndex> candidates) noexcept
      : flags_(flags), candidates_(candidates) {
    for (ExpertIndex expert : candidates_) {
      CHECK(expert.value < flags_.size());
      flags_[expert.value] = 1;
    }
  }
  ~CandidateMarks() {
    for (ExpertIndex expert : candidates_) flags_[expert.value] = 0;
  }
  CandidateMarks(const CandidateMarks&) = delete;
  CandidateMarks& operator=(const CandidateMarks&) = delete;

  [[nodiscard]] std::span<const std::uint8_t> flags() const noexcept { return flags_; }

 private:
  std::span<std::uint8_t> flags_;
  std::span<const ExpertIndex> candidates_;
};

}  // namespace moecached
