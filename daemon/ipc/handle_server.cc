#include "daemon/ipc/handle_server.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "daemon/ipc/register_model.h"
#include "daemon/platform/pidfd.h"

namespace moecached {

namespace {

constexpr std::size_t kMessageMax = 4096;

moecached_handle_header header_of(moecached_handle_type type, std::size_t bytes, std::size_t n_fds) {
  return {MOECACHED_HANDLE_MAGIC, MOECACHED_HANDLE_VERSION, static_cast<std::uint16_t>(type),
          static_cast<std::uint32_t>(bytes), static_cast<std::uint32_t>(n_fds)};
}

// A client that does not read its few replies is cut rather than waited for.
bool delivered(const Result<PacketOutcome>& sent) { return sent && *sent == PacketOutcome::kDone; }

bool send_error(int socket, moecached_handle_error_code code, std::string_view text) {
  moecached_handle_error message{};
  message.header = header_of(MOECACHED_HANDLE_ERROR, sizeof message, 0);
  message.code = code;
  std::memcpy(message.text, text.data(), std::min(text.size(), sizeof message.text - 1));
  (void)send_packet(socket, std::as_bytes(std::span(&message, 1)), {});
  return false;
}

moecached_handle_error_code code_of(const Fault& fault) {
  switch (fault.code) {
    case FaultCode::kLimit:
      return MOECACHED_ERROR_BUDGET;
    case FaultCode::kInvalid:
    case FaultCode::kNotFound:
    case FaultCode::kChanged:
      return MOECACHED_ERROR_MODEL;
    case FaultCode::kSpill:
      return MOECACHED_ERROR_SPILL;
    case FaultCode::kUnsupported:
    case FaultCode::kSystem:
      return MOECACHED_ERROR_SYSTEM;
  }
  return MOECACHED_ERROR_SYSTEM;
}

// What a client is told of a fault. What it did itself it may know; what a system call said tells of the
// machine, its paths and limits, and that is for the log, unless the client is root or the daemon's own user.
std::string told(const Fault& fault, std::uint32_t uid) {
  if (fault.code != FaultCode::kSystem || uid == 0 || uid == ::geteuid()) return fault.text;
  return "the daemon could not do it; its log says why";
}

std::uint64_t now_ms() {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(
                                        std::chrono::steady_clock::now().time_since_epoch())
                                        .count());
}

}  // namespace

Result<std::unique_ptr<HandleServer>> HandleServer::start(const Config& config, Core& core,
                                                          const FileRoots& roots, std::uint64_t boot_epoch) {
  auto listener = PacketListener::listen(
      {.path = config.handle_socket, .mode = config.socket_mode, .group = config.socket_group});
  if (!listener) return std::move(listener).error();
  auto wake = EventFd::create();
  if (!wake) return std::move(wake).error();
  auto epoll = Epoll::create();
  if (!epoll) return std::move(epoll).error();
  for (const int fd : {wake->fd(), listener->fd()}) {
    if (auto added = epoll->add(fd, EPOLLIN, static_cast<std::uint64_t>(fd)); !added)
      return std::move(added).error();
  }
  std::unique_ptr<HandleServer> server(new HandleServer(config, core, roots, boot_epoch, *std::move(listener),
                                                        *std::move(wake), *std::move(epoll)));
  server->opener_ = std::make_unique<GpuOpener>(server->config_, core, boot_epoch,
                                                [raw = server.get()] { raw->wake_.signal(); });
  server->thread_ = std::thread([raw = server.get()] { raw->run(); });
  return server;
}

HandleServer::HandleServer(const Config& config, Core& core, const FileRoots& roots, std::uint64_t boot_epoch,
                           PacketListener listener, EventFd wake, Epoll epoll)
    : config_(config),
      core_(core),
      roots_(roots),
      boot_epoch_(boot_epoch),
      listener_(std::move(listener)),
      wake_(std::move(wake)),
      epoll_(std::move(epoll)),
      unheard_(std::uint64_t{config.hello_seconds} * 1000) {}

