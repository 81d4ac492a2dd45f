// The real Brain and policies under thousands of seeds. To replay one:  MOECACHED_SIM_SEED=17 brain_sim_test
// To search for longer:  MOECACHED_SIM_RUNS=200000 brain_sim_test
#include <gtest/gtest.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>

#include <unistd.h>

#include "tests/sim/simulation.h"

namespace moecached::sim {
namespace {

std::uint64_t environment_number(const char* name, std::uint64_t fallback) {
  const char* text = std::getenv(name);
  return text == nullptr || *text == '\0' ? fallback : std::strtoull(text, nullptr, 0);
}

struct SeedRange {
  std::uint64_t first = 1;
  std::uint64_t n = 5000;
};

SeedRange chosen_seeds() {
  const bool is_one_seed = std::getenv("MOECACHED_SIM_SEED") != nullptr;
  return {.first = environment_number("MOECACHED_SIM_SEED", 1),
          .n = environment_number("MOECACHED_SIM_RUNS", is_one_seed ? 1 : SeedRange{}.n)};
}

// A failed CHECK aborts before GoogleTest can say anything: the handler prints the seed, with calls that a
// signal handler may make only.
char seed_line[64];
void set_seed_line(std::uint64_t seed) {
  std::snprintf(seed_line, sizeof seed_line, "simulation seed %llu\n", static_cast<unsigned long long>(seed));
}
extern "C" void print_seed_on_abort(int) {
  if (write(STDERR_FILENO, seed_line, std::strlen(seed_line)) < 0) _exit(134);
  std::signal(SIGABRT, SIG_DFL);
  std::raise(SIGABRT);
}

SimReport simulate_named(const SimOptions& options) {
  set_seed_line(options.seed);
  return simulate(options);
}

// The same run again, with its last events as text.
std::string explain(SimOptions options, const SimReport& report) {
  options.keep_trace_text = true;
  const SimReport again = simulate_named(options);
  std::string text = "seed " + std::to_string(options.seed) + ": " + report.text;
  text += again.trace_hash == report.trace_hash ? "\n" : " (and the replay differs)\n";
  return text + again.trace + "replay: MOECACHED_SIM_SEED=" + std::to_string(options.seed);
}

class BrainSimulation : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { std::signal(SIGABRT, print_seed_on_abort); }
  static void TearDownTestSuite() { std::signal(SIGABRT, SIG_DFL); }
};

void add(Stats& sum, const Stats& one) {
  sum.epochs += one.epochs;
  sum.grants += one.grants;
  sum.refusals += one.refusals;
  sum.failed_grants += one.failed_grants;
  sum.evictions += one.evictions;
  sum.waves += one.waves;
  sum.deaths_waiting += one.deaths_waiting;
  sum.deaths_mid_epoch += one.deaths_mid_epoch;
  sum.deaths_idle += one.deaths_idle;
  sum.stalls += one.stalls;
  sum.closes += one.closes;
  sum.read_errors += one.read_errors;
  sum.models_changed += one.models_changed;
  sum.duplicates += one.duplicates;
  sum.late_completions += one.late_completions;
  sum.models_removed += one.models_removed;
  sum.policy_swaps += one.policy_swaps;
  sum.policies_refused += one.policies_refused;
  sum.all_layer_epochs += one.all_layer_epochs;
  sum.lies += one.lies;
  sum.graces_waited += one.graces_waited;
  sum.leases_queued += one.leases_queued;
  sum.long_stalls += one.long_stalls;
  sum.undone += one.undone;
  sum.held += one.held;
  sum.held_whole += one.held_whole;
  sum.held_leases += one.held_leases;
  sum.known_unused += one.known_unused;
  sum.refused_by_stall += one.refused_by_stall;
  sum.streamed_prompts += one.streamed_prompts;
  sum.peer_changes += one.peer_changes;
  sum.reloads += one.reloads;
  sum.reloads_pinned += one.reloads_pinned;
  sum.drained += one.drained;
  sum.promotions += one.promotions;
  sum.promotions_evicting += one.promotions_evicting;
  sum.promotions_refused += one.promotions_refused;
  sum.trades += one.trades;
  sum.trades_refused += one.trades_refused;
  sum.trades_by_routing += one.trades_by_routing;
  sum.releases += one.releases;
  sum.trades_undone += one.trades_undone;
  sum.reads_ahead += one.reads_ahead;
  sum.reads_hastened += one.reads_hastened;
  sum.prefetch_used += one.prefetch_used;
  sum.prefetch_late += one.prefetch_late;
  sum.prefetch_wasted += one.prefetch_wasted;
  sum.prefetch_regretted += one.prefetch_regretted;
  sum.rises += one.rises;
  sum.swaps += one.swaps;
  sum.rises_refused += one.rises_refused;
  sum.rises_undone += one.rises_undone;
  sum.ram_slots_stalled += one.ram_slots_stalled;
  sum.falls_elsewhere += one.falls_elsewhere;
  sum.falls_given_up += one.falls_given_up;
  sum.falls_failed += one.falls_failed;
  sum.leases_of_falling += one.leases_of_falling;
  sum.device_hits += one.device_hits;
  sum.device_policy_swaps += one.device_policy_swaps;
  sum.device_slots_opened += one.device_slots_opened;
  sum.removed_while_rising += one.removed_while_rising;
}

TEST_F(BrainSimulation, HoldsUnderEveryMixtureOfFaultsAndMeetsEachOfThem) {
  const SeedRange seeds = chosen_seeds();
  Stats sum;
  for (std::uint64_t seed = seeds.first; seed < seeds.first + seeds.n; ++seed) {
    const SimOptions options = options_of_seed(seed);
    const SimReport report = simulate_named(options);
    ASSERT_EQ(report.violation, ViolationKind::kNone) << explain(options, report);
    add(sum, report.stats);
  }
  std::printf("%llu seeds: %llu epochs, %llu grants, %llu evictions, %llu queued leases, %llu promotions\n",
              static_cast<unsigned long long>(seeds.n), static_cast<unsigned long long>(sum.epochs),
              static_cast<unsigned long long>(sum.grants), static_cast<unsigned long long>(sum.evictions),
              static_cast<unsigned long long>(sum.leases_queued),
              static_cast<unsigned long long>(sum.promotions));
  if (seeds.n < SeedRange{}.n) return;  // too few to meet everything often
  const std::pair<const char*, std::uint64_t> met[] = {
      {"epochs", sum.epochs},
      {"grants", sum.grants},
      {"refusals", sum.refusals},
      {"failed grants", sum.failed_grants},
      {"evictions", sum.evictions},
      {"waves", sum.waves},
      {"deaths while waiting", sum.deaths_waiting},
      {"deaths within an epoch", sum.deaths_mid_epoch},
      {"deaths at rest", sum.deaths_idle},
      {"stalls", sum.stalls},
      {"orderly closes", sum.closes},
      {"read errors", sum.read_errors},
      {"changed models", sum.models_changed},
      {"duplicate completions", sum.duplicates},
      {"late completions", sum.late_completions},
      {"removed models", sum.models_removed},
      {"policy swaps", sum.policy_swaps},
      {"refused policies", sum.policies_refused},
      {"epochs over all layers", sum.all_layer_epochs},
      {"lies", sum.lies},
      {"grace periods that had to wait", sum.graces_waited},
      {"queued leases", sum.leases_queued},
      {"long stalls within an epoch", sum.long_stalls},
      {"evictions undone", sum.undone},
      {"experts held for a stalled lane", sum.held},
      {"layers held whole for a stalled lane", sum.held_whole},
      {"leases held for a stalled lane", sum.held_leases},
      {"slots that a stalled lane certainly does not use", sum.known_unused},
      {"leases refused for a stalled lane", sum.refused_by_stall},
      {"prompts told to stream", sum.streamed_prompts},
      {"changes of peers", sum.peer_changes},
      {"slots with wrong bytes", sum.reloads},
      {"slots with wrong bytes that were pinned", sum.reloads_pinned},
      {"slots with wrong bytes that a stalled lane keeps", sum.drained},
      {"promotions", sum.promotions},
      {"promotions that evicted", sum.promotions_evicting},
      {"promotions without room", sum.promotions_refused},
      {"slots moved", sum.trades},
      {"slots that could not be spared", sum.trades_refused},
      {"slots moved for the routing", sum.trades_by_routing},
      {"slots given back", sum.releases},
      {"moves undone for a stalled lane", sum.trades_undone},
      {"reads ahead", sum.reads_ahead},
      {"reads hastened", sum.reads_hastened},
      {"prefetches used", sum.prefetch_used},
      {"prefetches late", sum.prefetch_late},
      {"prefetches wasted", sum.prefetch_wasted},
      {"prefetches regretted", sum.prefetch_regretted},
      {"experts moved up", sum.rises},
      {"experts moved up for which another came down", sum.swaps},
      {"experts that did not move up", sum.rises_refused},
      {"rises undone for a stalled lane", sum.rises_undone},
      {"RAM slots kept for a stalled lane", sum.ram_slots_stalled},
      {"falling experts that got another slot", sum.falls_elsewhere},
      {"falling experts given up", sum.falls_given_up},
      {"failed copies from a spare slot", sum.falls_failed},
      {"leases of falling experts", sum.leases_of_falling},
      {"hits in device slots", sum.device_hits},
      {"swaps of device policies", sum.device_policy_swaps},
      {"device slots opened", sum.device_slots_opened},
      {"layers of models removed while an expert moves up", sum.removed_while_rising},
  };
  for (const auto& [what, count] : met)
    EXPECT_GE(count, 100u) << what << ": the faults are not what they say";
}

TEST_F(BrainSimulation, ReplaysASeedExactly) {
  std::set<std::uint64_t> hashes;
  for (std::uint64_t seed = 1; seed <= 50; ++seed) {
    const SimReport first = simulate_named(options_of_seed(seed));
    const SimReport second = simulate_named(options_of_seed(seed));
    EXPECT_EQ(first.trace_hash, second.trace_hash) << "seed " << seed;
    hashes.insert(first.trace_hash);
  }
  EXPECT_EQ(hashes.size(), 50u) << "the hash does not tell runs apart";
}

// Many lanes in one layer.
SimOptions contended_layer(std::uint64_t seed, std::uint32_t n_slots) {
  SimOptions options;
  options.seed = seed;
  options.n_models = 1;
  options.n_lanes = 10;
  options.n_layers_max = 1;
  options.n_experts_min = 40;
  options.n_experts_max = 40;
  options.n_slots_max = n_slots;
  options.ticks = 30000;
  return options;
}

// Many lanes, few slots, no faults but slow reads: nobody may wait for long while the others go on asking.
TEST_F(BrainSimulation, NobodyStarvesUnderContention) {
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    SimOptions options = contended_layer(seed, 6);
    const SimReport report = simulate_named(options);
    ASSERT_EQ(report.violation, ViolationKind::kNone) << explain(options, report);
    // Nine others go first, each with ~30 actions of its own (load, read twice, post, complete) and some of
    // the shell's, and a lane acts each twentieth tick: 5000 ticks are what chance makes of it. Leases that
    // may overtake reach 7800, starvation the length of the run.
    EXPECT_LT(report.stats.wait_ticks_max, 6000u) << "seed " << seed;
  }
}

