// What the runs of kth_call share: the model, and the counts that outlive the run's process.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>

namespace moecached::test {

inline constexpr std::uint32_t kRunLayers = 2, kRunExperts = 16, kRunTopK = 4;

struct Tally {
  std::atomic<std::uint64_t> enough{0};  // calls of the kind: behind them a run may end
  std::atomic<std::uint64_t> calls_seen{0}, calls_failed{0};
  std::atomic<std::uint64_t> served{0}, compared{0}, wrong{0};  // resolves or graphs; experts; bytes
  std::atomic<std::uint64_t> fallback_reads{0}, errors{0}, errors_without_words{0};
  std::atomic<std::uint64_t> daemons_ended{0};  // for want of memory
  Tally& operator+=(const Tally& other) {
    calls_seen += other.calls_seen;
    calls_failed += other.calls_failed;
    served += other.served;
    compared += other.compared;
    wrong += other.wrong;
    fallback_reads += other.fallback_reads;
    errors += other.errors;
    errors_without_words += other.errors_without_words;
    daemons_ended += other.daemons_ended;
    return *this;
  }
};

// Bytes that differ from those of the model's file.
[[nodiscard]] std::uint64_t wrong_bytes(const std::byte* at, std::uint64_t file_offset, std::uint64_t bytes);

[[nodiscard]] bool has_gpu_runs();  // this build has a soft CUDA driver
void run_on_gpu(const std::filesystem::path& folder, const std::filesystem::path& model, std::uint64_t k,
                bool each, Tally* tally);

}  // namespace moecached::test
