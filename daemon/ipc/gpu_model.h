// One model on one GPU, covered: pinned RAM holds every expert, device memory the slots that promotions fill.
// Owns the windows' memory, the slot table in device memory and its replica in the segment that clients map.
// Made off the core loop (allocating pinned memory takes seconds); used by the core loop afterwards, except
// share_*, which the handle server calls. Memory: shared with reads and copies in flight.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "daemon/base/ids.h"
#include "daemon/base/result.h"
#include "daemon/ipc/expert_ram.h"
#include "daemon/ipc/gpu_layout.h"
#include "daemon/ipc/reads.h"
#include "daemon/model/model_layout.h"
#include "daemon/platform/file.h"
#include "daemon/platform/gpu.h"
#include "daemon/platform/memfd.h"
#include "daemon/tier/ssd_tier.h"
#include "proto/shm/layout.h"

namespace moecached {

class GpuModel {
 public:
  struct Parameters {
    std::string name;
    std::vector<FileIdentity> identity;
    std::vector<FileId> files;
    ModelLayout layout;
    SlotsSpec slots;
    SlotScope scope = SlotScope::kLayer;
    // The GPU's place among those that may read each other's slots, and how many they are.
    GpuSections place;
    std::uint64_t boot_epoch = 0;
    std::shared_ptr<ExpertRam> ram;  // of the model on another GPU, to be shared; or null
  };
  // kLimit: the text says how much pinned memory was asked for. Blocks for seconds.
  static Result<std::shared_ptr<GpuModel>> create(Parameters parameters, ModelId id, Gpu& gpu);

  [[nodiscard]] ModelId id() const { return id_; }
  [[nodiscard]] const std::string& name() const { return p_.name; }
  [[nodiscard]] const ModelLayout& layout() const { return p_.layout; }
  [[nodiscard]] std::span<const FileIdentity> identity() const { return p_.identity; }
  [[nodiscard]] std::span<const FileId> files() const { return p_.files; }
  [[nodiscard]] Gpu& gpu() const { return gpu_; }
  [[nodiscard]] const GpuLayerPlan& plan(LayerIndex layer) const { return plans_[layer.value]; }
  [[nodiscard]] const std::vector<GpuLayerPlan>& plans() const { return plans_; }
  [[nodiscard]] std::span<const std::uint32_t> n_slots() const { return n_slots_; }  // device slots, by layer
  [[nodiscard]] const std::vector<std::uint32_t>& wanted() const { return wanted_; }
  [[nodiscard]] std::uint32_t peer_group() const {
    return peer_group_;
  }  // GPUs of one have sections in one window
  [[nodiscard]] std::uint64_t device_bytes() const { return device_bytes_; }  // backed
  [[nodiscard]] std::uint64_t expert_bytes(LayerIndex layer) const { return expert_bytes_[layer.value]; }
  [[nodiscard]] int segment_fd() const { return segment_.fd(); }
  [[nodiscard]] std::uint64_t segment_bytes() const { return segment_.bytes().size(); }
  [[nodiscard]] ExpertRam& ram() const { return *ram_; }
  [[nodiscard]] const std::shared_ptr<ExpertRam>& shared_ram() const { return ram_; }
  [[nodiscard]] std::uint64_t log_bytes_per_lane() const { return gpu_words().log_bytes_per_lane; }
  [[nodiscard]] const moecached_shm_gpu& log_geometry() const { return gpu_words(); }

  // -- loading RAM
  // All parts of all experts as reads, `visit` is called with at most kMaxPartReads at a time.
  template <typename Visit>
  void for_each_load(Visit visit) const;
  void set_load_state(moecached_load_state state);  // wakes clients
  [[nodiscard]] moecached_load_state load_state() const { return load_state_; }

  // Spoils one byte of every expert of the first layer: tests that compare must notice.
  void spoil_for_test();

