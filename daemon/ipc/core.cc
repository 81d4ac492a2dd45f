#include "daemon/ipc/core.h"

#include <spdlog/spdlog.h>

#include <algorithm>

#include "daemon/base/check.h"
#include "daemon/platform/clock.h"
#include "daemon/platform/futex.h"
#include "proto/shm/stream_place.h"

namespace moecached {

namespace {

constexpr std::uint64_t kMillisecond = 1'000'000;
// While something waits for a lane to move on (a grace period, a lease behind another), the loop looks this
// often.
constexpr int kBusyTickMs = 1;
// Rings are read at least this often while records flow: a ring holds 2048 records, a fast decode writes
// about 8000 a second.
constexpr int kActiveTickMs = 20;
constexpr int kIdleTickMs = 200;
constexpr std::uint64_t kActiveFor = 1000 * kMillisecond;

// Whether the lane may be in an epoch of the model. One that opens later begins later, and sees the entry
// absent: it was set so before these loads, by a sequentially consistent store as well. So a lane of another
// model of the session is not waited for, nor one that claims an epoch without being open.
bool is_open_for(moecached_shm_lane& words, std::uint32_t model_id) {
  return std::atomic_ref(words.state).load(std::memory_order_seq_cst) == 1 &&
         std::atomic_ref(words.model_id).load(std::memory_order_seq_cst) == model_id;
}

}  // namespace

Result<std::unique_ptr<Core>> Core::create(const Config& config, std::uint64_t boot_epoch) {
  auto ssd = make_ssd_tier(config.ssd);
  if (!ssd) return std::move(ssd).error();
  auto wake = EventFd::create();
  if (!wake) return std::move(wake).error();
  auto epoll = Epoll::create();
  if (!epoll) return std::move(epoll).error();
  if (auto added = epoll->add(wake->fd(), EPOLLIN, kWakePost); !added) return std::move(added).error();
  if (auto added = epoll->add((*ssd)->event_fd(), EPOLLIN, kWakeSsd); !added) return std::move(added).error();
  std::vector<std::unique_ptr<Gpu>> gpus;
  std::string no_gpu_reason;
  if (config.gpu.devices != "none") gpus = list_gpus(&no_gpu_reason);
  return std::unique_ptr<Core>(new Core(config, boot_epoch, *std::move(ssd), make_host_device(),
                                        *std::move(wake), *std::move(epoll), std::move(gpus),
                                        std::move(no_gpu_reason)));
}

Core::Core(const Config& config, std::uint64_t boot_epoch, std::unique_ptr<SsdTier> ssd,
           std::unique_ptr<Device> device, EventFd wake, Epoll epoll, std::vector<std::unique_ptr<Gpu>> gpus,
           std::string no_gpu_reason)
    : config_(config),
      boot_epoch_(boot_epoch),
      ssd_(std::move(ssd)),
      device_(std::move(device)),
      wake_(std::move(wake)),
      epoll_(std::move(epoll)),
      reads_(*ssd_, config_.ssd),
      warmth_(config_.state_directory),
      gpu_(config_, std::move(gpus), std::move(no_gpu_reason), reads_, taps_, policy_libraries_, uses_,
           shadows_) {}

Core::~Core() {
  stop();
  // First the reads end, then the memory they write into goes.
  ssd_.reset();
}

void Core::start() {
  thread_ = std::thread([this] { run(); });
}

void Core::stop() {
  if (!thread_.joinable()) return;
  stopping_.store(true);
  wake_.signal();
  thread_.join();
}

void Core::post(std::function<void()> fn) {
  {
    std::lock_guard lock(posts_mutex_);
    posts_.push_back(std::move(fn));
  }
  wake_.signal();
}

void Core::run() {
  while (!stopping_.load(std::memory_order_relaxed)) {
    wait();
    ++turn_;
    run_posts();
    drain_reads();
    const std::uint64_t now = monotonic_ns();
    turn_device_slots(now);
    if (now - last_sweep_ns_ >= kBusyTickMs * kMillisecond || rung_.empty()) {
      last_sweep_ns_ = now;
      for (auto& [id, state] : sessions_) drain_session(state);
    } else {
      for (const std::uint64_t id : rung_) {
        if (auto it = sessions_.find(id); it != sessions_.end()) drain_session(it->second);
      }
    }
    advance_epochs();
    carry_out_commands();
    read_wrong_slots_again();
    watch_stalls();
    watch_policy_libraries();
    session_list_.clear();
    for (auto& [id, state] : sessions_) session_list_.push_back(state.session.get());
    gpu_.turn(now, session_list_);
    reap_sessions();
    load_planned();
    reads_.flush();
  }
  run_posts();  // nobody may wait for an answer that never comes
}

void Core::wait() {
  int timeout = kIdleTickMs;
  if (waiting_on_lanes() || !plans_.empty()) {
    timeout = kBusyTickMs;
  } else if (!sessions_.empty() && monotonic_ns() - last_record_ns_ < kActiveFor) {
    timeout = reads_ahead() ? kBusyTickMs : kActiveTickMs;
  }
  if (const int wanted = gpu_.wanted_tick_ms(); wanted >= 0) timeout = std::min(timeout, wanted);
  epoll_event events[64];
  const std::size_t n = epoll_.wait(events, timeout);
  rung_.clear();
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint64_t kind = events[i].data.u64 & 3;
    const std::uint64_t id = events[i].data.u64 >> 2;
    if (kind == kWakePost) wake_.drain();
    const auto it = kind >= kWakeDoorbell ? sessions_.find(id) : sessions_.end();
    if (it == sessions_.end()) continue;
    if (kind == kWakeDoorbell) {
      it->second.session->doorbell().drain();
      rung_.push_back(id);
    } else {  // the process is gone, whatever its socket says
      epoll_.remove(it->second.session->pidfd());
      release_session(it->second);
    }
  }
}

