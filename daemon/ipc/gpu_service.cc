#include "daemon/ipc/gpu_service.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "daemon/base/check.h"
#include "daemon/platform/clock.h"
#include "daemon/policy/registry.h"

namespace moecached {
namespace {

// Promotions under way at once: enough to keep two copy streams busy while others wait for grace periods.
constexpr std::uint32_t kPromotionsMax = 48;
// Gain, in uses per token, below which an upload is not worth its share of the link. Link time per token
// (misses read in place at 40 GB/s, uploads copied at 50) is least between 0.03 and 0.06 on the gpt-oss-20b
// and the Qwen3-30B-A3B traces, at 10, 25 and 50 % slots alike.
constexpr double kGainMin = 0.04;
constexpr std::uint64_t kStalledAfterNs = 1'000'000'000;
constexpr std::uint64_t kActiveForNs = 50'000'000;
constexpr std::size_t kCandidatesMax = 4096;

bool is_set(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value == '1';
}

std::uint64_t load(std::uint64_t& word) { return std::atomic_ref(word).load(std::memory_order_acquire); }

}  // namespace

struct GpuService::Device {
  std::unique_ptr<Gpu> gpu;
  std::unique_ptr<GpuQueue> queue;  // made with the first model
  UploadBudget budget{UploadBudget::Options{}};
  double link_rate = 0;
  bool lost = false;
};

struct GpuService::Entry {
  enum class Growth : std::uint8_t { kNone, kAllocating, kDone };
  struct Candidate {
    double gain;
    LayerIndex layer;
    ExpertIndex expert;
    bool operator<(const Candidate& other) const { return gain > other.gain; }
  };
  std::shared_ptr<GpuModel> model;
  Device* device = nullptr;
  Growth growth = Growth::kNone;
  std::vector<std::uint32_t> growing_to;
  std::uint64_t growth_failed_ns = 0;
  std::string growth_note;  // why there are fewer slots than asked for
  std::string policy;
  bool has_slots = false;        // the brain knows the model
  std::uint32_t promotions = 0;  // under way, as of this turn
  std::vector<Candidate> candidates;
  std::vector<std::uint8_t> all_resident;
  std::vector<std::uint32_t> publishing;          // by layer: flips to device slots that are not done yet
  std::uint32_t fill_layer = 0, fill_expert = 0;  // of the first fill, when everything is to be resident
  std::uint64_t load_begun_ns = 0;
};

struct GpuService::Lane {
  std::uint64_t key = 0;
  LaneId id;
  Entry* entry = nullptr;
  Session* session = nullptr;
  moecached_shm_lane* words = nullptr;
  std::byte* log = nullptr;
  std::uint64_t drained = 0;
  bool known_to_brain = false;
  std::uint64_t begun = 0, begun_since_ns = 0;
  std::uint64_t records = 0, refused = 0;
};

struct GpuService::Pending {
  enum class Kind : std::uint8_t { kUnpublish, kPublish, kCopy, kGrow, kRelease } kind = Kind::kPublish;
  std::shared_ptr<GpuModel> model;  // kept alive: copies write into it
  LayerIndex layer;
  ExpertIndex expert;
  SlotIndex slot;
  std::shared_ptr<Status> growth;
};

// -------------------------------------------------------------------------------------------------- set up

GpuService::GpuService(const Config& config, std::vector<std::unique_ptr<Gpu>> gpus,
                       std::string no_gpu_reason, ReadTable& reads)
    : config_(config),
      no_gpu_reason_(config.gpu.devices == "none" ? "gpu.devices is none" : std::move(no_gpu_reason)),
      reads_(reads),
      test_no_grace_(is_set("MOECACHED_TEST_NO_GRACE")),
      test_churn_(is_set("MOECACHED_TEST_CHURN")),
      test_spoil_(is_set("MOECACHED_TEST_SPOIL")) {
  for (std::unique_ptr<Gpu>& gpu : gpus) {
    const std::string uuid = to_string(gpu->id());
    if (config.gpu.devices != "auto" && config.gpu.devices.find(uuid) == std::string::npos) continue;
    devices_.push_back(std::make_unique<Device>());
    devices_.back()->gpu = std::move(gpu);
  }
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
    const GpuModel& model = *entry->model;
    const bool usable = !model.changed_on_disk && model.load_state() != MOECACHED_LOAD_FAILED;
    if (usable && model.gpu().id() == gpu && std::ranges::equal(model.identity(), identity))
      return entry->model;
  }
  return nullptr;
}

std::shared_ptr<GpuModel> GpuService::find_model(std::uint32_t id) const {
  const auto found = models_.find(id);
  return found == models_.end() ? nullptr : found->second->model;
}

