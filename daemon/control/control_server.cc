#include "daemon/control/control_server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/impl/server_builder_option.h>
#include <grpcpp/impl/server_builder_plugin.h>
#include <grpcpp/resource_quota.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <vector>

#include "daemon/base/check.h"
#include "daemon/control/fault_status.h"
#include "daemon/control/route_streams.h"
#include "daemon/control/translate.h"
#include "proto/control/v1/control.grpc.pb.h"
#include "proto/control/v1/unix_target.h"

namespace moecached {
namespace {

using namespace control::v1;  // NOLINT(google-build-using-namespace): the messages are this file's vocabulary
using GrpcStatus = grpc::Status;

constexpr std::uint32_t kWatchIntervalMsDefault = 1000;
constexpr std::uint32_t kWatchIntervalMsMin = 100;
constexpr std::uint32_t kWatchIntervalMsMax = 3'600'000;

struct WatcherCount {
  explicit WatcherCount(std::atomic<std::uint32_t>& counted)
      : counter(counted), before(counted.fetch_add(1)) {}
  ~WatcherCount() { counter.fetch_sub(1); }
  WatcherCount(const WatcherCount&) = delete;
  WatcherCount& operator=(const WatcherCount&) = delete;
  std::atomic<std::uint32_t>& counter;
  const std::uint32_t before;
};

// The reflection library switches itself on in a static constructor; this takes it out again.
class WithoutReflection final : public grpc::ServerBuilderOption {
 public:
  void UpdateArguments(grpc::ChannelArguments*) override {}
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) override {
    std::erase_if(*plugins, [](const std::unique_ptr<grpc::ServerBuilderPlugin>& plugin) {
      return dynamic_cast<grpc::reflection::ProtoServerReflectionPlugin*>(plugin.get()) != nullptr;
    });
  }
};

class ControlService final : public Control::Service {
 public:
  ControlService(DaemonControl& daemon, const ControlServerOptions& options)
      : daemon_(daemon), max_watchers_(options.max_watchers), routes_(daemon, options.max_route_streams) {}

  // Watchers and streams end at once; each holds a thread that Shutdown would otherwise wait for until its
  // deadline.
  void end_watchers() {
    routes_.end();
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    stop_requested_.notify_all();
  }

  GrpcStatus GetStatus(grpc::ServerContext* context, const GetStatusRequest*,
                       control::v1::Status* response) override {
    return answer(context, [&] {
      translate(daemon_.status(), response);
      return GrpcStatus::OK;
    });
  }

  GrpcStatus ListModels(grpc::ServerContext* context, const ListModelsRequest*,
                        ListModelsResponse* response) override {
    return answer(context, [&] {
      for (const ModelReport& model : daemon_.models()) translate(model, response->add_models());
      return GrpcStatus::OK;
    });
  }

  GrpcStatus ListSessions(grpc::ServerContext* context, const ListSessionsRequest*,
                          ListSessionsResponse* response) override {
    return answer(context, [&] {
      for (const SessionReport& session : daemon_.sessions()) translate(session, response->add_sessions());
      return GrpcStatus::OK;
    });
  }

  GrpcStatus GetStats(grpc::ServerContext* context, const GetStatsRequest*, Stats* response) override {
    return answer(context, [&] {
      take_snapshot(response);
      return GrpcStatus::OK;
    });
  }

  GrpcStatus WatchStats(grpc::ServerContext* context, const WatchStatsRequest* request,
                        grpc::ServerWriter<Stats>* writer) override {
    return answer(context, [&] { return watch(context, *request, writer); });
  }

  GrpcStatus Doctor(grpc::ServerContext* context, const DoctorRequest*, DoctorResponse* response) override {
    return answer(context, [&] {
      for (const moecached::Finding& finding : daemon_.doctor()) translate(finding, response->add_findings());
      return GrpcStatus::OK;
    });
  }

  GrpcStatus GetPolicy(grpc::ServerContext* context, const GetPolicyRequest* request,
                       Policy* response) override {
    return answer(context, [&]() -> GrpcStatus {
      response->set_model(request->model());
      if (request->model() == 0) {
        response->set_spec(daemon_.default_policy());
        return GrpcStatus::OK;
      }
      for (const ModelReport& model : daemon_.models()) {
        if (model.id != request->model()) continue;
        response->set_spec(model.policy);
        return GrpcStatus::OK;
      }
      return {grpc::StatusCode::NOT_FOUND, "there is no model " + std::to_string(request->model())};
    });
  }

