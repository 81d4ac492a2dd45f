#include "daemon/tier/read_plan.h"

#include <algorithm>

#include "daemon/base/check.h"

namespace moecached {
namespace {

bool goes_straight(const Segment& segment, std::uint64_t alignment) {
  if (alignment == 1) return true;  // the kernel copies: any memory will do
  if (segment.staged) return false;
  const auto address = reinterpret_cast<std::uintptr_t>(segment.destination);
  if (segment.direct) return ((address ^ segment.offset) & (alignment - 1)) == 0;
  return ((address | segment.offset | segment.bytes) & (alignment - 1)) == 0;
}

// A run that may still grow at its end.
struct Growing {
  bool open = false;
  std::size_t run = 0;
  std::uint32_t last = 0;  // segment
};

bool continues(const Run& run, const Segment& segment) {
  if (run.file != segment.file) return false;
  // Straight into memory: bytes that nobody wants would land between two destinations, so no gap at all.
  if (run.memory != nullptr) {
    return segment.offset == run.end && segment.destination == run.memory + (segment.offset - run.begin);
  }
  // Overlapping segments are read twice: a run whose segments are disjoint needs no more than a list.
  return segment.offset >= run.end &&
         align_down(segment.offset, run.alignment) <= align_up(run.end, run.alignment);
}

}  // namespace

void plan_runs(std::span<Segment> segments, std::span<std::uint32_t> batch,
               std::span<const std::uint32_t> alignments, std::vector<Run>& runs) {
  std::sort(batch.begin(), batch.end(), [&](std::uint32_t a, std::uint32_t b) {
    if (segments[a].file != segments[b].file) return segments[a].file < segments[b].file;
    if (segments[a].offset != segments[b].offset) return segments[a].offset < segments[b].offset;
    return a < b;
  });
  const std::size_t n_runs_before = runs.size();
  Growing straight, staged;
  for (const std::uint32_t index : batch) {
    const Segment& segment = segments[index];
    const std::uint32_t alignment = alignments[segment.file];
    const bool is_straight = goes_straight(segment, alignment);
    Growing& growing = is_straight ? straight : staged;
    if (growing.open && continues(runs[growing.run], segment)) {
      Run& run = runs[growing.run];
      run.end = segment.end();
      run.order = std::min(run.order, segment.order);
      segments[growing.last].next = index;
    } else {
      growing.open = true;
      growing.run = runs.size();
      runs.push_back(Run{segment.file, alignment, index, segment.order, segment.offset, segment.end(),
                         is_straight ? segment.destination : nullptr});
    }
    growing.last = index;
  }
  std::sort(
      runs.begin() + static_cast<std::ptrdiff_t>(n_runs_before), runs.end(),
      [](const Run& a, const Run& b) { return a.order != b.order ? a.order < b.order : a.begin < b.begin; });
}

PlannedRead take_read(Run& run, std::span<const Segment> segments, std::uint64_t read_bytes_max) {
  DCHECK(run.begin < run.end && read_bytes_max % run.alignment == 0 && read_bytes_max > 0);
  PlannedRead read;
  read.file = run.file;
  read.alignment = run.alignment;
  read.first_segment = run.first_segment;
  read.offset = align_down(run.begin, run.alignment);
  read.wanted_begin = run.begin;
  read.wanted_end = std::min(run.end, read.offset + read_bytes_max);
  read.bytes = static_cast<std::uint32_t>(align_up(read.wanted_end, run.alignment) - read.offset);
  if (run.memory != nullptr) read.memory = run.memory - (run.begin - read.offset);

  // A segment is looked at only while it still has bytes to be read: after that its request may be done and
  // gone.
  std::uint32_t index = run.first_segment;
  while (true) {
    ++read.n_segments;
    const std::uint64_t end = segments[index].end();
    if (end > read.wanted_end) {  // the rest of it comes with the next read
      if (run.memory != nullptr) run.memory += read.wanted_end - run.begin;
      run.first_segment = index;
      run.begin = read.wanted_end;
      return read;
    }
    if (end >= run.end) {
      run.begin = run.end;
      return read;
    }
    const std::uint32_t next = segments[index].next;
    if (segments[next].offset >= read.wanted_end) {
      if (run.memory != nullptr) run.memory += segments[next].offset - run.begin;
      run.first_segment = next;
      run.begin = segments[next].offset;
      return read;
    }
    index = next;
  }
}

Run run_of_one(const PlannedRead& read, std::span<const Segment> segments, std::uint32_t segment) {
  const Segment& wanted = segments[segment];
  Run run;
  run.file = read.file;
  run.alignment = read.alignment;
  run.first_segment = segment;
  run.order = wanted.order;
  run.begin = std::max(read.wanted_begin, wanted.offset);
  run.end = std::min(read.wanted_end, wanted.end());
  if (read.memory != nullptr) run.memory = read.memory + (run.begin - read.offset);
  return run;
}

}  // namespace moecached
