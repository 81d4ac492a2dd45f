// Reads through io_uring. One wait point: completions and wake-ups (a read of an eventfd) arrive in the same
// queue.
#include <liburing.h>
#include <sys/eventfd.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "daemon/base/check.h"
#include "daemon/platform/fd.h"
#include "daemon/tier/read_engine.h"

namespace moecached {
namespace {

constexpr std::uint64_t kWakeTag = ~std::uint64_t{0};
constexpr std::uint32_t kBufferTableSize = 16384;  // IORING_MAX_REG_BUFFERS

struct RegisteredMemory {
  std::byte* begin = nullptr;
  std::byte* end = nullptr;
  std::uint32_t index = 0;  // in the kernel's table
};

class UringEngine final : public ReadEngine {
 public:
  explicit UringEngine(std::uint32_t queue_depth)
      : queue_depth_(queue_depth), fds_(kMaxFiles, -1), is_copied_(kMaxFiles) {}
  ~UringEngine() override {
    if (!ring_open_) return;
    // The kernel cancels what is left in a ring at its leisure; the read of the eventfd must not end after
    // wake_count_ does.
    if (wake_armed_) wake();
    while (wake_armed_) (void)wait({}, true);
    ::io_uring_queue_exit(&ring_);
  }
  UringEngine(const UringEngine&) = delete;
  UringEngine& operator=(const UringEngine&) = delete;

  Status open() {
    // A wake-up must not be waited for by anybody but the ring, so the eventfd may be a blocking one: the
    // kernel polls it.
    wake_fd_ = UniqueFd(::eventfd(0, EFD_CLOEXEC));
    if (!wake_fd_) return system_fault("eventfd", errno);
    if (Status status = open_ring(); !status) return status;
    register_tables();
    return ok();
  }

  std::string_view name() const override { return "io_uring"; }
  std::uint32_t depth_max() const override { return queue_depth_; }

  void add_file(std::uint32_t file, int fd, bool is_copied) override {
    fds_[file] = fd;
    is_copied_[file] = is_copied;
    if (file < n_fixed_files_ && ::io_uring_register_files_update(&ring_, file, &fd, 1) != 1)
      n_fixed_files_ = 0;
  }

  void remove_file(std::uint32_t file) override {
    int none = -1;
    if (file < n_fixed_files_) ::io_uring_register_files_update(&ring_, file, &none, 1);
    fds_[file] = -1;
  }

  bool can_register_memory() const override { return true; }

  Status register_memory(std::span<std::byte> memory) override {
    if (free_buffers_.empty()) {
      return Fault{FaultCode::kUnsupported,
                   buffer_error_ != 0
                       ? system_fault("a table of registered buffers (needs Linux 5.19)", buffer_error_).text
                       : "the kernel's table of registered buffers is full"};
    }
    const std::uint32_t index = free_buffers_.back();
    const iovec range{memory.data(), memory.size()};
    const __u64 tag = 0;
    const int result = ::io_uring_register_buffers_update_tag(&ring_, index, &range, &tag, 1);
    if (result < 0) {
      Fault fault =
          system_fault("registering " + std::to_string(memory.size()) + " bytes with io_uring", -result);
      if (result == -ENOMEM) fault.text += "; raise RLIMIT_MEMLOCK (LimitMEMLOCK= in a unit)";
      return fault;
    }
    free_buffers_.pop_back();
    const RegisteredMemory entry{memory.data(), memory.data() + memory.size(), index};
    registered_.insert(
        std::upper_bound(registered_.begin(), registered_.end(), entry.begin,
                         [](std::byte* begin, const RegisteredMemory& r) { return begin < r.begin; }),
        entry);
    return ok();
  }

  void unregister_memory(std::span<std::byte> memory) override {
    const auto entry = std::find_if(registered_.begin(), registered_.end(),
                                    [&](const RegisteredMemory& r) { return r.begin == memory.data(); });
    if (entry == registered_.end()) return;
    const iovec none{nullptr, 0};
    const __u64 tag = 0;
    CHECK(::io_uring_register_buffers_update_tag(&ring_, entry->index, &none, &tag, 1) >= 0);
    free_buffers_.push_back(entry->index);
    registered_.erase(entry);
  }

  void start(const EngineRead& read) override {
    io_uring_sqe* const entry = next_entry();
    const bool fixed_file = read.file < n_fixed_files_;
    const int fd = fixed_file ? static_cast<int>(read.file) : fds_[read.file];
    if (const RegisteredMemory* memory = registered_around(read.memory, read.bytes)) {
      ::io_uring_prep_read_fixed(entry, fd, read.memory, read.bytes, read.offset,
                                 static_cast<int>(memory->index));
    } else {
      ::io_uring_prep_read(entry, fd, read.memory, read.bytes, read.offset);
    }
    if (fixed_file) entry->flags |= IOSQE_FIXED_FILE;
    // The kernel would copy within submit, one read after the other on this thread; its workers do it side by
    // side. They are no more than the reads in flight.
    if (is_copied_[read.file]) entry->flags |= IOSQE_ASYNC;
    ::io_uring_sqe_set_data64(entry, read.id);
  }