HandleServer::~HandleServer() {
  stopping_.store(true);
  wake_.signal();
  if (thread_.joinable()) thread_.join();
  opener_.reset();
}

void HandleServer::run() {
  epoll_event events[64];
  while (!stopping_.load()) {
    const std::size_t n = epoll_.wait(events, unheard_.wait_ms(now_ms(), !takes_clients_));
    for (std::size_t i = 0; i < n && !stopping_.load(); ++i) {
      const int fd = static_cast<int>(events[i].data.u64);
      if (fd == wake_.fd()) {
        wake_.drain();
        for (GpuOpener::Done& done : opener_->take()) gpu_opened(done);
        continue;
      }
      if (fd == listener_.fd()) {
        accept_all();
        continue;
      }
      const auto it = connections_.find(fd);
      if (it != connections_.end() && !serve(it->second)) close(fd);
    }
    cut_silent();
    if (!takes_clients_ && (!unheard_.full() || unheard_.in_the_way(now_ms()) >= 0)) take_clients(true);
  }
}

// REQUIRES: one waits, so that nobody makes room for none.
void HandleServer::accept_all() {
  if (unheard_.full() && !make_room()) return take_clients(false);
  while (!unheard_.full()) {
    auto accepted = listener_.accept();
    if (!accepted) {
      spdlog::warn("handle socket: {}", accepted.error().text);
      return;
    }
    UniqueFd socket = *std::move(accepted);
    if (!socket) return;
    const auto peer = peer_credentials(socket.get());
    // A client is told why it is refused in answer to its hello: closing before it spoke would reset the
    // connection, and the reason would be lost.
    if (!peer) continue;
    const int fd = socket.get();
    if (auto added = epoll_.add(fd, EPOLLIN, static_cast<std::uint64_t>(fd)); !added) {
      spdlog::warn("handle socket: {}", added.error().text);
      continue;
    }
    unheard_.add(fd, peer->uid, now_ms());
    connections_[fd] = {.socket = std::move(socket), .uid = peer->uid, .session = nullptr};
  }
}

// Those whose hello is there leave at once. Who came just now is about to say it, and is waited for: the
// backlog keeps the others. So programs that start together lose no connection, and a user's silent ones keep
// nobody out.
bool HandleServer::make_room() {
  for (const int fd : unheard_.all()) (void)is_silent(fd);
  if (!unheard_.full()) return true;
  const int fd = unheard_.in_the_way(now_ms());
  if (fd < 0) return false;
  spdlog::info("client cut, others came and it said no hello uid={}", connections_.at(fd).uid);
  close(fd);
  return true;
}

// The listener is level-triggered: while nobody is taken it would wake this thread again and again.
void HandleServer::take_clients(bool yes) {
  const auto fd = static_cast<std::uint64_t>(listener_.fd());
  if (auto done = epoll_.modify(listener_.fd(), yes ? std::uint32_t{EPOLLIN} : 0u, fd); !done)
    spdlog::warn("handle socket: {}", done.error().text);
  takes_clients_ = yes;
}

void HandleServer::cut_silent() {
  for (const int fd : unheard_.expired(now_ms())) {
    if (!is_silent(fd)) continue;
    spdlog::info("client cut, no hello within {} s uid={}", config_.hello_seconds, connections_.at(fd).uid);
    close(fd);
  }
}

// This thread may have been held for long by a model of others: a hello that lies there is served first.
bool HandleServer::is_silent(int fd) {
  if (!serve(connections_.at(fd))) close(fd);
  return unheard_.contains(fd);
}

void HandleServer::close(int fd) {
  const auto it = connections_.find(fd);
  if (it == connections_.end()) return;
  if (it->second.session) {
    const SessionId id = it->second.session->id();
    core_.call([id](Core& core) {
      core.session_hung_up(id);
      return 0;
    });
    spdlog::info("session closed id={} label={}", id.value, it->second.session->label());
  }
  epoll_.remove(fd);
  unheard_.remove(fd);
  connections_.erase(it);
}

