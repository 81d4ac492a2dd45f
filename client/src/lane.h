// A lane: resolves (layer, expert ids) to slots of the window, and streams what does not fit.
//
//   resolve -> all entries present                      -> slots, ROUTE record           (no lock, call,
//   allocation)
//           -> some absent, the daemon answers a LEASE  -> slots of the daemon           (waits)
//           -> some absent, no help from the daemon     -> private slots, read from file (locks, reads)
//
// The fallback holds whether the daemon is gone, silent, or cannot read. When it is gone its table and pool
// stay as they were, so entries that are present remain right; a daemon that merely dropped this session goes
// on honouring the epochs of its lanes, which this class therefore keeps writing. Thread: one at a time.
// Memory: scratch arrays are sized at construction; borrows model, mapping and connection.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "client/include/moecached/moecached.h"
#include "client/src/lane_channel.h"
#include "client/src/model.h"

namespace moecached::client {

class Lane {
 public:
  struct IdMatrix {  // rows x cols ids, row r at (const char*)ids + r * row_stride_bytes
    const std::int32_t* ids = nullptr;
    std::size_t rows = 0;
    std::size_t cols = 0;
    std::size_t row_stride_bytes = 0;

    [[nodiscard]] const std::int32_t* row(std::size_t index) const noexcept {
      return reinterpret_cast<const std::int32_t*>(reinterpret_cast<const char*>(ids) +
                                                   index * row_stride_bytes);
    }
  };

  // `block` is a lane block of `connection`, taken for this lane.
  Lane(const Model& model, ModelMapping& mapping, Connection& connection, LaneBlock* block);

  [[nodiscard]] moecached_status resolve(std::uint32_t layer, const IdMatrix& ids, std::int32_t* slots_out);
  [[nodiscard]] moecached_status resolve_resident(std::uint32_t layer, std::span<const std::int32_t> experts,
                                                  std::int32_t* slots_out);
  void end();
  // Reads experts from the file, whatever the daemon has: at places `stride` bytes apart, each as in a slot.
  // For those that cannot be leased together. REQUIRES: distinct, in range; no epoch is needed.
  struct Records {
    std::byte* memory = nullptr;
    std::uint64_t stride = 0;
  };
  [[nodiscard]] moecached_status read_alone(std::uint32_t layer, std::span<const std::int32_t> experts,
                                            const Records& to);
  [[nodiscard]] bool is_connected() const noexcept { return channel_.connection().connected(); }

  [[nodiscard]] std::size_t stream_capacity(std::uint32_t layer, std::uint32_t part) const;
  [[nodiscard]] moecached_status stream_begin(const LaneChannel::StreamRequest& request,
                                              std::span<const std::int32_t> experts);
  [[nodiscard]] moecached_status stream_wait(std::uint32_t half, const void** data_out);

  // Streaming in place (proto/shm/stream_place.h). How many of the experts, from the first on, fit into a
  // half:
  [[nodiscard]] std::size_t stream_fit(std::uint32_t layer, std::uint32_t part,
                                       std::span<const std::int32_t> experts) const;
  // stream_begin() of experts that nobody may come to use: their lookups are told with note_streamed().
  [[nodiscard]] moecached_status stream_ahead(const LaneChannel::StreamRequest& request,
                                              std::span<const std::int32_t> experts);
  void note_streamed(std::size_t n_experts) { note_lookups(n_experts, 0); }
  // Waits until the daemon has done with the half, within its patience. What is there is not looked at, and
  // not read from the file instead.
  void stream_drop(std::uint32_t half);
  // The experts of a layer that are not resident now. A hint: the lane need not be in an epoch.
  void find_absent(std::uint32_t layer, std::vector<std::int32_t>* out) const;

  // Waits for reads that the daemon still does for this lane, within its patience, so that the next lane in
  // the block finds both halves free. Before the lane is closed.
  void settle_streams();

  // Moves the lane to another daemon. REQUIRES: ended; the old block is given back by the caller.
  void attach(ModelMapping& mapping, Connection& connection, LaneBlock* block);

  [[nodiscard]] const LaneCounters& counters() const noexcept { return counters_; }
  [[nodiscard]] LaneBlock* block() const noexcept { return block_; }
  [[nodiscard]] ModelMapping* mapping() const noexcept { return mapping_; }
  // Raised by attach(): the next mapping may lie where an earlier one lay.
  [[nodiscard]] std::uint64_t attachment() const noexcept { return attachment_; }
  // Entries that name one of so many device slots are taken for present from now on: the caller can use them.
  // They come as MOECACHED_DEVICE_SLOT + slot.
  void use_device_slots(std::uint32_t n) noexcept { n_device_slots_ = n; }

 private:
  struct StreamHalf {
    enum class State { kIdle, kAskedDaemon, kToReadHere, kReady } state = State::kIdle;
    LaneChannel::StreamRequest request;
    std::vector<std::uint16_t> experts;
    Mapping buffer;                   // of this process, for reads of its own; made when first needed
    const std::byte* data = nullptr;  // of kReady
  };

  // resolve(), step by step; slot_of_ and distinct_ carry the state between them.
  [[nodiscard]] bool gather(const IdMatrix& ids, std::uint32_t n_experts);
  [[nodiscard]] std::size_t load_entries(const LayerView& view);
  [[nodiscard]] bool is_present(const LayerView& view, std::int32_t slot) const noexcept {
    const auto id = static_cast<std::uint32_t>(slot);
    return id < view.n_slots || id - MOECACHED_DEVICE_SLOT < n_device_slots_;
  }
  void scatter(const IdMatrix& ids, std::int32_t* slots_out) const;
  [[nodiscard]] moecached_status serve_absent(std::uint32_t layer, LaneChannel::Batch batch);
  [[nodiscard]] moecached_status read_absent(std::uint32_t layer, bool asked_daemon);
  [[nodiscard]] std::uint64_t count_hits(const IdMatrix& ids) const;

  void begin(std::uint32_t layer);
  void release_pins();
  void note_route(std::uint32_t layer, LaneChannel::Batch batch, std::span<const std::uint16_t> ids);
  void note_lookups(std::uint64_t lookups, std::uint64_t hits);
  void note_fallback(std::uint64_t reads, std::uint64_t bytes);
  [[nodiscard]] moecached_status read_stream(StreamHalf& half);

  const Model& model_;
  ModelMapping* mapping_;
  std::uint64_t attachment_ = 1;
  LaneBlock* block_;
  LaneChannel channel_;
  LaneCounters counters_;

  // By expert, sized for the layer with the most of them.
  std::vector<std::uint32_t> stamp_;   // == stamp_now_: seen in this call
  std::vector<std::int32_t> slot_of_;  // of experts seen in this call; negative: absent
  std::vector<std::uint8_t> was_hit_;  // the expert needed no message and no read
  std::uint32_t stamp_now_ = 0;
  std::vector<std::uint16_t> distinct_;  // in order of appearance, n_distinct_ of them
  std::size_t n_distinct_ = 0;
  std::uint32_t n_device_slots_ = 0;

  // Private slots that the current epoch uses, all in one layer.
  std::uint32_t pinned_layer_ = 0;
  std::vector<std::int32_t> pins_;

  StreamHalf halves_[2];
};

}  // namespace moecached::client