Status GpuService::add_model(const std::shared_ptr<GpuModel>& model) {
  Device& device = device_of(*model);
  if (!device.queue) {
    auto rate = device.gpu->measure_copy_rate();
    if (!rate) return std::move(rate).error();
    auto queue = device.gpu->create_queue();
    if (!queue) return std::move(queue).error();
    device.queue = *std::move(queue);
    device.link_rate = *rate;
    device.budget =
        UploadBudget({.link_rate = *rate, .max_slowdown = config_.gpu.max_slowdown_percent / 100.0});
    spdlog::info("gpu {} ({}): pinned memory is copied at {:.1f} GB/s", to_string(device.gpu->id()),
                 device.gpu->name(), *rate / 1e9);
  }
  auto entry = std::make_unique<Entry>();
  entry->model = model;
  entry->device = &device;
  entry->policy = config_.gpu.policy;
  entry->all_resident.assign(model->layout().layers.size(), 0);
  entry->publishing.assign(model->layout().layers.size(), 0);
  entry->load_begun_ns = monotonic_ns();
  for (const LayerLayout& layer : model->layout().layers) {
    if (marks_.size() < layer.n_experts) marks_.resize(layer.n_experts);
  }
  model->for_each_load([&](std::span<const PartRead> parts) {
    reads_.start(BulkRead{.owner = model, .tag = model->id().value}, parts);
  });
  models_[model->id().value] = std::move(entry);
  return ok();
}

void GpuService::load_done(const ReadTable::BulkDone& done) {
  Entry* entry = find_entry(ModelId(static_cast<std::uint32_t>(done.read.tag)));
  if (entry == nullptr) return;
  GpuModel& model = *entry->model;
  --model.loads_left;
  if (model.load_state() != MOECACHED_LOADING) return;
  if (done.result != ReadResult::kOk) {
    model.changed_on_disk = done.result == ReadResult::kFileChanged;
    model.set_load_state(MOECACHED_LOAD_FAILED);
    spdlog::error("model {} ({}): loading failed: {}", model.id().value, model.name(),
                  model.changed_on_disk ? "the file was changed meanwhile" : "the file cannot be read");
    return;
  }
  model.bytes_loaded += done.bytes;
  if (model.loads_left > 0) return;
  if (test_spoil_) model.spoil_for_test();
  model.set_load_state(MOECACHED_COVERED);
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
  if (entry.growth == Entry::Growth::kAllocating || entry.model->loads_left > 0) {
    return Fault{FaultCode::kInvalid,
                 "model " + std::to_string(id) + " is being loaded; try again when it is done"};
  }
  if (entry.has_slots) brain_.remove_model(entry.model->id());
  grace_.model_gone(entry.model->id());
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
    if (entry->model->sessions > 0 || entry->model->loads_left > 0 ||
        entry->growth == Entry::Growth::kAllocating)
      continue;
    if (oldest == nullptr || entry->model->last_used < oldest->model->last_used) oldest = entry.get();
  }
  if (oldest == nullptr) return false;
  return drop_model(oldest->model->id().value, files).has_value();
}

Result<std::string> GpuService::set_policy(ModelId id, const std::string& spec) {
  Entry* entry = find_entry(id);
  if (entry == nullptr) return Fault{FaultCode::kNotFound, "no model " + std::to_string(id.value)};
  if (auto policy = make_policy(spec, {.n_experts = 2, .n_slots = 1}); !policy)
    return std::move(policy).error();
  if (entry->has_slots) {
    if (Status set = brain_.set_policy(id, spec); !set) return std::move(set).error();
  }
  entry->policy = spec;
  return spec;
}

void GpuService::open_in_session(Session& session, const std::shared_ptr<GpuModel>& model,
                                 std::shared_ptr<Memfd> log) {
  const bool is_new =
      session.gpu_models.try_emplace(model->id().value, Session::OpenedGpu{model, std::move(log)}).second;
  if (is_new) ++model->sessions;
}

void GpuService::release_session(Session& session) {
  for (std::uint32_t i = 0; i < MOECACHED_MAX_LANES; ++i)
    close_lane(session.id().value * MOECACHED_MAX_LANES + i);
  for (auto& [id, opened] : session.gpu_models) --opened.model->sessions;
  session.gpu_models.clear();
  std::erase(sessions_, &session);
  carry_out_commands();
}

// -------------------------------------------------------------------------------------------------- lanes

