#include "daemon/tier/io_loop.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

#include "daemon/base/check.h"
#include "daemon/platform/clock.h"
#include "daemon/platform/memory_file.h"

namespace moecached {
namespace {

constexpr std::uint64_t kStagingBytesMax = 256u
                                           << 20;  // also the largest max_read_bytes; one registered buffer
// Copied before the loop looks at the kernel and at new requests again: while many reads that ended together
// are copied out, the disk must have the next ones.
constexpr std::uint64_t kCopyBytes = 1u << 20;
// Staging buffers beyond the queue depth, so that reads go on while others wait to be copied.
constexpr std::uint32_t kBuffersAhead = 8;
constexpr std::uint32_t kRetriesMax = 100;  // EINTR or EAGAIN in a row
constexpr std::uint32_t kShortReadsMax =
    3;  // that brought no whole block: the file ends here, unless proven otherwise
constexpr std::uint32_t kBatchRequests = 256;  // planned together
// Waking this thread costs 3 to 60 us (the latter on virtual machines), at a queue depth of 1 once for every
// read. A caller that came back within this time after the last report is expected to do it again, and is
// waited for awake.
constexpr std::uint64_t kSpinNsMax = 50'000;

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

// A multiple of every alignment up to 64 KiB, or of every one that is not larger than it.
std::uint64_t read_bytes_max(const SsdOptions& options) {
  if (options.max_read_bytes >= kAlignmentMax) return align_down(options.max_read_bytes, kAlignmentMax);
  return std::bit_floor(options.max_read_bytes);
}

IoLoop::IoLoop(const SsdOptions& options, std::unique_ptr<ReadEngine> engine, RequestTable& table,
               TierCounters& counters, const EventFd& caller_event)
    : options_(options),
      engine_(std::move(engine)),
      table_(table),
      counters_(counters),
      caller_event_(caller_event),
      read_bytes_max_(read_bytes_max(options)),
      regions_(*engine_),
      files_(kMaxFiles),
      alignments_(kMaxFiles, 1),
      segments_(std::size_t{options.max_requests} * kMaxPartReads) {
  const std::uint32_t depth = engine_->depth_max();
  batch_.reserve(std::size_t{kBatchRequests} * kMaxPartReads);
  runs_.reserve(std::size_t{kBatchRequests} * kMaxPartReads);
  in_flight_.resize(depth);
  for (std::uint32_t id = depth; id-- > 0;) free_ids_.push_back(id);
  done_.resize(depth);
  finished_.reserve(options.max_requests);
}

Status IoLoop::open() {
  const std::uint64_t fit = std::max<std::uint64_t>(kStagingBytesMax / read_bytes_max_, 1);
  const auto n_buffers =
      static_cast<std::uint32_t>(std::min<std::uint64_t>(engine_->depth_max() + kBuffersAhead, fit));
  arrived_.reserve(n_buffers);
  Result<Staging> staging = Staging::create(n_buffers, read_bytes_max_);
  if (!staging) return std::move(staging).error();
  staging_ = std::move(staging).value();
  if (!engine_->can_register_memory()) return ok();
  if (Status status = engine_->register_memory(staging_.memory()); status) {
    staging_registered_ = true;
    counters_.registered_buffers = true;
  } else {
    counters_.add_reason(status.error().text);
  }
  return ok();
}

void IoLoop::run(const std::function<void()>& run_commands) {
  while (true) {
    run_commands();
    if (stopping_ && free_ids_.size() == in_flight_.size()) return;
    if (!stopping_) {
      take_requests();
      start_reads();
    }
    report_finished();

    bool may_sleep = true;
    if (!arrived_.empty()) {
      may_sleep = false;
    } else if (!stopping_ && is_idle_for_requests()) {
      // Only when nothing is in flight: completions come through the kernel.
      if (spins_ && free_ids_.size() == in_flight_.size() && spin_for_requests()) continue;
      table_.io_sleeps.store(true, std::memory_order_seq_cst);
      // Published before we said that we sleep: nobody is going to wake us for it.
      may_sleep = table_.to_io.empty();
    }
    const std::size_t n_done = engine_->wait(done_, may_sleep);
    table_.io_sleeps.store(false, std::memory_order_relaxed);
    for (std::size_t i = 0; i < n_done; ++i) on_done(done_[i]);
    copy_some();
  }
}

bool IoLoop::spin_for_requests() {
  const std::uint64_t start = monotonic_ns();
  while (table_.to_io.empty()) {
    if (monotonic_ns() - start > kSpinNsMax) {
      spins_ = false;  // until requests follow each other quickly again
      return false;
    }
    pause_cpu();
  }
  return true;
}

bool IoLoop::is_idle_for_requests() const { return next_run_ == runs_.size() && !free_ids_.empty(); }

// The next plan is made when the last one is in flight: what came meanwhile is planned together.
void IoLoop::take_requests() {
  if (!is_idle_for_requests()) return;
  runs_.clear();
  next_run_ = 0;
  batch_.clear();
  ++check_stamp_;
  std::uint32_t slot = 0;
  for (std::uint32_t n = 0; n < kBatchRequests && table_.to_io.pop(slot); ++n) {
    if (n == 0 && table_.slots[slot].submit_ns > reported_ns_) {
      spins_ = table_.slots[slot].submit_ns - reported_ns_ < kSpinNsMax;
    }
    accept(slot);
  }
  if (!batch_.empty()) plan_runs(segments_, batch_, alignments_, runs_);
}

// Makes segments of a request, or finishes it at once when its file is not what it was or has no such bytes.
void IoLoop::accept(std::uint32_t slot) {
  RequestSlot& entry = table_.slots[slot];
  const ReadRequest& request = entry.request;
  entry.bytes_left = 0;
  entry.failed = false;
  const std::size_t n_batch_before = batch_.size();
  for (std::uint32_t part = 0; part < request.n_parts; ++part) {
    const PartRead& wanted = request.parts[part];
    if (wanted.bytes == 0) continue;
    const std::uint64_t file_bytes = files_[wanted.file.value].file.identity.bytes;
    if (!file_unchanged(wanted.file.value) || wanted.offset > file_bytes ||
        wanted.bytes > file_bytes - wanted.offset) {
      entry.failed = true;
      break;
    }
    const auto index = static_cast<std::uint32_t>(slot * kMaxPartReads + part);
    segments_[index] = Segment{wanted.file.value,
                               slot,
                               static_cast<std::uint32_t>(n_batch_before),
                               wanted.direct,
                               wanted.offset,
                               wanted.bytes,
                               wanted.destination,
                               0,
                               wanted.staged};
    batch_.push_back(index);
    entry.bytes_left += wanted.bytes;
  }
  TierCounters::add(counters_.requests, std::uint64_t{1});
  TierCounters::add(counters_.bytes_wanted, entry.bytes_left);
  if (entry.failed || entry.bytes_left == 0) {
    batch_.resize(n_batch_before);
    entry.bytes_left = 0;
    finished_.push_back(slot);
  }
}

void IoLoop::start_reads() {
  while (next_run_ < runs_.size() && !free_ids_.empty()) {
    Run& run = runs_[next_run_];
    if (run.memory == nullptr && staging_.empty()) break;
    const std::uint32_t id = free_ids_.back();
    free_ids_.pop_back();
    InFlight& entry = in_flight_[id];
    entry.read = take_read(run, segments_, read_bytes_max_);
    if (entry.read.memory != nullptr) prepare(entry.read.memory, entry.read.bytes);
    entry.memory = entry.read.memory != nullptr ? entry.read.memory : staging_.take();
    entry.bytes_done = 0;
    entry.retries = 0;
    entry.short_reads = 0;
    if (run.begin == run.end) ++next_run_;
    start(id);
  }
  TierCounters::raise(counters_.depth_max, static_cast<std::uint32_t>(in_flight_.size() - free_ids_.size()));
}

void IoLoop::prepare(const std::byte* memory, std::uint64_t n_bytes) {
  const std::string refused = regions_.prepare(memory, n_bytes);
  if (!refused.empty()) counters_.add_reason(refused);
}

void IoLoop::start(std::uint32_t id) {
  const InFlight& entry = in_flight_[id];
  TierCounters::add(counters_.reads, std::uint64_t{1});
  engine_->start(EngineRead{id, entry.read.file, entry.read.offset + entry.bytes_done,
                            entry.read.bytes - entry.bytes_done, entry.memory + entry.bytes_done});
}

void IoLoop::on_done(const EngineDone& done) {
  InFlight& entry = in_flight_[done.id];
  const PlannedRead& read = entry.read;
  if (done.result > 0) {
    TierCounters::add(counters_.bytes_read, static_cast<std::uint64_t>(done.result));
    const std::uint64_t n = entry.bytes_done + static_cast<std::uint32_t>(done.result);
    // Past what is wanted only padding can be missing: the end of the file.
    if (read.offset + n >= read.wanted_end) return finish_read(done.id, true);
    const auto n_whole = static_cast<std::uint32_t>(align_down(n, read.alignment));
    if (n_whole == entry.bytes_done && ++entry.short_reads > kShortReadsMax)
      return finish_read(done.id, false);
    entry.bytes_done = n_whole;
    entry.retries = 0;
  } else if (done.result != -EINTR && done.result != -EAGAIN) {
    return finish_read(done.id, false);  // 0: the file ends before what is wanted
  } else if (++entry.retries > kRetriesMax) {
    return finish_read(done.id, false);
  }
  start(done.id);
}

void IoLoop::finish_read(std::uint32_t id, bool success) {
  const InFlight& entry = in_flight_[id];
  const PlannedRead& read = entry.read;
  if (!success) TierCounters::add(counters_.errors, std::uint64_t{1});
  const bool copies = success && read.memory == nullptr;
  if (copies) {
    arrived_.push_back({read, entry.memory});  // there is room: each has a staging buffer
  } else if (!success && read.n_segments > 1) {
    retry_each(read);
  } else {
    account(read, entry.memory, success);
  }
  const OpenFile& file = files_[read.file];
  if (file.file.direct_alignment == 0) drop_page_cache(file.file.fd.get(), read.offset, read.bytes);
  if (read.memory == nullptr) {
    if (!copies) staging_.give_back(entry.memory);
  } else if (success && staging_registered_) {
    const std::string refused = regions_.note_read(read.memory, read.bytes);
    if (!refused.empty()) {
      counters_.add_reason(refused);
      counters_.registered_buffers = false;
    }
  }
  free_ids_.push_back(id);
}

void IoLoop::copy_some() {
  std::size_t n = 0;
  for (std::uint64_t n_bytes = 0; n < arrived_.size() && n_bytes < kCopyBytes; ++n) {
    account(arrived_[n].read, arrived_[n].memory, true);
    staging_.give_back(arrived_[n].memory);
    n_bytes += arrived_[n].read.bytes;
  }
  arrived_.erase(arrived_.begin(), arrived_.begin() + static_cast<std::ptrdiff_t>(n));
}

// One bad block must fail the requests that want it, not their neighbours in the file.
void IoLoop::retry_each(const PlannedRead& read) {
  std::uint32_t segment = read.first_segment;
  for (std::uint32_t i = 0; i < read.n_segments; ++i) {
    if (i > 0) segment = segments_[segment].next;
    runs_.push_back(run_of_one(read, segments_, segment));
  }
}

// Copies out of staging and subtracts what came (or never will) from the requests. A failed request is
// finished, too, only when nothing of it is in flight any more: its destination is its owner's again then.
void IoLoop::account(const PlannedRead& read, const std::byte* memory, bool success) {
  std::uint32_t index = read.first_segment;
  for (std::uint32_t i = 0; i < read.n_segments; ++i) {
    if (i > 0) index = segments_[index].next;
    const Segment& segment = segments_[index];
    const std::uint64_t begin = std::max(segment.offset, read.wanted_begin);
    const std::uint64_t end = std::min(segment.end(), read.wanted_end);
    if (success && read.memory == nullptr) {
      prepare(segment.destination + (begin - segment.offset), end - begin);
      std::memcpy(segment.destination + (begin - segment.offset), memory + (begin - read.offset),
                  end - begin);
    }
    RequestSlot& entry = table_.slots[segment.request];
    DCHECK(entry.bytes_left >= end - begin);
    entry.failed |= !success;
    entry.bytes_left -= end - begin;
    if (entry.bytes_left == 0) finished_.push_back(segment.request);
  }
}

void IoLoop::report_finished() {
  if (finished_.empty()) return;
  ++check_stamp_;  // their bytes have arrived: a change up to now is seen
  const std::uint64_t now = monotonic_ns();
  for (const std::uint32_t slot : finished_) {
    RequestSlot& entry = table_.slots[slot];
    entry.result = entry.failed ? ReadResult::kIoError : ReadResult::kOk;
    for (std::uint32_t part = 0; part < entry.request.n_parts; ++part) {
      if (!file_unchanged(entry.request.parts[part].file.value)) entry.result = ReadResult::kFileChanged;
    }
    TierCounters::add(counters_.latency_ns_total, now - entry.submit_ns);
    TierCounters::raise(counters_.latency_ns_max, now - entry.submit_ns);
    table_.to_caller.push(slot);
  }
  table_.to_caller.publish();
  finished_.clear();
  reported_ns_ = now;
  if (!table_.caller_signalled.exchange(true, std::memory_order_seq_cst)) caller_event_.signal();
}

bool IoLoop::file_unchanged(std::uint32_t file) {
  OpenFile& entry = files_[file];
  if (entry.checked_at != check_stamp_ && !entry.changed) {
    entry.checked_at = check_stamp_;
    const Result<FileIdentity> now = file_identity(entry.file.fd.get());
    entry.changed = !now || *now != entry.file.identity;
  }
  return !entry.changed;
}

void IoLoop::add_file(std::uint32_t file, ReadableFile opened) {
  engine_->add_file(file, opened.fd.get(), opened.direct_alignment == 0 || is_memory_file(opened.fd.get()));
  alignments_[file] = opened.direct_alignment == 0 ? 1 : opened.direct_alignment;
  files_[file] = OpenFile{std::move(opened), 0, false};
}

void IoLoop::remove_file(std::uint32_t file) {
  engine_->remove_file(file);
  files_[file] = OpenFile{};
}

void IoLoop::add_region(std::span<std::byte> region, std::vector<SlotWindow> traded) {
  regions_.add(region, std::move(traded));
}

void IoLoop::remove_region(std::span<std::byte> region) {
  regions_.remove(region);
  counters_.registered_buffers = staging_registered_ && !regions_.refused();
}

}  // namespace moecached
