// Where the experts of a STREAM record with MOECACHED_FLAG_IN_PLACE lie in their half of the stream buffer. Daemon and
// client compute it alike from the model segment, expert by expert in the order of the record:
//
//   file   ...|##A##|##B##|....................|##D##|...        A, B and D are wanted
//   half   | .##A##|##B##. |   .##D##.  |                        | at multiples of 4096, . may be overwritten
//
// An expert that follows the one before it in the file lies right behind it, so that neighbours are one read and one
// copy. Any other begins in a page of its own, as far into it as into that of the file: a direct read, which begins and
// ends at multiples of 4096 in the file, lands there without a copy, and what it brings besides falls into padding. Pure.
#ifndef MOECACHED_SHM_STREAM_PLACE_H_
#define MOECACHED_SHM_STREAM_PLACE_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { MOECACHED_STREAM_PAGE = 4096 };

// The end of what has been placed so far. All zero: nothing yet.
struct moecached_stream_end {
  uint64_t bytes;   // in the half; 0: nothing has been placed
  uint64_t offset;  // in the file
  uint32_t file;
};

// Bytes of the half that are taken, padding included. What exceeds the half does not fit.
static inline uint64_t moecached_stream_bytes(struct moecached_stream_end end) {
  return (end.bytes + MOECACHED_STREAM_PAGE - 1) / MOECACHED_STREAM_PAGE * MOECACHED_STREAM_PAGE;
}

// Places the next expert, which lies at `offset` of `file`, and returns where it begins in the half. expert_bytes > 0.
static inline uint64_t moecached_stream_place(struct moecached_stream_end* end, uint32_t file, uint64_t offset,
                                              uint64_t expert_bytes) {
  const int follows = end->bytes > 0 && end->file == file && end->offset == offset;
  const uint64_t at = follows ? end->bytes : moecached_stream_bytes(*end) + offset % MOECACHED_STREAM_PAGE;
  end->bytes = at + expert_bytes;
  end->offset = offset + expert_bytes;
  end->file = file;
  return at;
}

#ifdef __cplusplus
}  // extern "C"
#endif
#endif  // MOECACHED_SHM_STREAM_PLACE_H_