// The same with promotions all the time: a lease that waits for slots must come before them.
TEST_F(BrainSimulation, NobodyStarvesUnderPromotions) {
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    SimOptions options = contended_layer(seed, 6);
    options.promote_permille = 1000;
    const SimReport report = simulate_named(options);
    ASSERT_EQ(report.violation, ViolationKind::kNone) << explain(options, report);
    EXPECT_LT(report.stats.wait_ticks_max, 6000u) << "seed " << seed;
  }
}

// Nor may slots that move keep a lease from those that it waits for.
TEST_F(BrainSimulation, NobodyStarvesUnderTrades) {
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    SimOptions options = contended_layer(seed, 8);
    options.n_layers_max = 3;
    options.trade_permille = 1000;
    const SimReport report = simulate_named(options);
    ASSERT_EQ(report.violation, ViolationKind::kNone) << explain(options, report);
    EXPECT_LT(report.stats.wait_ticks_max, 6000u) << "seed " << seed;
  }
}

// Nor may experts that move up and down all the time.
TEST_F(BrainSimulation, NobodyStarvesUnderRises) {
  std::uint64_t swaps = 0;
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    SimOptions options = contended_layer(seed, 16);
    options.rise_permille = 1000;
    const SimReport report = simulate_named(options);
    ASSERT_EQ(report.violation, ViolationKind::kNone) << explain(options, report);
    EXPECT_LT(report.stats.wait_ticks_max, 6000u) << "seed " << seed;
    swaps += report.stats.swaps;
  }
  EXPECT_GT(swaps, 500u);
}

