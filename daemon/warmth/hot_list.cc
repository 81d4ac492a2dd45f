#include "daemon/warmth/hot_list.h"

#include <algorithm>
#include <charconv>
#include <cstdio>

namespace moecached {
namespace {

constexpr std::string_view kMagic = "# moecounts-csv v1";
constexpr std::string_view kEnd = "# end ";
constexpr std::size_t kDigits = 16;

std::uint64_t fnv1a(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

std::string hex(std::uint64_t value) {
  char text[kDigits + 1];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

bool read_hex(std::string_view text, std::uint64_t* out) {
  if (text.size() < kDigits) return false;
  const auto [end, error] = std::from_chars(text.data(), text.data() + kDigits, *out, 16);
  return error == std::errc() && end == text.data() + kDigits;
}

// Lines one by one, without the line's end.
struct Lines {
  std::string_view rest;
  std::size_t number = 0;
  bool next(std::string_view* line) {
    if (rest.empty()) return false;
    const std::size_t end = std::min(rest.find('\n'), rest.size());
    *line = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    if (line->ends_with('\r')) line->remove_suffix(1);
    ++number;
    return true;
  }
};

Fault at(std::size_t line, const std::string& text, FaultCode code = FaultCode::kInvalid) {
  return {code, "line " + std::to_string(line) + ": " + text};
}

bool read_count(std::string_view text, std::uint64_t* out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out);
  return error == std::errc() && end == text.data() + text.size() && !text.empty();
}

Status parse_row(std::string_view row, std::size_t line, std::vector<UseList>* lists) {
  const std::size_t first = row.find(',');
  if (first == std::string_view::npos) return at(line, "has no comma: a row is workload,layer,c0,c1,..");
  const std::string label(row.substr(0, first));
  if (label.size() > kUseLabelBytesMax || file_label(label) != label)
    return at(line, "its workload is longer than " + std::to_string(kUseLabelBytesMax) +
                        " bytes, or not printable");
  LayerUses uses;
  std::size_t column = 1;
  for (std::string_view rest = row.substr(first + 1);;) {
    const std::size_t end = std::min(rest.find(','), rest.size());
    ++column;
    std::uint64_t value = 0;
    const std::uint64_t most = column == 2 ? kUseBlocksMax - 1 : kUseCountMax;
    if (!read_count(rest.substr(0, end), &value) || value > most)
      return at(line,
                "column " + std::to_string(column) + " is not a whole number up to " + std::to_string(most));
    if (column == 2) {
      uses.block = static_cast<std::uint32_t>(value);
    } else if (uses.counts.size() == kUseExpertsMax) {
      return at(line, "has more than " + std::to_string(kUseExpertsMax) + " counts, which is the limit",
                FaultCode::kLimit);
    } else {
      uses.counts.push_back(value);
    }
    if (end == rest.size()) break;
    rest.remove_prefix(end + 1);
  }
  if (uses.counts.empty()) return at(line, "has no counts");
  auto list = std::ranges::find(*lists, label, &UseList::label);
  if (list == lists->end()) {
    if (lists->size() == kUseLabelsMax)
      return at(line,
                "begins workload number " + std::to_string(kUseLabelsMax + 1) + "; a file has at most " +
                    std::to_string(kUseLabelsMax),
                FaultCode::kLimit);
    list = lists->insert(lists->end(), UseList{.label = label, .layers = {}});
  }
  const auto place = std::ranges::lower_bound(list->layers, uses.block, {}, &LayerUses::block);
  if (place != list->layers.end() && place->block == uses.block)
    return at(line, "gives layer " + std::to_string(uses.block) + " of its workload a second time");
  list->layers.insert(place, std::move(uses));
  return ok();
}

}  // namespace

bool looks_like_hot_list(std::string_view text) { return text.starts_with(kMagic); }

Result<HotLists> parse_hot_lists(std::string_view text) {
  if (text.size() > kHotListBytesMax) {
    return Fault{FaultCode::kLimit, "has " + std::to_string(text.size()) + " bytes; counts take at most " +
                                        std::to_string(kHotListBytesMax)};
  }
  HotLists out;
  Lines lines{.rest = text};
  std::string_view line;
  if (!lines.next(&line) || !looks_like_hot_list(line))
    return at(1, "does not begin with \"" + std::string(kMagic) + "\"");
  // Quotes inside of JSON strings are escaped, so this can be nothing but the key.
  constexpr std::string_view kKey = "\"key\":\"";
  if (const std::size_t key = line.find(kKey); key != std::string_view::npos) {
    if (!read_hex(line.substr(key + kKey.size()), &out.key))
      return at(1, "its key is not " + std::to_string(kDigits) + " hexadecimal digits");
  }
  if (!lines.next(&line) || !line.starts_with("workload,layer,"))
    return at(2, "does not name the columns: workload,layer,c0,c1,..");
  while (lines.next(&line)) {
    if (line.starts_with(kEnd)) {
      const auto before = static_cast<std::size_t>(line.data() - text.data());
      std::uint64_t hash = 0;
      if (!read_hex(line.substr(kEnd.size()), &hash) || hash != fnv1a(text.substr(0, before)))
        return at(lines.number,
                  "the checksum is another: the file was damaged or changed by hand (without "
                  "this line it is read as it is)");
      if (!lines.rest.empty()) return at(lines.number + 1, "comes after the end");
      out.sealed = true;
      break;
    }
    if (line.empty() || line.starts_with('#')) continue;
    if (Status parsed = parse_row(line, lines.number, &out.lists); !parsed) return std::move(parsed).error();
  }
  if (out.lists.empty()) return Fault{FaultCode::kInvalid, "has no counts"};
  return out;
}

std::string print_hot_lists(std::uint64_t key, std::string_view model, const std::vector<UseList>& lists) {
  std::size_t n_layers = 0, n_experts = 0;
  for (const UseList& list : lists) {
    n_layers = std::max(n_layers, list.layers.size());
    for (const LayerUses& layer : list.layers) n_experts = std::max(n_experts, layer.counts.size());
  }
  std::string name;
  for (const char c : model) name += c < 0x20 || c > 0x7e || c == '"' || c == '\\' ? '_' : c;
  std::string out(kMagic);
  out += " {\"key\":\"" + hex(key) + "\",\"model\":\"" + name + "\",\"layers\":" + std::to_string(n_layers) +
         ",\"experts\":" + std::to_string(n_experts) + ",\"source\":\"moecached\"}\nworkload,layer";
  for (std::size_t e = 0; e < n_experts; ++e) out.append(",c").append(std::to_string(e));
  out += '\n';
  for (const UseList& list : lists) {
    for (const LayerUses& layer : list.layers) {
      out.append(list.label).append(",").append(std::to_string(layer.block));
      for (const std::uint64_t count : layer.counts) out.append(",").append(std::to_string(count));
      out += '\n';
    }
  }
  const std::uint64_t hash = fnv1a(out);
  return out.append(kEnd).append(hex(hash)).append("\n");
}

}  // namespace moecached
