// When a promotion is worth its upload, for whoever asks Brain::promotion_gain: the daemon's GPU service and
// the simulator.
#pragma once

namespace moecached {

// Gain, in uses per token, below which an upload is not worth its share of the link. Link time per token
// (misses read in place at 40 GB/s, uploads copied at 50) is least between 0.03 and 0.06 on the gpt-oss-20b
// and the Qwen3-30B-A3B traces, at 10, 25 and 50 % slots alike.
inline constexpr double kPromotionGainMin = 0.04;

}  // namespace moecached
