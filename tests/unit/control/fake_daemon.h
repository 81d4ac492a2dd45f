// A DaemonControl that answers what a test put in, and remembers what it was asked.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "daemon/ipc/daemon_control.h"

namespace moecached {

class FakeDaemon final : public DaemonControl {
 public:
  StatusReport status() override {
    if (status_throws) throw std::runtime_error("out of luck");
    return status_report;
  }
  std::vector<ModelReport> models() override { return model_reports; }
  std::vector<SessionReport> sessions() override { return session_reports; }
  std::vector<Finding> doctor() override { return findings; }
  Result<std::string> set_policy(const PolicyTarget& target, const std::string& spec) override {
    if (fault) return *fault;
    policy_model = target.model;
    policy_tier = target.tier;
    return spec + ":parsed";
  }
  std::vector<PolicyReport> policies() override { return policy_reports; }
  std::string default_policy() override { return "slru"; }
  Result<std::uint32_t> register_model(const std::vector<std::string>& paths,
                                       const std::string& device) override {
    if (fault) return *fault;
    registered = paths;
    registered_on = device;
    return 9u;
  }
  Status drop_model(std::uint32_t model) override {
    if (fault) return *fault;
    dropped = model;
    return ok();
  }

  Result<PrewarmReport> prewarm(std::uint32_t model, const std::string& path) override {
    if (path != "/counts") return Fault{FaultCode::kNotFound, path + ": it is not there"};
    return PrewarmReport{.model = model, .layers = 3, .experts = 24};
  }
  Result<std::uint32_t> shadow_policies(std::uint32_t model, const std::vector<std::string>& specs) override {
    challengers = specs;
    return model == 0 ? 1 : model;
  }
  Result<PolicyComparison> compare_policies(std::uint32_t model) override {
    if (challengers.empty()) return Fault{FaultCode::kInvalid, "no challengers"};
    PolicyComparison comparison;
    comparison.model = model;
    comparison.policies = {"slru", challengers.front()};
    LayerComparison& layer = comparison.layers.emplace_back();
    layer.block = 5;
    layer.window_lookups = 100;
    layer.belady_hits = 90;
    layer.policies = {
        {.lookups = 100, .hits = 60, .uploads = 40, .link_experts = 40, .window_hits = 60, .covered = 50},
        {.lookups = 100, .hits = 70, .uploads = 10, .link_experts = 40, .window_hits = 70, .covered = 55}};
    comparison.advice = {"take the other"};
    return comparison;
  }
  std::vector<std::string> challengers;
  Result<RoutingRecording> open_recording(std::uint32_t model) override {
    if (fault) return *fault;
    if (model_reports.empty()) return Fault{FaultCode::kNotFound, "no model " + std::to_string(model)};
    tap = std::make_shared<RoutingTap>(ModelId(model_reports.front().id), tap_bytes);
    for (const auto& [event, experts] : routing) tap->put(event, experts);
    return RoutingRecording{model_reports.front(), tap};
  }
  void close_recording(const std::shared_ptr<RoutingTap>& closed) override { tap_closed = closed == tap; }
  Result<std::unique_ptr<RouteLane>> open_route(const RouteOpen& open) override {
    if (fault) return *fault;
    route_opened = open;
    return std::unique_ptr<RouteLane>(std::make_unique<FakeLane>(*this));
  }

  // A model of one layer with four experts, of which expert e is in slot 3 - e; expert 3 never comes.
  class FakeLane final : public RouteLane {
   public:
    explicit FakeLane(FakeDaemon& daemon) : daemon_(daemon) {
      geometry_.name = "m";
      geometry_.layers.push_back({.block = 7, .n_experts = 4, .n_slots = 4, .slot_stride = 64, .parts = {}});
    }
    ~FakeLane() override { daemon_.lanes_closed += left_open_ ? 0 : 1; }
    const RouteGeometry& geometry() const override { return geometry_; }
    Status decide(const RouteDecision& decision, const std::function<bool()>& gone,
                  RouteAnswer* out) override {
      if (decision.layer > 0) return Fault{FaultCode::kInvalid, "no such layer"};
      *out = {};
      for (const std::uint32_t expert : decision.experts) {
        while (expert == 3) {
          daemon_.waits_for_three = true;
          if (gone()) return Fault{FaultCode::kNotFound, "the stream has ended"};
        }
        out->slots.push_back(3 - expert);
        out->changed.push_back({expert, static_cast<std::int32_t>(3 - expert)});
      }
      return ok();
    }
    void release() override { ++daemon_.releases; }
    void leave_open() override {
      left_open_ = true;
      ++daemon_.lanes_left_open;
    }

   private:
    FakeDaemon& daemon_;
    RouteGeometry geometry_;
    bool left_open_ = false;
  };
  RouteOpen route_opened;
  std::atomic<bool> waits_for_three = false;
  std::atomic<int> releases = 0, lanes_closed = 0, lanes_left_open = 0;

  std::vector<std::pair<RoutingEvent, std::vector<ExpertIndex>>> routing;  // of every recording
  std::size_t tap_bytes = 1u << 20;
  std::shared_ptr<RoutingTap> tap;
  std::atomic<bool> tap_closed = false;
  StatusReport status_report;
  std::vector<ModelReport> model_reports;
  std::vector<SessionReport> session_reports;
  std::vector<Finding> findings;
  std::vector<PolicyReport> policy_reports;
  std::string policy_tier;
  std::optional<Fault> fault;  // answers every change
  bool status_throws = false;
  std::uint32_t policy_model = 99, dropped = 99;
  std::vector<std::string> registered;
  std::string registered_on;
};

}  // namespace moecached
