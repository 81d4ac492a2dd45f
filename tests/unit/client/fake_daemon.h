// A daemon for tests of the client: one thread, one client at a time, one model. It speaks the whole handle
// protocol and lane protocol, grace periods included, and can be told to misbehave. It sleeps without a
// timeout and relies on the doorbell alone, so a wake that the client owes and forgets hangs the test instead
// of slowing it. Thread: public functions from the test's thread; they take the lock that the daemon's thread
// holds while it works. Memory: owns its memfds; the client has mappings of its own.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "client/src/resources.h"
#include "proto/shm/layout.h"
#include "tests/unit/client/fake_gpu.h"
#include "tests/unit/client/test_model.h"

namespace moecached::client::test {

enum class OnRequest {  // what a LEASE or STREAM gets
  kServe,
  kIoError,
  kModelChanged,
  kRefuse,
  kNoRoom,
  kRefuseAsTraded,  // a slot went to another layer meanwhile: one fewer than the lease needs is open
  kSilence,         // no answer, ever
  kHangUp,          // the daemon closes the connection instead of answering
  kGrantNothing     // says OK, but leaves the entries absent
};

// Shared structures as the fake has written them, for tests that spoil one value before the client sees it.
struct ModelSegmentView {
  moecached_shm_header* header;
  moecached_shm_model* model;
  moecached_shm_layer* layers;
  moecached_shm_part* parts;
  moecached_shm_extent* extents;
};

struct FakeOptions {
  std::uint64_t boot_epoch = 0x1234;
  std::uint32_t n_lanes = MOECACHED_MAX_LANES;
  int tick_ms = 1;      // looks at its lanes that often; the doorbell rings for requests alone
  bool silent = false;  // takes the connection and never answers
  std::function<void(moecached_shm_header&, moecached_shm_session&)> spoil_session = nullptr;
  std::function<void(moecached_handle_welcome&)> spoil_welcome = nullptr;
  std::function<void(ModelSegmentView)> spoil_model = nullptr;
  std::function<void(moecached_handle_model_opened&)> spoil_opened = nullptr;
  std::uint32_t refuse_hello_with = 0;  // a moecached_handle_error_code
  std::uint32_t refuse_model_with = 0;
  std::optional<FakeGpuOptions> gpu = std::nullopt;  // else there is none
};

struct SeenMessage {  // a record, or a chain of them, put together
  std::uint16_t kind = 0;
  std::uint16_t flags = 0;
  std::uint16_t layer = 0;
  std::uint16_t part = 0;
  std::uint16_t half = 0;
  std::uint32_t seq = 0;
  std::uint64_t epoch = 0;
  std::uint32_t lane = 0;
  std::uint32_t n_records = 0;
  std::vector<std::uint16_t> ids;
};

class FakeDaemon {
 public:
  FakeDaemon(std::string socket_path, const TestModel& model, FakeOptions options = {});
  ~FakeDaemon();

  void on_lease(OnRequest what);
  void on_stream(OnRequest what);
  // While off, records stay in the rings.
  void read_rings(bool on);
  // Closes the connection and waits until it is closed. Lanes and table stay as they are, as after a crash.
  void hang_up();

  void make_resident(std::uint32_t layer, const std::vector<std::int32_t>& experts);
  void set_entry(std::uint32_t layer, std::uint32_t expert, std::int32_t value);
  void set_open_slots(std::uint32_t layer, std::uint32_t n);
  void flip_byte(std::uint32_t layer, std::int32_t slot, std::uint64_t offset);

  // Waits for at least n messages of the kind and returns all seen so far.
  std::vector<SeenMessage> wait_for(moecached_record_kind kind, std::size_t n);
  [[nodiscard]] std::size_t count(moecached_record_kind kind);
  // As the daemon sees them.
  [[nodiscard]] moecached_shm_lane lane_words(std::uint32_t lane);
  [[nodiscard]] std::string label();
  [[nodiscard]] bool got_pidfd_of_this_process();
  [[nodiscard]] std::uint64_t evictions();
  void wait_for_evictions(std::uint64_t n);
  void wait_for_open_lanes(std::uint32_t n);

  [[nodiscard]] FakeGpu& gpu() { return *gpu_; }
  [[nodiscard]] moecached_handle_gpu_open gpu_open_seen();  // the last one
  // Says that the log of a lane on the GPU was drained up to this epoch.
  void set_tail(std::uint32_t lane, std::uint64_t epoch);

 private:
  struct Slot {
    std::int32_t expert = -1;
    bool draining = false;
    std::vector<std::pair<std::uint32_t, std::uint64_t>> waits;  // lane, epoch
    std::uint64_t last_use = 0;
  };
  struct Layer {
    std::vector<Slot> slots;
  };
  struct Lease {
    std::uint32_t lane;
    std::uint64_t epoch;
    std::uint16_t layer;
    std::vector<std::uint16_t> ids;
  };

  void run();
  void serve_socket();
  void welcome_client(int socket, int pidfd);
  void open_model(int socket, const std::vector<UniqueFd>& files);
  void open_gpu_model(int socket, const moecached_handle_gpu_open& wanted);
  void fetch(int socket, const moecached_handle_gpu_fetch& wanted);
  void close_connection();
  void work();
  void drain(std::uint32_t index);
  void take(SeenMessage message);
  void stream(const SeenMessage& message);
  bool try_grant(const SeenMessage& message);
  void answer_lease(const SeenMessage& message, std::uint32_t status);
  bool grace_over(const Slot& slot);
  bool leased(std::uint32_t layer, std::int32_t expert, const std::vector<std::uint16_t>& own);
  void load(std::uint32_t layer, std::uint32_t slot, std::int32_t expert);
  moecached_shm_lane& lane(std::uint32_t index);
  std::int32_t& entry(std::uint32_t layer, std::uint32_t expert);
  void store_open_slots(std::uint32_t layer, std::uint32_t n);

  const TestModel& model_;
  const FakeOptions options_;
  UniqueFd listener_, wake_, doorbell_, connection_;
  UniqueFd session_fd_, model_fd_, pool_fd_, stream_fd_;
  Mapping session_, model_segment_, pool_, stream_;
  std::uint64_t table_offset_ = 0;
  std::unique_ptr<FakeGpu> gpu_;

  std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;
  bool hang_up_ = false;
  bool read_rings_ = true;
  OnRequest on_lease_ = OnRequest::kServe;
  OnRequest on_stream_ = OnRequest::kServe;
  std::vector<Layer> layers_;
  std::vector<Lease> leases_;
  std::deque<SeenMessage> pending_;
  std::vector<SeenMessage> seen_;
  std::string label_;
  moecached_handle_gpu_open gpu_open_{};
  bool pidfd_ok_ = false;
  std::uint64_t uses_ = 0;
  std::uint64_t evictions_ = 0;
  std::thread thread_;
};

}  // namespace moecached::client::test
