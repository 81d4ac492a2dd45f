#include "bench/replay/report.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

namespace moecached::replay {
namespace {

using nlohmann::ordered_json;

std::string fixed(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

// Aligned columns: the first to the left, the others to the right.
std::string align(const std::vector<std::vector<std::string>>& rows) {
  std::vector<std::size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (std::size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  }
  std::string out;
  for (const auto& row : rows) {
    for (std::size_t c = 0; c < row.size(); ++c) {
      const std::string pad(widths[c] - row[c].size(), ' ');
      out.append(c == 0 ? row[c] + pad : "  " + pad + row[c]);
    }
    out.erase(out.find_last_not_of(' ') + 1);
    out += '\n';
  }
  return out;
}

std::string processes(const Run& run) {
  if (run.n_lanes == 1) return "1";
  return std::to_string(run.n_lanes) + (run.private_pools ? " private" : " shared");
}

const char* name_of(SlotScope scope) { return scope == SlotScope::kLayer ? "layer" : "global"; }

// A run among others of one policy.
std::string label_of(const Run& run) {
  return run.policy + " " + run.slots.label + (run.scope == SlotScope::kLayer ? "" : " global") +
         (run.n_lanes > 1 ? " " + processes(run) : "");
}

// Of all layers, the prefetch counters alone.
LayerCounters prefetches(const Run& run) {
  LayerCounters sum;
  for (const LayerCounters& layer : run.result.layers) {
    sum.prefetched += layer.prefetched;
    sum.prefetch_used += layer.prefetch_used;
    sum.prefetch_wasted += layer.prefetch_wasted;
    sum.prefetch_regretted += layer.prefetch_regretted;
  }
  return sum;
}

double hits(const Tally& tally) { return share(tally.hits, tally.lookups); }

double ratio(const Tally& tally, const Tally& best) {
  return best.hits == 0 ? 0 : static_cast<double>(tally.hits) / static_cast<double>(best.hits);
}

ordered_json tally_json(const Tally& tally, const Report& report) {
  ordered_json json = {
      {"rows", tally.rows},
      {"lookups", tally.lookups},
      {"hits", tally.hits},
      {"hit_rate", hits(tally)},
      {"insertions", tally.insertions},
      {"uploads_per_access", share(tally.insertions, tally.lookups)},
      {"link_experts_per_access", share(link_experts(tally, report.mode), tally.lookups)},
  };
  if (report.expert_bytes > 0) {
    json["link_bytes_per_access"] =
        share(link_experts(tally, report.mode), tally.lookups) * static_cast<double>(report.expert_bytes);
  }
  return json;
}

}  // namespace

double share(std::uint64_t part, std::uint64_t whole) {
  return whole == 0 ? 0 : static_cast<double>(part) / static_cast<double>(whole);
}

const Yardstick* Report::yardstick_of(const Run& run) const {
  for (const Yardstick& each : yardsticks) {
    if (each.slots.label == run.slots.label && each.n_lanes == run.n_lanes &&
        each.private_pools == run.private_pools)
      return &each;
  }
  return nullptr;
}

std::vector<std::string> advice(const Report& report) {
  std::vector<std::string> out;
  std::vector<const Run*> curve;  // of the first policy, by size
  for (const Run& run : report.runs) {
    if (!run.private_pools && run.policy == report.runs.front().policy &&
        run.n_lanes == report.runs.front().n_lanes && run.scope == report.runs.front().scope)
      curve.push_back(&run);
  }
  std::sort(curve.begin(), curve.end(),
            [](const Run* a, const Run* b) { return a->slots.share < b->slots.share; });
  for (const Run* run : curve) {
    const std::uint32_t fewest = *std::min_element(run->slots.n_slots.begin(), run->slots.n_slots.end());
    if (fewest < 2 * report.header.n_used && fewest < report.header.n_experts) {
      out.push_back(run->slots.label + ": " + std::to_string(fewest) + " slots are fewer than twice the " +
                    std::to_string(report.header.n_used) +
                    " experts of a token: most lookups miss, whatever the policy (" +
                    fixed(100 * hits(run->result.total()), 1) + " % hit); have at least " +
                    std::to_string(std::min(2 * report.header.n_used, report.header.n_experts)));
    }
  }
  // The knee: from there on a further 1 % of the experts in slots brings less than a tenth of a point.
  for (std::size_t i = 0; i + 1 < curve.size(); ++i) {
    const double points = 100 * (hits(curve[i + 1]->result.total()) - hits(curve[i]->result.total()));
    const double more = 100 * (curve[i + 1]->slots.share - curve[i]->slots.share);
    if (more <= 0 || points / more >= 0.1) continue;
    out.push_back(curve[i + 1]->slots.label + " is past the knee: " + fixed(more, 1) +
                  " % more of the experts than at " + curve[i]->slots.label + " bring " + fixed(points, 2) +
                  " points; that memory is better spent elsewhere");
    break;
  }
  return out;
}

std::string to_table(const Report& report) {
  std::string out =
      report.path + ": " + report.header.model + (report.header.is_synthetic ? " (synthetic)" : "") + ", " +
      std::to_string(report.header.n_layers) + " layers x " + std::to_string(report.header.n_experts) +
      " experts, top " + std::to_string(report.header.n_used) + "; " + std::to_string(report.n_rows) +
      " rows, " + std::to_string(report.n_sequences) + " sequences; mode " +
      (report.mode == Mode::kPool ? "pool" : "covered") + "\n";
  if (report.header.dropped > 0)
    out += "the recorder lost " + std::to_string(report.header.dropped) + " events\n";
  out += '\n';
  const bool has_prefill =
      std::ranges::any_of(report.runs, [](const Run& run) { return run.result.prefill.lookups > 0; });
  const std::string link = report.expert_bytes > 0 ? "link KiB/access" : "link/access";
  std::vector<std::vector<std::string>> rows;
  const bool has_global =
      std::ranges::any_of(report.runs, [](const Run& run) { return run.scope == SlotScope::kGlobal; });
  std::vector<std::string> head = {"policy", "slots", "processes"};
  if (has_global) head.emplace_back("scope");
  head.emplace_back("hits %");
  if (has_prefill) head.insert(head.end(), {"decode", "prefill"});
  head.insert(head.end(), {"uploads/access", link});
  if (report.prefetch) head.insert(head.end(), {"prefetched/access", "used %", "wasted %", "prefetch"});
  head.insert(head.end(), {"of Belady", "of bypass", "M lookups/s"});
  rows.push_back(head);
  for (const Run& run : report.runs) {
    const Tally total = run.result.total();
    std::vector<std::string> row = {run.policy, run.slots.label, processes(run)};
    if (has_global) row.emplace_back(name_of(run.scope));
    row.push_back(fixed(100 * hits(total), 2));
    if (has_prefill) {
      row.push_back(run.result.decode.lookups == 0 ? "-" : fixed(100 * hits(run.result.decode), 2));
      row.push_back(run.result.prefill.lookups == 0 ? "-" : fixed(100 * hits(run.result.prefill), 2));
    }
    const double per_access = share(link_experts(total, report.mode), total.lookups);
    row.push_back(fixed(share(total.insertions, total.lookups), 4));
    row.push_back(report.expert_bytes > 0
                      ? fixed(per_access * static_cast<double>(report.expert_bytes) / 1024, 1)
                      : fixed(per_access, 4));
    if (report.prefetch) {
      const LayerCounters sum = prefetches(run);
      row.push_back(fixed(share(sum.prefetched, total.lookups), 4));
      row.push_back(fixed(100 * share(sum.prefetch_used, sum.prefetched), 1));
      row.push_back(fixed(100 * share(sum.prefetch_wasted, sum.prefetched), 1));
      row.emplace_back(name_of(run.result.prefetch));
    }
    const Yardstick* best = report.yardstick_of(run);
    row.push_back(best == nullptr ? "-" : fixed(ratio(total, best->belady), 3));
    row.push_back(best == nullptr ? "-" : fixed(ratio(total, best->bypass), 3));
    row.push_back(
        fixed(run.result.seconds > 0 ? static_cast<double>(total.lookups) / run.result.seconds / 1e6 : 0, 1));
    rows.push_back(std::move(row));
  }
  out += align(rows);
  if (!report.use.empty()) {
    rows = {{"layer", "lookups", "used", "Gini", "entropy bits"}};
    for (const Run& run : report.runs) rows[0].push_back(label_of(run));
    for (std::size_t l = 0; l < report.use.size(); ++l) {
      const LayerUse& use = report.use[l];
      rows.push_back({std::to_string(l), std::to_string(use.lookups), std::to_string(use.n_used),
                      fixed(use.gini, 3), fixed(use.entropy_bits, 2)});
      for (const Run& run : report.runs) {
        const LayerCounters& counters = run.result.layers[l];
        std::string cell = fixed(100 * share(counters.hits, counters.lookups), 1);
        // How many slots it ended with, where that is of interest.
        if (run.scope == SlotScope::kGlobal) cell += " (" + std::to_string(run.result.n_slots[l]) + ")";
        rows.back().push_back(std::move(cell));
      }
    }
    out += "\nby layer, hits % on the right (slots at the end)\n" + align(rows);
    for (const std::string& line : advice(report)) out += "\nadvice: " + line;
    if (out.back() != '\n') out += '\n';
  }
  if (!report.peers.empty()) {
    rows = {{"policy", "slots/GPU", "GPUs", "hits on any %", "own %", "peer %", "copies %", "uploads/access",
             link}};
    for (const PeerRun& run : report.peers) {
      const Tally& total = run.result.total;
      const double per_access = share(link_experts(total, Mode::kCovered), total.lookups);
      rows.push_back({run.policy, run.slots.label, std::to_string(run.n_gpus), fixed(100 * hits(total), 2),
                      fixed(100 * share(total.hits - run.result.peer_hits, total.lookups), 2),
                      fixed(100 * share(run.result.peer_hits, total.lookups), 2),
                      fixed(100 * share(run.result.copies, run.result.n_slots), 1),
                      fixed(share(total.insertions, total.lookups), 4),
                      report.expert_bytes > 0
                          ? fixed(per_access * static_cast<double>(report.expert_bytes) / 1024, 1)
                          : fixed(per_access, 4)});
    }
    out += "\na process on each GPU, which read each other's slots\n" + align(rows);
  }
  for (const std::string& note : report.notes) out += "note: " + note + "\n";
  return out;
}

ordered_json to_json(const Report& report) {
  ordered_json json = {
      {"trace",
       {{"file", report.path},
        {"model", report.header.model},
        {"source", report.header.source},
        {"license", report.header.licence},
        {"synthetic", report.header.is_synthetic},
        {"layers", report.header.n_layers},
        {"experts", report.header.n_experts},
        {"k", report.header.n_used},
        {"rows", report.n_rows},
        {"sequences", report.n_sequences},
        {"dropped", report.header.dropped}}},
      {"mode", report.mode == Mode::kPool ? "pool" : "covered"},
      {"runs", ordered_json::array()},
      {"belady", ordered_json::array()},
  };
  for (const Run& run : report.runs) {
    const Tally total = run.result.total();
    ordered_json out = {
        {"policy", run.policy},
        {"slots", run.slots.label},
        {"share", run.slots.share},
        {"processes", run.n_lanes},
        {"private", run.private_pools},
        {"scope", name_of(run.scope)},
        {"total", tally_json(total, report)},
        {"decode", tally_json(run.result.decode, report)},
        {"prefill", tally_json(run.result.prefill, report)},
        {"events_too_wide", run.result.events_too_wide},
        {"lookups_per_second",
         run.result.seconds > 0 ? static_cast<double>(total.lookups) / run.result.seconds : 0}};
    if (const Yardstick* best = report.yardstick_of(run)) {
      out["of_belady"] = ratio(total, best->belady);
      out["of_bypass"] = ratio(total, best->bypass);
    }
    if (report.prefetch) {
      const LayerCounters sum = prefetches(run);
      out["prefetch"] = {{"state", name_of(run.result.prefetch)},
                         {"prefetched", sum.prefetched},
                         {"used", sum.prefetch_used},
                         {"wasted", sum.prefetch_wasted},
                         {"regretted", sum.prefetch_regretted}};
    }
    if (!report.use.empty()) {
      for (std::size_t l = 0; l < run.result.layers.size(); ++l) {
        const LayerCounters& c = run.result.layers[l];
        out["layers"].push_back({{"lookups", c.lookups},
                                 {"hits", c.hits},
                                 {"misses", c.misses},
                                 {"insertions", c.insertions},
                                 {"evictions", c.evictions},
                                 {"slots", run.result.n_slots[l]}});
      }
    }
    json["runs"].push_back(std::move(out));
  }
  for (const Yardstick& each : report.yardsticks) {
    json["belady"].push_back({{"slots", each.slots.label},
                              {"share", each.slots.share},
                              {"processes", each.n_lanes},
                              {"private", each.private_pools},
                              {"mandatory", tally_json(each.belady, report)},
                              {"bypass", tally_json(each.bypass, report)}});
  }
  for (const PeerRun& run : report.peers) {
    json["peers"].push_back({{"policy", run.policy},
                             {"slots", run.slots.label},
                             {"gpus", run.n_gpus},
                             {"total", tally_json(run.result.total, report)},
                             {"peer_hits", run.result.peer_hits},
                             {"copies", run.result.copies},
                             {"n_slots", run.result.n_slots}});
  }
  if (!report.use.empty()) {
    for (const LayerUse& use : report.use) {
      json["layers"].push_back({{"lookups", use.lookups},
                                {"experts_used", use.n_used},
                                {"gini", use.gini},
                                {"entropy_bits", use.entropy_bits}});
    }
    json["advice"] = advice(report);
  }
  json["notes"] = report.notes;
  return json;
}

}  // namespace moecached::replay
