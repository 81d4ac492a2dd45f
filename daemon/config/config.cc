#include "daemon/config/config.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <string_view>

#include "daemon/base/text.h"
#include "daemon/config/default_paths.h"
#include "daemon/config/settings.h"
#include "daemon/config/tier_string.h"
#include "daemon/config/toml_file.h"

namespace moecached {
namespace {

constexpr const char* kDefaultFile = "/etc/moecached/moecached.toml";
constexpr std::string_view kTiers = "tiers";
constexpr std::string_view kReloadable[] = {"log.level", "policy.default"};

Fault invalid(std::string text) { return {FaultCode::kInvalid, std::move(text)}; }

// A fault quotes what files and flags hold, any bytes, and goes to terminals and logs.
Fault fit_to_print(Fault fault) {
  fault.text = for_people(fault.text);
  return fault;
}

std::string did_you_mean(std::string_view key) {
  return "the nearest known key is " + std::string(nearest_key(key));
}

// Sets what the tier string says. `said_singly`: where the same source says a setting by itself, or "".
template <typename SaidSingly>
Status apply_tiers(std::string_view text, const std::string& place, Config* config, SaidSingly said_singly,
                   std::vector<std::string>* keys = nullptr) {
  const Result<std::vector<TierSetting>> tiers = parse_tiers(text);
  if (!tiers) return Fault(tiers.error()).with_context(place);
  for (const TierSetting& tier : *tiers) {
    // Which GPUs are served is no matter of tiers, only whether any is.
    const bool serves = tier.key == "gpu.devices" && tier.value == "auto";
    const std::string single = said_singly(tier.key);
    if (serves && config->gpu.devices != "none") continue;
    if (!single.empty()) {
      return invalid(place + " sets " + std::string(tier.key) + ", and so does " + single +
                     ": leave one of them out");
    }
    const Status set = find_setting(tier.key)->set(*config, tier.value);
    if (!set)
      return Fault(set.error()).with_context(place + ": " + std::string(tier.key) + " = " + tier.value);
    if (keys != nullptr) keys->emplace_back(tier.key);
  }
  return ok();
}

Status apply_file(const std::string& path, Config* config) {
  const Result<std::vector<TomlValue>> values = read_toml_file(path);
  if (!values) return Fault(values.error());
  for (const TomlValue& value : *values) {
    const std::string place = path + ":" + std::to_string(value.line) + ": " + value.key;
    if (value.key == kTiers && value.kind == TomlKind::kText) continue;  // below: it may conflict
    if (value.key.substr(0, value.key.find('.')) == kTiers) {
      return invalid(place +
                     " is not how tiers are written: above the first [section], tiers = "
                     "\"GPU:slru:25%,RAM:lfu:50%,SSD:stream\"");
    }
    const bool bare = value.key.find('.') == std::string::npos;
    if (bare && is_section(value.key)) {
      if (value.kind == TomlKind::kOther) continue;  // an empty section
      return invalid(place + " is a section: write [" + value.key + "] and its keys below");
    }
    const Setting* setting = find_setting(value.key);
    if (setting == nullptr) return invalid(place + " is not a known key; " + did_you_mean(value.key));
    const Status kind = check_kind(*setting, value.kind);
    if (!kind) return invalid(place + " " + kind.error().text);
    const Status set = setting->set(*config, value.text);
    if (!set) return Fault(set.error()).with_context(place + " = " + value.text);
  }
  for (const TomlValue& value : *values) {
    if (value.key != kTiers) continue;
    const auto said_singly = [&](std::string_view key) {
      const auto found = std::ranges::find(*values, key, &TomlValue::key);
      if (found == values->end()) return std::string();
      return std::string(key) + " in line " + std::to_string(found->line);
    };
    return apply_tiers(value.text, path + ":" + std::to_string(value.line) + ": tiers", config, said_singly);
  }
  return ok();
}

// What depends on other settings, and what no single setting can see.
Status derive(Config* config) {
  const Setting& pool = *find_setting("pool.bytes");
  if (config->pool_bytes == 0) {
    const Status set = pool.set(*config, kDefaultPool);
    if (!set)
      return Fault(set.error()).with_context("pool.bytes = " + std::string(kDefaultPool) + " (the default)");
  }
  const auto place_socket = [&](std::string* path, const char* name, const char* key) -> Status {
    if (!path->empty()) return ok();
    const Status set = find_setting(key)->set(*config, config->runtime_directory + "/" + name);
    if (!set)
      return Fault(set.error()).with_context("sockets.directory = " + config->runtime_directory + ": " + key);
    return ok();
  };
  if (Status placed = place_socket(&config->control_socket, "control.sock", "sockets.control"); !placed)
    return placed;
  if (Status placed = place_socket(&config->handle_socket, "handle.sock", "sockets.handle"); !placed)
    return placed;
  const PathEnvironment environment = path_environment();
  if (config->state_directory.empty()) {
    // A daemon beside the usual one keeps to itself what it learns.
    config->state_directory = config->runtime_directory == default_runtime_directory(environment)
                                  ? "auto"
                                  : config->runtime_directory + "/state";
  }
  if (config->state_directory == "auto") config->state_directory = default_state_directory(environment);
  if (config->control_socket == config->handle_socket) {
    return invalid("sockets.control and sockets.handle are both " + config->control_socket +
                   ": they must be two sockets");
  }
  return ok();
}

Result<Config> defaults() {
  Config config;
  const std::string directory = default_runtime_directory(path_environment());
  const Status set = find_setting("sockets.directory")->set(config, directory);
  if (!set)
    return Fault(set.error()).with_context("runtime directory " + directory + " (from the environment)");
  return config;
}

struct CommandLine {
  CLI::App app{
      "moecached holds the experts of Mixture-of-Experts models once per machine and lends them to inference "
      "processes.",
      "moecached"};
  std::vector<std::string> texts;  // one per setting
  std::vector<CLI::Option*> options;
  std::string config_file, tiers;
  bool check = false, print = false, version = false;