// Lanes stop within an epoch, or with a lease that they have been granted, and never go on: the others may be
// told that there is no room, but must not wait.
TEST_F(BrainSimulation, NobodyWaitsForALaneThatHasStopped) {
  std::uint64_t no_room = 0, held_leases = 0;
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    SimOptions options = contended_layer(seed, 16);
    options.long_stall_permille = 1;
    options.long_stall_ticks_max = 1'000'000;
    options.death_permille = 1;
    options.corrupt_permille = 5;
    const SimReport report = simulate_named(options);
    ASSERT_EQ(report.violation, ViolationKind::kNone) << explain(options, report);
    EXPECT_LT(report.stats.wait_ticks_max, 6000u) << "seed " << seed;
    no_room += report.stats.refused_by_stall;
    held_leases += report.stats.held_leases;
  }
  EXPECT_GT(no_room, 0u);
  EXPECT_GT(held_leases, 0u);
}

// The same where what they may be reading is on its way up or down.
TEST_F(BrainSimulation, NobodyWaitsForAMoveThatAStoppedLaneHoldsUp) {
  std::uint64_t undone = 0, out_of_service = 0;
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    SimOptions options = contended_layer(seed, 16);
    options.rise_permille = 1000;
    options.long_stall_permille = 1;
    options.long_stall_ticks_max = 1'000'000;
    options.death_permille = 1;
    const SimReport report = simulate_named(options);
    ASSERT_EQ(report.violation, ViolationKind::kNone) << explain(options, report);
    EXPECT_LT(report.stats.wait_ticks_max, 6000u) << "seed " << seed;
    undone += report.stats.rises_undone;
    out_of_service += report.stats.ram_slots_stalled;
  }
  EXPECT_GT(undone, 0u);
  EXPECT_GT(out_of_service, 0u);
}