  GrpcStatus SetPolicy(grpc::ServerContext* context, const SetPolicyRequest* request,
                       Policy* response) override {
    return answer(context, [&] {
      const Result<std::string> parsed =
          daemon_.set_policy({.model = request->model(), .tier = request->tier()}, request->spec());
      if (!parsed) return status_of(parsed.error());
      response->set_model(request->model());
      response->set_tier(request->tier());
      response->set_spec(*parsed);
      return GrpcStatus::OK;
    });
  }

  GrpcStatus ListPolicies(grpc::ServerContext* context, const ListPoliciesRequest*,
                          ListPoliciesResponse* response) override {
    return answer(context, [&] {
      for (const PolicyReport& policy : daemon_.policies()) translate(policy, response->add_policies());
      return GrpcStatus::OK;
    });
  }

  GrpcStatus RegisterModel(grpc::ServerContext* context, const RegisterModelRequest* request,
                           RegisterModelResponse* response) override {
    return answer(context, [&]() -> GrpcStatus {
      if (request->paths().empty()) return {grpc::StatusCode::INVALID_ARGUMENT, "no path was given"};
      const std::vector<std::string> paths(request->paths().begin(), request->paths().end());
      for (const std::string& path : paths) {
        // The daemon's working directory is not the caller's. A NUL would cut the path that the kernel sees.
        if (path.empty() || path[0] != '/' || path.find('\0') != std::string::npos) {
          return {grpc::StatusCode::INVALID_ARGUMENT, "\"" + path + "\" is not an absolute path"};
        }
      }
      const Result<std::uint32_t> model = daemon_.register_model(paths, request->device());
      // A file that cannot be opened is the caller's to mend, and no failure of the daemon.
      if (!model && model.error().code == FaultCode::kSystem) {
        return {grpc::StatusCode::FAILED_PRECONDITION, model.error().text};
      }
      if (!model) return status_of(model.error());
      response->set_model(*model);
      return GrpcStatus::OK;
    });
  }

  GrpcStatus ShadowPolicies(grpc::ServerContext* context, const ShadowPoliciesRequest* request,
                            ShadowPoliciesResponse* response) override {
    return answer(context, [&] {
      const std::vector<std::string> specs(request->specs().begin(), request->specs().end());
      const Result<std::uint32_t> model = daemon_.shadow_policies(request->model(), specs);
      if (!model) return status_of(model.error());
      response->set_model(*model);
      return GrpcStatus::OK;
    });
  }

  GrpcStatus ComparePolicies(grpc::ServerContext* context, const ComparePoliciesRequest* request,
                             control::v1::PolicyComparison* response) override {
    return answer(context, [&] {
      const Result<moecached::PolicyComparison> comparison = daemon_.compare_policies(request->model());
      if (!comparison) return status_of(comparison.error());
      translate(*comparison, response);
      return GrpcStatus::OK;
    });
  }

  GrpcStatus Prewarm(grpc::ServerContext* context, const PrewarmRequest* request,
                     PrewarmResponse* response) override {
    return answer(context, [&]() -> GrpcStatus {
      const std::string& path = request->path();
      if (path.empty() || path[0] != '/' || path.find('\0') != std::string::npos)
        return {grpc::StatusCode::INVALID_ARGUMENT, "\"" + path + "\" is not an absolute path"};
      const Result<PrewarmReport> report = daemon_.prewarm(request->model(), path);
      // A file that cannot be opened is the caller's to mend, and no failure of the daemon.
      if (!report && report.error().code == FaultCode::kSystem)
        return {grpc::StatusCode::FAILED_PRECONDITION, report.error().text};
      if (!report) return status_of(report.error());
      response->set_model(report->model);
      response->set_layers(report->layers);
      response->set_experts(report->experts);
      return GrpcStatus::OK;
    });
  }

  GrpcStatus RecordRouting(grpc::ServerContext* context, const RecordRoutingRequest* request,
                           grpc::ServerWriter<RoutingChunk>* writer) override {
    return answer(context, [&] { return record(context, request->model(), writer); });
  }

  GrpcStatus Route(grpc::ServerContext* context, RouteStreams::Stream* stream) override {
    return answer(context, [&] { return routes_.serve(context, stream); });
  }

  GrpcStatus DropModel(grpc::ServerContext* context, const DropModelRequest* request,
                       DropModelResponse*) override {
    return answer(context, [&] {
      const moecached::Status dropped = daemon_.drop_model(request->model());
      return dropped ? GrpcStatus::OK : status_of(dropped.error());
    });
  }

