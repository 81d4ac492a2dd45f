#include "bench/replay/trace.h"

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>
#include <string_view>
#include <unordered_set>

#include "bench/replay/line_reader.h"
#include "daemon/base/text.h"

namespace moecached::replay {
namespace {

using nlohmann::json;

constexpr std::string_view kMagic = "# moetrace-csv v1 ";
constexpr std::uint32_t kLayersMax = 4096, kExpertsMax = 4096, kColumnsMax = 4096;
constexpr std::size_t kFirstId = 3;  // columns before it: seq, tok, phase

// What a file holds, for a message: short, and harmless to a terminal.
std::string shown(std::string_view text) { return for_people(text.substr(0, 40)); }

Fault invalid(std::string text) { return Fault{FaultCode::kInvalid, std::move(text)}; }

Status number(const json& object, const char* key, std::uint32_t max, std::uint32_t* out) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_number_unsigned() || found->get<std::uint64_t>() < 1 ||
      found->get<std::uint64_t>() > max) {
    return invalid(std::string("\"") + key + "\" must be a whole number from 1 to " + std::to_string(max) +
                   (found == object.end() ? ", and is not there" : ", and is " + found->dump()));
  }
  *out = found->get<std::uint32_t>();
  return ok();
}

std::string text_of(const json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_string() ? found->get<std::string>() : std::string();
}

Result<TraceHeader> parse_header(std::string_view line) {
  if (!line.starts_with(kMagic)) {
    return invalid("it begins with \"" + shown(line.substr(0, 24)) + "\", not with \"" + std::string(kMagic) +
                   "{...}\": is this a moetrace-csv file?");
  }
  const json object = json::parse(line.substr(kMagic.size()), nullptr, false);
  if (!object.is_object()) return invalid("what follows \"" + std::string(kMagic) + "\" is no JSON object");
  TraceHeader header;
  if (Status s = number(object, "layers", kLayersMax, &header.n_layers); !s) return std::move(s).error();
  if (Status s = number(object, "experts", kExpertsMax, &header.n_experts); !s) return std::move(s).error();
  if (Status s = number(object, "k", kColumnsMax, &header.k); !s) return std::move(s).error();
  header.n_used = header.k;
  if (object.contains("k_used")) {
    if (Status s = number(object, "k_used", kColumnsMax, &header.n_used); !s) return std::move(s).error();
  }
  header.model = text_of(object, "model");
  header.source = text_of(object, "source");
  header.licence = text_of(object, "license");
  header.policy = text_of(object, "policy");
  header.is_synthetic = object.contains("SYNTHETIC");
  if (const auto slots = object.find("slots"); slots != object.end()) {
    if (!slots->is_array() || slots->size() != header.n_layers)
      return invalid("\"slots\" must be an array with one number for each of the " +
                     std::to_string(header.n_layers) + " layers");
    for (const json& n : *slots) {
      if (!n.is_number_unsigned() || n.get<std::uint64_t>() < 1 || n.get<std::uint64_t>() > header.n_experts)
        return invalid("\"slots\": " + n.dump() + " is not from 1 to " + std::to_string(header.n_experts));
      header.n_slots.push_back(n.get<std::uint32_t>());
    }
  }
  if (const auto dropped = object.find("dropped"); dropped != object.end() && dropped->is_number_unsigned())
    header.dropped = dropped->get<std::uint64_t>();
  return header;
}

std::string column_name(const TraceHeader& header, std::size_t column) {
  constexpr std::string_view kFixed[] = {"seq", "tok", "phase"};
  if (column < kFirstId) return std::string(kFixed[column]);
  const std::size_t at = column - kFirstId;
  return std::string("L")
      .append(std::to_string(at / header.k))
      .append("_")
      .append(std::to_string(at % header.k));
}

Status check_columns(const TraceHeader& header, std::string_view line) {
  const std::size_t n = kFirstId + std::size_t{header.n_layers} * header.k;
  for (std::size_t column = 0; column < n; ++column) {
    const std::string wanted = column_name(header, column);
    const std::string_view got = line.substr(0, line.find(','));
    if (got != wanted) {
      return invalid("column " + std::to_string(column + 1) + " is \"" + shown(got) + "\", where " +
                     std::to_string(header.n_layers) + " layers of k = " + std::to_string(header.k) +
                     " have \"" + wanted + "\"");
    }
    line.remove_prefix(std::min(line.size(), got.size() + 1));
  }
  if (!line.empty())
    return invalid("there are more columns than the " + std::to_string(n) + " of the header");
  return ok();
}

