#include "daemon/model/hf_files.h"

#include <algorithm>
#include <initializer_list>
#include <map>
#include <span>
#include <string_view>
#include <utility>

#include "daemon/base/text.h"
#include "daemon/model/header_reader.h"
#include "daemon/model/json_events.h"
#include "daemon/model/safetensors.h"
#include "proto/shm/layout.h"

namespace moecached {
namespace {

Fault invalid(std::string text) { return Fault{FaultCode::kInvalid, std::move(text)}; }

// {"metadata": {..}, "weight_map": {"model.layers.0.mlp.experts.0.up_proj.weight":
// "model-00001-of-00002.safetensors", ..}} Of other keys, and of other files, anything is skipped.
class IndexEvents : public JsonEvents {
 public:
  bool null() override { return value("null"); }
  bool boolean(bool) override { return value("true or false"); }
  bool number_integer(number_integer_t) override { return value("a number"); }
  bool number_unsigned(number_unsigned_t) override { return value("a number"); }
  bool number_float(number_float_t, const string_t&) override { return value("a number"); }
  bool start_array(std::size_t) override { return open("an array"); }
  bool end_array() override { return close(); }
  bool start_object(std::size_t) override {
    if (depth_ == 1 && at_map_) in_map_ = true;
    return in_map_ && depth_ > 1 ? value("an object") : open("an object");
  }
  bool end_object() override {
    if (depth_ == 2) in_map_ = at_map_ = false;
    return close();
  }

  bool key(string_t& name) override {
    if (depth_ == 1) {
      at_map_ = name == "weight_map";
      if (at_map_ && has_map_) return refuse("'weight_map' is there twice");
      has_map_ = has_map_ || at_map_;
      return true;
    }
    if (!in_map_) return true;
    if (name.size() > kSafetensorsNameBytesMax || index_.entries.size() == kSafetensorsTensorsMax)
      return refuse({FaultCode::kLimit,
                     "'weight_map' has names of more than " + std::to_string(kSafetensorsNameBytesMax) +
                         " bytes, or more than " + std::to_string(kSafetensorsTensorsMax) + " of them"});
    index_.entries.push_back({std::move(name), 0});
    return true;
  }

  bool string(string_t& text) override {
    if (!in_map_) return value("a string");
    const auto [file, is_new] = files_.emplace(std::move(text), index_.n_files);
    if (is_new && ++index_.n_files > MOECACHED_MAX_FILES)
      return refuse({FaultCode::kLimit, "'weight_map' names more than " +
                                            std::to_string(static_cast<int>(MOECACHED_MAX_FILES)) +
                                            " files"});
    index_.entries.back().file = file->second;
    return true;
  }

  [[nodiscard]] bool has_map() const { return has_map_; }
  [[nodiscard]] SafetensorsIndex& index() { return index_; }

 protected:
  std::string where() const override { return "the index"; }

 private:
  bool value(const char* what) {
    if (depth_ == 0) return unexpected(what);
    if (in_map_ || (depth_ == 1 && at_map_))
      return refuse(std::string("'weight_map' has ") + what + " in it");
    return true;
  }
  bool open(const char* what) {
    if (in_map_ && depth_ > 1) return value(what);
    if (depth_ == 1 && at_map_ && !in_map_) return value(what);
    ++depth_;
    return true;
  }
  bool close() {
    --depth_;
    return true;
  }

  std::uint64_t depth_ = 0;
  bool at_map_ = false, in_map_ = false, has_map_ = false;
  SafetensorsIndex index_;
  std::map<std::string, std::uint32_t, std::less<>> files_;
};

Result<HeaderReader> open_json(int fd, std::uint64_t bytes_max, const char* what) {
  auto in = HeaderReader::open(fd, bytes_max);
  if (!in) return std::move(in).error();
  if (in->remaining() < in->file_bytes()) {
    return Fault{FaultCode::kLimit, std::string(what) + " has " + std::to_string(in->file_bytes()) +
                                        " bytes, the limit is " + std::to_string(bytes_max)};
  }
  return in;
}

// The first of these keys that is there, in the config or in what it says of the text model.
Result<std::uint32_t> count_of(const nlohmann::json& config, std::initializer_list<const char*> keys) {
  for (const nlohmann::json* from :
       {&config, config.contains("text_config") ? &config["text_config"] : nullptr}) {
    if (from == nullptr || !from->is_object()) continue;
    for (const char* key : keys) {
      const auto found = from->find(key);
      if (found == from->end() || found->is_null()) continue;
      if (!found->is_number_unsigned() || found->get<std::uint64_t>() < 1 ||
          found->get<std::uint64_t>() > MOECACHED_MAX_EXPERTS) {
        return invalid("config.json: " + in_quotes(key) + " must be a number from 1 to " +
                       std::to_string(static_cast<int>(MOECACHED_MAX_EXPERTS)));
      }
      return found->get<std::uint32_t>();
    }
  }
  return std::uint32_t{0};
}

}  // namespace

Result<std::optional<SafetensorsIndex>> read_safetensors_index(int fd) {
  auto in = open_json(fd, kIndexBytesMax, "a JSON file");
  if (!in) return std::move(in).error();
  IndexEvents events;
  if (auto done = read_json(*in, in->file_bytes(), events); !done)
    return std::move(done).error().with_context("JSON file");
  if (!events.has_map()) return std::optional<SafetensorsIndex>();
  SafetensorsIndex& index = events.index();
  std::ranges::sort(index.entries, {}, &SafetensorsIndex::Entry::tensor);
  const auto twice = std::ranges::adjacent_find(index.entries, {}, &SafetensorsIndex::Entry::tensor);
  if (twice != index.entries.end())
    return invalid("the index has tensor " + in_quotes(twice->tensor) + " twice");
  return std::optional(std::move(index));
}

Result<HfConfig> read_hf_config(int fd) {
  auto in = open_json(fd, kConfigBytesMax, "config.json");
  if (!in) return std::move(in).error();
  std::string text(static_cast<std::size_t>(in->file_bytes()), '\0');
  if (!in->read(std::as_writable_bytes(std::span(text)))) return in->fault("config.json");
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_object()) return invalid("config.json is not a JSON object");
  HfConfig config;
  if (const auto type = json.find("model_type"); type != json.end() && type->is_string())
    config.model_type = printable(type->get<std::string>().substr(0, 64));
  if (config.model_type.empty()) return invalid("config.json: 'model_type' is missing, or no string");
  if (const auto name = json.find("_name_or_path"); name != json.end() && name->is_string())
    config.name = for_people(name->get<std::string>().substr(0, 255));
  auto used = count_of(
      json, {"num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k"});
  if (!used) return std::move(used).error();
  if (*used == 0)
    return invalid("config.json: 'num_experts_per_tok' is missing; a model with experts needs it");
  auto experts = count_of(json, {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"});
  if (!experts) return std::move(experts).error();
  config.n_expert_used = *used;
  config.n_experts = *experts;
  return config;
}

}  // namespace moecached