 private:
  // Where exceptions of the libraries stop, and where a call that came too late ends before it costs the core
  // anything.
  template <typename Handler>
  GrpcStatus answer(grpc::ServerContext* context, Handler handler) {
    if (context->IsCancelled())
      return {grpc::StatusCode::CANCELLED, "the call's deadline passed before it was served"};
    try {
      return handler();
    } catch (const std::exception& error) {
      return {grpc::StatusCode::INTERNAL, error.what()};
    }
  }

  void take_snapshot(Stats* out) {
    const std::vector<ModelReport> models = daemon_.models();
    const std::vector<SessionReport> sessions = daemon_.sessions();
    // Last: its uptime is the snapshot's time, and rates are better a little low than infinite.
    const StatusReport status = daemon_.status();
    translate(StatsSource{.status = status, .models = models, .sessions = sessions}, out);
  }

  GrpcStatus watch(grpc::ServerContext* context, const WatchStatsRequest& request,
                   grpc::ServerWriter<Stats>* writer) {
    const std::uint32_t interval_ms =
        request.interval_ms() == 0 ? kWatchIntervalMsDefault : request.interval_ms();
    if (interval_ms < kWatchIntervalMsMin || interval_ms > kWatchIntervalMsMax) {
      return {grpc::StatusCode::INVALID_ARGUMENT,
              "interval_ms is " + std::to_string(interval_ms) + ": it must be between " +
                  std::to_string(kWatchIntervalMsMin) + " and " + std::to_string(kWatchIntervalMsMax)};
    }
    const WatcherCount count(watchers_);
    if (count.before >= max_watchers_) return too_many_watchers(count.before);
    std::unique_lock lock(mutex_);
    // A synchronous handler is not told of a cancelled call, so it looks now and then.
    constexpr std::chrono::milliseconds kCancelCheck(100);
    auto due = std::chrono::steady_clock::now();
    while (!stopping_) {
      lock.unlock();
      Stats snapshot;
      take_snapshot(&snapshot);
      const bool written = writer->Write(snapshot);
      lock.lock();
      if (!written) return {grpc::StatusCode::CANCELLED, "the watcher went away"};
      due = std::max(due + std::chrono::milliseconds(interval_ms), std::chrono::steady_clock::now());
      while (!stopping_ && std::chrono::steady_clock::now() < due) {
        if (context->IsCancelled()) return {grpc::StatusCode::CANCELLED, "the watcher went away"};
        stop_requested_.wait_until(lock, std::min(due, std::chrono::steady_clock::now() + kCancelCheck));
      }
    }
    return {grpc::StatusCode::UNAVAILABLE, "the daemon is stopping"};
  }

  // Looks at the buffer now and then instead of being woken: the core loop then has nothing to do for a
  // recording but to fill it.
  GrpcStatus record(grpc::ServerContext* context, std::uint32_t model,
                    grpc::ServerWriter<RoutingChunk>* writer) {
    constexpr int kEventsPerChunk = 2000;
    constexpr std::chrono::milliseconds kLook(10);
    constexpr int kLooksPerEmptyChunk =
        5;  // which finds out that the reader went away, and tells it the time
    const WatcherCount count(watchers_);
    if (count.before >= max_watchers_) return too_many_watchers(count.before);
    Result<RoutingRecording> opened = daemon_.open_recording(model);
    if (!opened) return status_of(opened.error());
    const std::shared_ptr<RoutingTap> tap = opened->tap;
    const std::unique_ptr<RoutingTap, std::function<void(RoutingTap*)>> closes(
        tap.get(), [&](RoutingTap*) { daemon_.close_recording(tap); });
    RoutingChunk chunk;
    translate(opened->model, chunk.mutable_model());
    moecached::RoutingEvent event;
    std::vector<std::uint32_t> experts;
    std::unique_lock lock(mutex_);
    for (int looks = kLooksPerEmptyChunk;; ++looks) {
      const bool last = stopping_;
      lock.unlock();
      chunk.set_drained(true);
      while (tap->take(&event, &experts)) {
        translate(event, experts, chunk.add_events());
        if (chunk.events_size() < kEventsPerChunk) continue;
        chunk.set_drained(false);
        break;
      }
      if (chunk.events_size() > 0 || looks >= kLooksPerEmptyChunk || last) {
        looks = 0;
        chunk.set_dropped(tap->dropped());
        const bool written = writer->Write(chunk);
        if (!written || context->IsCancelled())
          return {grpc::StatusCode::CANCELLED, "the recorder went away"};
      }
      const bool more = !chunk.drained();
      chunk.Clear();
      if (last && !more) return GrpcStatus::OK;
      lock.lock();
      if (!more && !stopping_) stop_requested_.wait_for(lock, kLook);
    }
  }