void GpuService::sync_lanes(std::span<Session* const> sessions) {
  sessions_.assign(sessions.begin(), sessions.end());
  for (Session* session : sessions) {
    if (session->gpu_models.empty()) continue;
    for (std::uint32_t i = 0; i < MOECACHED_MAX_LANES; ++i) {
      moecached_shm_lane& words = session->lane(i);
      const std::uint64_t key = session->id().value * MOECACHED_MAX_LANES + i;
      const bool open = std::atomic_ref(words.state).load(std::memory_order_acquire) == 1;
      const std::uint32_t model_id = std::atomic_ref(words.model_id).load(std::memory_order_relaxed);
      const auto opened = session->gpu_models.find(model_id);
      const auto known = lanes_.find(key);
      if (known != lanes_.end()) {
        if (open && opened != session->gpu_models.end() &&
            opened->second.model == known->second->entry->model)
          continue;
        drain_lane(*known->second, last_active_ns_);
        close_lane(key);
      }
      if (!open || opened == session->gpu_models.end() || find_entry(ModelId(model_id)) == nullptr) continue;
      auto lane = std::make_unique<Lane>();
      lane->key = key;
      if (free_lane_ids_.empty()) {
        lane->id = LaneId(next_lane_id_++);
      } else {
        lane->id = LaneId(free_lane_ids_.back());
        free_lane_ids_.pop_back();
      }
      lane->entry = models_.at(model_id).get();
      lane->session = session;
      lane->words = &words;
      lane->log = opened->second.log->bytes().data() + i * opened->second.model->log_bytes_per_lane();
      lane->drained = load(words.completed);
      std::atomic_ref(words.tail).store(lane->drained, std::memory_order_release);
      lanes_[key] = std::move(lane);
    }
  }
}

void GpuService::close_lane(std::uint64_t key) {
  // Also of lanes that never said they are open: grace periods look at the words of every lane.
  grace_.lane_gone(key);
  const auto found = lanes_.find(key);
  if (found == lanes_.end()) return;
  if (found->second->known_to_brain) brain_.lane_closed(found->second->id);
  free_lane_ids_.push_back(found->second->id.value);
  lanes_.erase(found);
}

void GpuService::drain_lane(Lane& lane, std::uint64_t now_ns) {
  const std::uint64_t begun = load(lane.words->begun);
  const std::uint64_t completed = load(lane.words->completed);
  if (begun != lane.begun || completed >= begun >> 16) {
    lane.begun = begun;
    lane.begun_since_ns = now_ns;
  }
  if (completed <= lane.drained) return;
  last_active_ns_ = now_ns;
  Entry& entry = *lane.entry;
  entry.model->last_used = now_ns;
  // A client cannot be further ahead than its log is long and have the entries still be there.
  // Counted, not compared: the client may have written any number.
  const std::uint64_t entries = entry.model->log_geometry().log_entries;
  const std::uint64_t n = std::min(completed - lane.drained, entries);
  for (std::uint64_t i = n; i-- > 0;) drain_log(lane, completed - i);
  entry.model->epochs += n;
  lane.drained = completed;
  std::atomic_ref(lane.words->tail).store(completed, std::memory_order_release);
  // Behind a real graph: a lane that only waited for the model to be loaded has ended epochs as well, and a
  // slot filled before would hold what was in memory before the expert.
  if (entry.growth == Entry::Growth::kNone && lane.records > 0 &&
      entry.model->load_state() == MOECACHED_COVERED)
    start_growth(entry);
}

