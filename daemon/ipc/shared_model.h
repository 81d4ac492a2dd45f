// One registered model: its files, its pool of slots and the segment that clients map read-only (layout and
// slot table). Built by plan_slots and create; the core loop alone changes the table afterwards. Memory: owns
// pool and segment; shared with reads in flight, so that nothing is unmapped under them.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "daemon/base/ids.h"
#include "daemon/base/result.h"
#include "daemon/config/config.h"
#include "daemon/ipc/ring_reader.h"
#include "daemon/ipc/vram_slots.h"
#include "daemon/model/model_layout.h"
#include "daemon/platform/device.h"
#include "daemon/platform/file.h"
#include "daemon/platform/memfd.h"
#include "daemon/residency/brain.h"
#include "daemon/tier/ssd_tier.h"

namespace moecached {

// Slots of each layer: at least top-k (a token must fit) and at most all experts, within `budget` bytes in
// total. kLimit: the text says what the smallest pool would take.
[[nodiscard]] Result<std::vector<std::uint32_t>> plan_slots(const ModelLayout& layout, const SlotsSpec& spec,
                                                            std::uint64_t budget);
// Bytes of one half of a lane's stream buffer.
[[nodiscard]] std::uint64_t plan_stream_half(const ModelLayout& layout, std::uint64_t stream_bytes_max,
                                             bool spills);
// Slots of whole pages, so that each can be given back by itself.
void align_slots_to_pages(ModelLayout& layout);
[[nodiscard]] std::uint64_t pool_bytes_of(const ModelLayout& layout, std::span<const std::uint32_t> n_slots);

// A slot that did not hold its expert's bytes.
struct WrongSlot {
  LayerIndex layer;
  SlotIndex slot;
  ExpertIndex expert;
  std::uint32_t stays = 0;  // SharedModel::Residence
  std::int64_t right_at_s =
      0;  // when it was last seen right, or the expert not yet there; seconds since 1970
  std::int64_t found_at_s = 0;
  bool is_pinned = false;  // leases keep it from being read again
};

class SharedModel {
 public:
  struct Parameters {
    ModelId id;
    std::string name;  // for people
    std::vector<FileIdentity> identity;
    std::vector<FileId> files;
    ModelLayout layout;
    std::vector<std::uint32_t> n_slots;  // per layer, open at first
    SlotScope scope = SlotScope::kLayer;
    std::uint64_t stream_half = 0;
    std::uint64_t boot_epoch = 0;
    Gpu* gpu = nullptr;  // of a spill model
  };
  static Result<std::shared_ptr<SharedModel>> create(Parameters parameters, Device& device);

  [[nodiscard]] ModelId id() const { return p_.id; }
  [[nodiscard]] const std::string& name() const { return p_.name; }
  [[nodiscard]] const ModelLayout& layout() const { return p_.layout; }
  [[nodiscard]] std::span<const FileIdentity> identity() const { return p_.identity; }
  [[nodiscard]] std::span<const FileId> files() const { return p_.files; }
  [[nodiscard]] FileId file(std::uint32_t shard) const { return p_.files[shard]; }
  // What the brain is told of it, but for the policy: layers of one slot class trade if the scope is global.
  [[nodiscard]] ModelShape shape() const;
  [[nodiscard]] std::span<const LayerLimits> limits() const { return limits_; }
  [[nodiscard]] std::uint64_t stream_bytes_per_lane() const { return 2 * p_.stream_half; }
  [[nodiscard]] Pool& pool() { return *pool_; }
  [[nodiscard]] const Pool& pool() const { return *pool_; }
  [[nodiscard]] int segment_fd() const { return segment_.fd(); }
  [[nodiscard]] std::uint64_t segment_bytes() const { return segment_.bytes().size(); }