// -------------------------------------------------------------------------------------------------------
// canaries

TEST_F(BrainSimulation, CanaryASkippedGracePeriodIsSeenAsWrongBytes) {
  int n_seen = 0;
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    SimOptions options;
    options.seed = seed;
    options.ticks = 6000;
    options.n_models = 1;
    options.n_lanes = 5;
    options.skip_grace = true;
    const SimReport report = simulate_named(options);
    if (report.violation == ViolationKind::kNone) continue;  // such shapes exist: a slot for every expert
    EXPECT_EQ(report.violation, ViolationKind::kWrongBytes) << explain(options, report);
    ++n_seen;
    options.skip_grace = false;
    const SimReport sound = simulate_named(options);
    EXPECT_EQ(sound.violation, ViolationKind::kNone) << explain(options, sound);
  }
  EXPECT_GE(n_seen, 20) << "the simulation is blind to slots reused too early";
}

// An expert that moves leaves two slots behind, one after the other: each has a grace period of its own.
TEST_F(BrainSimulation, CanaryASkippedGracePeriodOfAMoveIsSeenAsWrongBytes) {
  for (bool SimOptions::*const skipped : {&SimOptions::skip_grace_of_fall, &SimOptions::skip_grace_of_rise}) {
    int n_seen = 0;
    for (std::uint64_t seed = 1; seed <= 40; ++seed) {
      SimOptions options;
      options.seed = seed;
      options.ticks = 6000;
      options.n_models = 1;
      options.n_lanes = 5;
      options.n_experts_min = 6;
      options.rise_permille = 1000;
      options.*skipped = true;
      const SimReport report = simulate_named(options);
      if (report.violation == ViolationKind::kNone) continue;  // no device slots, or one for every expert
      EXPECT_EQ(report.violation, ViolationKind::kWrongBytes) << explain(options, report);
      ++n_seen;
      options.*skipped = false;
      const SimReport sound = simulate_named(options);
      EXPECT_EQ(sound.violation, ViolationKind::kNone) << explain(options, sound);
    }
    EXPECT_GE(n_seen, 20) << "the simulation is blind to slots of moves that are reused too early, "
                          << (skipped == &SimOptions::skip_grace_of_fall ? "on the device" : "in RAM");
  }
}