bool HandleServer::serve(Connection& connection) {
  std::byte buffer[kMessageMax];
  auto packet = receive_packet(connection.socket.get(), buffer, MOECACHED_MAX_FILES);
  if (!packet) {
    spdlog::warn("handle socket: {}", packet.error().text);
    return false;
  }
  if (packet->outcome == PacketOutcome::kWouldBlock) return true;
  if (packet->outcome == PacketOutcome::kClosed) return false;
  const std::span<const std::byte> message(buffer, packet->n_bytes);
  HandleMessage read = read_handle_message(message, packet->fds.size(), connection.session != nullptr);
  if (const auto* refusal = std::get_if<HandleRefusal>(&read))
    return send_error(connection.socket.get(), refusal->code, refusal->text);
  if (auto* said = std::get_if<HelloMessage>(&read)) return hello(connection, *said, std::move(packet->fds));
  if (auto* open = std::get_if<ModelOpenMessage>(&read))
    return open_model(connection, *open, std::move(packet->fds));
  if (auto* open = std::get_if<GpuOpenMessage>(&read))
    return open_gpu_model(connection, *open, std::move(packet->fds));
  if (const auto* wanted = std::get_if<GpuProbeMessage>(&read)) return probe(connection, *wanted);
  return fetch(connection, std::get<GpuFetchMessage>(read));
}

bool HandleServer::hello(Connection& connection, const HelloMessage& hello, std::vector<UniqueFd> fds) {
  const int socket = connection.socket.get();
  auto peer = peer_credentials(socket);
  const auto refuse = [&](moecached_handle_error_code code, const Fault& fault) {
    spdlog::warn("session refused uid={} label={} reason={}", connection.uid, hello.label, fault.text);
    return send_error(socket, code, told(fault, connection.uid));
  };
  if (!peer) return refuse(MOECACHED_ERROR_SYSTEM, peer.error());
  Session::Parameters parameters{.id = core_.new_session_id(),
                                 .boot_epoch = boot_epoch_,
                                 .peer = {static_cast<std::uint32_t>(peer->pid), peer->uid, peer->gid},
                                 .label = hello.label,
                                 .pidfd = {}};
  // The kernel's word where it can be had; across PID namespaces it says 0, and only the client's own pidfd
  // helps.
  if (peer->pid != 0) {
    if (auto pidfd = open_pidfd(peer->pid)) parameters.pidfd = *std::move(pidfd);
  }
  if (!parameters.pidfd && !fds.empty()) {
    auto received = check_pidfd(std::move(fds.front()));
    if (!received) return refuse(MOECACHED_ERROR_MESSAGE, received.error());
    parameters.pidfd = std::move(received->fd);
  }
  auto session = Session::create(std::move(parameters));
  if (!session) return refuse(MOECACHED_ERROR_SYSTEM, session.error());
  auto added = core_.call([&](Core& core) { return core.add_session(*session); });
  if (!added) return refuse(MOECACHED_ERROR_LIMIT, added.error());
  connection.session = *session;
  unheard_.remove(socket);
  moecached_handle_welcome welcome{};
  welcome.header = header_of(MOECACHED_HANDLE_WELCOME, sizeof welcome, 2);
  welcome.boot_epoch = boot_epoch_;
  welcome.session_id = (*session)->id().value;
  welcome.session_bytes = (*session)->segment_bytes();
  const int handles[] = {(*session)->segment_fd(), (*session)->doorbell().fd()};
  if (!delivered(send_packet(socket, std::as_bytes(std::span(&welcome, 1)), handles))) return false;
  spdlog::info("session opened id={} pid={} uid={} label={}", (*session)->id().value, peer->pid, peer->uid,
               (*session)->label());
  return true;
}

