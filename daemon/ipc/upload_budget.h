// How many bytes may be uploaded now, so that a decoding client loses at most a given share of its time.
// Uploads share the link with kernels that read missing experts in place, and a little device memory
// bandwidth with all others: an upload that takes t costs about t * (busy + kBackground), where busy is the
// share of time in which the link serves reads in place. Pure. Thread: core loop.
#pragma once

#include <algorithm>
#include <cstdint>

namespace moecached {

class UploadBudget {
 public:
  struct Options {
    double link_rate = 50e9;     // bytes per second, measured
    double max_slowdown = 0.05;  // share of a client's time; 0: nothing, 1 or more: no limit
  };
  explicit UploadBudget(Options options) : options_(options) {}

  // Bytes that kernels read over the link.
  void read_in_place(std::uint64_t bytes) { window_bytes_ += static_cast<double>(bytes); }
  // Time passes. active: some client is computing.
  void advance(std::uint64_t now_ns, bool active) {
    const double dt = last_ns_ == 0 ? 0 : static_cast<double>(now_ns - last_ns_) * 1e-9;
    last_ns_ = now_ns;
    // Averaged over about a tenth of a second: several tokens.
    const double keep = std::max(0.0, 1 - dt / kWindow);
    window_seconds_ = window_seconds_ * keep + dt;
    window_bytes_ *= keep;
    if (options_.max_slowdown <= 0) return;
    if (!active || options_.max_slowdown >= 1) {
      allowance_ = burst();
      return;
    }
    const double share = options_.max_slowdown / (link_busy() + kBackground);
    allowance_ = std::min(burst(), allowance_ + dt * options_.link_rate * std::min(1.0, share));
  }
  // What is larger than a burst may go once a whole burst is saved; the rest is waited for afterwards.
  [[nodiscard]] bool allows(std::uint64_t bytes) const {
    return allowance_ >= std::min(static_cast<double>(bytes), burst());
  }
  void uploaded(std::uint64_t bytes) { allowance_ -= static_cast<double>(bytes); }
  [[nodiscard]] double link_rate() const { return options_.link_rate; }
  [[nodiscard]] double link_busy() const {  // 0..1
    if (window_seconds_ <= 0) return 0;
    return std::min(1.0, window_bytes_ / window_seconds_ / options_.link_rate);
  }

 private:
  static constexpr double kWindow = 0.1;  // seconds
  static constexpr double kBackground =
      0.06;  // slowdown of busy kernels by copies at full rate, measured on an H200
  // What may be sent at once: 2 ms of the link.
  [[nodiscard]] double burst() const { return options_.link_rate * 2e-3; }

  Options options_;
  double allowance_ = 0;
  double window_bytes_ = 0, window_seconds_ = 0;
  std::uint64_t last_ns_ = 0;
};

}  // namespace moecached
