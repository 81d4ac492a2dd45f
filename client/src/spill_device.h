// The GPU side of one lane of a spill model: device slots of the daemon and scratch slots of this process,
// array by array in one range of addresses, and the copies that bring experts there.
//
//   array:  | device slots of the daemon, read-only |   no memory   | scratch slots |
//           0                            array.bytes                ^ the same slot id in all parts of a
//           layer
//
// A layer's window begins at its own device slot 0 and reaches to the end of the scratch slots, so one tensor
// covers both. All layers of a slot class share the array's scratch slots: they are computed one after the
// other. Copies come from the RAM slots of the daemon and the stream buffer, page-locked, on a stream of the
// lane's own; or, where a graph waits (spill_waits.h), by a kernel in the graph.
//
// Thread: the lane's, and for place() the one that answers waits; refresh() and open() under the session's
// lock. Memory: owns addresses, scratch memory, stream and events. The mapping of the model must outlive it,
// or be told of with refresh().
#pragma once

#include <cuda.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "client/include/moecached/moecached.h"
#include "client/src/connection.h"
#include "client/src/cuda_driver.h"
#include "client/src/lane.h"
#include "client/src/model.h"
#include "client/src/shared_words.h"
#include "client/src/spill_stream.h"

namespace moecached::client {

class SpillDevice {
 public:
  [[nodiscard]] static moecached_status open(Connection& connection, Model& model, Lane& lane,
                                             std::unique_ptr<SpillDevice>* out);
  ~SpillDevice();
  SpillDevice(const SpillDevice&) = delete;
  SpillDevice& operator=(const SpillDevice&) = delete;

  // Whether refresh() has something to do: device slots were added, or the model has moved to another daemon.
  // A load.
  [[nodiscard]] bool is_stale() const noexcept;
  // REQUIRES: nothing of the lane is under way. Device slots that cannot be mapped are done without; after a
  // failure there are no scratch slots either, and nothing can be resolved.
  [[nodiscard]] moecached_status refresh(Connection& connection);

  [[nodiscard]] std::uint64_t generation() const noexcept { return generation_; }
  [[nodiscard]] moecached_status window(std::uint32_t layer, std::uint32_t part, std::uint64_t* address,
                                        std::uint32_t* n_slots) const;

  [[nodiscard]] moecached_status resolve(std::uint32_t layer, const Lane::IdMatrix& ids,
                                         std::int32_t* slots_out, const moecached_spill_target& target);
  [[nodiscard]] moecached_status begin_layer(std::uint32_t layer, std::span<const std::int32_t> experts);

  // -- for SpillWaits: the same without CUDA calls, the copies left to the kernel `bring` of wait.ptx, which
  // reads it.
  struct Place {
    std::int32_t slot = 0;  // of the layer's windows
    std::uint32_t reserved = 0;
    std::uint64_t source = 0;  // CUdeviceptr of the expert's record, to be copied to the slot; 0: it is there
  };
  struct PartPlace {
    CUdeviceptr window = 0;
    std::uint64_t expert_bytes = 0;
    std::uint64_t record_offset = 0;  // in a record
  };
  struct Bounce {  // page-locked, a record of record_bytes_max() for each of the ids
    std::byte* memory = nullptr;
    CUdeviceptr address = 0;
  };
  // Resolves the layer's experts. What is in no page-locked slot (read here, as the daemon is gone or cannot
  // lease as many) is copied into `bounce`, which the layer's kernels may read until the next call.
  // rows: tokens that the ids are of, in equal parts.
  [[nodiscard]] moecached_status place(std::uint32_t layer, std::span<const std::int32_t> ids,
                                       std::size_t rows, const Bounce& bounce, std::span<Place> out);
  // MOECACHED_E_UNAVAILABLE, with the reason, where place() or its kernel could not do their work.
  [[nodiscard]] moecached_status can_be_waited_for() const;
  [[nodiscard]] PartPlace part_place(std::uint32_t layer, std::uint32_t part) const;
  [[nodiscard]] std::uint32_t n_layers() const { return static_cast<std::uint32_t>(layout().layers.size()); }
  [[nodiscard]] std::uint32_t n_parts(std::uint32_t layer) const {
    return static_cast<std::uint32_t>(layout().layers[layer].parts.size());
  }
  // As many distinct experts can be leased. A hint: the daemon may change it.
  [[nodiscard]] std::uint32_t n_slots_open(std::uint32_t layer) const {
    return load_relaxed(mapping_->views[layer].n_slots_open);
  }
  [[nodiscard]] std::uint32_t n_expert_used() const { return layout().model.n_expert_used; }
  [[nodiscard]] std::uint64_t record_bytes_max() const;
  [[nodiscard]] std::uint32_t n_scratch() const noexcept { return n_scratch_; }
  [[nodiscard]] const std::shared_ptr<CudaContext>& context() const noexcept { return context_; }
  [[nodiscard]] CUstream stream() const noexcept { return stream_; }

