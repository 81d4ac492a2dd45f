#include "daemon/config/settings.h"

#include <grp.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <initializer_list>
#include <limits>
#include <numeric>
#include <vector>

#include "daemon/config/size.h"
#include "daemon/platform/memory_info.h"
#include "daemon/policy/registry.h"

namespace moecached {
namespace {

constexpr std::size_t kSocketPathBytesMax = 107;  // sun_path is 108 with its NUL
constexpr std::uint64_t kMib = 1u << 20;

Fault invalid(std::string text) { return {FaultCode::kInvalid, std::move(text)}; }

struct Bounds {
  std::uint64_t min, max;
};

Result<std::uint64_t> parse_number(std::string_view text, Bounds bounds) {
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const bool whole = end == text.data() + text.size() && !text.empty();
  if (error != std::errc() || !whole || number < bounds.min || number > bounds.max) {
    return invalid("must be a whole number between " + std::to_string(bounds.min) + " and " +
                   std::to_string(bounds.max));
  }
  return number;
}

Result<std::uint64_t> parse_bounded_size(std::string_view text, Bounds bounds) {
  const std::uint64_t memory = machine_memory_bytes();
  if (memory == 0 && text.ends_with('%')) {
    return invalid("is a share of memory, and /proc does not say how much there is: give bytes");
  }
  const Result<std::uint64_t> bytes = parse_size(text, memory);
  if (!bytes) return bytes;
  if (*bytes < bounds.min || *bytes > bounds.max) {
    return invalid("is " + format_size(*bytes) + ": it must be between " + format_size(bounds.min) + " and " +
                   format_size(bounds.max));
  }
  return bytes;
}

// Device memory: a share of the machine's memory would mean nothing there.
Result<std::uint64_t> parse_bounded_bytes(std::string_view text, Bounds bounds) {
  if (text.ends_with('%')) return invalid("must be in bytes (\"2GiB\"), not a share");
  return parse_bounded_size(text, bounds);
}

Status parse_devices(std::string_view text, std::string* out) {
  if (text.empty()) return invalid("must be auto, none, or UUIDs separated by commas");
  if (text != "auto" && text != "none") {
    for (std::size_t begin = 0; begin <= text.size();) {
      const std::size_t end = std::min(text.find(',', begin), text.size());
      const std::string_view uuid = text.substr(begin, end - begin);
      if (uuid.size() != 40 || !uuid.starts_with("GPU-")) {
        return invalid("has '" + std::string(uuid) +
                       "', which is no UUID like GPU-01234567-89ab-cdef-0123-456789abcdef");
      }
      begin = end + 1;
    }
  }
  *out = text;
  return ok();
}

// A pool larger than memory would be swapped out or kill somebody.
std::uint64_t pool_bytes_max() {
  const std::uint64_t memory = machine_memory_bytes();
  return memory == 0 ? std::numeric_limits<std::int64_t>::max() : memory;
}

Result<bool> parse_bool(std::string_view text) {
  if (text == "true") return true;
  if (text == "false") return false;
  return invalid("must be true or false");
}

constexpr std::pair<std::string_view, GpuMode> kModes[] = {
    {"auto", GpuMode::kAuto}, {"covered", GpuMode::kCovered}, {"spill", GpuMode::kSpill}};

Status parse_mode(std::string_view text, GpuMode* out) {
  const auto found = std::ranges::find(kModes, text, [](const auto& mode) { return mode.first; });
  if (found == std::end(kModes)) return invalid("must be auto, covered or spill");
  *out = found->second;
  return ok();
}

std::string print_mode(GpuMode mode) {
  return std::string(std::ranges::find(kModes, mode, [](const auto& known) { return known.second; })->first);
}

Status parse_choice(std::string_view text, std::initializer_list<std::string_view> choices,
                    std::string* out) {
  if (std::ranges::find(choices, text) == choices.end()) {
    std::string list;
    for (const std::string_view choice : choices) list.append(list.empty() ? "" : ", ").append(choice);
    return invalid("must be one of " + list);
  }
  *out = text;
  return ok();
}

Status parse_path(std::string_view text, std::string* out) {
  if (text.empty() || text[0] != '/') return invalid("must be an absolute path");
  if (text.find('\0') != std::string_view::npos) return invalid("must not contain a NUL byte");
  if (text.size() > kSocketPathBytesMax) {
    return invalid("has " + std::to_string(text.size()) + " bytes: a socket path has at most " +
                   std::to_string(kSocketPathBytesMax));
  }
  *out = text;
  while (out->size() > 1 && out->back() == '/') out->pop_back();
  return ok();
}

Status parse_directory(std::string_view text, std::string* out) {
  if (!text.empty() && (text[0] != '/' || text.find('\0') != std::string_view::npos))
    return invalid("must be an absolute path, or empty");
  *out = text;
  return ok();
}

Status parse_directories(std::string_view text, std::string* out) {
  for (std::string_view rest = text; !rest.empty();) {
    const std::string_view path = rest.substr(0, rest.find(':'));
    if (!path.starts_with('/') || path.find('\0') != std::string_view::npos)
      return invalid("must be absolute paths separated by colons, or empty");
    rest.remove_prefix(std::min(rest.size(), path.size() + 1));
  }
  *out = text;
  return ok();
}

Status parse_state_directory(std::string_view text, std::string* out) {
  if (text != "auto" && text != "none") {
    if (text.empty() || text[0] != '/') return invalid("must be an absolute path, auto or none");
    if (text.size() > 3000 || text.find('\0') != std::string_view::npos)
      return invalid("must be a path of at most 3000 bytes, without a NUL byte");
  }
  *out = text;
  while (out->size() > 1 && out->back() == '/') out->pop_back();
  return ok();
}

Status parse_group(std::string_view text, std::string* out) {
  const std::string name(text);
  const bool number = !name.empty() && name.find_first_not_of("0123456789") == std::string::npos;
  if (!name.empty() && !number && ::getgrnam(name.c_str()) == nullptr)
    return invalid("is not a group of this machine");
  *out = name;
  return ok();
}

Status parse_mode(std::string_view text, std::uint32_t* out) {
  std::uint32_t mode = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), mode, 8);
  if (error != std::errc() || end != text.data() + text.size() || mode > 0777 || (mode & 0600) != 0600) {
    return invalid("must be an octal mode between \"0600\" and \"0777\" that lets the owner read and write");
  }
  *out = mode;
  return ok();
}

