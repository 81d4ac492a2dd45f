// From the files of a model, the shards of a GGUF or safetensors with their config.json, to where every
// expert's parts lie, in the files and in a slot record. Reads headers only, never weights. Bad files are
// refused with a sentence that names the tensor or key, the value and the limit.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "daemon/base/result.h"
#include "proto/shm/layout.h"

namespace moecached {

// Where one expert's bytes of a part lie.
struct PartExtent {
  std::uint32_t file = 0;  // shard
  std::uint64_t offset = 0;
  bool direct = false;  // file and record agree modulo the direct-I/O alignment: read in place, no copy
};

struct PartLayout {
  moecached_part_kind kind = MOECACHED_PART_GATE;
  std::uint32_t ggml_type = 0;
  std::uint32_t file = 0;          // shard
  std::uint64_t ne0 = 0, ne1 = 0;  // elements of a row; rows of one expert
  std::uint64_t file_offset = 0;   // bytes, of expert 0
  std::uint64_t expert_bytes = 0;
  std::uint64_t slot_offset = 0;    // bytes in a record
  bool direct = false;              // as in PartExtent; with extents: the record has room for such reads
  std::string name;                 // "blk.3.ffn_gate_exps.weight"
  std::vector<PartExtent> extents;  // by expert; empty: one behind the other in one file

  [[nodiscard]] PartExtent extent(std::uint32_t expert) const {
    return extents.empty() ? PartExtent{file, file_offset + expert * expert_bytes, direct} : extents[expert];
  }
};

struct LayerLayout {
  std::uint32_t block = 0;  // N of "blk.N." or "layers.N."
  std::uint32_t n_experts = 0;
  std::uint32_t slot_class = 0;  // equal for layers whose parts have equal kinds, types and sizes
  std::uint64_t slot_stride =
      0;  // bytes of one record, a multiple of 64 (of the alignment if any part is direct)
  std::vector<PartLayout> parts;  // ordered by kind
};

struct LeftOut {
  std::string tensor;
  std::string reason;  // a sentence for `moecachectl doctor`
};

struct ModelLayout {
  std::string architecture;         // general.architecture, or model_type of config.json
  std::string name;                 // general.name, may be empty
  std::uint32_t n_expert_used = 0;  // top-k
  std::uint32_t n_files = 0;
  std::uint64_t expert_bytes_total = 0;
  std::vector<LayerLayout> layers;  // ordered by block
  std::vector<LeftOut> left_out;    // tensors that look like experts and are not served
};

struct LayoutOptions {
  std::uint32_t direct_alignment = 4096;  // bytes, a power of two; 0: nothing is read in place
};

// fds: open for reading, borrowed. One per shard of a GGUF, in order; or, in any order, the safetensors files
// of a model, its config.json and, if it has one, its model.safetensors.index.json: which is which, their
// first bytes say. PartLayout::file is an index into them. kInvalid: not usable, or files that do not belong
// together; kNotFound: a good model without expert tensors.
[[nodiscard]] Result<ModelLayout> read_model_layout(std::span<const int> fds, const LayoutOptions& options);

}  // namespace moecached
