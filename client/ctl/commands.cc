#include "client/ctl/commands.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "client/ctl/json.h"
#include "client/ctl/render.h"
#include "client/ctl/run_plan.h"
#include "client/ctl/table.h"

namespace moecached::ctl {
namespace {

using nlohmann::ordered_json;

void print(const std::string& text) { std::fputs(text.c_str(), stdout); }
void print_json(const ordered_json& json) { print(dump(json, 2) + "\n"); }

template <typename Request, typename Response, typename Render>
int show(ControlClient& client, const Output& output, const Request& request, Response* response,
         Render render_text) {
  if (const auto failure = client.call(request, response)) return report(output, *failure);
  if (output.json) {
    print_json(to_json(*response));
  } else {
    print(render_text(*response));
  }
  return kExitOk;
}

// What only this side can see. The daemon's own findings come first.
void add_plugin_finding(control::v1::DoctorResponse* response) {
  const PluginSearch search = find_plugin("", executable_directory());
  control::v1::Finding* finding = response->add_findings();
  finding->set_subject("llama.cpp plugin");
  finding->set_severity(search.found.empty() ? "note" : "ok");
  finding->set_text(search.found.empty() ? "not found; looked at " + search.looked_at +
                                               ". `moecachectl run` needs it, the daemon does not"
                                         : search.found);
}

}  // namespace

int report(const Output& output, const Failure& failure) {
  std::fprintf(stderr, "moecachectl: %s\n", printable(failure.text).c_str());
  if (output.json)
    print_json(ordered_json{{"error", failure.text}, {"exit_code", static_cast<int>(failure.code)}});
  return failure.code;
}

int show_status(ControlClient& client, const Output& output) {
  control::v1::Status response;
  return show(client, output, control::v1::GetStatusRequest(), &response,
              [](const auto& r) { return render(r); });
}

int show_models(ControlClient& client, const Output& output, bool layers) {
  control::v1::ListModelsResponse response;
  return show(client, output, control::v1::ListModelsRequest(), &response,
              [layers](const auto& r) { return render(r, layers); });
}

int show_sessions(ControlClient& client, const Output& output) {
  control::v1::ListSessionsResponse response;
  return show(client, output, control::v1::ListSessionsRequest(), &response,
              [](const auto& r) { return render(r); });
}

int show_stats(ControlClient& client, const Output& output) {
  control::v1::Stats response;
  return show(client, output, control::v1::GetStatsRequest(), &response,
              [](const auto& r) { return render(r, nullptr); });
}

int watch_stats(ControlClient& client, const Output& output, const WatchOptions& options) {
  const bool terminal = !output.json && ::isatty(STDOUT_FILENO) != 0;
  std::optional<control::v1::Stats> before;
  std::uint32_t shown = 0;
  const auto on_snapshot = [&](const control::v1::Stats& stats) {
    if (output.json) {
      print(dump(to_json(stats), -1) + "\n");  // one line each
    } else {
      // Home, then clear to the end: no flicker, and nothing is left of a longer screen.
      print(terminal ? "\033[H\033[J" : shown > 0 ? "\n" : "");
      print(render(stats, before ? &*before : nullptr));
    }
    std::fflush(stdout);
    before = stats;
    return ++shown != options.count && std::ferror(stdout) == 0;
  };
  control::v1::WatchStatsRequest request;
  request.set_interval_ms(static_cast<std::uint32_t>(std::lround(options.interval_seconds * 1000)));
  if (const auto failure = client.watch(request, on_snapshot)) return report(output, *failure);
  return kExitOk;
}

int show_doctor(ControlClient& client, const Output& output) {
  control::v1::DoctorResponse response;
  if (const auto failure = client.call(control::v1::DoctorRequest(), &response))
    return report(output, *failure);
  add_plugin_finding(&response);
  if (output.json) {
    print_json(to_json(response));
  } else {
    print(render(response));
  }
  const bool bad = std::ranges::any_of(response.findings(),
                                       [](const auto& finding) { return finding.severity() == "error"; });
  return bad ? kExitFinding : kExitOk;
}

int get_policy(ControlClient& client, const Output& output, std::uint32_t model) {
  control::v1::GetPolicyRequest request;
  request.set_model(model);
  control::v1::Policy response;
  return show(client, output, request, &response, [](const auto& r) { return printable(r.spec()) + "\n"; });
}

int list_policies(ControlClient& client, const Output& output) {
  control::v1::ListPoliciesResponse response;
  return show(client, output, control::v1::ListPoliciesRequest(), &response,
              [](const auto& r) { return render(r); });
}

int set_policy(ControlClient& client, const Output& output, std::uint32_t model,
               const std::vector<std::string>& where) {
  control::v1::SetPolicyRequest request;
  request.set_model(model);
  request.set_spec(where.back());
  if (where.size() > 1) request.set_tier(where.front());
  control::v1::Policy response;
  return show(client, output, request, &response, [](const auto& r) {
    const std::string tier = r.tier().empty() ? "ram" : printable(r.tier());
    return (r.model() == 0 ? "all models in " + tier : "model " + std::to_string(r.model())) + ": " +
           printable(r.spec()) + "\n";
  });
}

int register_model(ControlClient& client, const Output& output, const std::vector<std::string>& paths,
                   const std::string& device) {
  control::v1::RegisterModelRequest request;
  request.set_device(device);
  std::error_code error;
  for (const std::string& path : paths) {
    // Relative to here, not to the daemon's directory.
    const std::filesystem::path absolute = std::filesystem::absolute(path, error);
    if (error) return report(output, {kExitUsage, path + ": " + error.message()});
    request.add_paths(absolute.lexically_normal());
  }
  control::v1::RegisterModelResponse response;
  return show(client, output, request, &response,
              [](const auto& r) { return "model " + std::to_string(r.model()) + "\n"; });
}

int prewarm(ControlClient& client, const Output& output, std::uint32_t model, const std::string& path) {
  std::error_code error;
  const std::filesystem::path absolute = std::filesystem::absolute(path, error);
  if (error) return report(output, {kExitUsage, path + ": " + error.message()});
  control::v1::PrewarmRequest request;
  request.set_model(model);
  request.set_path(absolute.lexically_normal());
  control::v1::PrewarmResponse response;
  if (const auto failure = client.call(request, &response)) return report(output, *failure);
  if (output.json) {
    print_json(ordered_json{
        {"model", response.model()}, {"layers", response.layers()}, {"experts", response.experts()}});
  } else {
    print("model " + std::to_string(response.model()) + ": counts of " + std::to_string(response.layers()) +
          " layers, " + std::to_string(response.experts()) + " experts are being loaded into free slots\n");
  }
  return kExitOk;
}

int drop_model(ControlClient& client, const Output& output, std::uint32_t model) {
  control::v1::DropModelRequest request;
  request.set_model(model);
  control::v1::DropModelResponse response;
  if (const auto failure = client.call(request, &response)) return report(output, *failure);
  if (output.json) {
    print_json(ordered_json{{"model", model}, {"dropped", true}});
  } else {
    print("model " + std::to_string(model) + " dropped\n");
  }
  return kExitOk;
}

int show_version(ControlClient& client, const Output& output) {
  control::v1::Status status;
  const auto failure = client.call(control::v1::GetStatusRequest(), &status);
  if (output.json) {
    ordered_json json = {{"moecachectl", MOECACHED_VERSION}, {"moecached", nullptr}};
    if (!failure) json["moecached"] = status.version();
    print_json(json);
  } else {
    print("moecachectl " MOECACHED_VERSION "\n");
    print("moecached   " +
          (failure ? "no answer (" + printable(failure->text) + ")" : printable(status.version())) + "\n");
  }
  return kExitOk;
}

}  // namespace moecached::ctl