// One epoch's slots, token by token. The client wrote header and layers, its GPU the slots: all of it is
// copied once and checked.
void GpuService::drain_log(Lane& lane, std::uint64_t epoch) {
  Entry& entry = *lane.entry;
  GpuModel& model = *entry.model;
  const moecached_shm_gpu& geometry = model.log_geometry();
  const std::byte* at = lane.log + (epoch % geometry.log_entries) * geometry.log_entry_bytes;
  moecached_shm_log_entry header;
  std::memcpy(&header, at, sizeof header);
  if (header.epoch != epoch) return;  // not logged: the ring was full, or nothing to tell
  const std::size_t n_layers = model.layout().layers.size();
  const std::uint32_t k = model.layout().n_expert_used;
  if (header.n_whole > n_layers || header.n_layers > n_layers - header.n_whole ||
      header.n_layers + header.n_whole == 0 || header.n_tokens == 0 ||
      header.n_tokens > MOECACHED_LOG_TOKENS) {
    ++lane.refused;
    return;
  }
  ++lane.records;
  auto layer_at = [&](std::uint32_t row) {
    std::uint16_t index = 0;
    std::memcpy(&index, at + sizeof header + row * sizeof index, sizeof index);
    return index;
  };
  for (std::uint32_t row = header.n_layers; row < header.n_layers + header.n_whole; ++row) {
    const std::uint16_t index = layer_at(row);
    if (index >= n_layers || entry.all_resident[index] == 0) {
      ++lane.refused;
      return;
    }
    // Nothing to learn where nothing can be given up.
    model.use[index].lookups += std::uint64_t{header.n_tokens} * k;
    model.use[index].hits += std::uint64_t{header.n_tokens} * k;
  }
  const bool routed = entry.has_slots && lane.known_to_brain;
  std::vector<std::int32_t> slots(std::size_t{header.n_tokens} * k);
  for (std::uint32_t row = 0; row < header.n_layers; ++row) {
    std::uint16_t layer_index = layer_at(row);
    const bool by_expert = (layer_index & MOECACHED_LOG_BY_EXPERT) != 0;
    layer_index = static_cast<std::uint16_t>(layer_index & ~MOECACHED_LOG_BY_EXPERT);
    if (layer_index >= n_layers) {
      ++lane.refused;
      return;
    }
    const LayerIndex layer(layer_index);
    std::memcpy(slots.data(), at + geometry.log_slots_offset + std::size_t{row} * geometry.log_layer_bytes,
                slots.size() * sizeof(std::int32_t));
    for (std::uint32_t token = 0; token < header.n_tokens; ++token) {
      experts_.clear();
      std::uint64_t hits = 0;
      for (std::uint32_t i = 0; i < k; ++i) {
        const std::int32_t slot = slots[std::size_t{token} * k + i];
        const std::uint32_t expert =
            by_expert ? static_cast<std::uint32_t>(slot) : model.expert_in(layer, slot);
        const bool is_known = expert < model.layout().layers[layer_index].n_experts;
        if (!is_known || std::exchange(marks_[expert], 1) != 0) {
          for (const ExpertIndex marked : experts_) marks_[marked.value] = 0;
          ++lane.refused;
          return;
        }
        experts_.push_back(ExpertIndex(expert));
        if (!by_expert && static_cast<std::uint32_t>(slot) < model.plan(layer).host_first) ++hits;
      }
      for (const ExpertIndex marked : experts_) marks_[marked.value] = 0;
      model.use[layer_index].lookups += k;
      model.use[layer_index].hits += hits;
      const std::uint64_t in_place = (k - hits) * model.expert_bytes(layer);
      model.bytes_in_place += in_place;
      entry.device->budget.read_in_place(in_place);
      if (!routed) continue;
      brain_.routed(lane.id, layer, experts_);
      if (test_churn_) continue;
      for (const ExpertIndex expert : experts_) {
        if (hits == k || entry.candidates.size() >= kCandidatesMax) break;
        entry.candidates.push_back({0, layer, expert});  // those that were hits turn out to gain nothing
      }
    }
  }
}

// -------------------------------------------------------------------------------------------- device slots

void GpuService::start_growth(Entry& entry) {
  if (entry.device->lost || entry.growth != Entry::Growth::kNone) return;
  if (entry.growth_failed_ns != 0 && monotonic_ns() - entry.growth_failed_ns < 10 * kStalledAfterNs) return;
  const std::shared_ptr<GpuModel> model = entry.model;
  std::vector<std::shared_ptr<GpuModel>> others;
  for (const auto& [id, other] : models_) {
    if (other->device == entry.device && other->model != model) others.push_back(other->model);
  }
  entry.growth = Entry::Growth::kAllocating;
  auto outcome = std::make_shared<Status>(ok());
  auto slots = std::make_shared<std::vector<std::uint32_t>>();
  const GpuOptions& options = config_.gpu;
  GpuQueue::Job job;
  job.call = [model, outcome, slots, others, &options] {
    auto memory = model->gpu().memory_info();
    if (!memory) {
      *outcome = std::move(memory).error();
      return;
    }
    // What an earlier try has left allocated is this model's to use.
    const std::uint64_t free = memory->free + model->device_bytes();
    std::uint64_t budget = free > options.keep_free ? free - options.keep_free : 0;
    std::uint64_t taken = 0;
    for (const auto& other : others) taken += other->device_bytes();
    if (options.bytes > 0) budget = std::min(budget, options.bytes > taken ? options.bytes - taken : 0);
    *slots = gpu_slots_that_fit(model->layout(), model->plans(), model->wanted(), budget,
                                model->gpu().granularity());
    *outcome = model->grow(*slots);
  };
  entry.growing_to.clear();
  Pending pending;
  pending.kind = Pending::Kind::kGrow;
  pending.model = model;
  pending.growth = outcome;
  // The plan is known only when the call has run; `slots` is read with its completion.
  const std::uint64_t tag = add_pending(std::move(pending));
  job.tag = tag;
  growth_slots_[model->id().value] = slots;
  entry.device->queue->submit(std::move(job));
}

