#include "tests/unit/client/fake_daemon.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>

#include "tests/unit/client/fake_segments.h"

namespace moecached::client::test {
namespace {

void futex_wake(std::uint32_t* word) {
  ::syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

std::uint32_t status_of(OnRequest what) {
  switch (what) {
    case OnRequest::kIoError:
      return MOECACHED_GRANT_IO_ERROR;
    case OnRequest::kModelChanged:
      return MOECACHED_GRANT_MODEL_CHANGED;
    case OnRequest::kRefuse:
    case OnRequest::kRefuseAsTraded:
      return MOECACHED_GRANT_REFUSED;
    case OnRequest::kNoRoom:
      return MOECACHED_GRANT_NO_ROOM;
    default:
      return MOECACHED_GRANT_OK;
  }
}

}  // namespace

FakeDaemon::FakeDaemon(std::string socket_path, const TestModel& model, FakeOptions options)
    : model_(model), options_(std::move(options)) {
  const TestModel::Shape& shape = model_.shape();
  listener_ = listen_at(socket_path);
  wake_ = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  doorbell_ = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  session_ = make_segment(sizeof(moecached_shm_header) + 64 + options_.n_lanes * sizeof(moecached_shm_lane),
                          &session_fd_);
  pool_ = make_segment(shape.n_layers * model_.window_bytes(), &pool_fd_);
  stream_ = make_segment(options_.n_lanes * 2 * shape.stream_half_bytes, &stream_fd_);
  write_session_segment(session_, options_);
  model_segment_ = write_model_segment(model_, options_, pool_.bytes(), &model_fd_, &table_offset_);
  if (options_.gpu) {
    gpu_ = std::make_unique<FakeGpu>(model_, *options_.gpu, options_.boot_epoch, options_.n_lanes);
  }
  layers_.resize(shape.n_layers);
  for (Layer& layer : layers_) layer.slots.resize(shape.n_slots);
  thread_ = std::thread([this] { run(); });
}

FakeDaemon::~FakeDaemon() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  ring(wake_);
  thread_.join();
}

void FakeDaemon::on_lease(OnRequest what) {
  const std::lock_guard lock(mutex_);
  on_lease_ = what;
}

void FakeDaemon::on_stream(OnRequest what) {
  const std::lock_guard lock(mutex_);
  on_stream_ = what;
}

void FakeDaemon::read_rings(bool on) {
  {
    const std::lock_guard lock(mutex_);
    read_rings_ = on;
  }
  ring(wake_);
}

void FakeDaemon::hang_up() {
  std::unique_lock lock(mutex_);
  hang_up_ = true;
  ring(wake_);
  changed_.wait(lock, [this] { return !hang_up_; });
}

void FakeDaemon::make_resident(std::uint32_t layer, const std::vector<std::int32_t>& experts) {
  const std::lock_guard lock(mutex_);
  for (const std::int32_t expert : experts) {
    auto& slots = layers_[layer].slots;
    const auto free =
        std::find_if(slots.begin(), slots.end(), [](const Slot& s) { return s.expert < 0 && !s.draining; });
    if (free == slots.end()) throw std::logic_error("make_resident: no free slot");
    load(layer, static_cast<std::uint32_t>(free - slots.begin()), expert);
  }
}

void FakeDaemon::set_entry(std::uint32_t layer, std::uint32_t expert, std::int32_t value) {
  const std::lock_guard lock(mutex_);
  std::atomic_ref(entry(layer, expert)).store(value);
}

void FakeDaemon::set_open_slots(std::uint32_t layer, std::uint32_t n) {
  const std::lock_guard lock(mutex_);
  store_open_slots(layer, n);
}

void FakeDaemon::store_open_slots(std::uint32_t layer, std::uint32_t n) {
  const auto* model =
      reinterpret_cast<moecached_shm_model*>(model_segment_.data() + sizeof(moecached_shm_header));
  auto* layers = reinterpret_cast<moecached_shm_layer*>(model_segment_.data() + model->layers_offset);
  std::atomic_ref(layers[layer].n_slots_open).store(n);
}

void FakeDaemon::flip_byte(std::uint32_t layer, std::int32_t slot, std::uint64_t offset) {
  const std::lock_guard lock(mutex_);
  pool_.data()[layer * model_.window_bytes() + slot * model_.slot_stride() + offset] ^= std::byte{1};
}

std::vector<SeenMessage> FakeDaemon::wait_for(moecached_record_kind kind, std::size_t n) {
  std::unique_lock lock(mutex_);
  std::vector<SeenMessage> found;
  changed_.wait(lock, [&] {
    found.clear();
    std::copy_if(seen_.begin(), seen_.end(), std::back_inserter(found),
                 [&](const auto& m) { return m.kind == kind; });
    return found.size() >= n;
  });
  return found;
}

std::size_t FakeDaemon::count(moecached_record_kind kind) {
  const std::lock_guard lock(mutex_);
  return static_cast<std::size_t>(
      std::count_if(seen_.begin(), seen_.end(), [&](const auto& m) { return m.kind == kind; }));
}

moecached_shm_lane FakeDaemon::lane_words(std::uint32_t index) {
  moecached_shm_lane copy{};
  moecached_shm_lane& words = lane(index);
  copy.begun = std::atomic_ref(words.begun).load();
  copy.completed = std::atomic_ref(words.completed).load();
  copy.state = std::atomic_ref(words.state).load();
  copy.model_id = std::atomic_ref(words.model_id).load();
  copy.head = std::atomic_ref(words.head).load();
  copy.dropped = std::atomic_ref(words.dropped).load();
  copy.fallback_reads = std::atomic_ref(words.fallback_reads).load();
  copy.fallback_bytes = std::atomic_ref(words.fallback_bytes).load();
  copy.lookups = std::atomic_ref(words.lookups).load();
  return copy;
}

moecached_handle_gpu_open FakeDaemon::gpu_open_seen() {
  const std::lock_guard lock(mutex_);
  return gpu_open_;
}

std::string FakeDaemon::label() {
  const std::lock_guard lock(mutex_);
  return label_;
}

bool FakeDaemon::got_pidfd_of_this_process() {
  const std::lock_guard lock(mutex_);
  return pidfd_ok_;
}

std::uint64_t FakeDaemon::evictions() {
  const std::lock_guard lock(mutex_);
  return evictions_;
}

void FakeDaemon::wait_for_evictions(std::uint64_t n) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return evictions_ >= n; });
}