  // -- device slots
  // Backs n_slots of each layer with device memory: blocking driver calls, on the queue's thread. After a
  // fault what was allocated is kept but not used. kUnsupported: it was done too often.
  Status grow(std::span<const std::uint32_t> n_slots);
  // Tells clients to map what grow added; lanes that begin later have it.
  void publish_growth(std::span<const std::uint32_t> n_slots);
  void set_shape(LayerIndex layer, moecached_gpu_shape shape);

  // Lists the chunks of a peer that are not listed yet. False: there is no room for all of them.
  bool add_peer_chunks(const std::shared_ptr<GpuModel>& peer);
  // REQUIRES: no session, so that nobody has mapped them.
  void remove_peer_chunks(const GpuModel& peer);
  // Nobody maps them from now on.
  void give_up_peer_chunks(const GpuModel& peer);
  void publish_chunks();

  // -- who is where. Slots count from the first of this GPU's section, as the brain's do; entries of the
  // table name slots of the window.
  void put(LayerIndex layer, ExpertIndex expert, SlotIndex slot);
  void take(LayerIndex layer, ExpertIndex expert);  // from the slot that it was put into
  static constexpr std::uint32_t kNowhere = UINT32_MAX;
  [[nodiscard]] std::uint32_t own_slot(LayerIndex layer, ExpertIndex expert) const {
    return own_slot_[layer.value][expert.value];
  }
  // The expert that was put there last; kNowhere: none, or there is no such slot.
  [[nodiscard]] std::uint32_t put_into(LayerIndex layer, std::uint32_t slot) const {
    return slot < n_slots_[layer.value] ? experts_[layer.value][slot] : kNowhere;
  }
  [[nodiscard]] std::int32_t entry(LayerIndex layer, ExpertIndex expert) const {
    return table_[table_first_[layer.value] + expert.value];
  }
  // The flip's device write is the caller's (GpuQueue); this keeps the replica.
  [[nodiscard]] GpuQueue::Flip flip(LayerIndex layer, ExpertIndex expert, std::int32_t entry);
  [[nodiscard]] std::int32_t host_entry(LayerIndex layer, ExpertIndex expert) const {
    return static_cast<std::int32_t>(plans_[layer.value].host_first + expert.value);
  }
  // Of slot `slot` of the section.
  [[nodiscard]] std::int32_t device_entry(LayerIndex layer, std::uint32_t slot) const {
    return static_cast<std::int32_t>(plans_[layer.value].own_first() + slot);
  }
  // Where copies on this GPU find part p of an expert: in RAM, or in a slot of its own that an entry names,
  // to a lane in an epoch. Any thread.
  [[nodiscard]] bool is_own_slot(LayerIndex layer, std::int32_t entry) const {
    const GpuLayerPlan& plan = plans_[layer.value];
    return entry >= 0 && static_cast<std::uint32_t>(entry) - plan.own_first() < plan.n_device_max;
  }
  [[nodiscard]] std::uint64_t slot_address(LayerIndex layer, std::size_t part, std::int32_t entry) const;
  [[nodiscard]] std::uint64_t host_address(LayerIndex layer, std::size_t part, ExpertIndex expert) const {
    return reinterpret_cast<std::uint64_t>(host_slot(layer, part, expert));
  }
  [[nodiscard]] GpuQueue::Job copy_job(LayerIndex layer, ExpertIndex expert, SlotIndex slot) const;

  // -- handles for clients, any thread
  Result<UniqueFd> share_host(std::uint32_t part) const { return ram_->share(part); }
  Result<UniqueFd> share_chunk(std::uint32_t chunk) const;
  Result<UniqueFd> share_table() const { return table_memory_->share(0); }
  [[nodiscard]] std::uint32_t n_parts() const { return ram_->n_parts(); }
  [[nodiscard]] std::uint32_t n_chunks() const;