void Core::run_posts() {
  std::vector<std::function<void()>> posts;
  {
    std::lock_guard lock(posts_mutex_);
    posts.swap(posts_);
  }
  for (auto& fn : posts) fn();
}

void Core::drain_reads() {
  slot_done_.clear();
  stream_done_.clear();
  bulk_done_.clear();
  reads_.poll(&slot_done_, &stream_done_, &bulk_done_);
  for (ReadTable::SlotDone& done : slot_done_) {
    SharedModel& model = *done.read.model;
    ReadOutcome outcome = ReadOutcome::kOk;
    switch (done.result) {
      case ReadResult::kOk:
        for (const PartLayout& part : model.layout().layers[done.read.layer.value].parts)
          model.bytes_read += part.expert_bytes;
        break;
      case ReadResult::kIoError:
        outcome = ReadOutcome::kIoError;
        break;
      case ReadResult::kFileChanged:
        outcome = ReadOutcome::kModelChanged;
        model.changed_on_disk = true;
        break;
    }
    brain_.read_done(model.id(), done.read.layer, done.read.slot, outcome);
    carry_out_commands();
  }
  for (const ReadTable::StreamDone& done : stream_done_) finish_stream(done);
  for (const ReadTable::BulkDone& done : bulk_done_) {
    if (done.read.on_done) {
      done.read.on_done(done.result);
    } else {
      gpu_.load_done(done);
    }
  }
}

void Core::finish_stream(const ReadTable::StreamDone& done) {
  SharedModel& model = *done.read.model;
  GrantStatus status = GrantStatus::kOk;
  if (done.result == ReadResult::kOk) {
    model.streamed_parts += done.parts;
    model.streamed_bytes += done.bytes;
  } else if (done.result == ReadResult::kIoError) {
    status = GrantStatus::kIoError;
  } else {
    status = GrantStatus::kModelChanged;
    model.changed_on_disk = true;
  }
  Lane* lane = find_lane(done.read.lane_key);
  if (lane == nullptr) return;
  answer_stream(*lane, done.read.half, done.read.seq, status);
}

void Core::drain_session(SessionState& state) {
  for (std::uint32_t i = 0; i < MOECACHED_MAX_LANES; ++i) {
    if (sync_lane(state, i)) drain_lane(state, *state.lanes[i]);
  }
}