// One row into numbers. The text names the column.
Status parse_row(const TraceHeader& header, std::string_view line, TraceRow* row,
                 std::span<std::uint16_t> ids) {
  const char* at = line.data();
  const char* const end = at + line.size();
  const std::size_t n = kFirstId + ids.size();
  for (std::size_t column = 0; column < n; ++column) {
    std::int64_t value = 0;
    const auto [rest, error] = std::from_chars(at, end, value);
    const auto fault = [&](const std::string& text) {
      return invalid("column " + std::to_string(column + 1) + " (" + column_name(header, column) +
                     "): " + text);
    };
    if (error != std::errc() || (rest != end && *rest != ',')) {
      if (at == end) return fault("the row ends here, it needs " + std::to_string(n) + " columns");
      const std::string_view field(at, static_cast<std::size_t>(end - at));
      return fault("\"" + shown(field.substr(0, field.find(','))) + "\" is no whole number");
    }
    if (column + 1 == n && rest != end) return fault("more columns follow it than the header has");
    at = rest == end ? end : rest + 1;
    if (column >= kFirstId) {
      if (value < -1 || value >= static_cast<std::int64_t>(header.n_experts)) {
        return fault(std::to_string(value) + " is no expert: the header says " +
                     std::to_string(header.n_experts) + " experts, 0 to " +
                     std::to_string(header.n_experts - 1) + ", or -1 for none");
      }
      ids[column - kFirstId] = value < 0 ? Trace::kNone : static_cast<std::uint16_t>(value);
    } else if (column == 2) {
      if (value != 0 && value != 1)
        return fault(std::to_string(value) + " is no phase: 0 is prefill, 1 is decode");
      row->is_decode = value == 1;
    } else {
      (column == 0 ? row->seq : row->tok) = value;
    }
  }
  return ok();
}

}  // namespace

Status Trace::add(const TraceRow& row, std::span<const std::uint16_t> ids) {
  seen_.resize(header_.n_experts);
  const std::size_t first = ids_.size();
  for (std::uint32_t layer = 0; layer < header_.n_layers; ++layer) {
    ++event_;
    const auto of_layer = ids.subspan(std::size_t{layer} * header_.k, header_.k);
    for (std::size_t i = 0; i < of_layer.size(); ++i) {
      const std::uint16_t id = of_layer[i];
      if (id == kNone) continue;
      if (id >= header_.n_experts || std::exchange(seen_[id], event_) == event_) {
        ids_.resize(first);
        return invalid("column " + std::to_string(kFirstId + layer * header_.k + i + 1) + " (L" +
                       std::to_string(layer) + "_" + std::to_string(i) + "): expert " + std::to_string(id) +
                       (id >= header_.n_experts ? " does not exist" : " is named twice in this layer"));
      }
      ids_.push_back(id);
    }
    ids_.resize(first + (std::size_t{layer} + 1) * header_.k, kNone);
  }
  rows_.push_back(row);
  return ok();
}

std::uint32_t Trace::n_sequences() const {
  std::unordered_set<std::int64_t> seen;
  for (const TraceRow& row : rows_) seen.insert(row.seq);
  return static_cast<std::uint32_t>(seen.size());
}

Result<Trace> Trace::read(const std::string& path, ReadLimits limits) {
  auto lines = LineReader::open(path);
  if (!lines) return std::move(lines).error();
  LineReader& reader = **lines;
  const auto place = [&] { return path + ", line " + std::to_string(reader.line_number()); };
  std::string_view line;
  Result<bool> more = reader.next(&line);
  if (!more) return std::move(more).error();
  if (!*more) return invalid(path + ": the file is empty");
  Result<TraceHeader> header = parse_header(line);
  if (!header) return std::move(header).error().with_context(place());
  more = reader.next(&line);
  if (!more) return std::move(more).error();
  if (!*more) return invalid(path + ": there is no line 2 with the names of the columns");
  if (Status named = check_columns(*header, line); !named)
    return std::move(named).error().with_context(place());

  Trace trace(*std::move(header));
  const std::size_t n_ids = std::size_t{trace.header_.n_layers} * trace.header_.k;
  const std::uint64_t row_bytes = n_ids * sizeof(std::uint16_t) + sizeof(TraceRow);
  std::vector<std::uint16_t> ids(n_ids);
  for (;;) {
    more = reader.next(&line);
    if (!more) return std::move(more).error();
    if (!*more) break;
    if (line.empty()) continue;
    TraceRow row;
    Status parsed = parse_row(trace.header_, line, &row, ids);
    if (parsed) parsed = trace.add(row, ids);
    if (!parsed) return std::move(parsed).error().with_context(place());
    if (trace.size() * row_bytes > limits.bytes) {
      return Fault{FaultCode::kLimit, place() + ": the trace takes more than the " +
                                          std::to_string(limits.bytes >> 20) +
                                          " MiB that are allowed: raise --memory, or cut the trace"};
    }
  }
  if (trace.size() == 0) return invalid(path + ": there is no row below the header");
  return trace;
}

}  // namespace moecached::replay