void FakeDaemon::wait_for_open_lanes(std::uint32_t n) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] {
    std::uint32_t open = 0;
    for (std::uint32_t i = 0; i < options_.n_lanes; ++i) open += std::atomic_ref(lane(i).state).load();
    return open == n;
  });
}

void FakeDaemon::run() {
  for (;;) {
    pollfd waits[4] = {{wake_.get(), POLLIN, 0},
                       {doorbell_.get(), POLLIN, 0},
                       {listener_.get(), POLLIN, 0},
                       {-1, POLLIN, 0}};
    {
      std::unique_lock lock(mutex_);
      work();
      changed_.notify_all();
      if (stop_) return;
      waits[3].fd = connection_.get();
    }
    ::poll(waits, 4, options_.tick_ms);
    drain_eventfd(wake_);
    drain_eventfd(doorbell_);
    std::unique_lock lock(mutex_);
    if (hang_up_) close_connection();
    hang_up_ = false;
    if ((waits[2].revents & POLLIN) != 0) {
      connection_ = UniqueFd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    } else if (waits[3].revents != 0 && connection_.valid()) {
      serve_socket();
    }
  }
}

void FakeDaemon::close_connection() { connection_ = UniqueFd(); }

void FakeDaemon::serve_socket() {
  if (options_.silent) return;
  std::vector<UniqueFd> fds;
  const Packet packet = receive_packet(connection_.get(), &fds);
  if (packet.type == MOECACHED_HANDLE_HELLO) {
    label_ = packet.as<moecached_handle_hello>().label;
    welcome_client(connection_.get(), fds.empty() ? -1 : fds[0].get());
  } else if (packet.type == MOECACHED_HANDLE_MODEL_OPEN) {
    open_model(connection_.get(), fds);
  } else if (packet.type == MOECACHED_HANDLE_GPU_PROBE) {
    const int probe = gpu_ == nullptr ? -1 : gpu_->options().probe_fd;
    moecached_handle_gpu_probed message{};
    message.header = frame(MOECACHED_HANDLE_GPU_PROBED, sizeof message, probe < 0 ? 0u : 1u);
    send_packet(connection_.get(), &message, sizeof message,
                probe < 0 ? std::vector<int>{} : std::vector{probe});
  } else if (packet.type == MOECACHED_HANDLE_GPU_OPEN) {
    gpu_open_ = packet.as<moecached_handle_gpu_open>();
    open_gpu_model(connection_.get(), gpu_open_);
  } else if (packet.type == MOECACHED_HANDLE_GPU_FETCH && gpu_ != nullptr) {
    fetch(connection_.get(), packet.as<moecached_handle_gpu_fetch>());
  } else {
    close_connection();
  }
}

