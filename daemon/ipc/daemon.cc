#include "daemon/ipc/daemon.h"

#include <fcntl.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <optional>

#include "daemon/base/text.h"
#include "daemon/ipc/policy_loader.h"
#include "daemon/ipc/register_model.h"
#include "daemon/ipc/remote_gpu_lane.h"
#include "daemon/ipc/remote_lane.h"
#include "daemon/warmth/prewarm_source.h"

namespace moecached {

namespace {

// A crash loses what was learnt since; writing it more often would teach nobody anything new.
constexpr std::chrono::minutes kSaveEvery(3);
// The tap of challengers holds some seconds of a fast decode.
constexpr std::chrono::milliseconds kLookEvery(250);

std::uint64_t random_word() {
  std::uint64_t word = 0;
  while (::getrandom(&word, sizeof word, 0) != sizeof word) {
  }
  return word;
}

}  // namespace

Result<std::unique_ptr<Daemon>> Daemon::start(const Config& config) {
  const std::uint64_t boot_epoch = random_word();
  auto roots = FileRoots::open(config.model_roots);
  if (!roots) return std::move(roots).error().with_context("models.roots");
  auto core = Core::create(config, boot_epoch);
  if (!core) return std::move(core).error();
  std::unique_ptr<Daemon> daemon(new Daemon(config, boot_epoch, *std::move(core), *std::move(roots)));
  daemon->core_->start();
  for (const std::string& spec : {config.policy, config.gpu.policy}) {
    Status loaded = load_policy_library(*daemon->core_, config.policy_directory, spec);
    if (loaded) loaded = daemon->core_->call([&](Core& loop) { return loop.check_policy(spec); });
    if (!loaded) return std::move(loaded).error();
  }
  auto handles = HandleServer::start(config, *daemon->core_, daemon->roots_, boot_epoch);
  if (!handles) return std::move(handles).error();
  daemon->handles_ = *std::move(handles);
  if (config.scrub_period_ms > 0) {
    daemon->scrubber_ = std::make_unique<Scrubber>(
        *daemon->core_, Scrubber::Pace{.period_ns = config.scrub_period_ms * 1'000'000,
                                       .bytes_per_second = config.scrub_bytes_per_second});
  }
  daemon->keeper_ = std::thread([raw = daemon.get()] { raw->keep(); });
  return daemon;
}

Daemon::Daemon(const Config& config, std::uint64_t boot_epoch, std::unique_ptr<Core> core, FileRoots roots)
    : config_(config), boot_epoch_(boot_epoch), core_(std::move(core)), roots_(std::move(roots)) {}

Daemon::~Daemon() { stop(); }

void Daemon::stop() {
  handles_.reset();  // no new sessions; it may still call the loop
  scrubber_.reset();
  if (keeper_.joinable()) {
    {
      const std::lock_guard lock(keeper_mutex_);
      keeper_stops_ = true;
    }
    keeper_wakes_.notify_all();
    keeper_.join();
    save_warmth();
  }
  core_->stop();
}

void Daemon::keep() {
  auto saved = std::chrono::steady_clock::now();
  std::unique_lock lock(keeper_mutex_);
  while (!keeper_wakes_.wait_for(lock, kLookEvery, [this] { return keeper_stops_; })) {
    lock.unlock();
    drain_windows();
    if (std::chrono::steady_clock::now() - saved >= kSaveEvery) {
      saved = std::chrono::steady_clock::now();
      save_warmth();
    }
    lock.lock();
  }
}

void Daemon::drain_windows() {
  const std::lock_guard lock(windows_mutex_);
  std::erase_if(windows_,
                [](const auto& each) { return each.second->is_orphan(); });  // models dropped to make room
  for (const auto& [model, window] : windows_) window->drain();
}

Result<std::uint32_t> Daemon::shadow_policies(std::uint32_t wanted, const std::vector<std::string>& specs) {
  auto id = core_->call([&](Core& core) { return core.resolve_model(wanted, "shadow"); });
  if (!id) return std::move(id).error();
  const std::lock_guard lock(windows_mutex_);
  if (specs.empty()) {
    core_->call([&](Core& core) {
      core.stop_shadows(*id);
      return true;
    });
    windows_.erase(*id);
    return *id;
  }
  auto basis = core_->call([&](Core& core) { return core.shadow_basis(*id); });
  if (!basis) return std::move(basis).error();
  const std::size_t n_layers = basis->shape.layers.size();
  auto set = ShadowSet::make(ModelId(*id), std::move(basis->shape), basis->mode, specs);
  if (!set) return std::move(set).error();
  auto window = std::make_unique<EventWindow>((*set)->tap, n_layers);
  if (Status started = core_->call([&](Core& core) { return core.start_shadows(*std::move(set)); }); !started)
    return std::move(started).error();
  windows_[*id] = std::move(window);
  return *id;
}

Result<PolicyComparison> Daemon::compare_policies(std::uint32_t wanted) {
  auto id = core_->call([&](Core& core) { return core.resolve_model(wanted, "compare"); });
  if (!id) return std::move(id).error();
  std::unique_lock lock(windows_mutex_);
  auto snapshot = core_->call([&](Core& core) { return core.shadow_snapshot(*id); });
  if (!snapshot) return std::move(snapshot).error();
  windows_.at(*id)->drain();
  // A copy: the comparison takes seconds, in which the taps must be drained.
  const EventWindow window = *windows_.at(*id);
  lock.unlock();
  PolicyComparison comparison = compare(*snapshot, window);
  comparison.model = *id;
  return comparison;
}

void Daemon::save_warmth() {
  // Taken and written by one at a time: else an older list could come behind a newer one.
  const std::lock_guard lock(saving_mutex_);
  const auto uses = core_->call([](Core& core) { return core.take_uses(); });
  core_->warmth().save(uses);
}

Result<PrewarmReport> Daemon::prewarm(std::uint32_t wanted, const std::string& path) {
  auto id = core_->call([&](Core& core) { return core.resolve_model(wanted, "prewarm"); });
  if (!id) return std::move(id).error();
  const auto shapes = core_->call([&](Core& core) { return core.block_shapes(*id); });
  // On this thread: files are slow, and the loop must not wait for one.
  auto file = open_by_name(path);
  if (!file) return std::move(file).error();
  auto list = read_prewarm_source(file->get(), shapes);
  if (!list) return std::move(list).error().with_context(path);
  PrewarmReport report{.model = *id};
  for (const LayerUses& layer : list->layers)
    report.layers += std::ranges::any_of(layer.counts, [](std::uint64_t count) { return count > 0; }) ? 1 : 0;
  auto experts = core_->call([&](Core& core) { return core.prewarm(*id, *list); });
  if (!experts) return std::move(experts).error();
  report.experts = *experts;
  return report;
}

Status Daemon::reload(const Config& config) {
  auto set = set_policy({}, config.policy);
  if (!set) return std::move(set).error();
  return ok();
}

StatusReport Daemon::status() {
  StatusReport report = core_->call([](Core& core) { return core.status_report(); });
  report.version = MOECACHED_VERSION;
  report.pid = static_cast<std::uint32_t>(::getpid());
  report.uptime_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - started_).count();
  report.control_socket = config_.control_socket;
  report.handle_socket = config_.handle_socket;
  report.scrub = describe_scrub();
  return report;
}