constexpr std::uint64_t kSlotsMax = 65536;

Status parse_slots(std::string_view text, SlotsSpec* out) {
  const Fault fault = invalid("must be auto, a number of slots between 1 and " + std::to_string(kSlotsMax) +
                              ", or a share of the experts (25%)");
  if (text == "auto") {
    *out = {};
    return ok();
  }
  double value = 0;
  const char* const end = text.data() + text.size();
  const auto [after, error] = std::from_chars(text.data(), end, value, std::chars_format::fixed);
  if (error != std::errc()) return fault;
  if (after != end && *after == '%' && after + 1 == end) {
    if (!(value > 0 && value <= 100)) return invalid("must be a share of more than 0% and at most 100%");
    *out = {SlotsSpec::Kind::kPercent, value};
    return ok();
  }
  const Result<std::uint64_t> count = parse_number(text, {1, kSlotsMax});
  if (!count) return fault;
  *out = {SlotsSpec::Kind::kCount, static_cast<double>(*count)};
  return ok();
}

std::string print_slots(const SlotsSpec& slots) {
  if (slots.kind == SlotsSpec::Kind::kAuto) return "auto";
  char text[64];
  const auto [end, error] = std::to_chars(text, text + sizeof text, slots.value, std::chars_format::fixed);
  return std::string(text, error == std::errc() ? end : text) +
         (slots.kind == SlotsSpec::Kind::kPercent ? "%" : "");
}

Status parse_policy(std::string_view text, std::string* out) {
  if (Status checked = check_policy(text); !checked) return checked;
  *out = canonical_policy(text);
  return ok();
}

