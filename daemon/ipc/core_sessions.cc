// The core loop's bookkeeping of sessions, lanes and models: who is connected, what is registered, what may
// be dropped.
#include <algorithm>
#include <set>

#include "daemon/base/check.h"
#include "daemon/config/size.h"
#include "daemon/ipc/core.h"
#include "daemon/platform/pidfd.h"

namespace moecached {

Status Core::add_session(const std::shared_ptr<Session>& session) {
  if (sessions_.size() >= config_.max_sessions) {
    return Fault{FaultCode::kLimit,
                 "the daemon serves " + std::to_string(sessions_.size()) +
                     " sessions already, limits.sessions = " + std::to_string(config_.max_sessions)};
  }
  UserUse would = use_of(session->peer().uid);
  ++would.sessions;
  would.files += kFilesOfSession;
  if (Status may = check_user(session->peer().uid, would, config_); !may) return may;
  if (auto added = epoll_.add(session->doorbell().fd(), EPOLLIN, session->id().value << 2 | kWakeDoorbell);
      !added)
    return added;
  if (session->pidfd() >= 0) {
    if (auto added = epoll_.add(session->pidfd(), EPOLLIN, session->id().value << 2 | kWakePidfd); !added)
      return added;
  }
  sessions_[session->id().value].session = session;
  return ok();
}

Result<Core::RouteModel> Core::find_route_model(std::uint32_t wanted) const {
  const auto id = resolve_model(wanted, "route");
  if (!id) return Fault(id.error());
  RouteModel model{.ram = find_model(ModelId(*id)), .gpu = gpu_.find_model(*id)};
  if (model.ram != nullptr && model.ram->device() != nullptr) {
    return Fault{FaultCode::kUnsupported,
                 "model " + std::to_string(*id) +
                     " spills from a GPU, and a stream has no way to slots there: register it "
                     "for RAM, or connect to the handle socket"};
  }
  return model;
}

void Core::session_hung_up(SessionId id) {
  const auto it = sessions_.find(id.value);
  if (it != sessions_.end()) it->second.session->hung_up = true;
}

// A closed socket alone does not end a session: the process may still be reading slots. It ends when the
// process is gone, or when it has closed every lane itself.
void Core::reap_sessions() {
  std::vector<std::uint64_t> gone;
  for (auto& [id, state] : sessions_) {
    if (!state.session->hung_up) continue;
    bool open = false;
    if (state.session->pidfd() >= 0 && !process_exited(state.session->pidfd())) {
      for (std::uint32_t i = 0; i < MOECACHED_MAX_LANES; ++i) {
        open = open || std::atomic_ref(state.session->lane(i).state).load(std::memory_order_acquire) != 0;
      }
    }
    if (!open) gone.push_back(id);
  }
  for (const std::uint64_t id : gone) {
    SessionState& state = sessions_.at(id);
    release_session(state);
    epoll_.remove(state.session->doorbell().fd());
    if (state.session->pidfd() >= 0) epoll_.remove(state.session->pidfd());
    sessions_.erase(id);
  }
}

// The lanes and models of a session whose process is gone or done.
void Core::release_session(SessionState& state) {
  for (std::uint32_t i = 0; i < MOECACHED_MAX_LANES; ++i) {
    close_lane(state, i);
    // Grace periods look at the words of every lane, also of one that never said it is open: none may be
    // waited for once its memory goes.
    grace_.lane_gone(state.session->id().value * MOECACHED_MAX_LANES + i);
  }
  for (auto& [id, opened] : state.session->models) --opened.model->sessions;
  state.session->models.clear();
  gpu_.release_session(*state.session);
}

// Brings the loop's view of a lane in line with the client's word. Returns whether the lane is open.
bool Core::sync_lane(SessionState& state, std::uint32_t index) {
  moecached_shm_lane& words = state.session->lane(index);
  const bool open = std::atomic_ref(words.state).load(std::memory_order_acquire) == 1;
  std::unique_ptr<Lane>& lane = state.lanes[index];
  const std::uint32_t model_id = std::atomic_ref(words.model_id).load(std::memory_order_relaxed);
  if (lane && (!open || lane->model->id().value != model_id)) {
    drain_lane(state, *lane);
    close_lane(state, index);
  }
  if (!open) return false;
  if (lane) return true;
  const auto opened = state.session->models.find(model_id);
  if (opened == state.session->models.end())
    return false;  // not a model of this session: the lane is not served
  lane = std::make_unique<Lane>();
  lane->key = state.session->id().value * MOECACHED_MAX_LANES + index;
  if (free_lane_ids_.empty()) {
    lane->id = LaneId(next_lane_id_++);
  } else {
    lane->id = LaneId(free_lane_ids_.back());
    free_lane_ids_.pop_back();
  }
  lane->model = opened->second.model;
  lane->words = &words;
  lane->ring = std::make_unique<RingReader>(words, lane->model->limits());
  lane_places_[lane->id.value] = {state.session->id().value, index};
  lane->uses = uses_.of_label(lane->model->id(), state.session->label());
  brain_.lane_opened(lane->id, lane->model->id());
  return true;
}

void Core::close_lane(SessionState& state, std::uint32_t index) {
  std::unique_ptr<Lane>& lane = state.lanes[index];
  if (!lane) return;
  brain_.lane_closed(lane->id);
  grace_.lane_gone(lane->key);
  state.records_closed += lane->ring->records();
  lane_places_.erase(lane->id.value);
  free_lane_ids_.push_back(lane->id.value);
  lane.reset();
  carry_out_commands();
}

std::uint64_t Core::reserved_bytes() const {
  std::uint64_t bytes = 0;
  for (const auto& [id, model] : models_) bytes += model->pool().bytes_backed_max();
  return bytes;
}

UserUse Core::use_of(std::uint32_t uid) const {
  UserUse use;
  std::set<std::uint32_t> counted;
  std::set<const ExpertRam*> rams;  // one may be of several models, on a GPU each
  for (const auto& [id, state] : sessions_) {
    const Session& session = *state.session;
    if (session.peer().uid != uid) continue;
    ++use.sessions;
    use.files += kFilesOfSession + kFilesOfOpen * (session.models.size() + session.gpu_models.size());
    for (const auto& [model, opened] : session.models) {
      if (!counted.insert(model).second) continue;
      use.files += opened.model->files().size();
      use.bytes += opened.model->pool().bytes_backed_max();
    }
    for (const auto& [model, opened] : session.gpu_models) {
      if (!counted.insert(model).second) continue;
      use.files += opened.model->files().size();
      if (rams.insert(&opened.model->ram()).second) use.bytes += opened.model->ram().bytes();
    }
  }
  return use;
}

Status Core::may_open(const Session& session, std::uint32_t model, UserUse of_model) const {
  const bool has_it = std::ranges::any_of(sessions_, [&](const auto& entry) {
    const Session& other = *entry.second.session;
    return other.peer().uid == session.peer().uid &&
           (other.models.contains(model) || other.gpu_models.contains(model));
  });
  UserUse would = use_of(session.peer().uid);
  would.files += kFilesOfOpen + (has_it ? 0 : of_model.files);
  would.bytes += has_it ? 0 : of_model.bytes;
  return check_user(session.peer().uid, would, config_);
}

std::uint64_t Core::bytes_more(std::uint32_t uid, const ExpertRam& ram) const {
  for (const auto& [id, state] : sessions_) {
    if (state.session->peer().uid != uid) continue;
    for (const auto& [model, opened] : state.session->gpu_models) {
      if (&opened.model->ram() == &ram) return 0;
    }
  }
  return ram.bytes();
}

Status Core::may_pin(SessionId session, std::uint64_t bytes, const ExpertRam* shared) const {
  if (session == SessionId()) return ok();
  const auto it = sessions_.find(session.value);
  if (it == sessions_.end()) return Fault{FaultCode::kNotFound, "the session is gone"};
  if (shared != nullptr) bytes = bytes_more(it->second.session->peer().uid, *shared);
  return may_open(*it->second.session, 0, {.bytes = bytes});
}

Result<Core::ModelFiles> Core::begin_model(std::vector<UniqueFd> shards, SessionId session, Gpu* gpu) {
  ModelFiles out;
  out.gpu = gpu;
  for (const UniqueFd& shard : shards) {
    auto identity = file_identity(shard.get());
    if (!identity) return std::move(identity).error();
    out.identity.push_back(*identity);
  }
  out.existing = find_model(out);
  if (out.existing) {
    out.existing->being_prepared = gpu != nullptr;
    return out;
  }
  if (const auto it = sessions_.find(session.value); it != sessions_.end()) {
    // Before anything makes room for it.
    if (Status may = may_open(*it->second.session, 0, {.files = shards.size()}); !may)
      return std::move(may).error();
    out.bytes_max = user_bytes_left(use_of(it->second.session->peer().uid), config_);
  }
  if (models_.size() + gpu_.n_models() >= config_.max_models) {
    std::uint64_t freed = 0;
    if (!drop_idle_model(&freed)) {
      return Fault{FaultCode::kLimit,
                   std::to_string(models_.size() + gpu_.n_models()) +
                       " models are in use, limits.models = " + std::to_string(config_.max_models)};
    }
  }
  return add_files(std::move(shards), std::move(out));
}

Result<Core::ModelFiles> Core::add_files(std::vector<UniqueFd> shards, ModelFiles out) {
  out.direct_alignment = 0;
  for (UniqueFd& shard : shards) {
    auto file = ssd_->add_file(std::move(shard));
    if (!file) {
      for (const FileId id : out.files) ssd_->remove_file(id);
      return std::move(file).error();
    }
    out.files.push_back(*file);
    out.direct_alignment = std::max(out.direct_alignment, ssd_->direct_alignment(*file));
  }
  return out;
}

void Core::remove_files(const ModelFiles& files) {
  for (const FileId id : files.files) ssd_->remove_file(id);
}

Result<Core::GpuModelFiles> Core::begin_gpu_model(std::vector<UniqueFd> shards, const GpuId& gpu,
                                                  SessionId session) {
  GpuModelFiles out;
  for (const UniqueFd& shard : shards) {
    auto identity = file_identity(shard.get());
    if (!identity) return std::move(identity).error();
    out.files.identity.push_back(*identity);
  }
  out.existing = gpu_.find_model(out.files.identity, gpu);
  if (out.existing) return out;
  if (const auto it = sessions_.find(session.value); it != sessions_.end()) {
    if (Status may = may_open(*it->second.session, 0, {.files = shards.size()}); !may)
      return std::move(may).error();
  }
  out.ram = gpu_.find_ram(out.files.identity);
  if (models_.size() + gpu_.n_models() >= config_.max_models) {
    if (!drop_idle_gpu_model()) {
      return Fault{FaultCode::kLimit,
                   std::to_string(models_.size() + gpu_.n_models()) +
                       " models are in use, limits.models = " + std::to_string(config_.max_models)};
    }
  }
  auto files = add_files(std::move(shards), std::move(out.files));
  if (!files) return std::move(files).error();
  out.files = *std::move(files);
  out.id = ModelId(next_model_id_++);
  return out;
}

Result<std::shared_ptr<GpuModel>> Core::finish_gpu_model(const ModelFiles& files,
                                                         Result<std::shared_ptr<GpuModel>> model,
                                                         WarmStart warm) {
  if (model) {
    if (Status added = gpu_.add_model(*model, warm); !added) model = std::move(added).error();
  }
  if (!model) {
    remove_files(files);
    return model;
  }
  for (const int fd : gpu_.event_fds()) {
    if (std::ranges::find(gpu_fds_, fd) != gpu_fds_.end()) continue;
    // Waking is all that is asked of it: the turn looks at every queue.
    if (auto added = epoll_.add(fd, EPOLLIN, std::uint64_t{1} << 2 | kWakePost); !added)
      return std::move(added).error();
    gpu_fds_.push_back(fd);
  }
  return model;
}

Result<std::shared_ptr<Memfd>> Core::open_gpu_in_session(SessionId session, Session::OpenedGpu opened) {
  const auto it = sessions_.find(session.value);
  if (it == sessions_.end()) return Fault{FaultCode::kNotFound, "the session is gone"};
  const std::uint32_t id = opened.model->id().value;
  if (gpu_.find_model(id) != opened.model)
    return Fault{FaultCode::kNotFound, "the model was dropped meanwhile: open it again"};
  if (!it->second.session->gpu_models.contains(id)) {
    const UserUse of_model{.files = opened.model->files().size(),
                           .bytes = bytes_more(it->second.session->peer().uid, opened.model->ram())};
    if (Status may = may_open(*it->second.session, id, of_model); !may) return std::move(may).error();
  }
  gpu_.open_in_session(*it->second.session, std::move(opened));
  return it->second.session->gpu_models.at(id).log;
}

bool Core::drop_idle_gpu_model() {
  std::vector<FileId> files;
  if (!gpu_.drop_idle_model(&files)) return false;
  for (const FileId id : files) ssd_->remove_file(id);
  return true;
}

std::shared_ptr<GpuModel> Core::gpu_model_of(SessionId session, std::uint32_t model) const {
  const auto it = sessions_.find(session.value);
  if (it == sessions_.end()) return nullptr;
  const auto opened = it->second.session->gpu_models.find(model);
  return opened == it->second.session->gpu_models.end() ? nullptr : opened->second.model;
}

Result<std::shared_ptr<SharedModel>> Core::finish_model(ModelFiles files, Result<ModelLayout> layout,
                                                        std::string name, WarmStart warm) {
  auto fail = [&](Fault fault) {
    for (const FileId id : files.files) ssd_->remove_file(id);
    return fault;
  };
  if (!layout) return fail(std::move(layout).error());
  // Another client may have brought the same model while the layout was read.
  if (auto model = find_model(files)) {
    for (const FileId file : files.files) ssd_->remove_file(file);
    model->being_prepared = files.gpu != nullptr;
    return model;
  }
  // A model nobody uses makes room for one that somebody wants; the one idle for longest goes first.
  // Slots that are copied to a GPU and back are pinned: they have no holes to trade with.
  const SlotScope scope = files.gpu != nullptr ? SlotScope::kLayer : config_.slot_scope;
  if (scope == SlotScope::kGlobal) align_slots_to_pages(*layout);
  Result<std::vector<std::uint32_t>> slots = Fault{};
  for (;;) {
    const std::uint64_t reserved = reserved_bytes();
    const std::uint64_t free = config_.pool_bytes > reserved ? config_.pool_bytes - reserved : 0;
    slots = plan_slots(*layout, config_.slots, std::min(free, files.bytes_max));
    const bool whole = slots && std::ranges::equal(*slots, layout->layers, {}, {}, &LayerLayout::n_experts);
    if (slots && (whole || config_.slots.kind != SlotsSpec::Kind::kAuto)) break;
    if (files.bytes_max < free) {  // no model of others that went would make it more
      if (!slots)
        slots.error().text += " (of limits.user_bytes, " + format_size(files.bytes_max) + " are left)";
      break;
    }
    std::uint64_t freed = 0;
    if (!drop_idle_model(&freed)) break;
  }
  if (!slots) return fail(std::move(slots).error());
  const std::uint64_t half = plan_stream_half(*layout, config_.stream_bytes, files.gpu != nullptr);
  if (name.empty()) name = layout->name;
  SharedModel::Parameters parameters{.id = ModelId(next_model_id_),
                                     .name = std::move(name),
                                     .identity = files.identity,
                                     .files = files.files,
                                     .layout = *std::move(layout),
                                     .n_slots = *std::move(slots),
                                     .scope = scope,
                                     .stream_half = half,
                                     .boot_epoch = boot_epoch_,
                                     .gpu = files.gpu};
  auto model = SharedModel::create(std::move(parameters), *device_);
  if (!model) return fail(std::move(model).error());
  ModelShape shape = (*model)->shape();
  shape.policy = config_.policy;
  shape.device_policy = config_.gpu.policy;
  shape.prefetch = config_.prefetch != "off";
  if (const VramSlots* device = (*model)->device()) {
    // Waking is all that is asked of it: the turn looks at every queue.
    if (auto added = epoll_.add(device->event_fd(), EPOLLIN, std::uint64_t{1} << 2 | kWakePost); !added)
      return fail(std::move(added).error());
  }
  if (auto added = brain_.add_model((*model)->id(), shape); !added) {
    if (const VramSlots* device = (*model)->device()) epoll_.remove(device->event_fd());
    return fail(std::move(added).error());
  }
  ++next_model_id_;
  (*model)->last_used = turn_;
  (*model)->being_prepared = files.gpu != nullptr;
  if (std::vector<SlotWindow> traded = (*model)->traded_slots(); !traded.empty()) {
    ssd_->register_traded_region((*model)->pool().host_view(), std::move(traded));
  } else {
    ssd_->register_region((*model)->pool().host_view());
  }
  models_[(*model)->id().value] = *model;
  uses_.add_model((*model)->id(), warm.key, (*model)->name(), shapes_of((*model)->layout()), warm.lists);
  if (!warm.lists.empty()) (void)prewarm((*model)->id().value, sum_of(warm.lists));
  return *std::move(model);
}

Result<std::shared_ptr<Memfd>> Core::open_in_session(SessionId session,
                                                     const std::shared_ptr<SharedModel>& model,
                                                     std::shared_ptr<Memfd> stream) {
  const auto it = sessions_.find(session.value);
  if (it == sessions_.end()) return Fault{FaultCode::kNotFound, "the session is gone"};
  if (!models_.contains(model->id().value))
    return Fault{FaultCode::kNotFound, "the model was dropped meanwhile: open it again"};
  if (!it->second.session->models.contains(model->id().value)) {
    const UserUse of_model{.files = model->files().size(), .bytes = model->pool().bytes_backed_max()};
    if (Status may = may_open(*it->second.session, model->id().value, of_model); !may)
      return std::move(may).error();
  }
  auto [place, is_new] =
      it->second.session->models.try_emplace(model->id().value, Session::Opened{model, std::move(stream)});
  if (is_new) ++model->sessions;
  if (is_new) prewarm_for_label(model->id(), it->second.session->label());
  return place->second.stream;
}

bool Core::drop_idle_model(std::uint64_t* freed) {
  std::shared_ptr<SharedModel> oldest;
  for (const auto& [id, model] : models_) {
    if (model->sessions == 0 && !model->being_prepared && (!oldest || model->last_used < oldest->last_used))
      oldest = model;
  }
  if (!oldest) return false;
  *freed = oldest->pool().bytes_backed_max();
  erase_model(oldest->id().value);
  return true;
}

void Core::erase_model(std::uint32_t id) {
  const std::shared_ptr<SharedModel> model = models_.at(id);
  CHECK(model->sessions == 0 && !model->being_prepared);
  brain_.remove_model(model->id());
  uses_.remove_model(model->id());
  shadows_.stop(model->id());
  plans_.erase(id);
  grace_.model_gone(model->id());
  std::erase_if(wrong_slots_, [&](const auto& wrong) { return wrong.first == model->id(); });
  models_.erase(id);
  // Its files are closed when the last read from them is done.
  while (model->reads_in_flight > 0) {
    reads_.flush();
    drain_reads();
    std::this_thread::yield();
  }
  if (const VramSlots* device = model->device()) {
    epoll_.remove(device->event_fd());
    gpu_.set_spill_use(device->gpu(), spill_use(device->gpu()));
  }
  ssd_->unregister_region(model->pool().host_view());
  for (const FileId file : model->files()) ssd_->remove_file(file);
}

Status Core::drop_model(std::uint32_t id) {
  if (gpu_.find_model(id)) {
    std::vector<FileId> files;
    if (Status dropped = gpu_.drop_model(id, &files); !dropped) return dropped;
    for (const FileId file : files) ssd_->remove_file(file);
    return ok();
  }
  const auto it = models_.find(id);
  if (it == models_.end()) return Fault{FaultCode::kNotFound, "no model " + std::to_string(id)};
  if (it->second->sessions > 0) {
    return Fault{FaultCode::kInvalid, "model " + std::to_string(id) + " is used by " +
                                          std::to_string(it->second->sessions) +
                                          " session(s); stop them first"};
  }
  if (it->second->being_prepared) {
    return Fault{FaultCode::kInvalid,
                 "model " + std::to_string(id) + " is being opened by a session; stop it first"};
  }
  erase_model(id);
  return ok();
}

}  // namespace moecached
