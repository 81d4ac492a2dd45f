// A model on a GPU, opened in a session: the mapping that the present daemon gave, the lanes, and the one
// that the next daemon gave while a move is under way. Thread: the session's lock guards all of it, except
// what says otherwise. Memory: the session owns the model, the model its lanes.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "client/include/moecached/moecached.h"
#include "client/src/gpu_lane.h"
#include "client/src/gpu_mapping.h"
#include "client/src/model_files.h"
#include "client/src/session.h"

namespace moecached::client {

class GpuModel final : public MovableModel {
 public:
  // `connection`: the session's, for its lock is held.
  [[nodiscard]] static moecached_status open(Session& session, Connection& connection,
                                             std::span<const char* const> paths, const GpuUuid& uuid,
                                             std::unique_ptr<GpuModel>* out);
  ~GpuModel() override;

  [[nodiscard]] std::uint32_t n_layers() const { return mapping_->layout().model.model.n_layers; }
  [[nodiscard]] std::uint32_t n_expert_used() const { return mapping_->layout().model.model.n_expert_used; }
  [[nodiscard]] moecached_status layer_info(std::uint32_t layer, moecached_gpu_layer_info* out) const;
  [[nodiscard]] moecached_status part_info(std::uint32_t layer, std::uint32_t part, moecached_part_info* out,
                                           std::uint64_t* window) const;
  [[nodiscard]] moecached_status locate(std::uint32_t layer, std::uint32_t part, std::uint32_t expert,
                                        std::uint32_t* file, std::uint64_t* offset) const;
  [[nodiscard]] moecached_status find(std::string_view tensor, std::uint32_t* layer,
                                      std::uint32_t* part) const;
  // Any thread, without the lock.
  [[nodiscard]] std::uint64_t generation() const noexcept {
    return generation_.load(std::memory_order_acquire);
  }
  [[nodiscard]] std::uint32_t shapes_seen() const noexcept {
    return shapes_seen_.load(std::memory_order_relaxed);
  }

  // Every layer is in the shape HOST_ONLY, as of shapes_seen().
  [[nodiscard]] bool is_host_only() const noexcept { return host_only_.load(std::memory_order_relaxed); }

  [[nodiscard]] moecached_status open_lane(Connection& connection, GpuLane** out);
  void close_lane(Connection& connection, GpuLane* lane);
  // *n_slots: 0 when another lane has them, or there are none.
  [[nodiscard]] moecached_status open_scratch(const GpuLane& lane, std::uint32_t* n_slots);

  // Takes the session's lock: maps new chunks, takes over new shapes.
  [[nodiscard]] moecached_status map_chunks();
  void refresh_shapes();

  [[nodiscard]] moecached_status prepare(Connection& next) override;
  [[nodiscard]] moecached_status ready() override;
  void commit(Connection& last, Connection& next) override;
  void forget(Connection& next) override;

 private:
  GpuModel(Session& session, ModelFiles files, const GpuUuid& uuid, std::unique_ptr<GpuMapping> mapping);
  void read_shapes();

  Session& session_;
  const ModelFiles files_;
  const GpuUuid uuid_;
  std::unique_ptr<GpuMapping> mapping_;
  std::vector<std::uint32_t> shapes_;  // of each layer, as told to the caller
  std::atomic<std::uint32_t> shapes_seen_{0};
  std::atomic<bool> host_only_{false};
  std::atomic<std::uint64_t> generation_{1};
  std::vector<std::unique_ptr<GpuLane>> lanes_;
  const GpuLane* scratch_lane_ = nullptr;  // that uses the mapping's scratch slots
  // Of the first mapping: names that were handed out stay valid, and later mappings are checked to be equal.
  std::vector<std::vector<std::string>> part_names_;

  std::unique_ptr<GpuMapping> next_;     // a move that is prepared
  std::vector<LaneBlock*> next_blocks_;  // one for each lane
};

}  // namespace moecached::client