void GpuService::growth_done(Entry& entry, bool succeeded, const Fault& fault) {
  const auto slots = growth_slots_.extract(entry.model->id().value).mapped();
  entry.growing_to = *slots;
  const bool any = std::ranges::any_of(entry.growing_to, [](std::uint32_t n) { return n > 0; });
  if (!succeeded || !any) {
    entry.growth = Entry::Growth::kNone;
    entry.growth_failed_ns = monotonic_ns();
    entry.growth_note = succeeded ? "no device memory within gpu.bytes and gpu.keep_free" : fault.text;
    spdlog::warn("model {}: no device slots: {}; trying again in 10 s", entry.model->id().value,
                 entry.growth_note);
    return;
  }
  if (entry.growing_to != entry.model->wanted())
    entry.growth_note = "fewer device slots than gpu.slots asks for fit into device memory";
  entry.model->publish_growth(entry.growing_to);
  // Epochs that were begun before may not have the new memory mapped, and need not: they are in the shape
  // HOST_ONLY, which does not look at the table. Whoever takes up another shape maps first.
  GpuModel& model = *entry.model;
  ModelShape shape{.layers = {}, .policy = entry.policy};
  for (std::size_t l = 0; l < model.layout().layers.size(); ++l)
    shape.layers.push_back({model.layout().layers[l].n_experts, std::max(1u, model.n_slots()[l])});
  if (Status added = brain_.add_model(model.id(), shape); !added) {
    spdlog::error("model {}: {}", model.id().value, added.error().text);
    entry.growth_note = added.error().text;
    entry.growth = Entry::Growth::kDone;
    return;
  }
  entry.has_slots = true;
  entry.growth = Entry::Growth::kDone;
  // A layer that is to be wholly resident stays as it is until it is, so that its shape is stock's all the
  // time.
  for (std::uint32_t l = 0; l < model.layout().layers.size(); ++l) {
    const std::uint32_t n = model.n_slots()[l];
    if (n > 0 && n < model.layout().layers[l].n_experts)
      model.set_shape(LayerIndex(l), MOECACHED_SHAPE_MIXED);
  }
  std::uint64_t n_slots = 0;
  for (const std::uint32_t n : model.n_slots()) n_slots += n;
  spdlog::info("model {} ({}): {} device slots, {} MiB of device memory", model.id().value, model.name(),
               n_slots, model.device_bytes() >> 20);
}

void GpuService::check_all_resident(Entry& entry) {
  GpuModel& model = *entry.model;
  for (std::uint32_t l = 0; l < entry.all_resident.size(); ++l) {
    const LayerIndex layer(l);
    const std::uint32_t n_experts = model.layout().layers[l].n_experts;
    if (entry.all_resident[l] != 0 || model.n_slots()[l] < n_experts || entry.publishing[l] != 0) continue;
    if (brain_.resident(model.id(), layer) < n_experts) continue;
    bool in_order = true;
    for (std::uint32_t e = 0; e < n_experts && in_order; ++e)
      in_order = model.expert_in(layer, static_cast<std::int32_t>(e)) == e;
    if (!in_order) continue;
    entry.all_resident[l] = 1;
    model.set_shape(layer, MOECACHED_SHAPE_ALL_RESIDENT);
  }
}

// ---------------------------------------------------------------------------------------------- promotions

