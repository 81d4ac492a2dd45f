// The one source of chance in a simulation. The standard distributions differ between libraries, so a printed
// seed would not replay elsewhere; these few lines do not.
#pragma once

#include <cstdint>

namespace moecached::sim {

class Rng {
 public:
  explicit Rng(std::uint64_t seed) : state_(seed) {}

  // SplitMix64: G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
  [[nodiscard]] std::uint64_t next() {
    std::uint64_t z = (state_ += UINT64_C(0x9e3779b97f4a7c15));
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
  }
  // 0..n-1; the bias of the modulus is of no matter here. REQUIRES: n > 0.
  [[nodiscard]] std::uint32_t below(std::uint64_t n) { return static_cast<std::uint32_t>(next() % n); }
  [[nodiscard]] std::uint32_t between(std::uint32_t low, std::uint32_t high) {
    return low + below(high - low + 1u);
  }
  [[nodiscard]] bool permille(std::uint32_t chance) { return below(1000) < chance; }

 private:
  std::uint64_t state_;
};

}  // namespace moecached::sim