void Core::drain_lane(SessionState& state, Lane& lane) {
  LaneMessage message;
  // Bounded, so that one client cannot keep the loop to itself; what is left is taken next turn.
  for (std::uint32_t i = 0; i < MOECACHED_RING_RECORDS; ++i) {
    const RingOutcome outcome = lane.ring->next(&message);
    if (outcome == RingOutcome::kEmpty) return;
    last_record_ns_ = monotonic_ns();
    lane.model->last_used = turn_;
    if (outcome == RingOutcome::kRefused) {
      ++state.session->records_refused;
      if (message.kind == MOECACHED_RECORD_LEASE) grant(lane, message.seq, GrantStatus::kRefused);
      if (message.kind == MOECACHED_RECORD_STREAM) {
        answer_stream(lane, message.half, message.seq, GrantStatus::kRefused);
      }
      continue;
    }
    handle_message(state, lane, message);
  }
}

void Core::handle_message(SessionState& state, Lane& lane, const LaneMessage& message) {
  if (message.kind == MOECACHED_RECORD_STREAM) {
    handle_stream(state, lane, message);
    return;
  }
  const Phase phase = message.prefill ? Phase::kPrompt : Phase::kDecode;
  lane.use_epoch = message.epoch;
  lane.use_layer = message.layer;
  lane.use_ids.assign(message.ids.begin(), message.ids.end());
  if (lane.uses && phase == Phase::kDecode) lane.uses->add(message.layer, message.ids);
  const RoutingEvent event{.lane = lane.key,
                           .graph = 0,
                           .layer = message.layer,
                           .token = 0,
                           .n_tokens = message.n_tokens,
                           .prefill = message.prefill};
  if (message.kind == MOECACHED_RECORD_ROUTE) {
    taps_.put(lane.model->id(), event, message.ids);
    const std::uint64_t hits_before = hits_of(lane, message.layer);
    brain_.routed(lane.id, message.layer, message.ids, phase);
    shadow(lane, message, phase, hits_before);
    rise(lane, message, phase);
    return;
  }
  if (lane.model->changed_on_disk) {
    grant(lane, message.seq, GrantStatus::kModelChanged);
    return;
  }
  lane.lease_pending = true;
  taps_.put(lane.model->id(), event, message.ids);
  const std::uint64_t hits_before = hits_of(lane, message.layer);
  brain_.lease(lane.id, message.layer, message.ids, message.seq, message.epoch, phase);
  shadow(lane, message, phase, hits_before);
  trade_slots(*lane.model, message.layer);
  carry_out_commands();
  rise(lane, message, phase);
}

// Behind a lease alone: without misses there is nothing to gain, and the lane that asked is in no epoch.
void Core::trade_slots(SharedModel& model, LayerIndex busy) {
  if (!release_failed_ && brain_.trade_slots(model.id(), busy)) tell_open(model);
}

void Core::tell_open(SharedModel& model) const {
  for (std::uint32_t l = 0; l < model.layout().layers.size(); ++l)
    model.tell_open(LayerIndex(l), brain_.slots(model.id(), LayerIndex(l)));
}

void Core::handle_stream(SessionState& state, Lane& lane, const LaneMessage& message) {
  const auto opened = state.session->models.find(lane.model->id().value);
  const PartLayout& part = lane.model->layout().layers[message.layer.value].parts[message.part];
  const std::uint64_t half_bytes = lane.model->stream_bytes_per_lane() / 2;
  GrantStatus status = GrantStatus::kOk;
  std::uint64_t bytes = message.ids.size() * part.expert_bytes;
  if (message.in_place) {
    moecached_stream_end end{};
    for (const ExpertIndex expert : message.ids) {
      const PartExtent from = part.extent(expert.value);
      (void)moecached_stream_place(&end, from.file, from.offset, part.expert_bytes);
    }
    bytes = moecached_stream_bytes(end);
  }
  if (opened == state.session->models.end() || bytes > half_bytes) {
    status = GrantStatus::kRefused;
    ++state.session->records_refused;
  } else if (lane.model->changed_on_disk) {
    status = GrantStatus::kModelChanged;
  }
  if (status != GrantStatus::kOk) {
    answer_stream(lane, message.half, message.seq, status);
    return;
  }
  const std::uint64_t index = lane.key % MOECACHED_MAX_LANES;
  reads_.start(
      StreamRead{.model = lane.model,
                 .buffer_owner = opened->second.stream,
                 .destination = opened->second.stream->bytes().data() +
                                index * lane.model->stream_bytes_per_lane() + message.half * half_bytes,
                 .in_place = message.in_place,
                 .lane_key = lane.key,
                 .layer = message.layer,
                 .part = message.part,
                 .half = message.half,
                 .seq = message.seq},
      message.ids);
}