void FakeDaemon::welcome_client(int socket, int pidfd) {
  pidfd_ok_ = pidfd >= 0 && pidfd_names_this_process(pidfd);
  if (options_.refuse_hello_with != 0) {
    send_error(socket, options_.refuse_hello_with, "no room for this session");
    return;
  }
  moecached_handle_welcome message{};
  message.header = frame(MOECACHED_HANDLE_WELCOME, sizeof message, 2);
  message.boot_epoch = options_.boot_epoch;
  message.session_id = kSessionId;
  message.session_bytes = session_.bytes();
  if (options_.spoil_welcome) options_.spoil_welcome(message);
  send_packet(socket, &message, sizeof message, {session_fd_.get(), doorbell_.get()});
}

void FakeDaemon::open_model(int socket, const std::vector<UniqueFd>& files) {
  if (options_.refuse_model_with != 0 || files.size() != model_.shape().n_files) {
    send_error(socket, options_.refuse_model_with, "this model is of no use");
    return;
  }
  // As a real daemon may. Were these duplicates of the client's own descriptors, its unaligned reads would
  // fail now.
  for (const UniqueFd& file : files) ::fcntl(file.get(), F_SETFL, ::fcntl(file.get(), F_GETFL) | O_DIRECT);
  moecached_handle_model_opened message{};
  message.header = frame(MOECACHED_HANDLE_MODEL_OPENED, sizeof message, 3);
  message.model_id = kModelId;
  message.model_bytes = model_segment_.bytes();
  message.pool_bytes = pool_.bytes();
  message.stream_bytes = stream_.bytes();
  if (options_.spoil_opened) options_.spoil_opened(message);
  send_packet(socket, &message, sizeof message, {model_fd_.get(), pool_fd_.get(), stream_fd_.get()});
}

void FakeDaemon::open_gpu_model(int socket, const moecached_handle_gpu_open& wanted) {
  if (gpu_ == nullptr ||
      !std::equal(std::begin(wanted.uuid), std::end(wanted.uuid), gpu_->options().uuid.begin())) {
    send_error(socket, MOECACHED_ERROR_MODEL, "that GPU is not served");
    return;
  }
  const moecached_handle_gpu_opened message = gpu_->opened();
  send_packet(socket, &message, sizeof message, gpu_->opened_fds());
}

void FakeDaemon::fetch(int socket, const moecached_handle_gpu_fetch& wanted) {
  const std::uint32_t at_open =
      static_cast<std::uint32_t>(model_.shape().n_layers * model_.shape().part_bytes.size());
  if (gpu_->options().dies_on_chunk_fetch && wanted.memory == MOECACHED_GPU_MEMORY_CHUNK &&
      wanted.first >= at_open) {
    return close_connection();
  }
  const std::vector<int> fds = gpu_->handles(wanted);
  moecached_handle_gpu_fetched message{};
  message.header =
      frame(MOECACHED_HANDLE_GPU_FETCHED, sizeof message, static_cast<std::uint32_t>(fds.size()));
  message.first = wanted.first;
  send_packet(socket, &message, sizeof message, fds);
}