  CommandLine() : texts(settings().size()) {
    app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
    app.add_option("--config", config_file,
                   std::string("configuration file (") + kDefaultFile + " if it exists)")
        ->type_name("FILE");
    app.add_option("--tiers", tiers, "all tiers at once: GPU:slru:128,RAM:lfu:25%:8GiB,SSD:stream")
        ->type_name("TIERS");
    app.add_flag("--check-config", check, "check configuration and flags, then exit");
    app.add_flag("--print-config", print, "print every setting as TOML, then exit");
    app.add_flag("--version", version, "print the version, then exit");
    for (std::size_t i = 0; i < settings().size(); ++i) {
      const Setting& setting = settings()[i];
      std::string names = flag_of(setting);
      if (!setting.alias.empty()) names += ",--" + std::string(setting.alias);
      CLI::Option* option = app.add_option(names, texts[i], std::string(setting.help))
                                ->type_name(std::string(setting.value_name));
      // A boolean may stand alone: --control-reflection.
      if (setting.kind == SettingKind::kBool) option->expected(0, 1);
      options.push_back(option);
    }
    app.get_formatter()->column_width(40);
    app.footer(
        "Flags win over the file, the file over the defaults; each flag is a key of the file ([pool] bytes "
        "is --pool-bytes).\n"
        "TIERS: each tier as NAME:POLICY:SIZE..., SIZE being 128 slots of each layer, 25% of its experts, "
        "8GiB of memory or\n"
        "free-1GiB; RAM also takes prefetch=off. A tier GPU that is left out is not served; SSD has no "
        "policy but stream.\n"
        "SIZE: bytes, 512MiB, 4GiB, 1.5GB, or 25% of the memory of this machine or cgroup.\n"
        "SIGHUP reads the file again and applies log.level and policy.default. SIGTERM and SIGINT stop.\n"
        "Exit codes: 0 stopped when asked to, 2 bad flag or configuration, 3 already running, 4 cannot "
        "start.");
  }
};

std::string nearest_flag(const std::string& argument) {
  std::string key = argument.substr(0, argument.find('='));
  key.erase(0, key.find_first_not_of('-') == std::string::npos ? key.size() : key.find_first_not_of('-'));
  // The flag of pool.bytes is pool-bytes; the first dash is the section's dot.
  if (const std::size_t dash = key.find('-'); dash != std::string::npos) key[dash] = '.';
  std::ranges::replace(key, '-', '_');
  return flag_of(*find_setting(nearest_key(key)));
}

std::string quote(std::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04X", static_cast<unsigned>(static_cast<unsigned char>(c)));
      quoted += escape;
    } else {
      quoted += c;
    }
  }
  return quoted + "\"";
}

bool is_number(std::string_view text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
}

}  // namespace