  struct LayerUse {  // of slots that lanes reported
    std::uint64_t lookups = 0, hits = 0, peer_hits = 0;
  };
  std::vector<LayerUse> use;  // core loop
  // Core loop.
  std::uint32_t sessions = 0;
  std::uint64_t last_used = 0;
  std::uint64_t bytes_loaded = 0;
  std::uint64_t bytes_uploaded = 0;
  std::uint64_t bytes_in_place = 0;  // read over the link by kernels
  std::uint64_t bytes_from_peers = 0;
  std::uint64_t epochs = 0;
  bool changed_on_disk = false;

 private:
  struct Chunk {
    ModelId owner;                         // this, or a peer
    std::weak_ptr<const GpuModel> peer{};  // which it may outlive
    std::uint32_t part = 0;                // over all layers
    std::size_t chunk = 0;                 // of the owner's range of the part
    std::uint64_t offset = 0, bytes = 0;   // of the window
    bool is_gone = false;
  };
  GpuModel(Parameters parameters, ModelId id, Gpu& gpu);
  Status allocate();
  Status write_segment();
  [[nodiscard]] moecached_shm_gpu& gpu_words() const;
  [[nodiscard]] moecached_shm_layer& layer_words(LayerIndex layer) const;
  [[nodiscard]] std::vector<Chunk> own_chunks() const;
  [[nodiscard]] bool add_chunk(const Chunk& chunk);  // REQUIRES: chunks_mutex_
  [[nodiscard]] moecached_shm_chunk* chunk_words() const;
  [[nodiscard]] std::byte* host_slot(LayerIndex layer, std::size_t part, ExpertIndex expert) const;

  Parameters p_;
  const ModelId id_;
  Gpu& gpu_;
  std::vector<GpuLayerPlan> plans_;
  std::vector<std::uint32_t> wanted_;
  std::vector<std::uint32_t> first_part_, table_first_;
  std::vector<std::uint64_t> expert_bytes_;
  std::shared_ptr<ExpertRam> ram_;
  std::vector<std::unique_ptr<GpuRange>>
      device_;  // by part over all layers; null: no addresses for device slots
  std::unique_ptr<GpuRange> table_memory_;
  Memfd segment_;
  std::uint64_t gpu_offset_ = 0, layers_offset_ = 0;
  std::int32_t* table_ = nullptr;  // the replica
  moecached_load_state load_state_ = MOECACHED_LOADING;
  std::atomic<std::uint64_t> device_bytes_{0};
  std::vector<std::uint64_t> backed_;  // by part over all layers; grow's own
  std::vector<std::uint32_t> n_slots_;
  std::vector<std::vector<std::uint32_t>> experts_;   // by layer, device slot
  std::vector<std::vector<std::uint32_t>> own_slot_;  // by layer, expert
  std::uint32_t peer_group_ = 0;
  mutable std::mutex chunks_mutex_;  // grow runs beside share_chunk
  std::vector<Chunk> chunks_;
};

template <typename Visit>
void GpuModel::for_each_load(Visit visit) const {
  std::vector<PartRead> batch;
  for (std::uint32_t l = 0; l < p_.layout.layers.size(); ++l) {
    const LayerLayout& layer = p_.layout.layers[l];
    for (std::size_t p = 0; p < layer.parts.size(); ++p) {
      const PartLayout& part = layer.parts[p];
      for (std::uint32_t e = 0; e < layer.n_experts; ++e) {
        const PartExtent from = part.extent(e);
        batch.push_back({.file = p_.files[from.file],
                         .offset = from.offset,
                         .bytes = part.expert_bytes,
                         .destination = host_slot(LayerIndex(l), p, ExpertIndex(e)),
                         .direct = false,
                         .staged = ram_->kind() == MOECACHED_HOST_MEMORY_VMM});
        if (batch.size() < kMaxPartReads && e + 1 < layer.n_experts) continue;
        visit(std::span<const PartRead>(batch));
        batch.clear();
      }
    }
  }
}

}  // namespace moecached