  static GrpcStatus too_many_watchers(std::uint32_t n) {
    return {
        grpc::StatusCode::RESOURCE_EXHAUSTED,
        "there are " + std::to_string(n) + " watchers already, which is the limit: end one or use GetStats"};
  }

  DaemonControl& daemon_;
  const std::uint32_t max_watchers_;
  std::mutex mutex_;
  std::condition_variable stop_requested_;
  bool stopping_ = false;  // guarded by mutex_
  std::atomic<std::uint32_t> watchers_ = 0;
  RouteStreams routes_;
};

class GrpcControlServer final : public ControlServer {
 public:
  GrpcControlServer(const ControlServerOptions& options, DaemonControl& daemon)
      : socket_(options.socket), service_(daemon, options) {}
  ~GrpcControlServer() override { stop(std::chrono::milliseconds(0)); }

  moecached::Status listen(const ControlServerOptions& options) {
    // A process-wide switch that the next BuildAndStart reads.
    grpc::EnableDefaultHealthCheckService(true);

    grpc::ResourceQuota quota("moecached-control");
    const auto max_threads = static_cast<int>(options.max_threads + options.max_route_streams);
    quota.SetMaxThreads(max_threads);
    grpc::ServerBuilder builder;
    builder.SetResourceQuota(quota)
        .SetMaxReceiveMessageSize(static_cast<int>(options.max_request_bytes))
        .SetSyncServerOption(grpc::ServerBuilder::NUM_CQS, 1)
        .SetSyncServerOption(grpc::ServerBuilder::MIN_POLLERS, 1)
        .SetSyncServerOption(grpc::ServerBuilder::MAX_POLLERS, 2)
        .AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, max_threads)
        .RegisterService(&service_);
    if (options.reflection) {
      grpc::reflection::InitProtoReflectionServerBuilderPlugin();  // no effect where the constructor has done
                                                                   // it
    } else {
      builder.SetOption(std::make_unique<WithoutReflection>());
    }
    int bound = 0;
    builder.AddListeningPort(control::unix_target(options.socket), grpc::InsecureServerCredentials(), &bound);

    // Between bind and chmod the file has the mode that the umask leaves: nobody but this user until the
    // group is set.
    const mode_t umask_before = ::umask(0177);
    server_ = builder.BuildAndStart();
    ::umask(umask_before);
    if (server_ == nullptr || bound == 0) {
      return Fault{FaultCode::kSystem, "cannot listen on " + options.socket +
                                           ": does its directory exist, and may this user write there?"};
    }
    moecached::Status access = apply_socket_access(options.socket, options.access);
    if (!access) return access;
    if (auto* health = server_->GetHealthCheckService(); health != nullptr) {
      health->SetServingStatus(Control::service_full_name(), true);
    }
    return ok();
  }

  void stop(std::chrono::milliseconds deadline) override {
    if (server_ == nullptr) return;
    if (auto* health = server_->GetHealthCheckService(); health != nullptr) health->SetServingStatus(false);
    service_.end_watchers();
    server_->Shutdown(std::chrono::system_clock::now() + deadline);
    server_->Wait();
    server_.reset();
    ::unlink(socket_.c_str());
  }

 private:
  const std::string socket_;
  ControlService service_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace

Result<std::unique_ptr<ControlServer>> ControlServer::start(const ControlServerOptions& options,
                                                            DaemonControl& daemon) {
  CHECK(options.max_watchers < options.max_threads);
  const Result<std::optional<std::string>> owner = socket_owner(options.socket);
  if (!owner) return Fault(owner.error());
  if (owner->has_value()) {
    return Fault{FaultCode::kLimit,
                 **owner + " already listens on " + options.socket + ": stop it or choose another socket"};
  }
  auto server = std::make_unique<GrpcControlServer>(options, daemon);
  moecached::Status listening = server->listen(options);
  if (!listening) return std::move(listening).error();
  return std::unique_ptr<ControlServer>(std::move(server));
}

}  // namespace moecached