Result<Config> load_config(int argc, const char* const* argv, ConfigRequest* request) {
  *request = {};
  CommandLine line;
  try {
    line.app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    request->action = ConfigRequest::Action::kHelp;
    request->help = line.app.help();
    return Config{};
  } catch (const CLI::ExtrasError&) {
    const std::vector<std::string> extras = line.app.remaining();
    const std::string first = extras.empty() ? "" : extras.front();
    if (!first.starts_with("-"))
      return invalid("\"" + first + "\" is not expected: there is nothing but flags (see --help)");
    return invalid(first + " is not a known flag; the nearest one is " + nearest_flag(first) +
                   " (see --help)");
  } catch (const CLI::ParseError& error) {
    return invalid(error.what());
  }
  if (line.version) {
    request->action = ConfigRequest::Action::kVersion;
    return Config{};
  }
  if (line.check) request->action = ConfigRequest::Action::kCheck;
  if (line.print) request->action = ConfigRequest::Action::kPrint;

  std::error_code ignored;
  if (line.app.count("--config") > 0) {
    request->config_file = std::filesystem::absolute(line.config_file, ignored).lexically_normal();
    if (line.config_file.empty()) return invalid("--config needs a file");
  } else if (std::filesystem::exists(kDefaultFile, ignored)) {
    request->config_file = kDefaultFile;
  }

  Result<Config> config = defaults();
  if (!config) return config;
  if (!request->config_file.empty()) {
    const Status applied = apply_file(request->config_file, &*config);
    if (!applied) return fit_to_print(applied.error());
  }
  if (line.app.count("--tiers") > 0) {
    const auto said_singly = [&](std::string_view key) {
      const auto index = static_cast<std::size_t>(find_setting(key) - settings().data());
      return line.options[index]->count() > 0 ? flag_of(settings()[index]) : std::string();
    };
    const Status applied = apply_tiers(line.tiers, "--tiers", &*config, said_singly, &request->flag_keys);
    if (!applied) return fit_to_print(applied.error());
  }
  for (std::size_t i = 0; i < settings().size(); ++i) {
    if (line.options[i]->count() == 0) continue;
    const Setting& setting = settings()[i];
    const std::string text =
        setting.kind == SettingKind::kBool && line.texts[i].empty() ? "true" : line.texts[i];
    const Status set = setting.set(*config, text);
    if (!set) return fit_to_print(Fault(set.error()).with_context(flag_of(setting) + " " + text));
    request->flag_keys.emplace_back(setting.key);
  }
  const Status derived = derive(&*config);
  if (!derived) return Fault(derived.error());
  return config;
}

Result<Config> reload_config(const Config& running, const ConfigRequest& request,
                             std::vector<std::string>* refused) {
  refused->clear();
  if (request.config_file.empty()) return running;
  Result<Config> fresh = defaults();
  if (!fresh) return fresh;
  const Status applied = apply_file(request.config_file, &*fresh);
  if (!applied) return fit_to_print(applied.error());
  // Flags win over the new file as they did over the old one, also for what is derived from them.
  for (const std::string& key : request.flag_keys) {
    const Setting& setting = *find_setting(key);
    const Status set = setting.set(*fresh, setting.get(running));
    if (!set) return Fault(set.error()).with_context(flag_of(setting));
  }
  const Status derived = derive(&*fresh);
  if (!derived) return Fault(derived.error());

  Config merged = running;
  for (const Setting& setting : settings()) {
    const std::string now = setting.get(running), wanted = setting.get(*fresh);
    if (now == wanted) continue;
    if (std::ranges::find(kReloadable, setting.key) == std::end(kReloadable)) {
      refused->push_back(for_people(std::string(setting.key) + " stays " + now +
                                    " until a restart (the file says " + wanted + ")"));
      continue;
    }
    const Status set = setting.set(merged, wanted);
    if (!set) return Fault(set.error()).with_context(setting.key);
  }
  return merged;
}

std::string print_config(const Config& config) {
  // A comment: beside the single settings it would say everything twice.
  std::string text = "# tiers = " + quote(print_tiers(config)) + "\n";
  std::string_view section;
  for (const Setting& setting : settings()) {
    const std::size_t dot = setting.key.find('.');
    if (setting.key.substr(0, dot) != section) {
      section = setting.key.substr(0, dot);
      text.append("\n[").append(section).append("]\n");
    }
    const std::string value = setting.get(config);
    const bool bare = setting.kind == SettingKind::kBool || setting.kind == SettingKind::kInteger ||
                      (setting.kind == SettingKind::kSize && is_number(value));
    text.append(setting.key.substr(dot + 1)).append(" = ").append(bare ? value : quote(value)).append("\n");
  }
  return text;
}

}  // namespace moecached
