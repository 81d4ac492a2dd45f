#include "daemon/ipc/gpu_opener.h"

#include <fcntl.h>

#include <cerrno>
#include <utility>

#include "daemon/ipc/register_model.h"

namespace moecached {

GpuOpener::GpuOpener(const Config& config, Core& core, std::uint64_t boot_epoch, std::function<void()> wake)
    : config_(config), core_(core), boot_epoch_(boot_epoch), wake_(std::move(wake)), thread_([this] {
        run();
      }) {}

GpuOpener::~GpuOpener() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void GpuOpener::submit(Request request) {
  {
    const std::lock_guard lock(mutex_);
    requests_.push_back(std::move(request));
  }
  changed_.notify_one();
}

std::vector<GpuOpener::Done> GpuOpener::take() {
  const std::lock_guard lock(mutex_);
  return std::exchange(done_, {});
}

void GpuOpener::run() {
  for (;;) {
    Request request;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return stopping_ || !requests_.empty(); });
      if (stopping_) return;
      request = std::move(requests_.front());
      requests_.pop_front();
    }
    Done done;
    done.connection = request.connection;
    done.name = request.name;
    done.gpu = request.gpu;
    done.opened = open(request);
    {
      const std::lock_guard lock(mutex_);
      done_.push_back(std::move(done));
    }
    wake_();
  }
}

Result<GpuOpener::Opened> GpuOpener::open_spill(Request& request) {
  if (config_.gpu.mode == GpuMode::kCovered)
    return Fault{FaultCode::kUnsupported, "gpu.mode is covered: no model spills"};
  auto gpu = core_.gpu().find_gpu(request.gpu);
  if (!gpu) return std::move(gpu).error();
  // Makes the GPU's context if it is the first use: on this thread, since the core loop is not to wait for
  // it.
  if (auto memory = (*gpu)->memory_info(); !memory) return std::move(memory).error();
  auto model = register_model(core_, std::move(request.shards), request.name, request.session, *gpu);
  if (!model) return std::move(model).error();
  auto opened = prepare_spill(request.session, *model);
  core_.call([&](Core& core) {
    core.spill_prepared(**model);
    return 0;
  });
  return opened;
}

// This thread alone makes them, so nobody has the model before it is prepared.
Result<GpuOpener::Opened> GpuOpener::prepare_spill(SessionId session,
                                                   const std::shared_ptr<SharedModel>& model) {
  if (VramSlots& device = *model->device(); !device.is_prepared()) {
    if (Status done = device.prepare(model->pool().host_view()); !done) return std::move(done).error();
  }
  auto stream = make_stream_segment(*model);
  if (!stream) return std::move(stream).error();
  auto opened =
      core_.call([&](Core& core) { return core.open_in_session(session, model, *std::move(stream)); });
  if (!opened) return std::move(opened).error();
  Opened out;
  out.spill = model;
  out.stream = *std::move(opened);
  return out;
}

Result<std::shared_ptr<GpuModel>> GpuOpener::make_now(std::vector<UniqueFd> shards, const GpuId& gpu) {
  Request request;
  request.shards = std::move(shards);
  request.gpu = gpu;
  const std::lock_guard lock(making_);
  return make_model(request);
}

Result<GpuOpener::Opened> GpuOpener::open(Request& request) {
  if (request.spill) return open_spill(request);
  Result<std::shared_ptr<GpuModel>> model = Fault{};
  {
    const std::lock_guard lock(making_);
    model = make_model(request);
  }
  if (!model) return std::move(model).error();
  auto log = make_log_segment(**model);
  if (!log) return std::move(log).error();
  auto opened = core_.call([&](Core& core) {
    return core.open_gpu_in_session(request.session, {.model = *model,
                                                      .log = *std::move(log),
                                                      .reads_peers = request.reads_peers,
                                                      .no_peers_reason = request.no_peers_reason});
  });
  if (!opened) return std::move(opened).error();
  auto table = (*model)->share_table();
  if (!table) return std::move(table).error();
  return Opened{*std::move(model), *std::move(opened), *std::move(table), {}, {}};
}

Result<std::shared_ptr<GpuModel>> GpuOpener::make_model(Request& request) {
  auto gpu = core_.gpu().find_gpu(request.gpu);
  if (!gpu) return std::move(gpu).error();
  if (config_.gpu.mode == GpuMode::kSpill) return Fault{FaultCode::kSpill, "gpu.mode is spill"};
  // The SSD tier takes the given descriptors; the layout is read from duplicates.
  std::vector<UniqueFd> readers;
  std::vector<int> fds;
  for (const UniqueFd& shard : request.shards) {
    readers.emplace_back(::fcntl(shard.get(), F_DUPFD_CLOEXEC, 0));
    if (!readers.back()) return system_fault("duplicating a model's descriptor", errno);
    fds.push_back(readers.back().get());
  }
  auto begun = core_.call([&](Core& core) {
    return core.begin_gpu_model(std::move(request.shards), request.gpu, request.session);
  });
  if (!begun) return std::move(begun).error();
  if (begun->existing) return begun->existing;
  Result<std::shared_ptr<GpuModel>> model = Fault{};
  WarmStart warm;
  if (auto layout = read_model_layout(fds, {.direct_alignment = 0}); !layout) {
    model = std::move(layout).error();
  } else if (auto may = core_.call([&](Core& core) {
               return core.may_pin(request.session, layout->expert_bytes_total, begun->ram.get());
             });
             !may) {
    model = std::move(may).error();
  } else {
    // Models that nobody uses make room, the one idle for longest first.
    do {
      model = GpuModel::create({.name = request.name.empty() ? layout->name : request.name,
                                .identity = begun->files.identity,
                                .files = begun->files.files,
                                .layout = *layout,
                                .slots = config_.gpu.slots,
                                .scope = config_.gpu.scope,
                                .place = core_.gpu().place_of(**gpu),
                                .boot_epoch = boot_epoch_,
                                .ram = begun->ram},
                               begun->id, **gpu);
    } while (!model && model.error().code == FaultCode::kLimit &&
             core_.call([](Core& core) { return core.drop_idle_gpu_model(); }));
    if (!model && model.error().code == FaultCode::kLimit && config_.gpu.mode == GpuMode::kAuto)
      model = Fault{FaultCode::kSpill, std::move(model).error().text};
    warm = core_.warmth().load(*layout, begun->files.identity);
  }
  return core_.call(
      [&](Core& core) { return core.finish_gpu_model(begun->files, std::move(model), std::move(warm)); });
}

}  // namespace moecached
