#include "client/ctl/compare.h"

#include <cstdio>
#include <nlohmann/json.hpp>

#include "client/ctl/json.h"
#include "client/ctl/table.h"

namespace moecached::ctl {
namespace {

using namespace control::v1;  // NOLINT(google-build-using-namespace): the messages are this file's vocabulary

std::string fixed(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

std::string per(std::uint64_t part, std::uint64_t whole) {
  return whole == 0 ? "-" : fixed(static_cast<double>(part) / static_cast<double>(whole), 4);
}

// Points of hits that the policy is behind what is possible; a warm start may put it ahead.
std::string regret(std::uint64_t hits, std::uint64_t best, std::uint64_t lookups) {
  if (lookups == 0) return "-";
  return fixed(100 * (static_cast<double>(best) - static_cast<double>(hits)) / static_cast<double>(lookups),
               2);
}

void add(const PolicyScore& from, PolicyScore* to) {
  to->set_lookups(to->lookups() + from.lookups());
  to->set_hits(to->hits() + from.hits());
  to->set_uploads(to->uploads() + from.uploads());
  to->set_link_experts(to->link_experts() + from.link_experts());
  to->set_window_hits(to->window_hits() + from.window_hits());
  to->set_covered(to->covered() + from.covered());
}

std::string layer_table(const PolicyComparison& comparison) {
  std::vector<std::string> head = {">BLOCK", ">SLOTS", ">LOOKUPS", ">GINI", ">ENTROPY", ">BELADY"};
  for (const std::string& policy : comparison.policies()) {
    head.push_back(std::string(">").append(printable(policy)));
    head.push_back(">REGRET");
  }
  Table table(head);
  for (const LayerComparison& layer : comparison.layers()) {
    const std::uint64_t lookups = layer.window_lookups();
    std::vector<std::string> row = {std::to_string(layer.block()),  std::to_string(layer.n_slots()),
                                    std::to_string(lookups),        fixed(layer.gini(), 3),
                                    fixed(layer.entropy_bits(), 2), percent(layer.belady_hits(), lookups)};
    for (const PolicyScore& score : layer.policies()) {
      row.push_back(percent(score.window_hits(), lookups));
      row.push_back(regret(score.window_hits(), layer.belady_hits(), lookups));
    }
    row.resize(head.size(), "-");
    table.add(row);
  }
  return table.text();
}

}  // namespace

std::string render(const PolicyComparison& comparison, bool layers) {
  std::uint64_t lookups = 0, best = 0, best_uploads = 0;
  std::vector<PolicyScore> sums(static_cast<std::size_t>(comparison.policies_size()));
  for (const LayerComparison& layer : comparison.layers()) {
    lookups += layer.window_lookups();
    best += layer.belady_hits();
    best_uploads += layer.belady_uploads();
    for (std::size_t i = 0; i < sums.size() && i < static_cast<std::size_t>(layer.policies_size()); ++i)
      add(layer.policies(static_cast<int>(i)), &sums[i]);
  }
  Table table({"POLICY", ">LOOKUPS", ">HIT RATE", ">UPLOADS/ACCESS", ">LINK/ACCESS", ">WINDOW HITS",
               ">COVERED NOW", ">REGRET"});
  for (std::size_t i = 0; i < sums.size(); ++i) {
    const PolicyScore& score = sums[i];
    table.add({printable(comparison.policies(static_cast<int>(i))) + (i == 0 ? " (live)" : ""),
               std::to_string(score.lookups()), percent(score.hits(), score.lookups()),
               per(score.uploads(), score.lookups()), per(score.link_experts(), score.lookups()),
               percent(score.window_hits(), lookups), percent(score.covered(), lookups),
               regret(score.window_hits(), best, lookups)});
  }
  table.add({"Belady, bypass", std::to_string(lookups), "-", per(best_uploads, lookups), "-",
             percent(best, lookups), "-", lookups == 0 ? "-" : "0.00"});
  std::string text = table.text();
  if (layers) text += "\nby layer, in the window\n" + layer_table(comparison);
  if (comparison.forgotten() > 0) {
    text += "\nthe window holds the latest " + std::to_string(lookups) + " lookups, " +
            std::to_string(comparison.forgotten()) + " are older\n";
  }
  if (comparison.dropped() > 0)
    text.append("\n")
        .append(std::to_string(comparison.dropped()))
        .append(" events were lost to the window\n");
  for (const std::string& advice : comparison.advice())
    text.append("\nadvice: ").append(printable(advice)).append("\n");
  return text;
}

int shadow_policies(ControlClient& client, const Output& output, std::uint32_t model,
                    const std::vector<std::string>& specs) {
  ShadowPoliciesRequest request;
  request.set_model(model);
  for (const std::string& spec : specs) request.add_specs(spec);
  ShadowPoliciesResponse response;
  if (const auto failure = client.call(request, &response)) return report(output, *failure);
  if (output.json) {
    std::fputs((dump(to_json(response), 2) + "\n").c_str(), stdout);
  } else if (specs.empty()) {
    std::printf("model %u: no challengers\n", response.model());
  } else {
    std::printf("model %u: %zu challengers; `moecachectl policy compare` shows them\n", response.model(),
                specs.size());
  }
  return kExitOk;
}

int compare_policies(ControlClient& client, const Output& output, std::uint32_t model, bool layers) {
  ComparePoliciesRequest request;
  request.set_model(model);
  PolicyComparison response;
  if (const auto failure = client.call(request, &response)) return report(output, *failure);
  std::fputs((output.json ? dump(to_json(response), 2) + "\n" : render(response, layers)).c_str(), stdout);
  return kExitOk;
}

}  // namespace moecached::ctl
