// The running daemon: core loop and handle socket, and what the control plane may ask of them. Thread: any;
// start and stop from the main thread.
#pragma once

#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "daemon/base/result.h"
#include "daemon/config/config.h"
#include "daemon/ipc/core.h"
#include "daemon/ipc/daemon_control.h"
#include "daemon/ipc/handle_server.h"
#include "daemon/ipc/scrubber.h"
#include "daemon/platform/fd.h"
#include "daemon/platform/file_roots.h"

namespace moecached {

class Daemon final : public DaemonControl {
 public:
  // kLimit: another daemon listens on the socket. kInvalid, kSystem: the text says what to do.
  static Result<std::unique_ptr<Daemon>> start(const Config& config);
  ~Daemon() override;

  void stop();
  Status reload(const Config& config);  // the policy; what else may change is main's business

  StatusReport status() override;
  std::vector<ModelReport> models() override;
  std::vector<SessionReport> sessions() override;
  std::vector<Finding> doctor() override;
  Result<std::string> set_policy(const PolicyTarget& target, const std::string& spec) override;
  std::string default_policy() override;
  std::vector<PolicyReport> policies() override;
  Result<std::uint32_t> register_model(const std::vector<std::string>& paths,
                                       const std::string& device = {}) override;
  Status drop_model(std::uint32_t model) override;
  Result<PrewarmReport> prewarm(std::uint32_t model, const std::string& path) override;
  Result<std::uint32_t> shadow_policies(std::uint32_t model, const std::vector<std::string>& specs) override;
  Result<PolicyComparison> compare_policies(std::uint32_t model) override;
  Result<RoutingRecording> open_recording(std::uint32_t model) override;
  void close_recording(const std::shared_ptr<RoutingTap>& tap) override;
  Result<std::unique_ptr<RouteLane>> open_route(const RouteOpen& open) override;

 private:
  Daemon(const Config& config, std::uint64_t boot_epoch, std::unique_ptr<Core> core, FileRoots roots);
  [[nodiscard]] Result<UniqueFd> open_by_name(const std::string& path) const;
  void keep();  // the keeper thread: saves now and then, empties the taps of challengers
  void drain_windows();
  [[nodiscard]] std::string describe_scrub() const;
  void save_warmth();
  const Config config_;
  const std::uint64_t boot_epoch_;
  const std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
  std::unique_ptr<Core> core_;
  std::unique_ptr<Scrubber> scrubber_;  // null: off
  const FileRoots roots_;
  std::unique_ptr<HandleServer> handles_;
  std::mutex keeper_mutex_;
  std::condition_variable keeper_wakes_;
  bool keeper_stops_ = false;  // guarded by keeper_mutex_
  std::mutex saving_mutex_;    // of hot lists
  std::mutex windows_mutex_;
  std::map<std::uint32_t, std::unique_ptr<EventWindow>> windows_;  // by model
  std::thread keeper_;
};

}  // namespace moecached