std::string Daemon::describe_scrub() const {
  if (!scrubber_) return "off";
  const std::uint64_t period_s = config_.scrub_period_ms / 1000;
  const std::uint64_t round_s = scrubber_->round_ns() / 1'000'000'000;
  std::string text = "each slot every " + std::to_string(std::max(round_s, period_s)) + " s";
  if (round_s > period_s + period_s / 8)
    text += " (scrub.rate is too low for " + std::to_string(period_s) + " s)";
  return text;
}

std::vector<ModelReport> Daemon::models() {
  return core_->call([](Core& core) { return core.model_reports(); });
}

std::vector<SessionReport> Daemon::sessions() {
  return core_->call([](Core& core) { return core.session_reports(); });
}

std::vector<Finding> Daemon::doctor() {
  return core_->call([](Core& core) { return core.findings(); });
}

Result<std::string> Daemon::set_policy(const PolicyTarget& target, const std::string& spec) {
  if (Status loaded = load_policy_library(*core_, config_.policy_directory, spec); !loaded)
    return std::move(loaded).error();
  return core_->call([&](Core& core) { return core.set_policy(target, spec); });
}

std::vector<PolicyReport> Daemon::policies() {
  return core_->call([](Core& core) { return core.policy_reports(); });
}

std::string Daemon::default_policy() {
  return core_->call([](Core& core) { return core.default_policy(); });
}

