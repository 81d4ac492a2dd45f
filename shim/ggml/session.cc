#include "shim/ggml/session.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "shim/ggml/gpu_model.h"
#include "shim/ggml/log.h"
#include "shim/ggml/model.h"
#include "shim/ggml/spill_model.h"

namespace moecached::shim {
namespace {

std::string file_identity(const std::string& path) {
  struct stat status;
  if (stat(path.c_str(), &status) != 0) return path;
  return std::to_string(status.st_dev) + ":" + std::to_string(status.st_ino) + ":" +
         std::to_string(status.st_size) + ":" + std::to_string(status.st_mtim.tv_sec) + "." +
         std::to_string(status.st_mtim.tv_nsec);
}

void add(moecached_counters& sum, const moecached_counters& more) {
  sum.lookups += more.lookups;
  sum.hits += more.hits;
  sum.leases += more.leases;
  sum.streamed_experts += more.streamed_experts;
  sum.fallback_reads += more.fallback_reads;
  sum.fallback_bytes += more.fallback_bytes;
  sum.dropped_records += more.dropped_records;
  sum.reconnects += more.reconnects;
}

// opened: std::vector<Session::Open<T>>; open: returns std::shared_ptr<T>, or null and a sentence in `error`.
template <typename List, typename Function>
auto find_or_open(List& opened, const std::string& path, std::string& error, Function open) {
  std::vector<std::string> paths = shard_paths(path);
  const std::string key = file_identity(paths.front());
  std::erase_if(opened, [](const auto& entry) { return entry.model.expired(); });
  for (const auto& entry : opened) {
    if (entry.key != key) continue;
    if (auto model = entry.model.lock()) return model;
  }
  auto model = open(std::move(paths), error);
  if (model != nullptr) opened.push_back({key, model});
  return model;
}

// Programs that leave without freeing their contexts still leave their figures.
__attribute__((destructor)) void write_stats_at_exit() { Session::instance().write_stats(); }

}  // namespace

Session& Session::instance() {
  static Session* session = new Session;  // never destroyed, see the header
  return *session;
}

std::string Session::open() {
  const std::lock_guard lock(models_mutex_);
  if (session_ != nullptr) return "";
  const moecached_status status = moecached_session_open(nullptr, nullptr, &session_);
  if (status == MOECACHED_OK) return "";
  session_ = nullptr;
  std::string reason = moecached_last_error();
  if (status == MOECACHED_E_UNAVAILABLE) {
    if (!reason.ends_with('?') && !reason.ends_with('.')) reason += '.';
    reason += " Start `moecached`, or put `moecachectl run --` in front of the command.";
  }
  return reason;
}

void Session::before_graph() {
  if (session_ == nullptr || moecached_session_connected(session_) != 0) return;
  std::unique_lock whole(graphs_, std::try_to_lock);
  if (!whole.owns_lock()) return;  // another graph is running; it or the next one will try
  if (moecached_session_reconnect(session_) != MOECACHED_OK) return;
  const std::lock_guard lock(models_mutex_);
  for (const Open<Model>& open : models_) {
    if (const std::shared_ptr<Model> model = open.model.lock()) model->refresh();
  }
}

std::shared_ptr<Model> Session::model(const std::string& path) {
  const std::lock_guard lock(models_mutex_);
  std::string error;
  const auto open = [this](std::vector<std::string> paths, std::string& reason) {
    return Model::open(session_, std::move(paths), reason);
  };
  std::shared_ptr<Model> model = find_or_open(models_, path, error, open);
  if (model == nullptr) {
    say("%s is not served: %s; its experts are kept in this process", path.c_str(), error.c_str());
  }
  return model;
}

std::shared_ptr<GpuExperts> Session::gpu_experts(const std::string& path) {
  const std::lock_guard lock(models_mutex_);
  if (std::find(refused_on_gpu_.begin(), refused_on_gpu_.end(), path) != refused_on_gpu_.end())
    return nullptr;
  std::string error;
  bool spills = false;
  const auto open = [&](std::vector<std::string> paths, std::string& reason) {
    return GpuExperts::open(session_, std::move(paths), gpu_.load(std::memory_order_relaxed), reason,
                            &spills);
  };
  std::shared_ptr<GpuExperts> experts = find_or_open(gpu_experts_, path, error, open);
  if (experts == nullptr && spills) {
    debug("%s is to spill: %s", path.c_str(), error.c_str());
    to_spill_.push_back(path);
    refused_on_gpu_.push_back(path);
  } else if (experts == nullptr) {
    say("%s is not served on the GPU: %s; its experts are computed on the CPU", path.c_str(), error.c_str());
    refused_on_gpu_.push_back(path);
  }
  return experts;
}

std::shared_ptr<SpillExperts> Session::spill_experts(const std::string& path) {
  const std::lock_guard lock(models_mutex_);
  if (std::find(to_spill_.begin(), to_spill_.end(), path) == to_spill_.end()) return nullptr;
  std::string error;
  const auto open = [this](std::vector<std::string> paths, std::string& reason) {
    return SpillExperts::open(session_, std::move(paths), gpu_.load(std::memory_order_relaxed), reason);
  };
  std::shared_ptr<SpillExperts> experts = find_or_open(spill_experts_, path, error, open);
  if (experts == nullptr) {
    say("%s is not served on the GPU: %s; its experts are computed on the CPU", path.c_str(), error.c_str());
    std::erase(to_spill_, path);
  }
  if (experts != nullptr) has_spilled_.store(true, std::memory_order_relaxed);
  return experts;
}

void Session::absorb(const moecached_counters& counters) {
  const std::lock_guard lock(closed_mutex_);
  add(closed_, counters);
}

void Session::write_stats() {
  const char* path = std::getenv("MOECACHED_STATS_FILE");
  const uint64_t graphs = counters_.graphs.load();
  if (path == nullptr || *path == '\0') return;
  const std::lock_guard lock(models_mutex_);
  if (graphs == graphs_written_) return;
  graphs_written_ = graphs;
  moecached_counters sum;
  {
    const std::lock_guard closed_lock(closed_mutex_);
    sum = closed_;
  }
  for (const Open<Model>& open : models_) {
    if (const std::shared_ptr<Model> model = open.model.lock()) add(sum, model->counters());
  }
  for (const Open<SpillExperts>& open : spill_experts_) {
    const std::shared_ptr<SpillExperts> experts = open.model.lock();
    if (experts == nullptr) continue;
    for (const moecached_counters& counters : experts->counters()) add(sum, counters);
  }
  std::FILE* file = std::fopen(path, "ae");
  if (file == nullptr) {
    say("MOECACHED_STATS_FILE=%s cannot be written: %s", path, std::strerror(errno));
    return;
  }
  std::fprintf(
      file,
      "{\"pid\":%d,\"graphs\":%llu,\"lookups\":%llu,\"hits\":%llu,\"leases\":%llu,\"streamed_experts\":%llu,"
      "\"fallback_reads\":%llu,\"fallback_bytes\":%llu,\"dropped_records\":%llu,\"reconnects\":%llu,"
      "\"cut_layers\":%llu,\"waves\":%llu,\"gpu_computes\":%llu,\"gpu_plans\":%llu,\"gpu_fetches\":%llu,"
      "\"gpu_waits\":%llu}\n",
      static_cast<int>(getpid()), static_cast<unsigned long long>(graphs),
      static_cast<unsigned long long>(sum.lookups), static_cast<unsigned long long>(sum.hits),
      static_cast<unsigned long long>(sum.leases), static_cast<unsigned long long>(sum.streamed_experts),
      static_cast<unsigned long long>(sum.fallback_reads),
      static_cast<unsigned long long>(sum.fallback_bytes),
      static_cast<unsigned long long>(sum.dropped_records), static_cast<unsigned long long>(sum.reconnects),
      static_cast<unsigned long long>(counters_.cut_layers.load()),
      static_cast<unsigned long long>(counters_.waves.load()),
      static_cast<unsigned long long>(counters_.gpu_computes.load()),
      static_cast<unsigned long long>(counters_.gpu_plans.load()),
      static_cast<unsigned long long>(counters_.gpu_fetches.load()),
      static_cast<unsigned long long>(counters_.gpu_waits.load()));
  std::fclose(file);
}

}  // namespace moecached::shim