Status parse_scope(std::string_view text, SlotScope* out) {
  std::string name;
  if (Status known = parse_choice(text, {"layer", "global"}, &name); !known) return known;
  *out = name == "layer" ? SlotScope::kLayer : SlotScope::kGlobal;
  return ok();
}

std::string print_scope(SlotScope scope) { return scope == SlotScope::kLayer ? "layer" : "global"; }

Status parse_engine(std::string_view text, SsdEngine* out) {
  std::string name;
  Status known = parse_choice(text, {"auto", "io_uring", "pread"}, &name);
  if (!known) return known;
  *out = name == "auto" ? SsdEngine::kAuto : name == "io_uring" ? SsdEngine::kIoUring : SsdEngine::kPread;
  return ok();
}

std::string print_engine(SsdEngine engine) {
  return engine == SsdEngine::kAuto ? "auto" : engine == SsdEngine::kIoUring ? "io_uring" : "pread";
}

struct TimeUnit {
  std::string_view suffix;
  std::uint64_t ms;
};
constexpr TimeUnit kTimeUnits[] = {{"h", 3'600'000}, {"m", 60'000}, {"s", 1000}};
constexpr std::uint64_t kPeriodMsMax = 7 * 24 * 3'600'000ull;

Status parse_period(std::string_view text, std::uint64_t* ms) {
  if (text == "none") {
    *ms = 0;
    return ok();
  }
  for (const TimeUnit& unit : kTimeUnits) {
    if (!text.ends_with(unit.suffix)) continue;
    const auto count = parse_number(text.substr(0, text.size() - 1), {1, kPeriodMsMax / unit.ms});
    if (!count) break;
    *ms = *count * unit.ms;
    return ok();
  }
  return invalid("must be none, or a time of at most 7 days like 90s, 30m or 2h");
}

std::string print_period(std::uint64_t ms) {
  if (ms == 0) return "none";
  for (const TimeUnit& unit : kTimeUnits) {
    if (ms % unit.ms == 0) return std::to_string(ms / unit.ms) + std::string(unit.suffix);
  }
  return std::to_string((ms + 999) / 1000) + "s";
}

template <typename T, typename U>
Status store(const Result<T>& value, U* out) {
  if (!value) return Fault(value.error());
  *out = static_cast<U>(*value);
  return ok();
}

std::string print_bool(bool value) { return value ? "true" : "false"; }

using C = Config;
using T = std::string_view;
using enum SettingKind;

constexpr std::array kSettings = {
    Setting{"sockets.directory", "directory", kText, "PATH",
            "directory of both sockets (created if its parent exists)",
            [](C& c, T t) { return parse_path(t, &c.runtime_directory); },
            [](const C& c) { return c.runtime_directory; }},
    Setting{"sockets.control", "", kText, "PATH", "gRPC control socket (DIRECTORY/control.sock)",
            [](C& c, T t) { return parse_path(t, &c.control_socket); },
            [](const C& c) { return c.control_socket; }},
    Setting{"sockets.handle", "", kText, "PATH",
            "socket that hands out file descriptors (DIRECTORY/handle.sock)",
            [](C& c, T t) { return parse_path(t, &c.handle_socket); },
            [](const C& c) { return c.handle_socket; }},
    Setting{"sockets.mode", "", kText, "OCTAL", "file mode of both sockets: who may connect (0660)",
            [](C& c, T t) { return parse_mode(t, &c.socket_mode); },
            [](const C& c) {
              char text[16];
              std::snprintf(text, sizeof text, "%04o", c.socket_mode);
              return std::string(text);
            }},
    Setting{"sockets.group", "", kText, "NAME", "group of both sockets (the daemon's own)",
            [](C& c, T t) { return parse_group(t, &c.socket_group); },
            [](const C& c) { return c.socket_group; }},
    Setting{"state.directory", "", kText, "PATH|auto|none",
            "where hot lists are kept between two starts (auto; DIRECTORY/state if --directory is given)",
            [](C& c, T t) { return parse_state_directory(t, &c.state_directory); },
            [](const C& c) { return c.state_directory; }},
    Setting{"pool.bytes", "", kSize, "SIZE", "memory for the slots of all models (50%)",
            [](C& c, T t) {
              return store(parse_bounded_size(t, {64 * 1024, pool_bytes_max()}), &c.pool_bytes);
            },
            [](const C& c) { return std::to_string(c.pool_bytes); }},
    Setting{"pool.slots", "slots", kSize, "N|P%|auto",
            "slots of each layer: a number, a share of its experts, or what the pool allows (auto)",
            [](C& c, T t) { return parse_slots(t, &c.slots); },
            [](const C& c) { return print_slots(c.slots); }},
    Setting{"pool.scope", "", kText, "layer|global",
            "layer: each layer keeps its slots; global: layers with experts of one size trade them (global)",
            [](C& c, T t) { return parse_scope(t, &c.slot_scope); },
            [](const C& c) { return print_scope(c.slot_scope); }},
    Setting{"pool.prefetch", "", kText, "auto|off",
            "read what decode is likely to use next, where that pays (auto)",
            [](C& c, T t) {
              return parse_choice(t, {"auto", "off"}, &c.prefetch);
            },
            [](const C& c) { return c.prefetch; }},
    Setting{"policy.default", "policy", kText, "SPEC", "eviction policy of models to come (slru)",
            [](C& c, T t) { return parse_policy(t, &c.policy); }, [](const C& c) { return c.policy; }},
    Setting{"policy.directory", "", kText, "PATH",
            "where policies lib:NAME come from; root's, and nobody else may write there (none are loaded)",
            [](C& c, T t) { return parse_directory(t, &c.policy_directory); },
            [](const C& c) { return c.policy_directory; }},
    Setting{"stream.bytes", "", kSize, "SIZE",
            "largest stream buffer of one lane, raised to twice the largest part of a model (32MiB)",
            [](C& c, T t) {
              return store(parse_bounded_size(t, {64 * 1024, 16384 * kMib}), &c.stream_bytes);
            },
            [](const C& c) { return std::to_string(c.stream_bytes); }},
    Setting{"ssd.engine", "", kText, "NAME", "auto, io_uring or pread (auto)",
            [](C& c, T t) { return parse_engine(t, &c.ssd.engine); },
            [](const C& c) { return print_engine(c.ssd.engine); }},
    Setting{"ssd.direct", "", kBool, "BOOL",
            "try O_DIRECT, so that the page cache does not hold a second copy (true)",
            [](C& c, T t) { return store(parse_bool(t), &c.ssd.direct); },
            [](const C& c) { return print_bool(c.ssd.direct); }},
    Setting{"ssd.queue_depth", "", kInteger, "N", "reads in flight (32)",
            [](C& c, T t) {
              return store(parse_number(t, {1, 1024}), &c.ssd.queue_depth);
            },
            [](const C& c) { return std::to_string(c.ssd.queue_depth); }},
    Setting{"ssd.max_read", "", kSize, "SIZE", "largest single read; larger ranges are split (1MiB)",
            [](C& c, T t) {
              return store(parse_bounded_size(t, {4096, 1024 * kMib}), &c.ssd.max_read_bytes);
            },
            [](const C& c) { return std::to_string(c.ssd.max_read_bytes); }},
    Setting{
        "gpu.devices", "", kText, "LIST",
        "GPUs to serve: auto (all), none, or UUIDs as nvidia-smi -L prints them, separated by commas (auto)",
        [](C& c, T t) { return parse_devices(t, &c.gpu.devices); }, [](const C& c) { return c.gpu.devices; }},
    Setting{"gpu.slots", "", kSize, "N|P%|auto",
            "device slots of each layer: a number, a share of its experts, or what memory allows (auto)",
            [](C& c, T t) { return parse_slots(t, &c.gpu.slots); },
            [](const C& c) { return print_slots(c.gpu.slots); }},
    Setting{"gpu.bytes", "", kSize, "SIZE",
            "device memory for slots on each GPU; 0: only keep_free limits it (0)",
            [](C& c, T t) {
              return store(parse_bounded_bytes(t, {0, 1ull << 46}), &c.gpu.bytes);
            },
            [](const C& c) { return std::to_string(c.gpu.bytes); }},
    Setting{"gpu.keep_free", "", kSize, "SIZE", "device memory that is left free on each GPU (1GiB)",
            [](C& c, T t) {
              return store(parse_bounded_bytes(t, {0, 1ull << 46}), &c.gpu.keep_free);
            },
            [](const C& c) { return std::to_string(c.gpu.keep_free); }},
    Setting{"gpu.scope", "", kText, "layer|global",
            "layer: the same share of each layer's experts; global: a quarter of the slots comes later, to "
            "the layers that need them (layer)",
            [](C& c, T t) { return parse_scope(t, &c.gpu.scope); },
            [](const C& c) { return print_scope(c.gpu.scope); }},
    Setting{
        "gpu.mode", "", kText, "auto|covered|spill",
        "covered: RAM holds every expert of a model on a GPU; spill: experts are in VRAM, in the RAM of the "
        "pool, or on disk; auto: covered if there is the memory for it (auto)",
        [](C& c, T t) { return parse_mode(t, &c.gpu.mode); },
        [](const C& c) { return print_mode(c.gpu.mode); }},
    Setting{"gpu.peers", "", kBool, "BOOL",
            "GPUs that compute the same model read each other's slots, where that is faster than RAM (true)",
            [](C& c, T t) { return store(parse_bool(t), &c.gpu.peers); },
            [](const C& c) { return print_bool(c.gpu.peers); }},
    Setting{"gpu.policy", "", kText, "SPEC", "eviction policy of device slots (ewma)",
            [](C& c, T t) { return parse_policy(t, &c.gpu.policy); },
            [](const C& c) { return c.gpu.policy; }},
    Setting{"gpu.max_slowdown", "", kInteger, "PERCENT",
            "what uploads may cost a decoding client; 0: only into free slots, 100: no limit (5)",
            [](C& c, T t) {
              return store(parse_number(t, {0, 100}), &c.gpu.max_slowdown_percent);
            },
            [](const C& c) { return std::to_string(c.gpu.max_slowdown_percent); }},
    Setting{"scrub.period", "", kText, "TIME|none",
            "in which every resident slot is compared with its file once: 90s, 30m, 2h (30m)",
            [](C& c, T t) { return parse_period(t, &c.scrub_period_ms); },
            [](const C& c) { return print_period(c.scrub_period_ms); }},
    Setting{"scrub.rate", "", kSize, "SIZE",
            "bytes a second that this reads at most, whatever the period; 0: no limit (16MiB)",
            [](C& c, T t) {
              return store(parse_bounded_bytes(t, {0, 1ull << 46}), &c.scrub_bytes_per_second);
            },
            [](const C& c) { return std::to_string(c.scrub_bytes_per_second); }},
    Setting{"limits.sessions", "", kInteger, "N", "client sessions at once (64)",
            [](C& c, T t) {
              return store(parse_number(t, {1, 4096}), &c.max_sessions);
            },
            [](const C& c) { return std::to_string(c.max_sessions); }},
    Setting{"limits.models", "", kInteger, "N", "models at once (16)",
            [](C& c, T t) {
              return store(parse_number(t, {1, 256}), &c.max_models);
            },
            [](const C& c) { return std::to_string(c.max_models); }},
    Setting{"limits.user_sessions", "", kInteger, "N", "sessions of one user (48)",
            [](C& c, T t) {
              return store(parse_number(t, {1, 4096}), &c.max_user_sessions);
            },
            [](const C& c) { return std::to_string(c.max_user_sessions); }},
    Setting{"limits.user_files", "", kInteger, "N",
            "descriptors that the daemon holds for one user: 4 a session, 1 an open model, 1 a shard (512)",
            [](C& c, T t) {
              return store(parse_number(t, {8, 1u << 20}), &c.max_user_files);
            },
            [](const C& c) { return std::to_string(c.max_user_files); }},
    Setting{"limits.user_bytes", "", kSize, "SIZE",
            "memory for models that one user has open; 0: only the pool limits it (0)",
            [](C& c, T t) {
              return store(parse_bounded_size(t, {0, 1ull << 46}), &c.max_user_bytes);
            },
            [](const C& c) { return std::to_string(c.max_user_bytes); }},
    Setting{"limits.hello_seconds", "", kInteger, "N",
            "after which a client that has not said hello is cut (10)",
            [](C& c, T t) {
              return store(parse_number(t, {1, 3600}), &c.hello_seconds);
            },
            [](const C& c) { return std::to_string(c.hello_seconds); }},
    Setting{"limits.route_streams", "", kInteger, "N",
            "streams of routing decisions at once, each a session and a thread (8)",
            [](C& c, T t) {
              return store(parse_number(t, {1, 64}), &c.max_route_streams);
            },
            [](const C& c) { return std::to_string(c.max_route_streams); }},
    Setting{"models.roots", "", kText, "PATH:PATH",
            "folders in which models and files for prewarm must lie (anywhere)",
            [](C& c, T t) { return parse_directories(t, &c.model_roots); },
            [](const C& c) { return c.model_roots; }},
    Setting{
        "log.level", "", kText, "LEVEL", "trace, debug, info, warning, error or critical (info)",
        [](C& c, T t) {
          return parse_choice(t, {"trace", "debug", "info", "warning", "error", "critical"}, &c.log_level);
        },
        [](const C& c) { return c.log_level; }},
    Setting{"log.format", "", kText, "FORMAT",
            "text, json, journald, or auto: journald under systemd, else text (auto)",
            [](C& c, T t) {
              return parse_choice(t, {"auto", "text", "json", "journald"}, &c.log_format);
            },
            [](const C& c) { return c.log_format; }},
    Setting{"control.reflection", "", kBool, "BOOL", "gRPC server reflection on the control socket (false)",
            [](C& c, T t) { return store(parse_bool(t), &c.reflection); },
            [](const C& c) { return print_bool(c.reflection); }},
    Setting{"control.route", "", kBool, "BOOL",
            "take routing decisions on the control socket, for clients that cannot map shared memory (false)",
            [](C& c, T t) { return store(parse_bool(t), &c.route); },
            [](const C& c) { return print_bool(c.route); }},
};

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0u);
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row[b.size()];
}

}  // namespace