void GpuService::promote(Entry& entry, std::uint64_t now_ns) {
  GpuModel& model = *entry.model;
  entry.promotions = brain_.coming(model.id());
  // Each promotion is at most a few jobs; the queue's bound must never be met.
  if (entry.device->queue->room() < 8 * kPromotionsMax) return;
  // Everything fits: in order, so that expert e gets slot e and the layer has stock's shape again.
  while (entry.fill_layer < entry.all_resident.size() && entry.promotions < kPromotionsMax) {
    const LayerIndex layer(entry.fill_layer);
    const std::uint32_t n_experts = model.layout().layers[layer.value].n_experts;
    if (model.n_slots()[layer.value] < n_experts || entry.fill_expert >= n_experts) {
      ++entry.fill_layer;
      entry.fill_expert = 0;
      continue;
    }
    if (!brain_.promote(model.id(), layer, ExpertIndex(entry.fill_expert))) break;
    ++entry.fill_expert;
    ++entry.promotions;
  }
  if (entry.fill_layer < entry.all_resident.size()) {
    entry.candidates.clear();
    return;
  }
  if (test_churn_) {
    churn(entry);
    return;
  }
  for (const auto& [key, lane] : lanes_) {
    // Its slots cannot be had while it does not move; every victim would wait for it.
    if (lane->entry == &entry && now_ns - lane->begun_since_ns > kStalledAfterNs &&
        load(lane->words->completed) < lane->begun >> 16) {
      entry.candidates.clear();
      return;
    }
  }
  const auto place = [](const Entry::Candidate& c) { return std::pair(c.layer, c.expert); };
  std::ranges::sort(entry.candidates, {}, place);
  const auto doubles = std::ranges::unique(entry.candidates, {}, place);
  entry.candidates.erase(doubles.begin(), doubles.end());
  for (Entry::Candidate& candidate : entry.candidates)
    candidate.gain = model.n_slots()[candidate.layer.value] == 0
                         ? 0
                         : brain_.promotion_gain(model.id(), candidate.layer, candidate.expert);
  std::erase_if(entry.candidates, [](const Entry::Candidate& c) { return c.gain < kGainMin; });
  std::sort(entry.candidates.begin(), entry.candidates.end());
  for (const Entry::Candidate& candidate : entry.candidates) {
    if (entry.promotions >= kPromotionsMax) break;
    const bool into_free_slot = candidate.gain == std::numeric_limits<double>::infinity();
    const std::uint64_t bytes = model.expert_bytes(candidate.layer);
    if (!into_free_slot && !entry.device->budget.allows(bytes)) break;
    // Asked again: promotions of this round have changed what is worth it.
    if (brain_.promotion_gain(model.id(), candidate.layer, candidate.expert) < kGainMin) continue;
    if (!brain_.promote(model.id(), candidate.layer, candidate.expert)) continue;
    entry.device->budget.uploaded(bytes);
    ++entry.promotions;
  }
  entry.candidates.clear();
}

// Random promotions as fast as the link takes them.
void GpuService::churn(Entry& entry) {
  auto random = [this] {
    churn_state_ ^= churn_state_ << 13;
    churn_state_ ^= churn_state_ >> 7;
    churn_state_ ^= churn_state_ << 17;
    return churn_state_;
  };
  const auto n_layers = static_cast<std::uint32_t>(entry.all_resident.size());
  for (int tries = 0; tries < 200 && entry.promotions < kPromotionsMax; ++tries) {
    const LayerIndex layer(static_cast<std::uint32_t>(random() % n_layers));
    const ExpertIndex expert(
        static_cast<std::uint32_t>(random() % entry.model->layout().layers[layer.value].n_experts));
    if (entry.model->n_slots()[layer.value] > 0 && brain_.promote(entry.model->id(), layer, expert))
      ++entry.promotions;
  }
}

void GpuService::submit(const GpuModel& model, GpuQueue::Job job, Pending pending) {
  Device& device = device_of(model);
  job.tag = add_pending(std::move(pending));
  device.queue->submit(std::move(job));
}

void GpuService::carry_out_commands() {
  for (;;) {
    const std::span<const Command> commands = brain_.take_commands();
    if (commands.empty()) return;
    for (const Command& command : commands) {
      Entry* entry = find_entry(command.model);
      if (entry == nullptr || command.kind == CommandKind::kGrant) continue;
      GpuModel& model = *entry->model;
      Pending pending;
      pending.model = entry->model;
      pending.layer = command.layer;
      pending.expert = command.expert;
      pending.slot = command.slot;
      GpuQueue::Job job;
      switch (command.kind) {
        case CommandKind::kUnpublish:
          pending.kind = Pending::Kind::kUnpublish;
          job.is_flip = true;
          job.flip = model.to_host(command.layer, command.expert);
          break;
        case CommandKind::kRead:
          pending.kind = Pending::Kind::kCopy;
          job = model.copy_job(command.layer, command.expert, command.slot);
          break;
        case CommandKind::kPublish:
          pending.kind = Pending::Kind::kPublish;
          ++entry->publishing[command.layer.value];
          job.is_flip = true;
          job.flip = model.to_device(command.layer, command.expert, command.slot);
          break;
        case CommandKind::kGrant:
          continue;
      }
      submit(model, std::move(job), std::move(pending));
    }
  }
}

void GpuService::begin_grace(const GraceTicket& ticket) {
  grace_lanes_.clear();
  for (Session* session : sessions_) {
    if (!session->gpu_models.contains(ticket.model.value)) continue;
    for (std::uint32_t i = 0; i < MOECACHED_MAX_LANES; ++i) {
      // Behind the flip, like the tracker's own look. A lane that is in no epoch now sees the flip in its
      // next one; it says that it is open, and for which model, before its first.
      moecached_shm_lane& words = session->lane(i);
      const std::uint64_t begun = std::atomic_ref(words.begun).load(std::memory_order_seq_cst);
      if (load(words.completed) >= begun >> 16) continue;
      if (std::atomic_ref(words.state).load(std::memory_order_acquire) != 1 ||
          std::atomic_ref(words.model_id).load(std::memory_order_relaxed) != ticket.model.value) {
        continue;
      }
      grace_lanes_.push_back({session->id().value * MOECACHED_MAX_LANES + i, &words});
    }
  }
  grace_.begin({&ticket, 1}, grace_lanes_, &grace_done_);
}