void FakeDaemon::set_tail(std::uint32_t index, std::uint64_t epoch) {
  const std::lock_guard lock(mutex_);  // its thread reads the word of a lane that has no model yet
  std::atomic_ref(lane(index).tail).store(epoch, std::memory_order_release);
}

// One pass over everything that may have changed.
void FakeDaemon::work() {
  std::erase_if(leases_, [this](const Lease& lease) {
    return std::atomic_ref(lane(lease.lane).completed).load() >= lease.epoch ||
           std::atomic_ref(lane(lease.lane).state).load() == 0;
  });
  if (read_rings_) {
    for (std::uint32_t i = 0; i < options_.n_lanes; ++i) drain(i);
  }
  while (!pending_.empty() && try_grant(pending_.front())) pending_.pop_front();
}

void FakeDaemon::drain(std::uint32_t index) {
  moecached_shm_lane& words = lane(index);
  if (std::atomic_ref(words.model_id).load() == kGpuModelId) return;  // it has a log instead of a ring
  const std::uint64_t head = std::atomic_ref(words.head).load(std::memory_order_acquire);
  std::uint64_t tail = words.tail;
  std::vector<SeenMessage> messages;
  bool more = false;
  for (; tail != head; ++tail) {
    const moecached_shm_record& record = words.ring[tail % MOECACHED_RING_RECORDS];
    if (!more) messages.emplace_back();
    SeenMessage& message = messages.back();
    message.kind = record.kind;
    message.flags = static_cast<std::uint16_t>(record.flags & ~MOECACHED_FLAG_MORE);
    message.layer = record.layer;
    message.part = record.part;
    message.half = record.half;
    message.seq = record.seq;
    message.epoch = record.epoch;
    message.lane = index;
    ++message.n_records;
    message.ids.insert(message.ids.end(), record.ids, record.ids + record.n_ids);
    more = (record.flags & MOECACHED_FLAG_MORE) != 0;
  }
  std::atomic_ref(words.tail).store(tail, std::memory_order_release);
  for (SeenMessage& message : messages) take(std::move(message));
}

void FakeDaemon::take(SeenMessage message) {
  seen_.push_back(message);
  if (message.kind == MOECACHED_RECORD_STREAM) stream(message);
  if (message.kind != MOECACHED_RECORD_LEASE) return;
  switch (on_lease_) {
    case OnRequest::kSilence:
      return;
    case OnRequest::kHangUp:
      close_connection();
      return;
    case OnRequest::kServe:
      pending_.push_back(std::move(message));
      return;
    default:
      if (on_lease_ == OnRequest::kRefuseAsTraded)
        store_open_slots(message.layer, static_cast<std::uint32_t>(message.ids.size() - 1));
      answer_lease(message, status_of(on_lease_));
  }
}

void FakeDaemon::stream(const SeenMessage& message) {
  if (on_stream_ == OnRequest::kSilence) return;
  if (on_stream_ == OnRequest::kHangUp) return close_connection();
  const std::uint64_t half_bytes = model_.shape().stream_half_bytes;
  std::byte* to = stream_.data() + message.lane * 2 * half_bytes + message.half * half_bytes;
  if (on_stream_ == OnRequest::kServe) {
    for (const std::uint16_t expert : message.ids) {
      model_.fill_part(message.layer, message.part, expert, to);
      to += model_.shape().part_bytes[message.part];
    }
  }
  moecached_shm_lane& words = lane(message.lane);
  std::atomic_ref(words.stream_status[message.half]).store(status_of(on_stream_));
  std::atomic_ref(words.stream_done[message.half]).store(message.seq, std::memory_order_release);
  futex_wake(&words.stream_done[message.half]);
}

