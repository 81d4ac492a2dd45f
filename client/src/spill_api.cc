// The C interface of models that spill from a GPU. As api.cc: handles become objects, exceptions a status.
#include <algorithm>
#include <memory>
#include <mutex>

#include "client/include/moecached/moecached.h"
#include "client/src/api.h"
#include "client/src/error.h"
#include "client/src/spill_device.h"
#include "client/src/spill_waits.h"

using moecached::client::fail;
using moecached::client::guarded;
using moecached::client::Lane;
using moecached::client::Model;
using moecached::client::null_argument;
using moecached::client::Session;
using moecached::client::SpillDevice;
using moecached::client::SpillWaits;

struct moecached_spill_lane {
  moecached_model& owner;
  Lane* lane = nullptr;
  std::unique_ptr<SpillDevice> device;
  std::unique_ptr<SpillWaits> waits;  // goes before the device

  // Takes over what the daemon has added. A failure: there is no memory for scratch slots either.
  moecached_status refresh() {
    if (!device->is_stale()) return MOECACHED_OK;
    return owner.session.locked([&](Session::Locked locked) { return device->refresh(locked.connection()); });
  }
};

moecached_status moecached_spill_model_open(moecached_session* session, const char* const* paths,
                                            size_t n_paths, const uint8_t uuid[16], moecached_model** out) {
  if (out == nullptr) return null_argument("out");
  *out = nullptr;
  if (session == nullptr) return null_argument("session");
  if (paths == nullptr && n_paths > 0) return null_argument("paths");
  if (uuid == nullptr) return null_argument("uuid");
  return guarded([&] {
    moecached::client::GpuUuid gpu{};
    std::copy_n(uuid, gpu.size(), gpu.begin());
    Model* model = nullptr;
    if (const auto status = session->session->open_model({paths, n_paths}, &gpu, &model)) return status;
    *out = new moecached_model{*session->session, *model};
    return MOECACHED_OK;
  });
}

moecached_status moecached_spill_lane_open(moecached_model* model, moecached_spill_lane** out) {
  if (out == nullptr) return null_argument("out");
  *out = nullptr;
  if (model == nullptr) return null_argument("model");
  return guarded([&] {
    if (!model->model.gpu) return fail(MOECACHED_E_ARGUMENT, "the model was not opened to spill from a GPU");
    auto lane =
        std::unique_ptr<moecached_spill_lane>(new moecached_spill_lane{*model, nullptr, nullptr, nullptr});
    if (const auto status = model->session.open_lane(model->model, &lane->lane)) return status;
    const auto status = model->session.locked([&](Session::Locked locked) {
      return SpillDevice::open(locked.connection(), model->model, *lane->lane, &lane->device);
    });
    if (status != MOECACHED_OK) {
      model->session.close_lane(model->model, lane->lane);
      return status;
    }
    *out = lane.release();
    return MOECACHED_OK;
  });
}

void moecached_spill_lane_close(moecached_spill_lane* lane) {
  if (lane == nullptr) return;
  lane->waits.reset();
  lane->device.reset();  // waits for its copies, which read what the lane holds
  lane->owner.session.close_lane(lane->owner.model, lane->lane);
  delete lane;
}

uint64_t moecached_spill_lane_generation(const moecached_spill_lane* lane) {
  return lane->device->generation();
}

moecached_status moecached_spill_lane_window(moecached_spill_lane* lane, uint32_t layer, uint32_t part,
                                             uint64_t* window, uint32_t* n_slots) {
  if (lane == nullptr || window == nullptr || n_slots == nullptr) return null_argument("an argument");
  return guarded([&] { return lane->device->window(layer, part, window, n_slots); });
}

moecached_status moecached_spill_resolve(moecached_spill_lane* lane, uint32_t layer, const int32_t* ids,
                                         size_t rows, size_t cols, size_t row_stride_bytes,
                                         int32_t* slots_out, const moecached_spill_target* target) {
  if (lane == nullptr || target == nullptr) return null_argument("lane or target");
  return guarded([&] {
    if (const auto status = lane->refresh()) return status;
    return lane->device->resolve(layer, Lane::IdMatrix{ids, rows, cols, row_stride_bytes}, slots_out,
                                 *target);
  });
}

moecached_status moecached_spill_begin_layer(moecached_spill_lane* lane, uint32_t layer,
                                             const int32_t* experts, size_t n) {
  if (lane == nullptr) return null_argument("lane");
  return guarded([&] {
    if (const auto status = lane->refresh()) return status;
    return lane->device->begin_layer(layer, {experts, n});
  });
}

moecached_status moecached_spill_load_part(moecached_spill_lane* lane, uint32_t part, uint64_t destination,
                                           void* ready) {
  if (lane == nullptr) return null_argument("lane");
  return guarded([&] { return lane->device->load_part(part, destination, static_cast<CUevent>(ready)); });
}

void moecached_spill_end(moecached_spill_lane* lane) { lane->lane->end(); }

moecached_status moecached_spill_waits_reserve(moecached_spill_lane* lane, uint32_t n_ids) {
  if (lane == nullptr) return null_argument("lane");
  return guarded([&] {
    if (const auto status = lane->refresh()) return status;
    if (lane->waits == nullptr) {
      if (const auto status = SpillWaits::open(*lane->device, &lane->waits)) return status;
    }
    return lane->waits->reserve(n_ids);
  });
}

moecached_status moecached_spill_waits_begin(moecached_spill_lane* lane, const uint32_t* layers, size_t n,
                                             uint32_t n_ids, uint32_t n_ids_of_token) {
  if (lane == nullptr || (layers == nullptr && n > 0)) return null_argument("lane or layers");
  return guarded([&] {
    if (lane->waits == nullptr) return fail(MOECACHED_E_ARGUMENT, "no room was reserved for waits");
    if (!lane->lane->is_connected()) return fail(MOECACHED_E_UNAVAILABLE, "the daemon is gone");
    if (const auto status = lane->refresh()) return status;
    return lane->waits->begin({layers, n}, {n_ids, n_ids_of_token});
  });
}

moecached_status moecached_spill_wait_enqueue(moecached_spill_lane* lane, const moecached_spill_wait* wait) {
  if (lane == nullptr || wait == nullptr) return null_argument("lane or wait");
  return guarded([&] {
    if (lane->waits == nullptr) return fail(MOECACHED_E_ARGUMENT, "no room was reserved for waits");
    return lane->waits->enqueue(*wait);
  });
}

moecached_status moecached_spill_waits_end(moecached_spill_lane* lane) {
  if (lane == nullptr) return null_argument("lane");
  return guarded([&] {
    if (lane->waits == nullptr) return fail(MOECACHED_E_ARGUMENT, "no room was reserved for waits");
    const auto status = lane->waits->end();
    lane->lane->end();
    return status;
  });
}
