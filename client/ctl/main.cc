// moecachectl: the command line; commands.h does the work.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "client/ctl/commands.h"
#include "client/ctl/compare.h"
#include "client/ctl/record.h"
#include "client/ctl/run.h"

namespace moecached::ctl {
namespace {

constexpr const char* kFooter =
    "Exit codes: 0 ok, 1 doctor found an error, 2 bad command line, 3 no daemon answers, 4 the daemon (or "
    "the mode of its\n"
    "socket) refuses, 5 no answer in time, 6 the daemon failed. `run` returns the program's own code, 128 + "
    "N when signal N\n"
    "ended it, 125 when it could not be set up, 126 when the program is not executable, 127 when it is not "
    "there.\n"
    "Environment: MOECACHED_CONTROL_SOCKET (--socket), MOECACHED_PLUGIN (run --plugin), MOECACHED_DAEMON "
    "(for run).";

struct CommandLine {
  CLI::App app{"Looks at and steers moecached, and runs programs with it.", "moecachectl"};
  std::string format = "table", socket;
  double timeout_seconds = 10;
  bool layers = false;
  double watch_seconds = 1;
  std::uint32_t watch_count = 0;
  std::uint32_t model = 0;
  std::vector<std::string> policy_words;
  std::vector<std::string> paths;
  std::string device;
  RunOptions run;
  RecordOptions record;

  std::string prewarm_file;
  std::vector<std::string> challengers;

  CLI::App *prewarm_, *policy_shadow, *policy_compare;
  CLI::App *status, *models, *sessions, *stats, *policy, *policy_get, *policy_set, *register_, *drop, *doctor,
      *run_, *version, *trace, *trace_record;
  CLI::Option* watch;

