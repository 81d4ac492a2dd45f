// What the io thread does: takes requests, plans reads, keeps as many in flight as it may, puts the bytes
// where they belong, and reports a request when its last byte is there and its files are still the ones that
// were opened. One request's failure is its own: a read that served several is tried again for each. Thread:
// the io thread alone.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "daemon/base/result.h"
#include "daemon/platform/eventfd.h"
#include "daemon/platform/file.h"
#include "daemon/tier/read_engine.h"
#include "daemon/tier/read_plan.h"
#include "daemon/tier/region_registry.h"
#include "daemon/tier/request_table.h"
#include "daemon/tier/staging.h"

namespace moecached {

// Of one read: max_read_bytes, rounded down so that it is a multiple of every alignment that a file is read
// with.
[[nodiscard]] std::uint64_t read_bytes_max(const SsdOptions& options);

class IoLoop {
 public:
  IoLoop(const SsdOptions& options, std::unique_ptr<ReadEngine> engine, RequestTable& table,
         TierCounters& counters, const EventFd& caller_event);
  // Memory for staging, and its registration.
  Status open();

  // Until it is told to stop and nothing is in flight any more: requests that were not finished by then never
  // are.
  void run(const std::function<void()>& run_commands);

  // From run_commands.
  void stop() { stopping_ = true; }
  void add_file(std::uint32_t file, ReadableFile opened);
  void remove_file(std::uint32_t file);
  void add_region(std::span<std::byte> region, std::vector<SlotWindow> traded);
  void released(std::span<const std::byte> memory) { regions_.released(memory); }
  void remove_region(std::span<std::byte> region);

  ReadEngine& engine() { return *engine_; }  // wake() for any thread

 private:
  struct OpenFile {
    ReadableFile file;
    std::uint64_t checked_at = 0;  // check_stamp_ of the last comparison
    bool changed = false;          // stays so
  };
  struct InFlight {
    PlannedRead read;
    std::byte* memory = nullptr;    // where read.offset goes
    std::uint32_t bytes_done = 0;   // a multiple of the alignment, but at the end of a file
    std::uint32_t retries = 0;      // in a row
    std::uint32_t short_reads = 0;  // without progress
  };

  // A read whose bytes are in staging and not yet where they belong.
  struct Arrived {
    PlannedRead read;
    std::byte* memory = nullptr;
  };

  void take_requests();
  void accept(std::uint32_t slot);
  void start_reads();
  void prepare(const std::byte* memory, std::uint64_t n_bytes);
  void start(std::uint32_t id);
  void on_done(const EngineDone& done);
  void finish_read(std::uint32_t id, bool success);
  void copy_some();
  void retry_each(const PlannedRead& read);
  void account(const PlannedRead& read, const std::byte* staged, bool success);
  void report_finished();
  [[nodiscard]] bool file_unchanged(std::uint32_t file);
  [[nodiscard]] bool is_idle_for_requests() const;
  [[nodiscard]] bool spin_for_requests();  // whether some came

  SsdOptions options_;
  std::unique_ptr<ReadEngine> engine_;
  RequestTable& table_;
  TierCounters& counters_;
  const EventFd& caller_event_;
  std::uint64_t read_bytes_max_ = 0;

  bool stopping_ = false;
  bool spins_ = false;  // the last requests came soon after a report
  std::uint64_t reported_ns_ = 0;

  Staging staging_;
  RegionRegistry regions_;
  bool staging_registered_ = false;

  std::vector<OpenFile> files_;            // by file
  std::vector<std::uint32_t> alignments_;  // by file
  std::uint64_t check_stamp_ = 0;

  std::vector<Segment> segments_;  // slot * kMaxPartReads + part
  std::vector<std::uint32_t> batch_;
  std::vector<Run> runs_;
  std::size_t next_run_ = 0;

  std::vector<InFlight> in_flight_;  // by id
  std::vector<std::uint32_t> free_ids_;
  std::vector<EngineDone> done_;
  std::vector<Arrived> arrived_;         // copied first in, first out
  std::vector<std::uint32_t> finished_;  // slots
};

}  // namespace moecached