std::uint64_t GpuService::add_pending(Pending pending) {
  if (free_pending_.empty()) {
    pending_.push_back(std::make_unique<Pending>(std::move(pending)));
    return pending_.size() - 1;
  }
  const std::uint32_t index = free_pending_.back();
  free_pending_.pop_back();
  *pending_[index] = std::move(pending);
  return index;
}

void GpuService::drain_queues() {
  for (const auto& device : devices_) {
    if (!device->queue) continue;
    done_.clear();
    device->queue->poll(&done_);
    for (const GpuQueue::Done& done : done_) {
      Pending pending = std::move(*pending_[done.tag]);
      *pending_[done.tag] = Pending{};
      free_pending_.push_back(static_cast<std::uint32_t>(done.tag));
      if (!done.ok) lose(*device);
      queue_done(pending, done.ok);
    }
  }
}

void GpuService::queue_done(Pending& pending, bool succeeded) {
  Entry* entry = pending.kind == Pending::Kind::kRelease ? nullptr : find_entry(pending.model->id());
  if (entry == nullptr) return;
  switch (pending.kind) {
    case Pending::Kind::kUnpublish: {
      if (!succeeded) return;
      const GraceTicket ticket{pending.model->id(), pending.layer, pending.slot, pending.expert};
      if (test_no_grace_) {
        grace_done_.push_back(ticket);
      } else {
        begin_grace(ticket);
      }
      return;
    }
    case Pending::Kind::kCopy:
      if (!succeeded) return;
      entry->model->bytes_uploaded += entry->model->expert_bytes(pending.layer);
      brain_.read_done(pending.model->id(), pending.layer, pending.slot, ReadOutcome::kOk);
      return;
    case Pending::Kind::kPublish:
      --entry->publishing[pending.layer.value];
      if (succeeded && entry->has_slots) check_all_resident(*entry);
      return;
    case Pending::Kind::kRelease:
      return;
    case Pending::Kind::kGrow:
      growth_done(*entry, pending.growth->has_value(), *pending.growth ? Fault{} : pending.growth->error());
      return;
  }
}

// The sessions of a lost GPU lose it as well; nothing more is tried there, everything else goes on.
void GpuService::lose(Device& device) {
  if (std::exchange(device.lost, true)) return;
  spdlog::error("gpu {} ({}) is lost: a copy failed. Restart the daemon once it is back",
                to_string(device.gpu->id()), device.gpu->name());
}

void GpuService::watch_stalls(std::uint64_t now_ns) {
  std::vector<GraceTicket> stalled;
  grace_.for_each_wait([&](std::uint64_t key, const GraceTicket& ticket) {
    const auto lane = lanes_.find(key);
    if (lane == lanes_.end() || now_ns - lane->second->begun_since_ns <= kStalledAfterNs) return;
    stalled.push_back(ticket);
  });
  for (const GraceTicket& ticket : stalled) {
    // Nobody waits for the newcomer: it gets no other slot, whose eviction would wait for the same lane.
    if (!brain_.undo_eviction(ticket.model, ticket.layer, ticket.slot, ticket.expert, Brain::Undo::kCancel))
      continue;
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
             load(lane.second->words->completed) < lane.second->begun >> 16;
    });
    device->budget.advance(now_ns, active || computing);
  }
  for (const auto& [id, entry] : models_) {
    if (entry->has_slots && !entry->device->lost) promote(*entry, now_ns);
  }
  carry_out_commands();
  watch_stalls(now_ns);
}

int GpuService::wanted_tick_ms() const {
  if (models_.empty() || lanes_.empty()) return -1;
  if (!grace_.empty() || monotonic_ns() - last_active_ns_ < 20 * kActiveForNs) return 1;
  return 20;
}

std::vector<int> GpuService::event_fds() const {
  std::vector<int> fds;
  for (const auto& device : devices_) {
    if (device->queue) fds.push_back(device->queue->event_fd());
  }
  return fds;
}

// ------------------------------------------------------------------------------------------------- reports

