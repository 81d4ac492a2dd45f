// The C interface: turns handles into objects and exceptions (std::bad_alloc, std::system_error) into a
// status.
#include <cstring>
#include <memory>

#include "client/include/moecached/moecached.h"
#include "client/src/api.h"
#include "client/src/error.h"
#include "client/src/lane.h"
#include "client/src/session.h"

using moecached::client::guarded;
using moecached::client::Lane;
using moecached::client::Model;
using moecached::client::null_argument;
using moecached::client::Session;

// The objects behind the opaque types; each knows its owner, which the C functions are not given.
struct moecached_lane {
  moecached_model& owner;
  Lane& lane;
};

moecached_status moecached_session_open(const char* socket, const char* label, moecached_session** out) {
  if (out == nullptr) return null_argument("out");
  *out = nullptr;
  return guarded([&] {
    auto handle = std::make_unique<moecached_session>();
    if (const auto status = Session::open(socket, label, &handle->session)) return status;
    *out = handle.release();
    return MOECACHED_OK;
  });
}

void moecached_session_close(moecached_session* session) { delete session; }

int moecached_session_connected(const moecached_session* session) {
  return session->session->connected() ? 1 : 0;
}

moecached_status moecached_session_reconnect(moecached_session* session) {
  if (session == nullptr) return null_argument("session");
  return guarded([&] { return session->session->reconnect(); });
}

moecached_status moecached_model_open(moecached_session* session, const char* const* paths, size_t n_paths,
                                      moecached_model** out) {
  if (out == nullptr) return null_argument("out");
  *out = nullptr;
  if (session == nullptr) return null_argument("session");
  if (paths == nullptr && n_paths > 0) return null_argument("paths");
  return guarded([&] {
    Model* model = nullptr;
    if (const auto status = session->session->open_model({paths, n_paths}, nullptr, &model)) return status;
    *out = new moecached_model{*session->session, *model};
    return MOECACHED_OK;
  });
}

void moecached_model_close(moecached_model* model) {
  if (model == nullptr) return;
  model->session.close_model(&model->model);
  delete model;
}

uint32_t moecached_model_layers(const moecached_model* model) {
  return model->session.with(
      model->model, [](const Model& m) { return static_cast<uint32_t>(m.mapping->layout.layers.size()); });
}

moecached_status moecached_model_layer(const moecached_model* model, uint32_t layer,
                                       moecached_layer_info* out) {
  if (model == nullptr || out == nullptr) return null_argument("model or out");
  return guarded([&] {
    return model->session.with(model->model, [&](const Model& m) { return m.layer_info(layer, out); });
  });
}

moecached_status moecached_model_part(const moecached_model* model, uint32_t layer, uint32_t part,
                                      moecached_part_info* out) {
  if (model == nullptr || out == nullptr) return null_argument("model or out");
  return guarded([&] {
    return model->session.with(model->model, [&](const Model& m) { return m.part_info(layer, part, out); });
  });
}

moecached_status moecached_model_locate(const moecached_model* model, uint32_t layer, uint32_t part,
                                        uint32_t expert, uint32_t* file, uint64_t* offset) {
  if (model == nullptr || file == nullptr || offset == nullptr) return null_argument("an argument");
  return guarded([&] {
    return model->session.with(model->model, [&](const Model& m) {
      return m.mapping->layout.locate(layer, part, expert, file, offset);
    });
  });
}

moecached_status moecached_model_find(const moecached_model* model, const char* tensor, uint32_t* layer,
                                      uint32_t* part) {
  if (model == nullptr || tensor == nullptr || layer == nullptr || part == nullptr)
    return null_argument("an argument");
  return guarded([&] {
    return model->session.with(model->model, [&](const Model& m) { return m.find(tensor, layer, part); });
  });
}

void moecached_model_counters(const moecached_model* model, moecached_counters* out) {
  *out = model->session.counters(model->model);
}

uint64_t moecached_model_generation(const moecached_model* model) {
  return model->session.with(model->model, [](const Model& m) { return m.generation; });
}

moecached_status moecached_lane_open(moecached_model* model, moecached_lane** out) {
  if (out == nullptr) return null_argument("out");
  *out = nullptr;
  if (model == nullptr) return null_argument("model");
  return guarded([&] {
    Lane* lane = nullptr;
    if (const auto status = model->session.open_lane(model->model, &lane)) return status;
    *out = new moecached_lane{*model, *lane};
    return MOECACHED_OK;
  });
}

void moecached_lane_close(moecached_lane* lane) {
  if (lane == nullptr) return;
  lane->owner.session.close_lane(lane->owner.model, &lane->lane);
  delete lane;
}

moecached_status moecached_lane_resolve(moecached_lane* lane, uint32_t layer, const int32_t* ids, size_t rows,
                                        size_t cols, size_t row_stride_bytes, int32_t* slots_out) {
  return guarded([&] { return lane->lane.resolve(layer, {ids, rows, cols, row_stride_bytes}, slots_out); });
}

void moecached_lane_end(moecached_lane* lane) { lane->lane.end(); }

moecached_status moecached_lane_resolve_resident(moecached_lane* lane, uint32_t layer, const int32_t* experts,
                                                 size_t n, int32_t* slots_out) {
  return guarded([&] { return lane->lane.resolve_resident(layer, {experts, n}, slots_out); });
}

size_t moecached_stream_capacity(const moecached_lane* lane, uint32_t layer, uint32_t part) {
  return lane->lane.stream_capacity(layer, part);
}

moecached_status moecached_stream_begin(moecached_lane* lane, uint32_t layer, uint32_t part,
                                        const int32_t* experts, size_t n, uint32_t half) {
  return guarded([&] { return lane->lane.stream_begin({layer, part, half}, {experts, n}); });
}

moecached_status moecached_stream_wait(moecached_lane* lane, uint32_t half, const void** data_out) {
  return guarded([&] { return lane->lane.stream_wait(half, data_out); });
}

const char* moecached_last_error(void) { return moecached::client::last_error(); }
