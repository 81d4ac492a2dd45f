#include "daemon/model/hf_names.h"

#include <algorithm>
#include <span>

#include "daemon/model/expert_names.h"

namespace moecached {
namespace {

struct Suffix {
  std::string_view text;
  moecached_part_kind kind;
};
constexpr Suffix kSingle[] = {
    {"gate_proj.weight", MOECACHED_PART_GATE},
    {"up_proj.weight", MOECACHED_PART_UP},
    {"down_proj.weight", MOECACHED_PART_DOWN},
    {"w1.weight", MOECACHED_PART_GATE},
    {"w3.weight", MOECACHED_PART_UP},
    {"w2.weight", MOECACHED_PART_DOWN},
    {"gate_proj.bias", MOECACHED_PART_GATE_BIAS},
    {"up_proj.bias", MOECACHED_PART_UP_BIAS},
    {"down_proj.bias", MOECACHED_PART_DOWN_BIAS},
};
constexpr Suffix kFused[] = {
    {"gate_up_proj", MOECACHED_PART_GATE_UP},
    {"gate_up_proj.weight", MOECACHED_PART_GATE_UP},
    {"gate_proj", MOECACHED_PART_GATE},
    {"gate_proj.weight", MOECACHED_PART_GATE},
    {"up_proj", MOECACHED_PART_UP},
    {"up_proj.weight", MOECACHED_PART_UP},
    {"down_proj", MOECACHED_PART_DOWN},
    {"down_proj.weight", MOECACHED_PART_DOWN},
    {"gate_up_proj_bias", MOECACHED_PART_GATE_UP_BIAS},
    {"gate_up_proj.bias", MOECACHED_PART_GATE_UP_BIAS},
    {"down_proj_bias", MOECACHED_PART_DOWN_BIAS},
    {"down_proj.bias", MOECACHED_PART_DOWN_BIAS},
};

// Where `word`, between dots or at the start, begins behind `from`.
std::size_t find_word(std::string_view text, std::string_view word_and_dot, std::size_t from) {
  for (std::size_t at = text.find(word_and_dot, from); at != std::string_view::npos;
       at = text.find(word_and_dot, at + 1)) {
    if (at == 0 || text[at - 1] == '.') return at;
  }
  return std::string_view::npos;
}

}  // namespace

HfTensorName classify_hf_tensor(std::string_view name) {
  constexpr std::string_view kLayers = "layers.", kExperts = "experts.";
  HfTensorName out;
  const std::size_t layers = find_word(name, kLayers, 0);
  const std::size_t experts = layers == std::string_view::npos ? layers : find_word(name, kExperts, layers);
  if (experts == std::string_view::npos) return out;
  out.role = TensorRole::kLeftOut;
  std::string_view rest = name.substr(layers + kLayers.size());
  if (!take_number(rest, out.block)) {
    out.reason = "experts outside of a numbered layer";
    return out;
  }
  out.stack = name.substr(0, layers);
  rest = name.substr(experts + kExperts.size());
  out.single = take_number(rest, out.expert);
  const std::span<const Suffix> suffixes = out.single ? std::span<const Suffix>(kSingle) : kFused;
  const auto suffix = std::ranges::find(suffixes, rest, &Suffix::text);
  if (suffix == suffixes.end()) {
    const bool packed = rest.find("_blocks") != std::string_view::npos ||
                        rest.find("scale") != std::string_view::npos ||
                        rest.find(".q") != std::string_view::npos;
    out.reason = packed ? "of a quantization that no slot holds: convert the model to GGUF"
                        : "not one of {gate,up,down,gate_up}_proj or w1, w2, w3";
    return out;
  }
  out.role = TensorRole::kPart;
  out.kind = suffix->kind;
  if (out.single) {
    out.before_expert = name.substr(0, experts + kExperts.size());
    out.behind_expert = name.substr(name.size() - rest.size() - 1);
  }
  return out;
}

}  // namespace moecached
