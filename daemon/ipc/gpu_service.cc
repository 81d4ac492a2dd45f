#include "daemon/ipc/gpu_service.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/ipc/gpu_service_state.h"
#include "daemon/platform/clock.h"

namespace moecached {
namespace {

constexpr std::uint64_t kActiveForNs = 50'000'000;

bool is_set(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value == '1';
}

// For sessions to come: the same files, and nothing went wrong with them.
bool is_usable(const GpuModel& model, std::span<const FileIdentity> identity) {
  return !model.changed_on_disk && model.load_state() != MOECACHED_LOAD_FAILED &&
         model.load_state() != MOECACHED_GPU_LOST && std::ranges::equal(model.identity(), identity);
}

}  // namespace

// -------------------------------------------------------------------------------------------------- set up

GpuService::GpuService(const Config& config, std::vector<std::unique_ptr<Gpu>> gpus,
                       std::string no_gpu_reason, ReadTable& reads, RoutingTaps& taps,
                       const PolicyLibraries& libraries, UseCounts& uses, Shadows& shadows)
    : config_(config),
      no_gpu_reason_(config.gpu.devices == "none" ? "gpu.devices is none" : std::move(no_gpu_reason)),
      reads_(reads),
      taps_(taps),
      uses_(uses),
      shadows_(shadows),
      brain_(&libraries),
      test_no_grace_(is_set("MOECACHED_TEST_NO_GRACE")),
      test_churn_(is_set("MOECACHED_TEST_CHURN")),
      test_spoil_(is_set("MOECACHED_TEST_SPOIL")) {
  for (std::unique_ptr<Gpu>& gpu : gpus) {
    const std::string uuid = to_string(gpu->id());
    if (config.gpu.devices != "auto" && config.gpu.devices.find(uuid) == std::string::npos) continue;
    devices_.push_back(std::make_unique<Device>());
    devices_.back()->gpu = std::move(gpu);
  }
  find_groups();
  if (test_no_grace_)
    spdlog::error("MOECACHED_TEST_NO_GRACE: slots are reused while in use, results are wrong");
}

GpuService::~GpuService() {
  // The queues' threads end before the memory that they copy into.
  for (const auto& device : devices_) device->queue.reset();
}

Result<Gpu*> GpuService::find_gpu(const GpuId& id) const {
  std::string known;
  for (const auto& device : devices_) {
    if (device->gpu->id() == id) return device->gpu.get();
    known.append(known.empty() ? "" : ", ").append(to_string(device->gpu->id()));
  }
  return Fault{FaultCode::kNotFound,
               "this daemon does not serve " + to_string(id) + ": " +
                   (known.empty() ? "it serves no GPU (" + no_gpu_reason_ + ")" : "it serves " + known)};
}

GpuService::Device& GpuService::device_of(const GpuModel& model) {
  for (const auto& device : devices_) {
    if (device->gpu.get() == &model.gpu()) return *device;
  }
  CHECK(false);
  std::abort();
}

GpuService::Entry* GpuService::find_entry(ModelId id) {
  const auto found = models_.find(id.value);
  return found == models_.end() ? nullptr : found->second.get();
}

std::shared_ptr<GpuModel> GpuService::find_model(std::span<const FileIdentity> identity,
                                                 const GpuId& gpu) const {
  for (const auto& [id, entry] : models_) {
    if (entry->model->gpu().id() == gpu && is_usable(*entry->model, identity)) return entry->model;
  }
  return nullptr;
}

std::shared_ptr<ExpertRam> GpuService::find_ram(std::span<const FileIdentity> identity) const {
  for (const auto& [id, entry] : models_) {
    if (is_usable(*entry->model, identity)) return entry->model->shared_ram();
  }
  return nullptr;
}

std::shared_ptr<GpuModel> GpuService::find_model(std::uint32_t id) const {
  const auto found = models_.find(id);
  return found == models_.end() ? nullptr : found->second->model;
}

Status GpuService::add_model(const std::shared_ptr<GpuModel>& model, const WarmStart& warm) {
  Device& device = device_of(*model);
  if (!device.queue) {
    auto rate = device.gpu->measure_copy_rate();
    if (!rate) return std::move(rate).error();
    auto queue = device.gpu->create_queue();
    if (!queue) return std::move(queue).error();
    device.queue = *std::move(queue);
    device.budget =
        UploadBudget({.link_rate = *rate, .max_slowdown = config_.gpu.max_slowdown_percent / 100.0});
    spdlog::info("gpu {} ({}): pinned memory is copied at {:.1f} GB/s", to_string(device.gpu->id()),
                 device.gpu->name(), *rate / 1e9);
  }
  auto entry = std::make_unique<Entry>();
  entry->model = model;
  entry->device = &device;
  entry->policy = config_.gpu.policy;
  entry->scope = config_.gpu.scope;
  entry->seen.assign(model->layout().layers.size(), 0);
  entry->n_open.assign(model->layout().layers.size(), 0);
  entry->all_resident.assign(model->layout().layers.size(), 0);
  entry->publishing.assign(model->layout().layers.size(), 0);
  for (const LayerLayout& layer : model->layout().layers) entry->is_stale.emplace_back(layer.n_experts, 0);
  entry->load_begun_ns = monotonic_ns();
  for (const LayerLayout& layer : model->layout().layers) {
    if (marks_.size() < layer.n_experts) marks_.resize(layer.n_experts);
  }
  if (!std::exchange(model->ram().load_begun, true)) {
    model->for_each_load([&](std::span<const PartRead> parts) {
      reads_.start(BulkRead{.owner = model, .tag = model->id().value}, parts);
    });
  } else if (model->ram().state != MOECACHED_LOADING) {  // else with the one that loads it
    model->set_load_state(model->ram().state);
  }
  uses_.add_model(model->id(), warm.key, model->name(), shapes_of(model->layout()), warm.lists);
  if (!warm.lists.empty()) entry->warm = sum_of(warm.lists);
  models_[model->id().value] = std::move(entry);
  return ok();
}

void GpuService::load_done(const ReadTable::BulkDone& done) {
  Entry* entry = find_entry(ModelId(static_cast<std::uint32_t>(done.read.tag)));
  if (entry == nullptr) return;
  GpuModel& model = *entry->model;
  ExpertRam& ram = model.ram();
  --ram.loads_left;
  if (ram.state != MOECACHED_LOADING) return;
  const auto set_state = [&](moecached_load_state state) {
    ram.state = state;
    for (const auto& [id, other] : models_) {
      if (&other->model->ram() != &ram) continue;
      other->model->changed_on_disk = done.result == ReadResult::kFileChanged;
      other->model->set_load_state(state);
    }
  };
  if (done.result != ReadResult::kOk) {
    spdlog::error("model {} ({}): loading failed: {}", model.id().value, model.name(),
                  done.result == ReadResult::kFileChanged ? "the file was changed meanwhile"
                                                          : "the file cannot be read");
    set_state(MOECACHED_LOAD_FAILED);
    return;
  }
  model.bytes_loaded += done.bytes;
  if (ram.loads_left > 0) return;
  if (test_spoil_) model.spoil_for_test();
  set_state(MOECACHED_COVERED);
  const double seconds = static_cast<double>(monotonic_ns() - entry->load_begun_ns) * 1e-9;
  spdlog::info("model {} ({}): {} MiB of experts in pinned memory after {:.1f} s", model.id().value,
               model.name(), model.bytes_loaded >> 20, seconds);
}

Status GpuService::drop_model(std::uint32_t id, std::vector<FileId>* files) {
  const auto found = models_.find(id);
  if (found == models_.end()) return Fault{FaultCode::kNotFound, "no model " + std::to_string(id)};
  Entry& entry = *found->second;
  if (entry.model->sessions > 0) {
    return Fault{FaultCode::kInvalid, "model " + std::to_string(id) + " is used by " +
                                          std::to_string(entry.model->sessions) +
                                          " session(s); stop them first"};
  }
  if (entry.is_growing() || entry.model->ram().loads_left > 0) {
    return Fault{FaultCode::kInvalid,
                 "model " + std::to_string(id) + " is being loaded; try again when it is done"};
  }
  const std::vector<Entry*> readers = readers_of(entry);
  for (const Entry* reader : readers) {
    if (reader->model->sessions > 0) {
      return Fault{FaultCode::kInvalid, "its slots are read by sessions of model " +
                                            std::to_string(reader->model->id().value) +
                                            ", the same model on another GPU; stop them first"};
    }
  }
  for (Entry* reader : readers) {
    forget_peer(*reader, entry);
    reader->model->remove_peer_chunks(*entry.model);
  }
  if (entry.has_slots) brain_.remove_model(entry.model->id());
  grace_.model_gone(entry.model->id());
  growth_grace_.model_gone(entry.model->id());
  uses_.remove_model(entry.model->id());
  shadows_.stop(entry.model->id());
  files->assign(entry.model->files().begin(), entry.model->files().end());
  // Unmapping and unpinning a hundred gigabytes takes tens of seconds: the queue's thread lets go of it.
  Pending pending;
  pending.kind = Pending::Kind::kRelease;
  GpuQueue::Job job;
  job.call = [model = entry.model] {};
  GpuQueue& queue = *entry.device->queue;
  models_.erase(found);
  job.tag = add_pending(std::move(pending));
  queue.submit(std::move(job));
  return ok();
}

bool GpuService::drop_idle_model(std::vector<FileId>* files) {
  const Entry* oldest = nullptr;
  for (const auto& [id, entry] : models_) {
    if (entry->model->sessions > 0 || entry->model->ram().loads_left > 0 || entry->is_growing()) continue;
    const std::vector<Entry*> readers = readers_of(*entry);
    if (std::ranges::any_of(readers, [](const Entry* reader) { return reader->model->sessions > 0; }))
      continue;
    if (oldest == nullptr || entry->model->last_used < oldest->model->last_used) oldest = entry.get();
  }
  if (oldest == nullptr) return false;
  return drop_model(oldest->model->id().value, files).has_value();
}

Status GpuService::set_policy(std::span<const ModelId> models, const std::string& spec) {
  // Those without device slots get it with them.
  std::vector<ModelId> known;
  for (const ModelId id : models) {
    const Entry* entry = find_entry(id);
    if (entry == nullptr) return Fault{FaultCode::kNotFound, "no model " + std::to_string(id.value)};
    if (entry->has_slots) known.push_back(id);
  }
  if (Status set = brain_.set_policy(known, spec); !set) return set;
  for (const ModelId id : models) find_entry(id)->policy = spec;
  return ok();
}

void GpuService::open_in_session(Session& session, Session::OpenedGpu opened) {
  GpuModel& model = *opened.model;
  const bool reads_peers = opened.reads_peers;
  const std::string reason = opened.no_peers_reason;
  Entry& entry = *find_entry(model.id());
  const auto [known, is_new] = session.gpu_models.try_emplace(model.id().value, std::move(opened));
  if (is_new) ++model.sessions;
  // Opened a second time it may be unable to what it was able to the first time.
  if (reads_peers || (!is_new && !known->second.reads_peers)) return;
  known->second.reads_peers = false;
  session_without_peers(entry, reason);
}

void GpuService::release_session(Session& session) {
  for (std::uint32_t i = 0; i < MOECACHED_MAX_LANES; ++i)
    close_lane(session.id().value * MOECACHED_MAX_LANES + i);
  for (auto& [id, opened] : session.gpu_models) {
    --opened.model->sessions;
    if (Entry* entry = find_entry(opened.model->id()); entry != nullptr && !opened.reads_peers)
      session_without_peers_gone(*entry);
  }
  session.gpu_models.clear();
  std::erase(sessions_, &session);
  carry_out_commands();
}

// -------------------------------------------------------------------------------------------------- the loop

bool GpuService::has_stalled_lane(const Entry& entry, std::uint64_t now_ns) const {
  return std::ranges::any_of(lanes_, [&](const auto& known) {
    const Lane& lane = *known.second;
    return lane.entry == &entry && now_ns - lane.begun_since_ns > kGpuStalledAfterNs &&
           load_word(lane.words->completed) < lane.begun >> 16;
  });
}

void GpuService::watch_stalls(std::uint64_t now_ns) {
  std::vector<GraceTicket> stalled;
  grace_.for_each_wait([&](std::uint64_t key, const GraceTicket& ticket) {
    const auto lane = lanes_.find(key);
    if (lane == lanes_.end() || now_ns - lane->second->begun_since_ns <= kGpuStalledAfterNs) return;
    stalled.push_back(ticket);
  });
  for (const GraceTicket& ticket : stalled) {
    // Nobody waits for the newcomer: it gets no other slot, whose eviction would wait for the same lane.
    if (!brain_.cancel_eviction({ticket.model, ticket.layer, ticket.slot, ticket.expert})) continue;
    grace_.forget(ticket);
    carry_out_commands();
  }
}

void GpuService::turn(std::uint64_t now_ns, std::span<Session* const> sessions) {
  if (models_.empty()) {
    drain_queues();  // of a model that was dropped
    return;
  }
  sync_lanes(sessions);
  grace_done_.clear();
  drain_queues();
  // Which grace periods are over is found out before the logs are read, and told to the brain afterwards: the
  // epochs that ended them are in the logs by then, read under the experts that the slots still hold.
  if (!grace_.empty())
    grace_.poll([](std::uint64_t, std::uint64_t, LayerIndex, ExpertIndex) { return false; }, &grace_done_);
  if (!growth_grace_.empty()) {
    growth_grace_.poll([](std::uint64_t, std::uint64_t, LayerIndex, ExpertIndex) { return false; }, &grown_);
    slots_mapped();
  }
  for (const auto& [key, lane] : lanes_) {
    if (!lane->known_to_brain && lane->entry->has_slots) {
      brain_.lane_opened(lane->id, lane->entry->model->id());
      lane->known_to_brain = true;
    }
    drain_lane(*lane, now_ns);
  }
  for (const GraceTicket& ticket : grace_done_) brain_.grace_done(ticket.model, ticket.layer, ticket.slot);
  grace_done_.clear();
  carry_out_commands();
  const bool active = now_ns - last_active_ns_ < kActiveForNs;
  for (const auto& device : devices_) {
    if (!device->queue) continue;
    // A long graph completes nothing for a while, and is what uploads would slow down.
    const bool computing = std::ranges::any_of(lanes_, [&](const auto& lane) {
      return lane.second->entry->device == device.get() &&
             load_word(lane.second->words->completed) < lane.second->begun >> 16;
    });
    device->budget.advance(now_ns, active || computing);
  }
  look_for_peers(now_ns);
  for (const auto& [id, entry] : models_) {
    if (wants_growth(*entry, now_ns)) start_growth(*entry, now_ns);
    if (entry->has_slots && !entry->device->lost) promote(*entry, now_ns);
  }
  carry_out_commands();
  watch_stalls(now_ns);
}

int GpuService::wanted_tick_ms() const {
  if (models_.empty() || lanes_.empty()) return -1;
  if (!grace_.empty() || !growth_grace_.empty() || monotonic_ns() - last_active_ns_ < 20 * kActiveForNs)
    return 1;
  return 20;
}

std::vector<int> GpuService::event_fds() const {
  std::vector<int> fds;
  for (const auto& device : devices_) {
    if (device->queue) fds.push_back(device->queue->event_fd());
  }
  return fds;
}

}  // namespace moecached
