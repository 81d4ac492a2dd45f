// A model opened in a session: the checked layout, the mapped segments and the windows. One ModelMapping is
// what one daemon gave; a reconnect builds the next one and swaps it in, which is what the generation counts.
// Thread: the session's lock guards everything; lanes keep a pointer to the mapping, which changes only while
// the caller promises that no lane is in use (moecached_session_reconnect). Memory: the session owns models.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "client/include/moecached/moecached.h"
#include "client/src/connection.h"
#include "client/src/gpu_segment.h"
#include "client/src/model_files.h"
#include "client/src/resources.h"
#include "client/src/segments.h"
#include "client/src/windows.h"

namespace moecached::client {

class Lane;

// What resolve() touches of a layer, close together.
struct LayerView {
  const std::int32_t* entries = nullptr;
  std::uint32_t n_experts = 0;
  std::uint32_t n_slots = 0;  // ids are below it
  const std::uint32_t* n_slots_open = nullptr;
};

struct ModelMapping {
  // Sends the files to the daemon and maps what it answers.
  // gpu: of a model that spills; null: slots in RAM alone.
  [[nodiscard]] static moecached_status open(Connection& connection, const ModelFiles& files,
                                             const GpuUuid* gpu, std::unique_ptr<ModelMapping>* out);

  std::uint32_t model_id = 0;
  ModelLayout layout;
  std::vector<LayerView> views;
  Mapping segment, stream;
  WindowSet windows;
  // Keep the windows, and by lane index parts of the stream segment, page-locked for a GPU. They go before
  // what they lock: a driver would read whatever is mapped there next as the pages that were.
  std::shared_ptr<void> pinned;
  std::map<std::uint32_t, std::shared_ptr<void>> pinned_streams;
};

// Counters of a lane: written by its thread, read by any. Not locked instructions: there is one writer.
class LaneCounter {
 public:
  void add(std::uint64_t amount) noexcept {
    value_.store(value_.load(std::memory_order_relaxed) + amount, std::memory_order_relaxed);
  }
  [[nodiscard]] std::uint64_t value() const noexcept { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> value_{0};
};

struct LaneCounters {
  LaneCounter lookups, hits, leases, streamed_experts, fallback_reads, fallback_bytes, dropped_records;
  void add_to(moecached_counters* sum) const noexcept;
};

// Every member is guarded by the lock of the session, except `files`, which never changes.
class Model {
 public:
  Model(ModelFiles opened, const GpuUuid* gpu, std::unique_ptr<ModelMapping> first);

  [[nodiscard]] moecached_status layer_info(std::uint32_t layer, moecached_layer_info* out) const;
  [[nodiscard]] moecached_status part_info(std::uint32_t layer, std::uint32_t part,
                                           moecached_part_info* out) const;
  [[nodiscard]] moecached_status find(std::string_view tensor, std::uint32_t* layer,
                                      std::uint32_t* part) const;

  const ModelFiles files;
  const std::optional<GpuUuid> gpu;  // of a model that spills
  std::unique_ptr<ModelMapping> mapping;
  std::uint64_t generation = 1;
  std::vector<Lane*> lanes;
  moecached_counters retired{};  // of lanes that were closed

 private:
  // Of the first mapping: names that were handed out stay valid, and later mappings are checked to be equal.
  std::vector<std::vector<std::string>> part_names_;
};

}  // namespace moecached::client