std::span<const Setting> settings() { return kSettings; }

const Setting* find_setting(std::string_view key) {
  const auto found = std::ranges::find(kSettings, key, &Setting::key);
  return found == kSettings.end() ? nullptr : &*found;
}

bool is_section(std::string_view name) {
  return std::ranges::any_of(kSettings,
                             [name](const Setting& s) { return s.key.substr(0, s.key.find('.')) == name; });
}

std::string flag_of(const Setting& setting) {
  std::string flag = "--" + std::string(setting.key);
  std::ranges::replace_if(
      flag, [](char c) { return c == '.' || c == '_'; }, '-');
  return flag;
}

std::string_view nearest_key(std::string_view key) {
  // A setting in the wrong section, or in none, is nearer than one whose letters happen to match.
  const std::string_view leaf = key.substr(key.rfind('.') == std::string_view::npos ? 0 : key.rfind('.') + 1);
  for (const Setting& setting : kSettings) {
    if (setting.key.substr(setting.key.find('.') + 1) == leaf || setting.alias == leaf) return setting.key;
  }
  return std::ranges::min_element(kSettings, {},
                                  [key](const Setting& s) { return edit_distance(key, s.key); })
      ->key;
}

Status check_kind(const Setting& setting, TomlKind kind) {
  switch (setting.kind) {
    case kText:
      return kind == TomlKind::kText ? ok() : Status(invalid("must be a string in quotes"));
    case kInteger:
      return kind == TomlKind::kInteger ? ok() : Status(invalid("must be a whole number without quotes"));
    case kSize:
      return kind == TomlKind::kText || kind == TomlKind::kInteger
                 ? ok()
                 : Status(invalid("must be a string in quotes or a whole number"));
    case kBool:
      return kind == TomlKind::kBool ? ok() : Status(invalid("must be true or false without quotes"));
  }
  return ok();
}

}  // namespace moecached
