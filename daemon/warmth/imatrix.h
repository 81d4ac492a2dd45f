// Importance matrices of llama.cpp as a source of use counts: an imatrix run counts how many rows each expert
// was given.
//
//   GGUF    tensor "blk.N.ffn_*_exps.weight.counts", F32, one count an expert, beside ".in_sum2"
//   legacy  u32 entries, each: u32 length, name, u32 calls, u32 values, F32 values (all experts in a row).
//           It has no counts of experts. In files of the first version values are sums over the rows, which
//           grow with them, so that their sum over an expert's channels stands for its count; later versions
//           wrote means, from which use cannot be told: those are refused
//
// gate, up and down of a layer see the same rows: the first that a file has is taken. The file is hostile:
// each length and size is checked against the file before memory is taken for it. Thread: any. Memory: the
// GGUF reader's, or 64 KiB.
#pragma once

#include <span>

#include "daemon/base/result.h"
#include "daemon/warmth/use_list.h"

namespace moecached {

// fd: borrowed, a regular file. kInvalid, kLimit, kNotFound (no experts in it), kUnsupported (means).
[[nodiscard]] Result<UseList> read_imatrix_gguf(int fd);
// shapes: of the model, since the file does not say how many experts a layer has.
[[nodiscard]] Result<UseList> read_imatrix_legacy(int fd, std::span<const BlockShape> shapes);

}  // namespace moecached