TEST_F(BrainSimulation, CanaryAStalledLaneTakenForGoneIsSeenAsWrongBytes) {
  int n_seen = 0;
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    SimOptions options;
    options.seed = seed;
    options.ticks = 12000;
    options.n_models = 1;
    options.n_lanes = 5;
    options.long_stall_permille = 5;
    options.stalled_is_gone = true;
    const SimReport report = simulate_named(options);
    if (report.violation == ViolationKind::kNone) continue;
    EXPECT_EQ(report.violation, ViolationKind::kWrongBytes) << explain(options, report);
    ++n_seen;
    options.stalled_is_gone = false;
    const SimReport sound = simulate_named(options);
    EXPECT_EQ(sound.violation, ViolationKind::kNone) << explain(options, sound);
  }
  EXPECT_GE(n_seen, 20) << "the simulation is blind to slots taken from a stalled lane";
}

TEST_F(BrainSimulation, CanaryAClosedSlotThatKeepsItsMemoryIsSeen) {
  int n_seen = 0;
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    SimOptions options;
    options.seed = seed;
    options.n_experts_min = 6;
    options.n_models = 1;
    options.trade_permille = 100;
    options.keep_released = true;
    const SimReport report = simulate_named(options);
    if (report.violation == ViolationKind::kNone) continue;  // a model of one layer trades nothing
    EXPECT_EQ(report.violation, ViolationKind::kOverBudget) << explain(options, report);
    ++n_seen;
    options.keep_released = false;
    const SimReport sound = simulate_named(options);
    EXPECT_EQ(sound.violation, ViolationKind::kNone) << explain(options, sound);
  }
  EXPECT_GE(n_seen, 15) << "the simulation is blind to memory that is not given back";
}

TEST_F(BrainSimulation, CanaryALostCompletionIsSeenAsStuck) {
  int n_seen = 0;
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    SimOptions options;
    options.seed = seed;
    options.lose_completions = true;
    const SimReport report = simulate_named(options);
    if (report.violation == ViolationKind::kNone) continue;
    EXPECT_EQ(report.violation, ViolationKind::kStuck) << explain(options, report);
    ++n_seen;
  }
  EXPECT_GE(n_seen, 20) << "the simulation is blind to lanes that wait for ever";
}

}  // namespace
}  // namespace moecached::sim