  [[nodiscard]] std::byte* slot(LayerIndex layer, SlotIndex slot);
  [[nodiscard]] std::uint32_t room(LayerIndex layer) const { return room_[layer.value]; }  // slots
  [[nodiscard]] std::uint64_t slot_offset(LayerIndex layer, SlotIndex slot) const {        // in the pool
    return window_offset_[layer.value] + slot.value * slot_bytes(layer);
  }
  [[nodiscard]] std::uint64_t slot_bytes(LayerIndex layer) const {
    return p_.layout.layers[layer.value].slot_stride;
  }
  // Of a pool whose slots are traded; otherwise empty.
  [[nodiscard]] std::vector<SlotWindow> traded_slots() const;
  // The slot has been closed: its memory goes back.
  Status release(LayerIndex layer, SlotIndex slot);
  // How many slots are open now: a hint that saves clients a lease.
  void tell_open(LayerIndex layer, std::uint32_t n_slots);
  // The slot table entry: release, so that a lane which sees the slot sees its bytes.
  void publish(LayerIndex layer, ExpertIndex expert, SlotIndex slot);
  // Sequentially consistent: GraceTracker::begin must not look at the lanes before the entry is absent for
  // all.
  void unpublish(LayerIndex layer, ExpertIndex expert);
  // Who is in a slot, any thread. While it stays equal, the slot's bytes were not the daemon's to change: it
  // is another before the grace period of an eviction begins.
  struct Residence {
    std::uint32_t stays = 0;  // that began or ended here
    std::uint32_t expert_plus_1 = 0;
    [[nodiscard]] bool is_empty() const { return expert_plus_1 == 0; }
    [[nodiscard]] ExpertIndex expert() const { return ExpertIndex(expert_plus_1 - 1); }
    bool operator==(const Residence&) const = default;
  };
  [[nodiscard]] Residence residence(LayerIndex layer, SlotIndex slot) const;

  // Of a spill model; or null.
  [[nodiscard]] VramSlots* device() const { return device_.get(); }
  // Clients may map the arrays from now on. REQUIRES: allocated.
  void tell_device_slots();
  // The expert is in another slot: sequentially consistent, as unpublish, for the sake of the slot that it
  // has left.
  void move(LayerIndex layer, ExpertIndex expert, SlotIndex slot);

  // Counters and state kept by the core loop.
  std::uint32_t sessions = 0;
  bool being_prepared = false;  // for a session that is to open it: not idle
  std::uint64_t last_used = 0;  // core loop turn, to pick an idle model to drop
  bool changed_on_disk = false;
  std::uint32_t reads_in_flight = 0;  // operations of the read table
  std::uint64_t bytes_read = 0, streamed_parts = 0, streamed_bytes = 0;
  std::uint64_t slots_corrupt = 0;
  std::deque<WrongSlot> wrong_slots;            // the latest of them
  bool is_file_unsteady = false;                // two reads of it gave different bytes
  std::atomic<std::uint64_t> slots_checked{0};  // the scrubber's

 private:
  SharedModel(Parameters parameters, std::unique_ptr<Pool> pool);
  [[nodiscard]] std::uint64_t segment_bytes_needed() const;
  void write_segment();
  [[nodiscard]] std::atomic_ref<std::int32_t> entry(LayerIndex layer, ExpertIndex expert);
  void set_residence(LayerIndex layer, std::int32_t slot, std::uint32_t expert_plus_1);

  Parameters p_;
  std::unique_ptr<Pool> pool_;
  std::unique_ptr<VramSlots> device_;  // goes before the pool that it has pinned
  Memfd segment_;
  std::vector<LayerLimits> limits_;
  std::vector<std::uint32_t> room_;  // slots, by layer
  std::vector<std::uint64_t> window_offset_;
  std::vector<std::uint32_t> table_first_;
  std::vector<std::vector<std::atomic<std::uint64_t>>>
      residence_;  // by layer, slot: stays << 32 | expert + 1
  std::int32_t* table_ = nullptr;
  moecached_shm_layer* layers_ = nullptr;
  moecached_shm_spill* spill_ = nullptr;
  moecached_shm_array* arrays_ = nullptr;
};

}  // namespace moecached