void GpuService::report(std::vector<ModelReport>* models) const {
  for (const auto& [id, entry] : models_) {
    const GpuModel& model = *entry->model;
    ModelReport& out = models->emplace_back();
    out.id = id;
    out.name = model.name();
    out.architecture = model.layout().architecture;
    out.policy = entry->policy;
    out.device = to_string(model.gpu().id());
    out.sessions = model.sessions;
    out.n_expert_used = model.layout().n_expert_used;
    out.expert_bytes_total = model.layout().expert_bytes_total;
    out.pool_bytes = model.host_bytes();
    out.pool_bytes_backed = model.host_bytes();
    out.device_bytes = model.device_bytes();
    out.changed_on_disk = model.changed_on_disk;
    out.loading = model.load_state() == MOECACHED_LOADING;
    out.bytes_read = model.bytes_loaded;
    out.bytes_uploaded = model.bytes_uploaded;
    out.upload_ns = entry->device->queue->copy_ns();
    out.bytes_in_place = model.bytes_in_place;
    out.epochs = model.epochs;
    const std::span<const LayerCounters> counters =
        entry->has_slots ? brain_.counters(model.id()) : std::span<const LayerCounters>();
    for (std::uint32_t l = 0; l < model.layout().layers.size(); ++l) {
      const LayerLayout& layer = model.layout().layers[l];
      LayerReport& to = out.layers.emplace_back();
      to.block = layer.block;
      to.n_experts = layer.n_experts;
      to.n_slots = model.n_slots()[l];
      to.slot_class = layer.slot_class;
      to.slot_bytes = model.expert_bytes(LayerIndex(l));
      // What kernels really read, not what the table said when the log was read.
      to.lookups = model.use[l].lookups;
      to.hits = model.use[l].hits;
      to.misses = to.lookups - to.hits;
      if (counters.empty()) continue;
      to.resident = brain_.resident(model.id(), LayerIndex(l));
      to.insertions = counters[l].insertions;
      to.evictions = counters[l].evictions;
    }
    for (const LeftOut& left_out : model.layout().left_out)
      out.left_out.push_back({left_out.tensor, left_out.reason});
  }
}

void GpuService::report(Session& session, SessionReport* out) const {
  for (const auto& [id, opened] : session.gpu_models) out->models.push_back(id);
  for (std::uint32_t i = 0; i < MOECACHED_MAX_LANES; ++i) {
    const auto found = lanes_.find(session.id().value * MOECACHED_MAX_LANES + i);
    if (found == lanes_.end()) continue;
    const Lane& lane = *found->second;
    ++out->lanes;
    out->records += lane.records;
    out->records_refused += lane.refused;
    out->stalled = out->stalled || (load(lane.words->completed) < lane.begun >> 16 &&
                                    monotonic_ns() - lane.begun_since_ns > kStalledAfterNs);
  }
}

void GpuService::report_devices(std::vector<std::string>* devices) const {
  for (const auto& device : devices_) devices->push_back(to_string(device->gpu->id()));
}

void GpuService::findings(std::vector<Finding>* out) const {
  if (devices_.empty()) {
    out->push_back({"note", "gpu", "no GPU is served: " + no_gpu_reason_});
    return;
  }
  for (const auto& device : devices_) {
    const std::string subject = "gpu " + to_string(device->gpu->id());
    if (device->lost) {
      out->push_back(
          {"error", subject, "a copy failed, the GPU counts as lost; restart the daemon once it is back"});
    } else {
      out->push_back({"ok", subject, device->gpu->name()});
    }
    if (const std::string why = device->gpu->host_memory_fallback(); !why.empty()) {
      out->push_back(
          {"warning", subject,
           "pinned memory is a registered memfd, because memory that the driver shares cannot be had: " +
               why});
    }
  }
  for (const auto& [id, entry] : models_) {
    const std::string subject = "model " + std::to_string(id) + " (" + entry->model->name() + ")";
    if (entry->model->load_state() == MOECACHED_LOAD_FAILED)
      out->push_back({"error", subject, "loading it into pinned memory failed; restart its clients"});
    if (!entry->growth_note.empty()) out->push_back({"warning", subject, entry->growth_note});
    std::uint64_t lookups = 0, hits = 0;
    for (const GpuModel::LayerUse& use : entry->model->use) {
      lookups += use.lookups;
      hits += use.hits;
    }
    if (lookups > 100'000 && hits * 2 < lookups) {
      out->push_back(
          {"warning", subject,
           "only " + std::to_string(hits * 100 / lookups) +
               " % of the lookups hit device slots; the others are read over the link, which is slower than "
               "computing on many CPU cores: raise gpu.slots or gpu.bytes"});
    }
  }
}

Result<std::shared_ptr<Memfd>> make_log_segment(const GpuModel& model) {
  auto memory =
      Memfd::create("log", MOECACHED_MAX_LANES * model.log_bytes_per_lane(), ClientAccess::kReadWrite);
  if (!memory) return std::move(memory).error();
  return std::make_shared<Memfd>(*std::move(memory));
}

}  // namespace moecached