void Core::answer_stream(Lane& lane, std::uint32_t half, std::uint32_t seq, GrantStatus status) {
  lane.words->stream_status[half] = static_cast<std::uint32_t>(status);
  std::atomic_ref(lane.words->stream_done[half]).store(seq, std::memory_order_release);
  futex_wake(&lane.words->stream_done[half]);
}

void Core::grant(Lane& lane, std::uint32_t seq, GrantStatus status) {
  lane.lease_pending = false;
  lane.stalled_since_ns = 0;  // from here on it may begin
  lane.words->lease_status = static_cast<std::uint32_t>(status);
  std::atomic_ref(lane.words->lease_done).store(seq, std::memory_order_release);
  futex_wake(&lane.words->lease_done);
}

void Core::advance_epochs() {
  for (auto& [id, state] : sessions_) {
    for (const auto& lane : state.lanes) {
      std::uint64_t epoch = 0;
      if (!lane || !brain_.has_lease_until(lane->id, &epoch)) continue;
      const std::uint64_t completed = std::atomic_ref(lane->words->completed).load(std::memory_order_acquire);
      if (completed >= epoch) {
        brain_.epoch_completed(lane->id, completed);
        carry_out_commands();
      }
    }
  }
  if (grace_.empty()) return;
  grace_done_.clear();
  grace_.poll(
      [this](std::uint64_t key, std::uint64_t epoch, LayerIndex layer, ExpertIndex expert) {
        const Lane* lane = find_lane(key);
        return lane != nullptr && lane->use_epoch == epoch && lane->use_layer == layer &&
               std::find(lane->use_ids.begin(), lane->use_ids.end(), expert) == lane->use_ids.end();
      },
      &grace_done_);
  for (const GraceTicket& ticket : grace_done_) brain_.grace_done(ticket.model, ticket.layer, ticket.slot);
  carry_out_commands();
}

