// The C interface of models on a GPU. As api.cc: handles become objects, exceptions a status.
#include <algorithm>
#include <exception>
#include <memory>

#include "client/include/moecached/moecached.h"
#include "client/src/api.h"
#include "client/src/error.h"
#include "client/src/gpu_model.h"

using moecached::client::fail;
using moecached::client::GpuLane;
using moecached::client::GpuModel;
using moecached::client::guarded;
using moecached::client::null_argument;
using moecached::client::Session;

struct moecached_gpu_model {
  Session& session;
  GpuModel& model;
};
struct moecached_gpu_lane {
  moecached_gpu_model& owner;
  GpuLane& lane;
};

moecached_status moecached_gpu_model_open(moecached_session* session, const char* const* paths,
                                          size_t n_paths, const uint8_t uuid[16], moecached_gpu_model** out) {
  if (out == nullptr) return null_argument("out");
  *out = nullptr;
  if (session == nullptr) return null_argument("session");
  if (paths == nullptr && n_paths > 0) return null_argument("paths");
  if (uuid == nullptr) return null_argument("uuid");
  return guarded([&] {
    moecached::client::GpuUuid gpu{};
    std::copy_n(uuid, gpu.size(), gpu.begin());
    Session& owner = *session->session;
    return owner.locked([&](Session::Locked locked) {
      std::unique_ptr<GpuModel> model;
      locked.drop_prepared_move();
      if (const auto status = GpuModel::open(owner, locked.connection(), {paths, n_paths}, gpu, &model)) {
        return status;
      }
      auto handle = std::unique_ptr<moecached_gpu_model>(new moecached_gpu_model{owner, *model});
      locked.add(std::move(model));
      *out = handle.release();
      return MOECACHED_OK;
    });
  });
}

void moecached_gpu_model_close(moecached_gpu_model* model) {
  if (model == nullptr) return;
  model->session.locked([&](Session::Locked locked) { locked.remove(&model->model); });
  delete model;
}

uint32_t moecached_gpu_model_layers(const moecached_gpu_model* model) {
  return model->session.locked([&](Session::Locked) { return model->model.n_layers(); });
}

uint32_t moecached_gpu_model_expert_used(const moecached_gpu_model* model) {
  return model->session.locked([&](Session::Locked) { return model->model.n_expert_used(); });
}

moecached_status moecached_gpu_model_layer(const moecached_gpu_model* model, uint32_t layer,
                                           moecached_gpu_layer_info* out) {
  if (model == nullptr || out == nullptr) return null_argument("model or out");
  return guarded([&] {
    return model->session.locked([&](Session::Locked) { return model->model.layer_info(layer, out); });
  });
}

moecached_status moecached_gpu_model_part(const moecached_gpu_model* model, uint32_t layer, uint32_t part,
                                          moecached_part_info* out, uint64_t* window) {
  if (model == nullptr || out == nullptr || window == nullptr) return null_argument("an argument");
  return guarded([&] {
    return model->session.locked(
        [&](Session::Locked) { return model->model.part_info(layer, part, out, window); });
  });
}

moecached_status moecached_gpu_model_locate(const moecached_gpu_model* model, uint32_t layer, uint32_t part,
                                            uint32_t expert, uint32_t* file, uint64_t* offset) {
  if (model == nullptr || file == nullptr || offset == nullptr) return null_argument("an argument");
  return guarded([&] {
    return model->session.locked(
        [&](Session::Locked) { return model->model.locate(layer, part, expert, file, offset); });
  });
}

moecached_status moecached_gpu_model_find(const moecached_gpu_model* model, const char* tensor,
                                          uint32_t* layer, uint32_t* part) {
  if (model == nullptr || tensor == nullptr || layer == nullptr || part == nullptr) {
    return null_argument("an argument");
  }
  return guarded([&] {
    return model->session.locked([&](Session::Locked) { return model->model.find(tensor, layer, part); });
  });
}

uint64_t moecached_gpu_model_generation(const moecached_gpu_model* model) {
  return model->model.generation();
}

moecached_status moecached_gpu_lane_open(moecached_gpu_model* model, moecached_gpu_lane** out) {
  if (out == nullptr) return null_argument("out");
  *out = nullptr;
  if (model == nullptr) return null_argument("model");
  return guarded([&] {
    return model->session.locked([&](Session::Locked locked) {
      locked.drop_prepared_move();
      GpuLane* lane = nullptr;
      if (const auto status = model->model.open_lane(locked.connection(), &lane)) return status;
      *out = new moecached_gpu_lane{*model, *lane};
      return MOECACHED_OK;
    });
  });
}

void moecached_gpu_lane_close(moecached_gpu_lane* lane) {
  if (lane == nullptr) return;
  (void)lane->lane.settle();  // may wait: not under the lock
  lane->owner.session.locked([&](Session::Locked locked) {
    locked.drop_prepared_move();
    lane->owner.model.close_lane(locked.connection(), &lane->lane);
  });
  delete lane;
}

moecached_status moecached_gpu_lane_begin(moecached_gpu_lane* lane) {
  return guarded([&] { return lane->lane.begin(); });
}

moecached_status moecached_gpu_lane_submit(moecached_gpu_lane* lane, const moecached_gpu_submit* submit) {
  if (submit == nullptr) return null_argument("submit");
  return guarded([&] { return lane->lane.submit(*submit); });
}

moecached_status moecached_gpu_lane_scratch(moecached_gpu_lane* lane, uint32_t* n_slots) {
  if (lane == nullptr || n_slots == nullptr) return null_argument("lane or n_slots");
  *n_slots = 0;
  return guarded([&] {
    return lane->owner.session.locked(
        [&](Session::Locked) { return lane->owner.model.open_scratch(lane->lane, n_slots); });
  });
}

moecached_status moecached_gpu_lane_fetch(moecached_gpu_lane* lane, const moecached_gpu_fetch* fetch) {
  if (fetch == nullptr) return null_argument("fetch");
  return guarded([&] { return lane->lane.fetch(*fetch); });
}