  [[nodiscard]] moecached_status load_part(std::uint32_t part, CUdeviceptr destination, CUevent ready);

 private:
  struct Array {
    CUdeviceptr address = 0;
    std::uint64_t reserved_bytes = 0;
    std::uint64_t device_bytes = 0;                   // mapped from the daemon
    std::uint64_t scratch_at = 0, scratch_bytes = 0;  // mapped, this process's
  };
  SpillDevice(Model& model, Lane& lane) : model_(model), lane_(lane), waves_(lane) {}
  [[nodiscard]] const ModelLayout& layout() const { return lane_.mapping()->layout; }
  void pin_windows();
  void pin_stream();
  moecached_status map_arrays(Connection* connection, std::uint32_t n_device_slots);
  moecached_status map_array(std::size_t index, UniqueFd memory);
  void plan_scratch(std::uint32_t n_device_slots);
  void unmap_arrays() noexcept;
  [[nodiscard]] CUdeviceptr window_of(const LayerLayout& layer, std::uint32_t part) const;
  [[nodiscard]] const std::byte* record(std::uint32_t layer, std::int32_t slot) const;
  moecached_status copy(CUdeviceptr to, const std::byte* from, std::uint64_t bytes);
  moecached_status settled(moecached_status status);
  moecached_status copy_expert(std::uint32_t layer, std::int32_t slot, std::uint32_t scratch);
  [[nodiscard]] std::int32_t scratch_slot(const LayerLayout& layer, std::size_t scratch) const;
  [[nodiscard]] bool assign_scratch(const LayerLayout& layer, std::span<std::int32_t> slots);
  void look_up_addresses();
  moecached_status load_resident(std::uint32_t part, CUdeviceptr destination);

  Model& model_;
  Lane& lane_;
  std::shared_ptr<CudaContext> context_;
  ModelMapping* mapping_ = nullptr;  // for which all this was made
  std::uint64_t attachment_ = 0;     // of the lane, to that mapping
  std::vector<Array> arrays_;
  std::vector<std::uint32_t> scratch_first_;  // of each array's class, slot ids of the array
  std::uint32_t n_scratch_ = 0;
  bool has_scratch_ = false;  // all arrays are mapped
  std::uint32_t n_device_slots_ = 0;
  bool has_slots_ = false;  // the daemon's arrays are mapped
  std::uint64_t generation_ = 1;
  CUstream stream_ = nullptr;
  SpillStream waves_;
  std::vector<std::int32_t> copied_;           // RAM slots in scratch slots, by scratch slot
  std::vector<CUdeviceptr> window_addresses_;  // of RAM slots, by layer; empty: not page-locked
  std::uint32_t layer_ = 0;                    // of begin_layer
  bool has_begun_layer_ = false;
  std::vector<std::int32_t> experts_, slots_, absent_;
};

}  // namespace moecached::client