  std::size_t wait(std::span<EngineDone> done, bool block) override {
    if (!wake_armed_ && !done.empty()) {
      io_uring_sqe* const entry = next_entry();
      ::io_uring_prep_read(entry, wake_fd_.get(), &wake_count_, sizeof wake_count_, 0);
      ::io_uring_sqe_set_data64(entry, kWakeTag);
      wake_armed_ = true;
    }
    // Errors here (EINTR, EAGAIN and EBUSY when the kernel is short of memory) leave entries in the queue for
    // the next call; entries that were taken report their own errors.
    if (block) {
      (void)::io_uring_submit_and_wait(&ring_, 1);
    } else {
      (void)::io_uring_submit_and_get_events(&ring_);
    }
    std::size_t n_done = 0;
    unsigned head = 0;
    unsigned n_seen = 0;
    io_uring_cqe* entry = nullptr;
    io_uring_for_each_cqe(&ring_, head, entry) {
      if (entry->user_data == kWakeTag) {
        wake_armed_ = false;
      } else {
        if (n_done == done.size()) break;
        int result = entry->res;
        if (result ==
            -ECANCELED) {  // by nobody here: the kernel has no worker for it (a limit on tasks, say)
          std::fill(is_copied_.begin(), is_copied_.end(), false);
          result = -EAGAIN;
        }
        done[n_done++] = EngineDone{static_cast<std::uint32_t>(entry->user_data), result};
      }
      ++n_seen;
    }
    ::io_uring_cq_advance(&ring_, n_seen);
    return n_done;
  }

  void wake() override {
    const std::uint64_t one = 1;
    while (::write(wake_fd_.get(), &one, sizeof one) < 0 && errno == EINTR) {
    }
  }

 private:
  Status open_ring() {
    // The newest modes first: completions are then handled where we wait for them, not by interrupting the
    // thread.
    static constexpr unsigned kModes[] = {
        IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,  // Linux 6.1
        IORING_SETUP_COOP_TASKRUN,                                // 5.19
        0};
    int result = 0;
    for (const unsigned mode : kModes) {
      result = ::io_uring_queue_init(queue_depth_ + 1, &ring_, mode);  // one more for the wake-up
      if (result != -EINVAL) break;
    }
    if (result < 0) return system_fault("io_uring_queue_init", -result);
    ring_open_ = true;
    return ok();
  }

  void register_tables() {
    // The kernel refuses a table larger than the number of files that this process may open.
    rlimit files{};
    std::uint32_t n_files = kMaxFiles;
    if (::getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < n_files) {
      n_files = static_cast<std::uint32_t>(files.rlim_cur);
    }
    if (::io_uring_register_files_sparse(&ring_, n_files) == 0) n_fixed_files_ = n_files;
    buffer_error_ = -::io_uring_register_buffers_sparse(&ring_, kBufferTableSize);
    if (buffer_error_ != 0) return;
    free_buffers_.reserve(kBufferTableSize);
    for (std::uint32_t i = kBufferTableSize; i-- > 0;) free_buffers_.push_back(i);
  }

  io_uring_sqe* next_entry() {
    io_uring_sqe* entry = ::io_uring_get_sqe(&ring_);
    if (entry == nullptr) {  // entries left over from a submit that the kernel cut short
      ::io_uring_submit(&ring_);
      entry = ::io_uring_get_sqe(&ring_);
    }
    CHECK(entry != nullptr);  // at most queue_depth_ reads and one wake-up are ever outstanding
    return entry;
  }

  [[nodiscard]] const RegisteredMemory* registered_around(const std::byte* memory,
                                                          std::uint32_t n_bytes) const {
    auto next = std::upper_bound(registered_.begin(), registered_.end(), memory,
                                 [](const std::byte* at, const RegisteredMemory& r) { return at < r.begin; });
    if (next == registered_.begin()) return nullptr;
    --next;
    return memory + n_bytes <= next->end ? &*next : nullptr;
  }

  std::uint32_t queue_depth_;
  io_uring ring_{};
  bool ring_open_ = false;
  UniqueFd wake_fd_;
  std::uint64_t wake_count_ = 0;  // written by the kernel
  bool wake_armed_ = false;
  std::vector<int> fds_;
  std::vector<bool> is_copied_;  // by file
  std::uint32_t n_fixed_files_ = 0;
  int buffer_error_ = 0;
  std::vector<std::uint32_t> free_buffers_;
  std::vector<RegisteredMemory> registered_;  // by address
};

}  // namespace

Result<std::unique_ptr<ReadEngine>> make_uring_engine(std::uint32_t queue_depth) {
  auto engine = std::make_unique<UringEngine>(queue_depth);
  if (Status status = engine->open(); !status) return std::move(status).error();
  return std::unique_ptr<ReadEngine>(std::move(engine));
}

}  // namespace moecached
