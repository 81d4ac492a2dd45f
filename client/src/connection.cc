#include "client/src/connection.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "client/src/error.h"
#include "client/src/shared_words.h"

namespace moecached::client {
namespace {

// Opening a model makes the daemon read and check the headers of all shards, perhaps from a cold disk.
constexpr int kModelOpenPatience = 6;
// On a GPU it allocates pinned memory for every expert as well: about a second for 4 GiB.
constexpr int kGpuOpenPatience = 12;

enum LaneState : std::uint32_t { kLaneClosed = 0, kLaneOpen = 1 };

template <std::size_t N>
void copy_text(char (&to)[N], const char* from) {
  const std::size_t length = std::min(std::strlen(from), N - 1);
  std::memcpy(to, from, length);
  to[length] = '\0';
}

// The daemon owes this block nothing: no record unread, no read into a half of its stream buffer under way.
bool settled(const LaneBlock& block) {
  return load_acquire(&block.words->tail) == block.head &&
         load_acquire(&block.words->stream_done[0]) == block.stream_seq[0] &&
         load_acquire(&block.words->stream_done[1]) == block.stream_seq[1];
}

}  // namespace

moecached_status Connection::open(const Options& options, std::unique_ptr<Connection>* out) {
  std::unique_ptr<Connection> connection(new Connection);
  connection->patience_ = options.patience;
  if (const auto status = HandleSocket::connect(options.socket_path.c_str(), &connection->socket_))
    return status;

  moecached_handle_hello hello{};
  hello.shm_version = MOECACHED_SHM_VERSION;
  hello.pid = static_cast<std::uint32_t>(::getpid());
  copy_text(hello.label, options.label.c_str());
  // Across PID namespaces the peer credentials of the socket say pid 0; a descriptor of the process works
  // everywhere. Kernels before 5.3 have none; then the daemon has the credentials alone.
  const UniqueFd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
  const int pidfds[] = {pidfd.get()};
  if (const auto status = connection->socket_.send(&hello, MOECACHED_HANDLE_HELLO,
                                                   std::span<const int>(pidfds, pidfd.valid() ? 1 : 0))) {
    return status;
  }

  moecached_handle_welcome welcome{};
  std::vector<UniqueFd> fds;
  if (const auto status = connection->socket_.receive(&welcome, MOECACHED_HANDLE_WELCOME, 2,
                                                      static_cast<int>(options.patience.count()), &fds)) {
    return status;
  }
  if (const auto status = map_segment(fds[0], welcome.session_bytes, PROT_READ | PROT_WRITE,
                                      "session segment", &connection->segment_)) {
    return status;
  }
  SessionLayout layout;
  if (const auto status = check_session_segment(connection->segment_, welcome, &layout)) return status;
  connection->doorbell_ = std::move(fds[1]);
  connection->boot_epoch_ = welcome.boot_epoch;
  for (std::uint32_t i = 0; i < layout.n_lanes; ++i) {
    LaneBlock block;
    block.words = layout.lanes + i;
    block.index = i;
    connection->lanes_.push_back(block);
  }
  *out = std::move(connection);
  return MOECACHED_OK;
}

moecached_status Connection::open_model(const char* name, std::span<const UniqueFd> files, OpenedModel* out) {
  moecached_handle_model_open request{};
  copy_text(request.name, name);
  std::vector<int> descriptors;
  for (const UniqueFd& file : files) descriptors.push_back(file.get());
  if (const auto status = socket_.send(&request, MOECACHED_HANDLE_MODEL_OPEN, descriptors)) return status;
  return receive_opened(static_cast<int>(patience_.count()) * kModelOpenPatience, out);
}

moecached_status Connection::open_spill_model(const char* name, std::span<const std::uint8_t> uuid,
                                              std::span<const UniqueFd> files, OpenedModel* out) {
  moecached_handle_spill_open request{};
  copy_text(request.name, name);
  std::copy_n(uuid.begin(), std::min(uuid.size(), sizeof request.uuid), request.uuid);
  std::vector<int> descriptors;
  for (const UniqueFd& file : files) descriptors.push_back(file.get());
  if (const auto status = socket_.send(&request, MOECACHED_HANDLE_SPILL_OPEN, descriptors)) return status;
  return receive_opened(static_cast<int>(patience_.count()) * kGpuOpenPatience, out);
}

moecached_status Connection::receive_opened(int timeout_ms, OpenedModel* out) {
  moecached_handle_model_opened answer{};
  std::vector<UniqueFd> fds;
  if (const auto status = socket_.receive(&answer, MOECACHED_HANDLE_MODEL_OPENED, 3, timeout_ms, &fds)) {
    // A refusal is an answer. After anything else the next message might belong to this request.
    if (status != MOECACHED_E_REFUSED) connected_.store(false, std::memory_order_relaxed);
    return status;
  }
  out->model_id = answer.model_id;
  out->model_bytes = answer.model_bytes;
  out->pool_bytes = answer.pool_bytes;
  out->stream_bytes = answer.stream_bytes;
  out->model = std::move(fds[0]);
  out->pool = std::move(fds[1]);
  out->stream = std::move(fds[2]);
  return MOECACHED_OK;
}

moecached_status Connection::gpu_probe(std::span<const std::uint8_t> uuid, std::vector<UniqueFd>* out) {
  moecached_handle_gpu_probe request{};
  std::copy_n(uuid.begin(), std::min(uuid.size(), sizeof request.uuid), request.uuid);
  if (const auto status = socket_.send(&request, MOECACHED_HANDLE_GPU_PROBE, {})) return status;
  moecached_handle_gpu_probed answer{};
  const int timeout_ms = static_cast<int>(patience_.count()) * kGpuOpenPatience;
  const auto status =
      socket_.receive_some(&answer, MOECACHED_HANDLE_GPU_PROBED, {0, MOECACHED_FETCH_MAX}, timeout_ms, out);
  if (status != MOECACHED_OK && status != MOECACHED_E_REFUSED) {
    connected_.store(false, std::memory_order_relaxed);
  }
  return status;
}

moecached_status Connection::gpu_open(const GpuOpen& wanted, std::span<const UniqueFd> files,
                                      OpenedGpuModel* out) {
  moecached_handle_gpu_open request{};
  copy_text(request.name, wanted.name);
  std::copy_n(wanted.uuid.begin(), std::min(wanted.uuid.size(), sizeof request.uuid), request.uuid);
  request.flags = wanted.flags;
  copy_text(request.no_peers_reason, wanted.no_peers_reason);
  std::vector<int> descriptors;
  for (const UniqueFd& file : files) descriptors.push_back(file.get());
  if (const auto status = socket_.send(&request, MOECACHED_HANDLE_GPU_OPEN, descriptors)) return status;

  moecached_handle_gpu_opened answer{};
  std::vector<UniqueFd> fds;
  const int timeout_ms = static_cast<int>(patience_.count()) * kGpuOpenPatience;
  if (const auto status = socket_.receive(&answer, MOECACHED_HANDLE_GPU_OPENED, 3, timeout_ms, &fds)) {
    if (status != MOECACHED_E_REFUSED && status != MOECACHED_E_SPILL)
      connected_.store(false, std::memory_order_relaxed);
    return status;
  }
  out->model_id = answer.model_id;
  out->host_memory = answer.host_memory;
  out->model_bytes = answer.model_bytes;
  out->log_bytes = answer.log_bytes;
  out->model = std::move(fds[0]);
  out->log = std::move(fds[1]);
  out->table = std::move(fds[2]);
  return MOECACHED_OK;
}

moecached_status Connection::gpu_fetch(const GpuFetch& wanted, std::vector<UniqueFd>* out) {
  moecached_handle_gpu_fetch request{};
  request.model_id = wanted.model_id;
  request.memory = wanted.memory;
  request.first = wanted.first;
  request.count = std::min<std::uint32_t>(wanted.count, MOECACHED_FETCH_MAX);
  if (const auto status = socket_.send(&request, MOECACHED_HANDLE_GPU_FETCH, {})) return status;

  moecached_handle_gpu_fetched answer{};
  // The daemon answers one at a time, and may be allocating pinned memory for somebody else's model.
  const int timeout_ms = static_cast<int>(patience_.count()) * kGpuOpenPatience;
  auto status =
      socket_.receive_some(&answer, MOECACHED_HANDLE_GPU_FETCHED, {1, request.count}, timeout_ms, out);
  if (status == MOECACHED_OK && answer.first != wanted.first) {
    status = fail(MOECACHED_E_VERSION, "the daemon sent the memory from handle %u on, asked for was %u",
                  answer.first, wanted.first);
  }
  if (status != MOECACHED_OK && status != MOECACHED_E_REFUSED) {
    connected_.store(false, std::memory_order_relaxed);
  }
  return status;
}

moecached_status Connection::take_lane(std::uint32_t model_id, LaneUse use, LaneBlock** out) {
  // A settled block is better: records still in its ring were meant for the last lane's model, and a half
  // that is still being read into cannot be used.
  const auto suits = [use](const LaneBlock& block) {
    return !block.in_use && (block.use == use || block.use == LaneUse::kNone);
  };
  auto free_block = std::find_if(lanes_.begin(), lanes_.end(),
                                 [&](auto& b) { return suits(b) && (use != LaneUse::kRing || settled(b)); });
  if (free_block == lanes_.end()) free_block = std::find_if(lanes_.begin(), lanes_.end(), suits);
  if (free_block == lanes_.end()) {
    return fail(MOECACHED_E_REFUSED, "all %zu lanes of this session are in use", lanes_.size());
  }
  moecached_shm_lane* words = free_block->words;
  store_relaxed(&words->model_id, model_id);
  std::uint32_t closed = kLaneClosed;
  // Sequentially consistent, like the lane's first `begun`: a daemon that flips an entry and then finds this
  // lane closed may rely on the lane to see the flip.
  if (!__atomic_compare_exchange_n(&words->state, &closed, std::uint32_t{kLaneOpen}, false, __ATOMIC_SEQ_CST,
                                   __ATOMIC_SEQ_CST)) {
    return fail(MOECACHED_E_VERSION, "lane %u is in use, but not by this process", free_block->index);
  }
  free_block->in_use = true;
  free_block->use = use;
  free_block->lease_unanswered = false;  // the daemon forgets the requests of a lane that is closed
  ring_doorbell();
  *out = &*free_block;
  return MOECACHED_OK;
}

void Connection::give_back_lane(LaneBlock* block) noexcept {
  store_release(&block->words->completed, block->epoch);
  store_then_fence(&block->words->state, std::uint32_t{kLaneClosed});
  block->in_use = false;
  ring_doorbell();
}

bool Connection::check_alive() noexcept {
  if (connected() && socket_.hung_up()) connected_.store(false, std::memory_order_relaxed);
  return connected();
}

void Connection::ring_doorbell() noexcept {
  if (!connected()) return;
  const std::uint64_t one = 1;
  // An eventfd refuses only when 2^64 - 2 rings are unread; then the daemon has one to read.
  [[maybe_unused]] const ssize_t written = ::write(doorbell_.get(), &one, sizeof one);
}

}  // namespace moecached::client
