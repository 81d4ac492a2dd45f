// Device slots of a spill model: memory on one GPU that experts are moved to from the RAM slots of the
// model's pool, and back. Laid out as one dense array for each part of a slot class,
//
//   array of (class, part):  | layer 0: slot 0 .. n-1 | layer 1 | ... |     slot s at (class_index * n + s) *
//   expert_bytes
//
// so that a client needs a handful of mappings, and can put its own memory right behind an array (client/src/
// spill_device.h). All layers have the same number of slots, and they are added once: memory comes last.
// Spare slots, each room for one expert of any layer, are where an expert waits while its place is taken.
//
// Thread: create and prepare on any, before the core loop has it; allocate on the queue's; share any; the
// rest the core loop. Memory: owns the arrays, the pin of the pool and the queue; the pool must outlive it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "daemon/base/ids.h"
#include "daemon/base/result.h"
#include "daemon/model/model_layout.h"
#include "daemon/platform/gpu.h"

namespace moecached {

class VramSlots {
 public:
  static constexpr std::uint32_t kSpares = 8;  // experts that change places at once

  static Result<std::unique_ptr<VramSlots>> create(const ModelLayout& layout, Gpu& gpu);

  [[nodiscard]] Gpu& gpu() const { return gpu_; }
  [[nodiscard]] std::size_t n_arrays() const { return arrays_.size(); }
  [[nodiscard]] std::uint64_t array_expert_bytes(std::size_t array) const {
    return arrays_[array].expert_bytes;
  }
  [[nodiscard]] std::uint64_t array_bytes(std::size_t array, std::uint32_t n_slots) const;
  [[nodiscard]] std::uint32_t first_array(LayerIndex layer) const { return places_[layer.value].first_array; }
  [[nodiscard]] std::uint32_t class_index(LayerIndex layer) const { return places_[layer.value].class_index; }

  // Populates the pool, in huge pages where the kernel can, and pins it: copies of pageable memory take seven
  // times as long. It must not have holes. Blocks for seconds.
  Status prepare(std::span<std::byte> pool);
  [[nodiscard]] bool is_prepared() const { return pin_ != nullptr; }

  // -- memory. More slots of each layer are of no use: ggml's kernels count the blocks of a tensor, which
  // reaches from a layer's first slot to a client's scratch slots behind the array, in 32 bits with a sign.
  [[nodiscard]] std::uint32_t n_slots_max() const;
  // For n slots of each layer, spare slots included.
  [[nodiscard]] std::uint64_t bytes_for(std::uint32_t n_slots) const;
  [[nodiscard]] std::uint64_t bytes() const {
    return n_slots() == 0 ? 0 : bytes_for(n_slots());
  }  // that it has
  Status allocate(std::uint32_t n_slots);
  [[nodiscard]] std::uint32_t n_slots() const {
    return n_slots_.load(std::memory_order_acquire);
  }  // 0: not yet
  // A handle for one client. REQUIRES: n_slots() > 0.
  Result<UniqueFd> share(std::size_t array) const { return arrays_[array].memory->share(0); }

  // -- moves
  enum class Work : std::uint8_t { kUp, kAside, kDown, kAllocate };
  struct Place {
    LayerIndex layer;
    ExpertIndex expert;
    SlotIndex slot;  // as the brain numbers them: what comes back with done
  };
  struct Done {
    Work work = Work::kUp;
    Place place;
    bool ok = true;  // false: the GPU is lost
  };
  // device_slot: counted from 0.
  void copy_up(const Place& place, const std::byte* record, std::uint32_t device_slot);
  void copy_aside(const Place& place, std::uint32_t device_slot, std::uint32_t spare);
  void copy_down(const Place& place, std::uint32_t spare, std::byte* record);
  // `call` on the queue's thread; kAllocate when it is done.
  void run(std::function<void()> call);
  void poll(std::vector<Done>* done);
  [[nodiscard]] int event_fd() const { return queue_->event_fd(); }

  [[nodiscard]] std::optional<std::uint32_t> take_spare();
  void give_back_spare(std::uint32_t spare) { free_spares_.push_back(spare); }

  // -- the core loop's
  std::uint64_t first_record_ns = 0, tried_ns = 0;
  std::uint64_t told_ns = 0;  // clients, that there are slots; 0: not yet, or long ago
  bool is_allocating = false, is_lost = false;
  bool is_open = false;  // the brain has the slots
  std::string note;      // why there are fewer slots than asked for
  std::uint64_t bytes_up = 0, bytes_down = 0;

 private:
  struct Array {
    std::uint64_t expert_bytes = 0;
    std::uint64_t blocks = 0;    // of an expert, as its type counts them
    std::uint32_t n_layers = 0;  // of the class
    std::unique_ptr<GpuRange> memory;
  };
  struct LayerPlace {
    std::uint32_t first_array = 0, class_index = 0;
  };
  VramSlots(const ModelLayout& layout, Gpu& gpu) : layout_(layout), gpu_(gpu) {}
  [[nodiscard]] std::uint64_t address(LayerIndex layer, std::size_t part, std::uint32_t device_slot) const;
  void submit(Work work, const Place& place, GpuQueue::Job job);

  const ModelLayout& layout_;  // of the model that owns this
  Gpu& gpu_;
  std::vector<Array> arrays_;
  std::vector<LayerPlace> places_;  // by layer
  std::uint64_t spare_bytes_ = 0;   // of one
  std::unique_ptr<GpuRange> spares_;
  std::unique_ptr<PinnedMemory> pin_;
  std::atomic<std::uint32_t> n_slots_{0};
  std::vector<std::uint32_t> free_spares_;
  std::vector<Done> pending_;  // by tag
  std::vector<std::uint32_t> free_pending_;
  std::vector<GpuQueue::Done> queue_done_;  // scratch
  std::unique_ptr<GpuQueue> queue_;         // ends first: its jobs use what is above
};

}  // namespace moecached