// As the daemon's user. Without waiting: a FIFO is no file. With roots, what is outside of them and what
// there is none of are told alike.
Result<UniqueFd> Daemon::open_by_name(const std::string& path) const {
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (roots_.any() && (!fd || !roots_.check(fd.get())))
    return Fault{FaultCode::kInvalid, path + " is no readable file beneath models.roots"};
  if (fd) return fd;
  Fault fault = system_fault("open " + path, errno);
  if (errno == ENOENT) fault.code = FaultCode::kNotFound;
  return fault;
}

Result<std::uint32_t> Daemon::register_model(const std::vector<std::string>& paths,
                                             const std::string& device) {
  const std::optional<GpuId> gpu = parse_gpu_id(device);
  if (!device.empty() && !gpu)
    return Fault{FaultCode::kInvalid, in_quotes(device) + " is no UUID of a GPU, as nvidia-smi -L prints it"};
  if (paths.empty() || paths.size() > MOECACHED_MAX_FILES) {
    return Fault{FaultCode::kInvalid, std::to_string(paths.size()) + " files given; a model has 1 to " +
                                          std::to_string(MOECACHED_MAX_FILES)};
  }
  std::vector<UniqueFd> shards;
  for (const std::string& path : paths) {
    auto shard = open_by_name(path);
    if (!shard) return std::move(shard).error();
    shards.push_back(*std::move(shard));
  }
  if (gpu) {
    auto model = handles_->register_gpu_model(std::move(shards), *gpu);
    if (!model) return std::move(model).error().with_context(paths.front());
    return (*model)->id().value;
  }
  auto model = moecached::register_model(*core_, std::move(shards), {}, SessionId());
  if (!model) return std::move(model).error().with_context(paths.front());
  return (*model)->id().value;
}

Result<RoutingRecording> Daemon::open_recording(std::uint32_t model) {
  return core_->call([&](Core& core) { return core.open_recording(model); });
}

void Daemon::close_recording(const std::shared_ptr<RoutingTap>& tap) {
  core_->call([&](Core& core) {
    core.close_recording(tap);
    return true;
  });
}

Result<std::unique_ptr<RouteLane>> Daemon::open_route(const RouteOpen& open) {
  auto model = core_->call([&](Core& core) { return core.find_route_model(open.model); });
  if (!model) return std::move(model).error();
  const bool wants_device = open.memory == RouteMemory::kCudaIpc;
  if (model->gpu) {
    if (!wants_device) {
      return Fault{FaultCode::kUnsupported,
                   "the model is on a GPU: route to it with ROUTE_MEMORY_CUDA_IPC, or by the handle socket"};
    }
    return RemoteGpuLane::open(*core_, {.boot_epoch = boot_epoch_, .keep_free = config_.gpu.keep_free},
                               std::move(model->gpu), open);
  }
  if (wants_device) {
    return Fault{FaultCode::kUnsupported,
                 "the model is in RAM: register it with the GPU as device for ROUTE_MEMORY_CUDA_IPC"};
  }
  return RemoteLane::open(*core_, boot_epoch_, std::move(model->ram), open);
}

Status Daemon::drop_model(std::uint32_t model) {
  Status dropped = core_->call([&](Core& core) { return core.drop_model(model); });
  if (!dropped) return dropped;
  save_warmth();
  const std::lock_guard lock(windows_mutex_);
  windows_.erase(model);
  return dropped;
}

}  // namespace moecached
