// One connected client: its session segment, doorbell, and the stream buffers of the models it opened. The
// handle server makes it; the core loop owns its lanes. Memory: shared with stream reads in flight.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "daemon/base/ids.h"
#include "daemon/base/result.h"
#include "daemon/ipc/shared_model.h"
#include "daemon/platform/eventfd.h"
#include "daemon/platform/fd.h"
#include "daemon/platform/memfd.h"
#include "proto/shm/layout.h"

namespace moecached {

class GpuModel;

struct PeerIdentity {
  std::uint32_t pid = 0;  // 0: another PID namespace
  std::uint32_t uid = 0;
  std::uint32_t gid = 0;
};

class Session {
 public:
  struct Parameters {
    SessionId id;
    std::uint64_t boot_epoch = 0;
    PeerIdentity peer;
    std::string label;
    UniqueFd pidfd;  // of the client's process; none: the socket alone says when it is gone
  };
  static Result<std::shared_ptr<Session>> create(Parameters parameters);

  [[nodiscard]] SessionId id() const { return p_.id; }
  [[nodiscard]] const PeerIdentity& peer() const { return p_.peer; }
  [[nodiscard]] const std::string& label() const { return p_.label; }
  [[nodiscard]] int pidfd() const { return p_.pidfd.get(); }
  [[nodiscard]] int segment_fd() const { return segment_.fd(); }
  [[nodiscard]] std::uint64_t segment_bytes() const { return segment_.bytes().size(); }
  [[nodiscard]] const EventFd& doorbell() const { return doorbell_; }
  [[nodiscard]] moecached_shm_lane& lane(std::uint32_t index);

  // The stream buffers of one model, one per lane; made by the handle server before the client learns of the
  // model.
  struct Opened {
    std::shared_ptr<SharedModel> model;
    std::shared_ptr<Memfd> stream;
  };
  struct OpenedGpu {
    std::shared_ptr<GpuModel> model;
    std::shared_ptr<Memfd> log;
    bool reads_peers = false;  // it can map other GPUs' memory
    std::string no_peers_reason;
  };
  // Core loop only.
  std::map<std::uint32_t, Opened> models;
  std::map<std::uint32_t, OpenedGpu> gpu_models;
  std::chrono::steady_clock::time_point connected_at = std::chrono::steady_clock::now();
  std::uint64_t records_refused = 0;
  bool hung_up = false;

 private:
  Session(Parameters parameters, Memfd segment, EventFd doorbell);
  Parameters p_;
  Memfd segment_;
  EventFd doorbell_;
};

// The stream segment of a session for one model; nothing of it is backed by memory until something is
// streamed, but the share of the first lane where the model spills.
[[nodiscard]] Result<std::shared_ptr<Memfd>> make_stream_segment(const SharedModel& model);

}  // namespace moecached