bool HandleServer::open_model(Connection& connection, const ModelOpenMessage& open,
                              std::vector<UniqueFd> fds) {
  const int socket = connection.socket.get();
  // A refused model leaves the session as it is: the client may go on with others.
  auto refuse = [&](const Fault& fault) {
    spdlog::warn("model refused session={} name={} reason={}", connection.session->id().value, open.name,
                 fault.text);
    send_error(socket, code_of(fault), told(fault, connection.uid));
    return true;
  };
  if (Status allowed = check_roots(fds); !allowed) return refuse(allowed.error());
  auto model = register_model(core_, std::move(fds), open.name, connection.session->id());
  if (!model) return refuse(model.error());
  auto stream = make_stream_segment(**model);
  if (!stream) return refuse(stream.error());
  auto opened = core_.call(
      [&](Core& core) { return core.open_in_session(connection.session->id(), *model, *std::move(stream)); });
  if (!opened) return refuse(opened.error());
  return send_opened(connection, **model, **opened, open.name);
}

bool HandleServer::send_opened(Connection& connection, const SharedModel& model, const Memfd& stream,
                               std::string_view name) {
  moecached_handle_model_opened reply{};
  reply.header = header_of(MOECACHED_HANDLE_MODEL_OPENED, sizeof reply, 3);
  reply.model_id = model.id().value;
  reply.model_bytes = model.segment_bytes();
  reply.pool_bytes = model.pool().bytes();
  reply.stream_bytes = stream.bytes().size();
  const int handles[] = {model.segment_fd(), model.pool().export_fd(), stream.fd()};
  if (!delivered(send_packet(connection.socket.get(), std::as_bytes(std::span(&reply, 1)), handles)))
    return false;
  spdlog::info("model opened session={} model={} name={} pool_bytes={}{}", connection.session->id().value,
               reply.model_id, name, model.pool().bytes_backed_max(),
               model.device() == nullptr ? "" : " gpu=" + to_string(model.device()->gpu().id()));
  return true;
}

bool HandleServer::open_gpu_model(Connection& connection, const GpuOpenMessage& open,
                                  std::vector<UniqueFd> fds) {
  const int socket = connection.socket.get();
  if (Status allowed = check_roots(fds); !allowed) {
    refuse_gpu_model(connection, open.name, {.uuid = open.uuid}, allowed.error());
    return true;
  }
  GpuOpener::Request request{.connection = socket,
                             .session = connection.session->id(),
                             .shards = std::move(fds),
                             .name = open.name,
                             .gpu = {.uuid = open.uuid},
                             .spill = open.spill,
                             .reads_peers = open.reads_peers,
                             .no_peers_reason = open.no_peers_reason};
  // Answered by gpu_opened; until then nothing more is read from this client.
  epoll_.remove(socket);
  opener_->submit(std::move(request));
  return true;
}

Status HandleServer::check_roots(std::span<const UniqueFd> shards) const {
  for (const UniqueFd& shard : shards) {
    if (Status allowed = roots_.check(shard.get()); !allowed) return allowed;
  }
  return ok();
}

void HandleServer::refuse_gpu_model(const Connection& connection, std::string_view name, const GpuId& gpu,
                                    const Fault& fault) {
  spdlog::warn("model refused session={} name={} gpu={} reason={}", connection.session->id().value, name,
               to_string(gpu), fault.text);
  send_error(connection.socket.get(), code_of(fault), told(fault, connection.uid));
}

