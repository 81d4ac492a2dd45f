#include "daemon/config/tier_string.h"

#include <algorithm>
#include <array>
#include <cctype>

#include "daemon/config/settings.h"
#include "daemon/config/size.h"
#include "daemon/platform/memory_info.h"

namespace moecached {
namespace {

constexpr std::array<std::string_view, 3> kTiers = {"gpu", "ram", "ssd"};
constexpr std::string_view kGrammar = "write GPU:POLICY:SIZE,RAM:POLICY:SIZE,SSD:stream";

Fault invalid(std::string text) { return {FaultCode::kInvalid, std::move(text)}; }

std::string quoted(std::string_view text) { return std::string("'").append(text).append("'"); }

std::string lower(std::string_view text) {
  std::string out(text);
  std::ranges::transform(out, out.begin(),
                         [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return out;
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(separator, begin), text.size());
    parts.push_back(trimmed(text.substr(begin, end - begin)));
    begin = end + 1;
  }
  return parts;
}

bool starts_tier(std::string_view part) {
  return std::ranges::find(kTiers, lower(part.substr(0, part.find(':')))) != kTiers.end();
}

struct Tier {
  std::string text;                                 // as given, for faults
  std::string name;                                 // of kTiers
  std::string policy;                               // with its options
  std::string slots, bytes, free, scope, prefetch;  // empty: not given
};

bool is_size(std::string_view field) {
  return !field.empty() && (std::isdigit(static_cast<unsigned char>(field.front())) != 0 ||
                            lower(field) == "auto" || lower(field).starts_with("free-"));
}

bool is_scope(std::string_view field) { return lower(field) == "layer" || lower(field) == "global"; }

Status take_scope(std::string_view field, Tier* tier) {
  if (tier->name == "ssd")
    return invalid(quoted(tier->text) + ": " + lower(field) + " is for the tiers GPU and RAM: leave it out");
  if (!tier->scope.empty()) return invalid(quoted(tier->text) + " has two scopes: leave one out");
  tier->scope = lower(field);
  return ok();
}

constexpr std::string_view kPrefetch = "prefetch=";

bool is_prefetch(std::string_view field) { return lower(field).starts_with(kPrefetch); }

Status take_prefetch(std::string_view field, Tier* tier) {
  if (!tier->prefetch.empty()) return invalid(quoted(tier->text) + " says prefetch= twice: leave one out");
  tier->prefetch = lower(field).substr(kPrefetch.size());
  if (tier->name == "ram" && !tier->prefetch.empty()) return ok();
  return invalid(quoted(tier->text) + ": only the tier RAM prefetches, with prefetch=auto or prefetch=off");
}

Status take_size(std::string_view field, Tier* tier) {
  const std::string size = lower(field);
  std::string* place = &tier->bytes;
  if (size == "auto" || size.ends_with('%') || size.find_first_not_of("0123456789") == std::string::npos)
    place = &tier->slots;
  if (size.starts_with("free-")) place = &tier->free;
  if (!place->empty()) {
    return invalid(quoted(tier->text) + " has two sizes of one kind, " + *place + " and " + size +
                   ": leave one out");
  }
  *place = size.starts_with("free-") ? size.substr(5) : size;
  return ok();
}

Result<Tier> parse_tier(const std::string& text) {
  std::vector<std::string_view> fields = split(text, ':');
  Tier tier{.text = text,
            .name = lower(fields.front()),
            .policy = {},
            .slots = {},
            .bytes = {},
            .free = {},
            .scope = {},
            .prefetch = {}};
  const auto ends_in_scope = [&] {  // and not in the name of a library, lib:global
    return is_scope(fields.back()) && lower(fields[fields.size() - 2]) != "lib";
  };
  while (fields.size() > 1) {
    Status taken = ok();
    if (is_prefetch(fields.back())) {
      taken = take_prefetch(fields.back(), &tier);
    } else if (is_size(fields.back())) {
      taken = take_size(fields.back(), &tier);
    } else if (ends_in_scope()) {
      taken = take_scope(fields.back(), &tier);
    } else {
      break;
    }
    if (!taken) return Fault(taken.error());
    fields.pop_back();
  }
  for (std::size_t i = 1; i < fields.size(); ++i) {
    if (fields[i].empty()) return invalid(quoted(text) + " has an empty part: " + std::string(kGrammar));
    tier.policy.append(i == 1 ? "" : ":").append(fields[i]);
  }
  return tier;
}

// A comma parts tiers, and the options of a policy as well: those are KEY=VALUE.
Result<std::vector<Tier>> parse_all(std::string_view text) {
  std::vector<std::string> items;
  for (const std::string_view part : split(text, ',')) {
    if (starts_tier(part)) {
      items.emplace_back(part);
    } else if (!items.empty() && part.substr(0, part.find(':')).find('=') != std::string_view::npos) {
      items.back().append(",").append(part);
    } else {
      return invalid(quoted(part.substr(0, part.find(':'))) +
                     " is no tier, there are GPU, RAM and SSD: " + std::string(kGrammar));
    }
  }
  std::vector<Tier> tiers;
  for (const std::string& item : items) {
    Result<Tier> tier = parse_tier(item);
    if (!tier) return std::move(tier).error();
    if (std::ranges::find(tiers, tier->name, &Tier::name) != tiers.end())
      return invalid(quoted(item) + " names a tier for the second time: leave one out");
    tiers.push_back(*std::move(tier));
  }
  return tiers;
}

// What is available now, less what is to stay free; whole MiB, so that it can be read.
Result<std::string> memory_less(const Tier& tier) {
  const Result<std::uint64_t> stays = parse_size(tier.free, 0);
  if (!stays || tier.free.ends_with('%'))
    return invalid(quoted(tier.text) + ": free- takes a size in bytes, as in free-1GiB");
  const Result<MemoryInfo> memory = read_memory_info();
  if (!memory) return Fault(memory.error());
  if (*stays >= memory->available_bytes) {
    return invalid(quoted(tier.text) + " leaves nothing: " + bytes_for_people(memory->available_bytes) +
                   " are available now; free less, or give the size itself");
  }
  return std::to_string((memory->available_bytes - *stays) >> 20 << 20);
}

std::string given_or(const std::string& value, std::string_view otherwise) {
  return value.empty() ? std::string(otherwise) : value;
}

Status needs_policy(const Tier& tier) {
  if (!tier.policy.empty()) return ok();
  return invalid(quoted(tier.text) + " names no policy: write " + tier.text.substr(0, 3) +
                 ":POLICY:SIZE, for instance " + tier.text.substr(0, 3) + ":slru:25%");
}

// In a string bare digits are slots, so bytes have a unit.
std::string print_bytes(std::uint64_t bytes) {
  const std::string text = format_size(bytes);
  return std::isdigit(static_cast<unsigned char>(text.back())) != 0 ? text + "B" : text;
}

std::string get(const Config& config, std::string_view key) { return find_setting(key)->get(config); }

}  // namespace

Result<std::vector<TierSetting>> parse_tiers(std::string_view text) {
  const Result<std::vector<Tier>> tiers = parse_all(text);
  if (!tiers) return Fault(tiers.error());
  std::vector<TierSetting> settings;
  const bool has_gpu = std::ranges::find(*tiers, "gpu", &Tier::name) != tiers->end();
  settings.push_back({"gpu.devices", has_gpu ? "auto" : "none"});
  for (const Tier& tier : *tiers) {
    if (tier.name == "ssd") {
      if (lower(tier.policy) != "stream" || !tier.slots.empty() || !tier.free.empty()) {
        return invalid(quoted(tier.text) +
                       " is not what the SSD can do: write SSD:stream, or SSD:stream:32MiB with the size of "
                       "one lane's buffer");
      }
      if (!tier.bytes.empty()) settings.push_back({"stream.bytes", tier.bytes});
      continue;
    }
    if (Status named = needs_policy(tier); !named) return Fault(named.error());
    if (tier.name == "gpu") {
      settings.push_back({"gpu.policy", tier.policy});
      settings.push_back({"gpu.slots", given_or(tier.slots, "auto")});
      settings.push_back({"gpu.bytes", given_or(tier.bytes, "0")});
      settings.push_back({"gpu.keep_free", given_or(tier.free, "1GiB")});
      settings.push_back({"gpu.scope", given_or(tier.scope, "layer")});
      continue;
    }
    settings.push_back({"policy.default", tier.policy});
    settings.push_back({"pool.slots", given_or(tier.slots, "auto")});
    settings.push_back({"pool.scope", given_or(tier.scope, "global")});
    if (!tier.prefetch.empty()) settings.push_back({"pool.prefetch", tier.prefetch});
    if (!tier.bytes.empty() && !tier.free.empty())
      return invalid(quoted(tier.text) + " gives the memory twice: write either its size or free-, not both");
    Result<std::string> memory = given_or(tier.bytes, kDefaultPool);
    if (!tier.free.empty()) memory = memory_less(tier);
    if (!memory) return std::move(memory).error();
    settings.push_back({"pool.bytes", *std::move(memory)});
  }
  return settings;
}

std::string print_tiers(const Config& config) {
  std::string text;
  if (config.gpu.devices != "none") {
    text.append("GPU:").append(config.gpu.policy).append(":").append(get(config, "gpu.slots"));
    if (config.gpu.bytes != 0) text.append(":").append(print_bytes(config.gpu.bytes));
    text.append(":free-").append(print_bytes(config.gpu.keep_free));
    text.append(":").append(get(config, "gpu.scope")).append(",");
  }
  text.append("RAM:").append(config.policy).append(":").append(get(config, "pool.slots"));
  text.append(":").append(print_bytes(config.pool_bytes)).append(":").append(get(config, "pool.scope"));
  if (config.prefetch != "auto") text.append(":prefetch=").append(config.prefetch);
  return text.append(",SSD:stream:").append(print_bytes(config.stream_bytes));
}

}  // namespace moecached