void Core::carry_out_commands() {
  for (;;) {
    const std::span<const Command> commands = brain_.take_commands();
    if (commands.empty()) return;
    tickets_.clear();
    for (const Command& command : commands) {
      if (command.kind == CommandKind::kGrant) {
        const auto place = lane_places_.find(command.lane.value);
        if (place == lane_places_.end()) continue;
        grant(*sessions_.at(place->second.first).lanes[place->second.second], command.seq, command.status);
        continue;
      }
      const std::shared_ptr<SharedModel> model = find_model(command.model);
      if (model == nullptr) continue;
      switch (command.kind) {
        case CommandKind::kUnpublish:
          model->unpublish(command.layer, command.expert);
          tickets_.push_back({command.model, command.layer, command.slot, command.expert});
          break;
        case CommandKind::kMove:
          model->move(command.layer, command.expert, command.slot);
          tickets_.push_back({command.model, command.layer, command.from, command.expert});
          break;
        case CommandKind::kCopyUp:
        case CommandKind::kCopyAside:
          start_device_copy(*model, command);
          break;
        case CommandKind::kSpareFreed:
          model->device()->give_back_spare(static_cast<std::uint32_t>(command.spare));
          break;
        case CommandKind::kRead:
          if (command.spare >= 0) {
            start_device_copy(*model, command);
            break;
          }
          reads_.start(SlotRead{model, command.layer, command.expert, command.slot, command.is_ahead});
          break;
        case CommandKind::kHasten:
          reads_.hasten(command.model, command.layer, command.slot);
          break;
        case CommandKind::kPublish:
          model->publish(command.layer, command.expert, command.slot);
          break;
        case CommandKind::kRelease:
          release(*model, command.layer, command.slot);
          break;
        case CommandKind::kGrant:
          break;
      }
    }
    if (tickets_.empty()) continue;
    // Lanes as the clients wrote them, not as the loop knows them: one may have begun before the loop saw it
    // open.
    grace_done_.clear();
    std::uint32_t model_id = 0;
    for (std::size_t first = 0; first < tickets_.size();) {
      model_id = tickets_[first].model.value;
      std::size_t last = first;
      while (last < tickets_.size() && tickets_[last].model.value == model_id) ++last;
      if (gpu_.tests_without_grace() && find_model(ModelId(model_id))->device() != nullptr) {
        grace_done_.insert(grace_done_.end(), tickets_.begin() + static_cast<std::ptrdiff_t>(first),
                           tickets_.begin() + static_cast<std::ptrdiff_t>(last));
        first = last;
        continue;
      }
      grace_lanes_.clear();
      for (auto& [id, state] : sessions_) {
        if (!state.session->models.contains(model_id)) continue;
        for (std::uint32_t i = 0; i < MOECACHED_MAX_LANES; ++i) {
          moecached_shm_lane& words = state.session->lane(i);
          if (is_open_for(words, model_id)) grace_lanes_.push_back({id * MOECACHED_MAX_LANES + i, &words});
        }
      }
      grace_.begin(std::span(tickets_).subspan(first, last - first), grace_lanes_, &grace_done_);
      first = last;
    }
    for (const GraceTicket& ticket : grace_done_) brain_.grace_done(ticket.model, ticket.layer, ticket.slot);
  }
}

// Commands behind this one may read into the slot that another layer gets for it.
void Core::release(SharedModel& model, LayerIndex layer, SlotIndex slot) {
  if (Status released = model.release(layer, slot); !released && !release_failed_) {
    release_failed_ = true;
    spdlog::warn(
        "the pool takes more memory than pool.bytes: a slot that moved to another layer keeps its own: {}; "
        "no more are moved, set pool.scope = layer",
        released.error().text);
  }
  ssd_->released({model.slot(layer, slot), model.slot_bytes(layer)});
  tell_open(model);
}

// Records of layers that missed nothing ring no bell, and what they foretell is wanted a layer later.
bool Core::reads_ahead() const {
  return std::ranges::any_of(models_, [this](const auto& model) {
    const PrefetchState state = brain_.prefetch(ModelId(model.first));
    return state == PrefetchState::kProbing || state == PrefetchState::kOn;
  });
}

bool Core::waiting_on_lanes() const {
  if (!grace_.empty() || !wrong_slots_.empty()) return true;
  for (const auto& [id, state] : sessions_) {
    if (state.session->hung_up) return true;
    for (const auto& lane : state.lanes) {
      if (lane && lane->lease_pending && reads_.in_flight() == 0) return true;
    }
  }
  return false;
}

Core::Lane* Core::find_lane(std::uint64_t key) {
  const auto it = sessions_.find(key / MOECACHED_MAX_LANES);
  if (it == sessions_.end()) return nullptr;
  return it->second.lanes[key % MOECACHED_MAX_LANES].get();
}

std::shared_ptr<SharedModel> Core::find_model(const ModelFiles& files) const {
  for (const auto& [id, model] : models_) {
    const Gpu* gpu = model->device() == nullptr ? nullptr : &model->device()->gpu();
    if (!model->changed_on_disk && gpu == files.gpu && std::ranges::equal(model->identity(), files.identity))
      return model;
  }
  return nullptr;
}

std::shared_ptr<SharedModel> Core::find_model(ModelId id) const {
  const auto it = models_.find(id.value);
  return it == models_.end() ? nullptr : it->second;
}

}  // namespace moecached