void HandleServer::gpu_opened(GpuOpener::Done& done) {
  const auto it = connections_.find(done.connection);
  if (it == connections_.end()) return;
  Connection& connection = it->second;
  const int socket = connection.socket.get();
  // As after any reply; first, so that close() finds it there.
  if (auto added = epoll_.add(socket, EPOLLIN, static_cast<std::uint64_t>(socket)); !added) {
    spdlog::warn("handle socket: {}", added.error().text);
    close(socket);
    return;
  }
  if (!done.opened) {
    refuse_gpu_model(connection, done.name, done.gpu, done.opened.error());
    return;
  }
  const GpuOpener::Opened& opened = *done.opened;
  if (opened.spill != nullptr) {
    if (!send_opened(connection, *opened.spill, *opened.stream, done.name)) close(socket);
    return;
  }
  moecached_handle_gpu_opened reply{};
  reply.header = header_of(MOECACHED_HANDLE_GPU_OPENED, sizeof reply, 3);
  reply.model_id = opened.model->id().value;
  reply.host_memory = opened.model->ram().kind();
  reply.model_bytes = opened.model->segment_bytes();
  reply.log_bytes = opened.log->bytes().size();
  const int handles[] = {opened.model->segment_fd(), opened.log->fd(), opened.table.get()};
  if (!delivered(send_packet(socket, std::as_bytes(std::span(&reply, 1)), handles))) {
    close(socket);
    return;
  }
  spdlog::info("model opened session={} model={} name={} gpu={}", connection.session->id().value,
               reply.model_id, done.name, to_string(done.gpu));
}

bool HandleServer::probe(Connection& connection, const GpuProbeMessage& request) {
  const int socket = connection.socket.get();
  auto shared = core_.gpu().share_probes({.uuid = request.uuid});
  if (!shared) {
    send_error(socket, code_of(shared.error()), told(shared.error(), connection.uid));
    return true;
  }
  std::vector<int> handles;
  for (const UniqueFd& fd : *shared) handles.push_back(fd.get());
  moecached_handle_gpu_probed reply{};
  reply.header = header_of(MOECACHED_HANDLE_GPU_PROBED, sizeof reply, handles.size());
  return delivered(send_packet(socket, std::as_bytes(std::span(&reply, 1)), handles));
}

bool HandleServer::fetch(Connection& connection, const GpuFetchMessage& request) {
  const int socket = connection.socket.get();
  const SessionId session = connection.session->id();
  std::shared_ptr<GpuModel> model;
  std::shared_ptr<SharedModel> spill;
  std::uint32_t limit = 0;
  const bool host = request.memory == MOECACHED_GPU_MEMORY_HOST;
  const bool array = request.memory == MOECACHED_GPU_MEMORY_ARRAY;
  if (array) {
    spill = core_.call([&](Core& core) { return core.spill_model_of(session, request.model_id); });
    if (spill && spill->device()->n_slots() > 0)
      limit = static_cast<std::uint32_t>(spill->device()->n_arrays());
  } else {
    model = core_.call([&](Core& core) { return core.gpu_model_of(session, request.model_id); });
    if (model) limit = host ? model->n_parts() : model->n_chunks();
  }
  if (!model && !spill) {
    send_error(socket, MOECACHED_ERROR_MODEL,
               "model " + std::to_string(request.model_id) + " is not open here");
    return true;
  }
  if ((!host && !array && request.memory != MOECACHED_GPU_MEMORY_CHUNK) || !request.lies_within(limit)) {
    send_error(socket, MOECACHED_ERROR_MESSAGE,
               "gpu-fetch of " + std::to_string(request.count) + " handles from " +
                   std::to_string(request.first) + ": there are " + std::to_string(limit));
    return true;
  }
  std::vector<UniqueFd> shared;
  std::vector<int> handles;
  for (std::uint32_t i = request.first; i < request.first + request.count; ++i) {
    auto fd = array ? spill->device()->share(i) : host ? model->share_host(i) : model->share_chunk(i);
    if (!fd) {
      spdlog::warn("handle not shared session={} reason={}", connection.session->id().value, fd.error().text);
      send_error(socket, code_of(fd.error()), told(fd.error(), connection.uid));
      return true;
    }
    handles.push_back(fd->get());
    shared.push_back(*std::move(fd));
  }
  moecached_handle_gpu_fetched reply{};
  reply.header = header_of(MOECACHED_HANDLE_GPU_FETCHED, sizeof reply, handles.size());
  reply.first = request.first;
  return delivered(send_packet(socket, std::as_bytes(std::span(&reply, 1)), handles));
}

}  // namespace moecached
