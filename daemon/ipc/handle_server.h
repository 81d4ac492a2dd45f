// The handle socket: where clients say hello, open models and are given file descriptors (SCM_RIGHTS), which
// gRPC cannot carry. One thread; reading a model's header happens here, so that the core loop is not held up.
// Models on GPUs are made on another (gpu_opener.h). Every message is one packet of a fixed size, checked
// before use; a client that breaks the protocol is told why and cut.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "daemon/base/result.h"
#include "daemon/config/config.h"
#include "daemon/ipc/core.h"
#include "daemon/ipc/gpu_opener.h"
#include "daemon/ipc/handle_message.h"
#include "daemon/ipc/session.h"
#include "daemon/ipc/unheard_clients.h"
#include "daemon/platform/epoll.h"
#include "daemon/platform/eventfd.h"
#include "daemon/platform/fd.h"
#include "daemon/platform/file_roots.h"
#include "daemon/platform/unix_socket.h"

namespace moecached {

class HandleServer {
 public:
  // core and roots outlive it.
  static Result<std::unique_ptr<HandleServer>> start(const Config& config, Core& core, const FileRoots& roots,
                                                     std::uint64_t boot_epoch);
  ~HandleServer();  // stops and joins; the socket file is removed
  // For the control plane. Waits until it is made, which takes seconds; any thread.
  Result<std::shared_ptr<GpuModel>> register_gpu_model(std::vector<UniqueFd> shards, const GpuId& gpu) {
    return opener_->make_now(std::move(shards), gpu);
  }
  HandleServer(const HandleServer&) = delete;
  HandleServer& operator=(const HandleServer&) = delete;

 private:
  struct Connection {
    UniqueFd socket;
    std::uint32_t uid = 0;
    std::shared_ptr<Session> session;  // after HELLO
  };
  HandleServer(const Config& config, Core& core, const FileRoots& roots, std::uint64_t boot_epoch,
               PacketListener listener, EventFd wake, Epoll epoll);
  void run();
  void accept_all();
  bool make_room();  // for one more that has not said hello
  void take_clients(bool yes);
  void cut_silent();
  bool is_silent(int fd);
  // Returns false when the connection is to be closed.
  bool serve(Connection& connection);
  bool hello(Connection& connection, const HelloMessage& hello, std::vector<UniqueFd> fds);
  bool open_model(Connection& connection, const ModelOpenMessage& open, std::vector<UniqueFd> fds);
  bool open_gpu_model(Connection& connection, const GpuOpenMessage& open, std::vector<UniqueFd> fds);
  void gpu_opened(GpuOpener::Done& done);
  [[nodiscard]] Status check_roots(std::span<const UniqueFd> shards) const;
  static void refuse_gpu_model(const Connection& connection, std::string_view name, const GpuId& gpu,
                               const Fault& fault);
  bool probe(Connection& connection, const GpuProbeMessage& request);
  bool fetch(Connection& connection, const GpuFetchMessage& request);
  bool send_opened(Connection& connection, const SharedModel& model, const Memfd& stream, std::string_view name);
  void close(int fd);

  const Config config_;
  Core& core_;
  const FileRoots& roots_;
  const std::uint64_t boot_epoch_;
  PacketListener listener_;
  EventFd wake_;
  Epoll epoll_;
  std::unique_ptr<GpuOpener> opener_;
  std::thread thread_;
  std::atomic<bool> stopping_{false};
  std::map<int, Connection> connections_;
  UnheardClients unheard_;
  bool takes_clients_ = true;  // else the listener waits for room
};

}  // namespace moecached
