// From wanted ranges to reads that the kernel accepts: which ranges become one read, where a read starts and
// ends so that direct I/O takes it, where long ones are cut. Pure: no system call, no clock. Thread: any.
// Memory: the caller's.
//
//   file      ----|#### A ####|## B ##|-----|# C #|----------        A, B, C: wanted (segments)
//   blocks    |         |         |         |         |              of the alignment
//   one run   |<------------- read ------------------>|              through staging: A, B and C are copied
//   out
//
// A segment goes straight into its destination when it permits padding there and lies at the same place
// within a block in the file and in memory, or when it needs no padding at all. Others are read into staging
// memory and copied out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace moecached {

// One wanted range. bytes > 0.
struct Segment {
  std::uint32_t file = 0;
  std::uint32_t request = 0;  // carried along for the caller
  std::uint32_t order = 0;    // runs are read by the lowest order of their segments: first come, first read
  bool direct = false;        // padding up to the block may be overwritten at the destination
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::byte* destination = nullptr;
  std::uint32_t next = 0;  // filled in: the segment after this one in its run
  bool staged = false;     // through staging in any case
  [[nodiscard]] std::uint64_t end() const { return offset + bytes; }
};

// Disjoint segments of one file, ascending, that are read together.
struct Run {
  std::uint32_t file = 0;
  std::uint32_t alignment = 1;  // power of two; 1: any offset and length
  std::uint32_t first_segment = 0;
  std::uint32_t order = 0;
  std::uint64_t begin = 0, end = 0;  // of what is still to be read; not aligned
  std::byte* memory = nullptr;       // where byte `begin` goes; null: through staging
};

struct PlannedRead {
  std::uint32_t file = 0;
  std::uint32_t alignment = 1;
  std::uint32_t first_segment = 0, n_segments = 0;  // that want something of it, following Segment::next
  std::uint64_t offset = 0;                         // aligned, as is bytes
  std::uint32_t bytes = 0;
  std::uint64_t wanted_begin = 0, wanted_end = 0;  // offsets in the file
  std::byte* memory = nullptr;                     // where byte `offset` goes; null: staging
};

[[nodiscard]] constexpr std::uint64_t align_down(std::uint64_t value, std::uint64_t alignment) {
  return value & ~(alignment - 1);
}
[[nodiscard]] constexpr std::uint64_t align_up(std::uint64_t value, std::uint64_t alignment) {
  return align_down(value + alignment - 1, alignment);
}

// Sorts `batch` (indices into `segments`) and appends runs, in the order in which they should be read.
// alignments: by file.
void plan_runs(std::span<Segment> segments, std::span<std::uint32_t> batch,
               std::span<const std::uint32_t> alignments, std::vector<Run>& runs);

// Cuts the next read off the front of a run. REQUIRES: run.begin < run.end; read_bytes_max is a multiple of
// the alignment.
[[nodiscard]] PlannedRead take_read(Run& run, std::span<const Segment> segments,
                                    std::uint64_t read_bytes_max);

// The run of what one segment wants of a read: to try it again on its own.
[[nodiscard]] Run run_of_one(const PlannedRead& read, std::span<const Segment> segments,
                             std::uint32_t segment);

}  // namespace moecached
