#include "daemon/model/expert_names.h"

#include <algorithm>
#include <charconv>
#include <iterator>

namespace moecached {
namespace {

constexpr std::string_view kSuffixes[] = {
    // by moecached_part_kind
    "ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight", "ffn_gate_up_exps.weight",
    "ffn_gate_exps.bias",   "ffn_up_exps.bias",   "ffn_down_exps.bias",   "ffn_gate_up_exps.bias",
};

// "ffn_gate.3.weight": one tensor for each expert
bool is_single_expert(std::string_view rest) {
  for (const std::string_view prefix : {"ffn_gate.", "ffn_up.", "ffn_down."}) {
    std::uint32_t expert = 0;
    std::string_view tail = rest;
    if (!tail.starts_with(prefix)) continue;
    tail.remove_prefix(prefix.size());
    if (take_number(tail, expert) && (tail == "weight" || tail == "bias")) return true;
  }
  return false;
}

TensorName left_out(std::string_view reason) {
  return TensorName{.role = TensorRole::kLeftOut, .reason = reason};
}

}  // namespace

bool take_number(std::string_view& text, std::uint32_t& number) {
  const char* end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, number);
  if (parsed.ec != std::errc() || parsed.ptr == end || *parsed.ptr != '.') return false;
  if (text.front() == '0' && parsed.ptr - text.data() > 1) return false;
  text.remove_prefix(static_cast<std::size_t>(parsed.ptr + 1 - text.data()));
  return true;
}

std::string_view part_suffix(moecached_part_kind kind) { return kSuffixes[kind]; }

TensorName classify_tensor(std::string_view name) {
  const bool says_experts = name.find("exps") != std::string_view::npos;
  std::string_view rest = name;
  std::uint32_t block = 0;
  bool in_block = rest.starts_with("blk.");
  if (in_block) {
    rest.remove_prefix(4);
    in_block = take_number(rest, block);
  }
  if (in_block && is_single_expert(rest)) {
    return left_out(
        "one tensor for each expert, as old Mixtral files have it; convert the model again with a current "
        "llama.cpp");
  }
  if (!says_experts) return TensorName{};
  if (!in_block) return left_out("not in a numbered block (blk.N.)");
  const auto* suffix = std::ranges::find(kSuffixes, rest);
  if (suffix != std::end(kSuffixes)) {
    return TensorName{
        TensorRole::kPart, block, static_cast<moecached_part_kind>(suffix - std::begin(kSuffixes)), {}};
  }
  if (rest.find("_chexps.") != std::string_view::npos) {
    return left_out(
        "experts shared by groups (GroveMoE chunk experts), chosen by other ids than the routed ones");
  }
  if (rest.ends_with(".scale") || rest.ends_with(".input_scale")) {
    return left_out(
        "one number for each expert, indexed by expert and not by slot: it stays with the host's tensors");
  }
  if (rest.starts_with("ffn_norm_exps.")) return left_out("a norm, used by every token");
  return left_out("not one of ffn_{gate,up,down,gate_up}_exps.{weight,bias}");
}

}  // namespace moecached
