// From the shards of a GGUF to where every expert's parts lie, in the files and in a slot record. Reads
// headers only, never weights. Bad files are refused with a sentence that names the tensor or key, the value
// and the limit.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "daemon/base/result.h"
#include "proto/shm/layout.h"

namespace moecached {

struct PartLayout {
  moecached_part_kind kind = MOECACHED_PART_GATE;
  std::uint32_t ggml_type = 0;
  std::uint32_t file = 0;          // shard
  std::uint64_t ne0 = 0, ne1 = 0;  // elements of a row; rows of one expert
  std::uint64_t file_offset = 0;   // bytes, of expert 0
  std::uint64_t expert_bytes = 0;
  std::uint64_t slot_offset = 0;  // bytes in a record
  bool direct = false;  // file and record agree modulo the direct-I/O alignment: read in place, no copy
  std::string name;     // "blk.3.ffn_gate_exps.weight"
};

struct LayerLayout {
  std::uint32_t block = 0;  // N of "blk.N."
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
  std::string architecture;         // general.architecture
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

// fds: one per shard, in order, open for reading; borrowed. kInvalid: not a usable GGUF, or shards that do
// not belong together; kNotFound: a good GGUF without expert tensors.
[[nodiscard]] Result<ModelLayout> read_model_layout(std::span<const int> fds, const LayoutOptions& options);

}  // namespace moecached
