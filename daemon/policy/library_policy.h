// A policy of a shared library behind our interface. It trusts no answer: victims must be candidates, each
// once and as many as were asked for, gains must be numbers. A wrong answer is counted, and an LRU of its own
// decides in that call. It cannot keep the library from crashing. Thread: core loop. Memory: sized at
// construction, never grows; owns the library's policy, borrows the library.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "daemon/base/result.h"
#include "daemon/policy/eviction_policy.h"
#include "daemon/policy/lru.h"
#include "daemon/policy/policy_libraries.h"
#include "daemon/policy/registry.h"

namespace moecached {

class LibraryPolicy final : public EvictionPolicy {
 public:
  // kInvalid: the library refuses options or shape; the text is its own.
  [[nodiscard]] static Result<std::unique_ptr<EvictionPolicy>> make(PolicyLibrary& library,
                                                                    const std::string& options,
                                                                    PolicyShape shape);
  ~LibraryPolicy() override;
  LibraryPolicy(const LibraryPolicy&) = delete;
  LibraryPolicy& operator=(const LibraryPolicy&) = delete;

  [[nodiscard]] std::string_view name() const noexcept override { return library_.name; }
  void on_insert(ExpertIndex expert, Step step) noexcept override;
  void on_access(ExpertIndex expert, Step step) noexcept override;
  void on_miss(ExpertIndex expert, Step step) noexcept override;
  void on_remove(ExpertIndex expert) noexcept override;
  void seed(std::span<const PastUse> past, Step now) noexcept override;
  [[nodiscard]] std::size_t rank(std::span<const ExpertIndex> candidates,
                                 std::span<ExpertIndex> victims_out) noexcept override;
  [[nodiscard]] double gain(ExpertIndex newcomer, ExpertIndex victim) const noexcept override;

 private:
  LibraryPolicy(PolicyLibrary& library, void* policy, PolicyShape shape);
  [[nodiscard]] const char* what_is_wrong(std::size_t n_written, std::size_t n_wanted,
                                          std::span<const ExpertIndex> candidates) noexcept;
  void wrong_answer(const char* what) const noexcept;

  PolicyLibrary& library_;
  void* policy_;
  LruPolicy lru_;
  std::vector<std::uint8_t> marks_;
  // Scratch: what the library reads and writes, never memory that others use.
  std::vector<std::uint32_t> candidates_, victims_;
  std::vector<moecached_policy_past> past_;
};

}  // namespace moecached