  CommandLine() {
    app.require_subcommand(1)->fallthrough()->footer(kFooter);
    app.get_formatter()->column_width(36);
    app.add_option("-o,--output", format, "table or json")
        ->type_name("FORMAT")
        ->check(CLI::IsMember({"table", "json"}));
    app.add_option("--socket", socket, "control socket (/run/moecached/control.sock, or the user's own)")
        ->type_name("PATH");
    app.add_option("--timeout", timeout_seconds, "seconds to wait for an answer (10)")
        ->type_name("SECONDS")
        ->check(CLI::Range(0.001, 86400.0));
    const auto command = [&](CLI::App& parent, const char* name, const char* help) {
      CLI::App* sub = parent.add_subcommand(name, help);
      sub->fallthrough();  // -o and --socket may come after the command
      return sub;
    };
    status = command(app, "status", "version, sockets, pool and tiers");
    models = command(app, "models", "the models that are laid out");
    models->add_flag("--layers", layers, "a table of each model's layers");
    sessions = command(app, "sessions", "the connected clients");
    stats = command(app, "stats", "lookups, hits and bytes");
    watch = stats->add_option("--watch", watch_seconds, "again every SECONDS (1), with rates")
                ->type_name("[SECONDS]")
                ->expected(0, 1)
                ->check(CLI::Range(0.1, 3600.0));
    stats->add_option("--count", watch_count, "end --watch after N snapshots")->type_name("N")->needs(watch);
    policy = command(app, "policy", "eviction policy: get or set")->require_subcommand(1);
    policy_get = command(*policy, "get", "print the policy");
    policy_set = command(*policy, "set", "change the policy while running");
    policy_set
        ->add_option(
            "spec", policy_words,
            "of which tier: ram, gpu or a GPU's UUID (the model's, or ram); and the policy: ewma, lru, "
            "slru:probation=20, lfu:halve=64,admit=second-miss ...; a wrong name lists all")
        ->type_name("[TIER] SPEC")
        ->expected(1, 2)
        ->required();
    for (CLI::App* sub : {policy_get, policy_set}) {
      sub->add_option("--model", model, "of this model (get: all; set: all of the tier and new ones)")
          ->type_name("ID");
    }
    policy_shadow =
        command(*policy, "shadow", "let other policies see what the live one sees, and load nothing");
    policy_shadow
        ->add_option("specs", challengers,
                     "up to three: slru,ewma, or apart where they have options; none: "
                     "end it")
        ->type_name("SPEC");
    policy_shadow->add_option("--model", model, "of this model (the only one there is)")->type_name("ID");
    policy_compare =
        command(*policy, "compare", "the live policy, its challengers, and one that knows the future");
    policy_compare->add_option("--model", model, "of this model (the only one there is)")->type_name("ID");
    policy_compare->add_flag("--layers", layers, "a table of the layers");
    register_ = command(app, "register", "lay a model out before its first client comes");
    register_->add_option("path", paths, "the GGUF file, or its shards in order")
        ->type_name("PATH")
        ->required();
    register_->add_option("--gpu", device, "into pinned RAM and slots of this GPU")->type_name("UUID");
    drop = command(app, "drop", "free a model that no session uses");
    drop->add_option("id", model, "see `moecachectl models`")->type_name("ID")->required();
    prewarm_ = command(app, "prewarm", "start a model's policy and free slots from use counts");
    prewarm_->add_option("--model", model, "this model (the only one there is)")->type_name("ID");
    prewarm_
        ->add_option("--from", prewarm_file,
                     "imatrix of llama.cpp, moecounts-csv or hot list; the daemon reads it as its own user")
        ->type_name("FILE")
        ->required();
    doctor =
        command(app, "doctor", "every fallback taken, every expert tensor left out and why, and what to do");
    run_ = command(app, "run", "run -- PROGRAM ARGUMENTS: with its experts in moecached");
    run_->add_option("--tiers", run.daemon.tiers,
                     "all tiers of the private daemon: GPU:slru:128,RAM:lfu:25%,SSD:stream")
        ->type_name("TIERS");
    run_->add_option("--pool-bytes", run.daemon.pool_bytes, "memory of the private daemon (4GiB, 25%)")
        ->type_name("SIZE");
    run_->add_option("--slots", run.daemon.slots, "its slots of each layer")->type_name("N|P%");
    run_->add_option("--policy", run.daemon.policy, "its eviction policy")->type_name("SPEC");
    run_->add_option("--gpu-slots", run.daemon.gpu_slots, "its slots of each layer in GPU memory")
        ->type_name("N|P%");
    run_->add_option("--gpu-bytes", run.daemon.gpu_bytes, "its share of a GPU's memory (8GiB, 50%)")
        ->type_name("SIZE");
    run_->add_option("--gpu-keep-free", run.daemon.gpu_keep_free, "GPU memory that it leaves to others")
        ->type_name("SIZE");
    run_->add_option("--gpu-policy", run.daemon.gpu_policy, "the eviction policy of its slots in GPU memory")
        ->type_name("SPEC");
    run_->add_option("--gpu-max-slowdown", run.daemon.gpu_max_slowdown,
                     "what its uploads to a GPU may cost a decoding program; 100: no limit")
        ->type_name("PERCENT");
    run_->add_option("--gpu-mode", run.daemon.gpu_mode,
                     "covered: its RAM holds every expert of a model on a GPU; spill: VRAM, RAM or disk; "
                     "auto: covered "
                     "if there is the memory for it")
        ->type_name("MODE");
    run_->add_flag("--private", run.always_private, "start a private daemon even if one is running");
    run_->add_option("--plugin", run.plugin, "libggml-moecache.so, if it is not found")->type_name("PATH");
    run_->add_flag("--no-flags", run.no_flags, "set the environment only, add no -ot to llama.cpp programs");
    run_->footer(
        "Uses the daemon that answers on the socket, or starts a private one and stops it afterwards. Sets "
        "GGML_BACKEND_PATH and\n"
        "MOECACHED_SOCKET; programs named llama or llama-* also get -ot "
        "'\\.ffn_(gate|up|down|gate_up)_exps=MOECACHE' unless\n"
        "they have it. Example: moecachectl run --pool-bytes 8GiB -- llama-server -m model.gguf");
    trace = command(app, "trace", "routing traces: record")->require_subcommand(1);
    trace_record = command(*trace, "record", "write what a model routes to into a moetrace-csv file");
    trace_record->add_option("-o,--out", record.path, "the file; .zst compresses it")
        ->type_name("FILE")
        ->required();
    trace_record->add_option("--model", record.model, "of this model (the only one there is)")
        ->type_name("ID");
    CLI::Option* seconds = trace_record->add_option("--seconds", record.seconds, "stop after this time")
                               ->type_name("N")
                               ->check(CLI::Range(0.1, 1e9));
    trace_record->add_option("--tokens", record.tokens, "stop after so many tokens")
        ->type_name("N")
        ->check(CLI::Range(std::uint64_t{1}, std::uint64_t{1} << 40))
        ->excludes(seconds);
    trace_record->add_flag("--single-tokens", record.single_tokens,
                           "leave out batches, of which only the union of their tokens is known");
    trace_record->footer(
        "Ends after --seconds or --tokens, or with Ctrl-C; the file is written then. `moecache-sim FILE` "
        "replays it.");
    version = command(app, "version", "of moecachectl and of the daemon");
  }
};

// "slru,ewma" is two policies. A word with a colon is one, whose options may be separated by commas.
std::vector<std::string> split(const std::vector<std::string>& words) {
  std::vector<std::string> out;
  for (const std::string& word : words) {
    if (word.find(':') != std::string::npos) {
      out.push_back(word);
      continue;
    }
    for (std::size_t begin = 0; begin <= word.size();) {
      const std::size_t end = std::min(word.find(',', begin), word.size());
      out.push_back(word.substr(begin, end - begin));
      begin = end + 1;
    }
  }
  return out;
}

int dispatch(CommandLine& line) {
  const Output output{.json = line.format == "json"};
  ControlClient client(
      choose_control_socket(line.socket),
      std::chrono::milliseconds(static_cast<std::int64_t>(std::ceil(line.timeout_seconds * 1000))));
  if (line.status->parsed()) return show_status(client, output);
  if (line.models->parsed()) return show_models(client, output, line.layers);
  if (line.sessions->parsed()) return show_sessions(client, output);
  if (line.stats->parsed() && line.watch->count() > 0) {
    return watch_stats(client, output, {.interval_seconds = line.watch_seconds, .count = line.watch_count});
  }
  if (line.stats->parsed()) return show_stats(client, output);
  if (line.policy_get->parsed() && line.model == 0) return list_policies(client, output);
  if (line.policy_get->parsed()) return get_policy(client, output, line.model);
  if (line.policy_set->parsed()) return set_policy(client, output, line.model, line.policy_words);
  if (line.policy_shadow->parsed())
    return shadow_policies(client, output, line.model, split(line.challengers));
  if (line.policy_compare->parsed()) return compare_policies(client, output, line.model, line.layers);
  if (line.register_->parsed()) return register_model(client, output, line.paths, line.device);
  if (line.drop->parsed()) return drop_model(client, output, line.model);
  if (line.prewarm_->parsed()) return prewarm(client, output, line.model, line.prewarm_file);
  if (line.doctor->parsed()) return show_doctor(client, output);
  if (line.run_->parsed()) return run_program(client, line.run);
  if (line.trace_record->parsed()) return record_trace(client, output, line.record);
  return show_version(client, output);
}

int run(int argc, char** argv) {
  // Split here: what follows belongs to the program, also where it looks like an option of ours.
  int ours = 1;
  while (ours < argc && std::string_view(argv[ours]) != "--") ++ours;
  CommandLine line;
  for (int i = ours + 1; i < argc; ++i) line.run.command.emplace_back(argv[i]);
  try {
    line.app.parse(ours, argv);
  } catch (const CLI::CallForHelp& help) {
    return line.app.exit(help);
  } catch (const CLI::ParseError& error) {
    return report({.json = line.format == "json"}, {kExitUsage, std::string(error.what()) + " (see --help)"});
  }
  const bool wants_program = line.run_->parsed();
  if (wants_program == line.run.command.empty()) {
    return report(
        {.json = line.format == "json"},
        {kExitUsage, wants_program ? "run needs a program: moecachectl run -- llama-server -m model.gguf"
                                   : "only run takes a program after --"});
  }
  return dispatch(line);
}

}  // namespace
}  // namespace moecached::ctl

int main(int argc, char** argv) { return moecached::ctl::run(argc, argv); }
