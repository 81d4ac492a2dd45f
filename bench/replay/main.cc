// moecache-sim: replays a routing trace against eviction policies and says what each would have done.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "bench/replay/report.h"
#include "bench/replay/svg.h"
#include "daemon/policy/registry.h"

namespace moecached::replay {
namespace {

enum ExitCode : int { kExitOk = 0, kExitFailed = 1, kExitUsage = 2 };

constexpr const char* kSlots = "12.5%,25%,50%";
constexpr const char* kCurveSlots = "5%,10%,15%,20%,25%,30%,40%,50%,60%,75%,90%,100%";
constexpr const char* kFooter =
    "A trace is moetrace-csv v1, plain or zstd; `moecachectl trace record` writes one. Ids of a token in one "
    "layer are\nlooked up together, against the state before the token. link/access counts experts over the "
    "link: what is loaded\ninto slots and, in mode covered, misses that are read in place. prefetched/access "
    "are loads of --prefetch, used and\n"
    "wasted the shares of them that decode used and that were evicted unused.\n"
    "Exit codes: 0 ok, 1 the trace cannot be read or replayed, 2 bad command line.";

struct Options {
  std::string trace, mode = "pool", slots, format = "table", svg;
  std::vector<std::string> policies;
  std::uint32_t n_processes = 1;
  std::uint64_t memory_mib = 4096;
  std::uint64_t expert_bytes = 0;
  bool layers = false, no_belady = false, prefetch = false;
  double peers = 0;
  std::vector<SlotScope> scopes;
};

int fail(ExitCode code, const std::string& text) {
  std::fprintf(stderr, "moecache-sim: %s\n", text.c_str());
  return code;
}

std::vector<std::string> policies_of(const Options& options, const Trace& trace) {
  std::vector<std::string> out;
  for (const std::string& spec : options.policies) {
    if (spec == "all") {
      for (const std::string_view name : policy_names()) out.emplace_back(name);
    } else {
      out.push_back(spec == "recorded" ? trace.header().policy : spec);
    }
  }
  return out;
}

// One pool size: every policy, and the yardsticks.
Status run_size(const Trace& trace, std::span<const Turn> order, const std::vector<std::string>& policies,
                const Options& options, const SlotChoice& slots, bool private_pools, Report* report) {
  std::vector<std::uint32_t> of_pool = slots.n_slots;
  if (private_pools) {
    of_pool = private_part(slots, options.n_processes, trace.header());
    if (of_pool.empty()) {
      report->notes.push_back(slots.label + ": " + std::to_string(options.n_processes) +
                              " private pools of this size would have fewer slots each than the " +
                              std::to_string(trace.header().n_used) + " experts of a token");
      return ok();
    }
  }
  for (const std::string& policy : policies) {
    for (const SlotScope scope : options.scopes) {
      Result<ReplayResult> result = replay(trace, order,
                                           {.mode = report->mode,
                                            .policy = policy,
                                            .n_slots = of_pool,
                                            .n_lanes = options.n_processes,
                                            .private_pools = private_pools,
                                            .scope = scope,
                                            .prefetch = options.prefetch});
      if (!result) return std::move(result).error().with_context(policy + ", " + slots.label);
      report->runs.push_back({policy, slots, options.n_processes, private_pools, *std::move(result), scope});
    }
  }
  if (options.peers > 0 && !private_pools) {
    for (const std::string& policy : policies) {
      Result<PeerResult> result = replay_peers(
          trace, order, {.policy = policy, .n_slots = slots.n_slots, .n_lanes = options.n_processes},
          options.peers);
      if (!result) return std::move(result).error().with_context(policy + ", " + slots.label);
      report->peers.push_back({policy, slots, options.n_processes, *std::move(result)});
    }
  }
  if (options.no_belady) return ok();
  Yardstick best{slots, options.n_processes, private_pools, {}, {}};
  BeladyOptions oracle{
      .bypass = false, .n_slots = of_pool, .n_lanes = options.n_processes, .private_pools = private_pools};
  best.belady = replay_belady(trace, order, oracle).total();
  oracle.bypass = true;
  best.bypass = replay_belady(trace, order, oracle).total();
  report->yardsticks.push_back(std::move(best));
  return ok();
}

int run(const Options& options) {
  if (options.prefetch && options.mode != "pool") {
    return fail(
        kExitUsage,
        "--prefetch needs --mode pool: on a GPU routing arrives a whole token late, and nobody waits");
  }
  if (options.peers > 0 && options.mode != "covered")
    return fail(kExitUsage, "--peers needs --mode covered: only GPUs read each other's slots");
  Result<Trace> trace = Trace::read(options.trace, {.bytes = options.memory_mib << 20});
  if (!trace) return fail(kExitFailed, trace.error().text);
  const std::string wanted = !options.slots.empty() ? options.slots
                             : options.svg.empty()  ? kSlots
                                                    : kCurveSlots;
  const Result<std::vector<SlotChoice>> sizes = parse_slots(wanted, trace->header());
  if (!sizes) return fail(kExitUsage, sizes.error().text);
  const std::vector<std::string> policies = policies_of(options, *trace);
  if (std::ranges::find(policies, "") != policies.end())
    return fail(kExitUsage,
                "--policy recorded needs a trace that a daemon recorded; this one names no policy");
  if (!options.svg.empty() && options.scopes.size() > 1)
    return fail(kExitUsage, "--svg draws one scope: give --scope layer or --scope global");
  const Result<std::vector<Turn>> order = interleave(*trace, options.n_processes);
  if (!order) return fail(kExitUsage, order.error().text);

  Report report;
  report.header = trace->header();
  report.path = options.trace;
  report.n_rows = trace->size();
  report.n_sequences = trace->n_sequences();
  report.mode = options.mode == "pool" ? Mode::kPool : Mode::kCovered;
  report.expert_bytes = options.expert_bytes;
  report.prefetch = options.prefetch;
  if (options.layers) report.use = layer_use(*trace);
  for (const SlotChoice& slots : *sizes) {
    for (const bool private_pools : {false, true}) {
      if (private_pools && options.n_processes == 1) continue;
      if (Status ran = run_size(*trace, *order, policies, options, slots, private_pools, &report); !ran)
        return fail(kExitFailed, ran.error().text);
    }
  }
  if (!options.svg.empty()) {
    std::ofstream file(options.svg);
    file << to_svg(report);
    file.close();
    if (!file)
      return fail(kExitFailed, "cannot write " + options.svg + ": is the folder there and writable?");
  }
  // Names come out of a file: what is no UTF-8 is replaced, not thrown about.
  const std::string text =
      options.format == "json"
          ? to_json(report).dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n"
          : to_table(report);
  std::fputs(text.c_str(), stdout);
  return std::fflush(stdout) == 0 ? kExitOk : fail(kExitFailed, "cannot write the result");
}

int parse_and_run(int argc, char** argv) {
  Options options;
  CLI::App app{"Replays a routing trace against the daemon's eviction policies.", "moecache-sim"};
  app.footer(kFooter);
  app.get_formatter()->column_width(30);
  app.add_option("trace", options.trace, "a moetrace-csv file, or - for standard input")
      ->type_name("TRACE")
      ->required();
  app.add_option("--mode", options.mode,
                 "pool: every miss is loaded; covered: misses are read in place (pool)")
      ->check(CLI::IsMember({"pool", "covered"}))
      ->type_name("MODE");
  app.add_option("--policy", options.policies,
                 "a policy as the daemon takes it, \"all\" or \"recorded\" (all)")
      ->type_name("SPEC")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_option("--slots", options.slots, "shares or counts of each layer, or \"recorded\" (12.5%,25%,50%)")
      ->type_name("LIST");
  app.add_option("--interleave", options.n_processes,
                 "deal the sequences to N processes on one pool, and on N private pools of the same total")
      ->type_name("N")
      ->check(CLI::Range(1u, 256u));
  app.add_option("--scope", options.scopes,
                 "whether layers keep their slots or trade them: layer, global, or both (layer)")
      ->transform(CLI::CheckedTransformer(
          std::map<std::string, SlotScope>{{"layer", SlotScope::kLayer}, {"global", SlotScope::kGlobal}}))
      ->delimiter(',')
      ->type_name("LIST");
  app.add_option("-o,--output", options.format, "table or json (table)")
      ->check(CLI::IsMember({"table", "json"}))
      ->type_name("FORMAT");
  app.add_option("--svg", options.svg, "draw hit rates over slots into this file")->type_name("FILE");
  app.add_flag("--layers", options.layers, "use, Gini, entropy and hits by layer, and advice");
  app.add_option("--expert-bytes", options.expert_bytes, "size of an expert, for link figures in bytes")
      ->type_name("BYTES");
  app.add_flag("--prefetch", options.prefetch, "load what decode is likely to use next, as pool.prefetch");
  app.add_option(
         "--peers", options.peers,
         "also: the processes of --interleave on a GPU each, with slots of this size each, that read each "
         "other's; COST of that, of a read from RAM (0.125 over NVLink)")
      ->check(CLI::Range(0.001, 1.0))
      ->type_name("COST");
  app.add_flag("--no-belady", options.no_belady, "leave the yardsticks out");
  app.add_option("--memory", options.memory_mib, "the most a trace may take (4096)")
      ->type_name("MIB")
      ->check(CLI::Range(1u, 1u << 20));
  app.set_version_flag("--version", "moecache-sim " MOECACHED_VERSION);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& done) {
    return app.exit(done);
  } catch (const CLI::ParseError& error) {
    return fail(kExitUsage, std::string(error.what()) + " (see --help)");
  }
  if (options.scopes.empty()) options.scopes.push_back(SlotScope::kLayer);
  if (options.policies.empty()) options.policies.emplace_back("all");
  return run(options);
}

}  // namespace
}  // namespace moecached::replay

int main(int argc, char** argv) { return moecached::replay::parse_and_run(argc, argv); }
