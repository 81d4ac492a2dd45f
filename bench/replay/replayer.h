// Replays a trace through the daemon's own brain and policies, event by event: what a token asked for in one
// layer is looked up together, against the state before it, and only then loaded. Plays the shell (core loop
// or GPU service) with reads, copies and grace periods that take no time. Thread: one. Memory: the brain's,
// and a byte an expert.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "bench/replay/interleave.h"
#include "bench/replay/trace.h"
#include "daemon/residency/instant_pool.h"

namespace moecached::replay {

using Mode = MissMode;

struct Tally {
  std::uint64_t rows = 0;
  std::uint64_t lookups = 0, hits = 0;
  std::uint64_t insertions = 0;  // uploads into slots
  void add(const Tally& other);
  [[nodiscard]] std::uint64_t misses() const { return lookups - hits; }
};

// Experts over the link (or from the disk): what is loaded into slots, and in covered mode what is read in
// place.
[[nodiscard]] std::uint64_t link_experts(const Tally& tally, Mode mode);

struct ReplayOptions {
  Mode mode = Mode::kPool;
  std::string policy;
  std::vector<std::uint32_t> n_slots;  // of each pool, by layer
  std::uint32_t n_lanes = 1;           // of the order
  bool private_pools = false;          // one for each lane instead of one for all
  SlotScope scope = SlotScope::kLayer;
  bool prefetch = false;  // as a daemon with pool.prefetch; mode kPool alone
};

struct ReplayResult {
  Tally prefill, decode;
  std::vector<LayerCounters> layers;   // the brain's, summed over the pools
  std::vector<std::uint32_t> n_slots;  // by layer, open at the end, summed over the pools
  std::uint64_t events_too_wide = 0;  // more experts than slots: what was absent was not loaded, but streamed
  PrefetchState prefetch = PrefetchState::kOff;  // at the end, of the first pool
  double seconds = 0;                            // of processor time
  [[nodiscard]] Tally total() const;
};

// kInvalid: a policy or slots that cannot be.
[[nodiscard]] Result<ReplayResult> replay(const Trace& trace, std::span<const Turn> order,
                                          const ReplayOptions& options);

// One process on each of n_lanes GPUs that read each other's slots (peer_pools.h); n_slots are each GPU's.
struct PeerResult {
  Tally total;                  // hits: on any GPU
  std::uint64_t peer_hits = 0;  // of those, on another than the process's own
  std::uint64_t copies = 0;     // experts in slots at the end that another GPU has as well
  std::uint64_t n_slots = 0;    // of all GPUs and layers
};
// `cost` of a use that a peer's slot serves, of one that is read from RAM.
[[nodiscard]] Result<PeerResult> replay_peers(const Trace& trace, std::span<const Turn> order,
                                              const ReplayOptions& options, double cost);

}  // namespace moecached::replay
