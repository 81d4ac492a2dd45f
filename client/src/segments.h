// Turns the segments that the daemon sends into checked copies. The daemon is trusted, but it may be of
// another version, and its segments then mean something else: every size, offset and count is checked once
// here, against the real size of its descriptor and the limits of proto/shm/layout.h, and ends in a sentence
// instead of a crash. Nothing after this reads geometry from shared memory again. Thread: any. Memory: a
// ModelLayout owns its copies; the mappings stay with the caller.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "client/include/moecached/moecached.h"
#include "client/src/resources.h"
#include "proto/shm/layout.h"

namespace moecached::client {

// The object behind `fd` has at least the announced number of bytes. `what` names it in sentences.
[[nodiscard]] moecached_status check_size(const UniqueFd& fd, std::uint64_t bytes, const char* what);

// check_size(), then maps that many bytes.
[[nodiscard]] moecached_status map_segment(const UniqueFd& fd, std::uint64_t bytes, int protection,
                                           const char* what, Mapping* out);

// The sentence for memory that is not laid out as proto/shm/layout.h says; `what` names what was found odd.
[[nodiscard]] moecached_status layout_mismatch(const char* what);

// Whether `count` items of `size` bytes from `offset` lie within `bytes`; no sum here can overflow unseen.
[[nodiscard]] bool fits(std::uint64_t offset, std::uint64_t count, std::uint64_t size,
                        std::uint64_t bytes) noexcept;

// The header that every segment starts with.
[[nodiscard]] moecached_status check_header(const Mapping& segment, moecached_segment_kind kind,
                                            std::uint64_t boot_epoch);

// The session segment: checks, then the address of lane 0 and the count.
struct SessionLayout {
  moecached_shm_lane* lanes = nullptr;
  std::uint32_t n_lanes = 0;
};
[[nodiscard]] moecached_status check_session_segment(const Mapping& segment,
                                                     const moecached_handle_welcome& welcome,
                                                     SessionLayout* out);

using Extents = std::vector<moecached_shm_extent>;

struct LayerLayout {
  moecached_shm_layer layer{};
  std::vector<moecached_shm_part> parts;
  std::vector<Extents> extents;                 // by part; empty: its experts lie one behind the other
  const std::int32_t* entries = nullptr;        // the layer's slot table, in the mapped segment
  const std::uint32_t* n_slots_open = nullptr;  // in the mapped segment: the daemon changes it

  // Where the part of an expert lies in the files.
  [[nodiscard]] moecached_shm_extent place(std::uint32_t part, std::uint32_t expert) const;
};

// Of a spill model, in the mapped segment: the daemon changes it once, see proto/shm/layout.h.
struct SpillWords {
  const moecached_shm_spill* spill = nullptr;  // null: the model does not spill
  const moecached_shm_array* arrays = nullptr;
  std::uint32_t n_arrays = 0;
};

struct ModelLayout {
  moecached_shm_model model{};
  SpillWords spill;
  std::vector<LayerLayout> layers;
  std::uint32_t n_experts_max = 0;  // over all layers

  // The same experts at the same places of the same files: what a restarted daemon must find again. Slots may
  // differ.
  [[nodiscard]] bool same_experts(const ModelLayout& other) const;
  [[nodiscard]] moecached_status locate(std::uint32_t layer, std::uint32_t part, std::uint32_t expert,
                                        std::uint32_t* file, std::uint64_t* offset) const;
};

// The arrays of parts and extents lie within the segment.
[[nodiscard]] bool parts_fit(const moecached_shm_model& model, std::uint64_t segment_bytes);
// Copies the parts of a layer and where their experts lie, and checks that they lie within the files. Null,
// or what is odd. REQUIRES: parts_fit(), and the layer's parts are some of the model's.
[[nodiscard]] const char* take_parts(const Mapping& segment, const moecached_shm_model& model,
                                     const std::vector<std::uint64_t>& file_bytes, LayerLayout* layer);

struct ModelSegmentFacts {
  std::uint64_t boot_epoch = 0;
  std::uint32_t model_id = 0;
  std::uint32_t n_lanes = 0;     // of the session
  std::uint64_t pool_bytes = 0;  // of the mapped descriptors
  std::uint64_t stream_bytes = 0;
  std::vector<std::uint64_t> file_bytes;  // of the files this process opened
  bool spills = false;                    // was asked for
};
[[nodiscard]] moecached_status check_model_segment(const Mapping& segment, const ModelSegmentFacts& facts,
                                                   ModelLayout* out);

}  // namespace moecached::client