// Brings the experts in one by one; false: a grace period or a lease of another lane is in the way.
bool FakeDaemon::try_grant(const SeenMessage& message) {
  std::vector<Slot>& slots = layers_[message.layer].slots;
  for (const std::uint16_t expert : message.ids) {
    auto has = std::find_if(slots.begin(), slots.end(), [&](const Slot& s) { return s.expert == expert; });
    if (has == slots.end()) {
      auto free = std::find_if(slots.begin(), slots.end(),
                               [&](const Slot& s) { return s.expert < 0 && (!s.draining || grace_over(s)); });
      if (free == slots.end()) {
        auto victim = slots.end();
        for (auto s = slots.begin(); s != slots.end(); ++s) {
          if (s->draining || leased(message.layer, s->expert, message.ids)) continue;
          if (victim == slots.end() || s->last_use < victim->last_use) victim = s;
        }
        if (victim == slots.end()) return false;
        std::atomic_ref(entry(message.layer, static_cast<std::uint32_t>(victim->expert)))
            .exchange(MOECACHED_ABSENT);
        ++evictions_;
        victim->expert = -1;
        victim->draining = true;
        victim->waits.clear();
        for (std::uint32_t i = 0; i < options_.n_lanes; ++i) {
          const std::uint64_t begun = std::atomic_ref(lane(i).begun).load();
          if ((begun & 0xffff) == message.layer) victim->waits.emplace_back(i, begun >> 16);
        }
        if (!grace_over(*victim)) return false;
        free = victim;
      }
      load(message.layer, static_cast<std::uint32_t>(free - slots.begin()), expert);
      has = free;
    }
    has->last_use = ++uses_;
  }
  leases_.push_back({message.lane, message.epoch, message.layer, message.ids});
  answer_lease(message, MOECACHED_GRANT_OK);
  return true;
}

void FakeDaemon::answer_lease(const SeenMessage& message, std::uint32_t status) {
  moecached_shm_lane& words = lane(message.lane);
  std::atomic_ref(words.lease_status).store(status);
  std::atomic_ref(words.lease_done).store(message.seq, std::memory_order_release);
  futex_wake(&words.lease_done);
}

bool FakeDaemon::grace_over(const Slot& slot) {
  return std::all_of(slot.waits.begin(), slot.waits.end(), [this](const auto& wait) {
    return std::atomic_ref(lane(wait.first).completed).load(std::memory_order_acquire) >= wait.second;
  });
}

bool FakeDaemon::leased(std::uint32_t layer, std::int32_t expert, const std::vector<std::uint16_t>& own) {
  if (std::find(own.begin(), own.end(), expert) != own.end()) return true;
  return std::any_of(leases_.begin(), leases_.end(), [&](const Lease& lease) {
    return lease.layer == layer && std::find(lease.ids.begin(), lease.ids.end(), expert) != lease.ids.end();
  });
}

void FakeDaemon::load(std::uint32_t layer, std::uint32_t slot, std::int32_t expert) {
  std::byte* record = pool_.data() + layer * model_.window_bytes() + slot * model_.slot_stride();
  for (std::uint32_t part = 0; part < model_.shape().part_bytes.size(); ++part) {
    model_.fill_part(layer, part, static_cast<std::uint32_t>(expert), record + model_.slot_offset(part));
  }
  Slot& state = layers_[layer].slots[slot];
  state.expert = expert;
  state.draining = false;
  state.last_use = ++uses_;
  std::atomic_ref(entry(layer, static_cast<std::uint32_t>(expert)))
      .store(static_cast<std::int32_t>(slot), std::memory_order_release);
}

moecached_shm_lane& FakeDaemon::lane(std::uint32_t index) { return lanes_of(session_)[index]; }

std::int32_t& FakeDaemon::entry(std::uint32_t layer, std::uint32_t expert) {
  auto* table = reinterpret_cast<std::int32_t*>(model_segment_.data() + table_offset_);
  return table[layer * model_.shape().n_experts + expert];
}

}  // namespace moecached::client::test
