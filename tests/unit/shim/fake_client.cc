#include "tests/unit/shim/fake_client.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <set>

using moecached::testing::fake_daemon;
using moecached::testing::FakeLayer;
using moecached::testing::FakePart;

namespace {

std::string g_error;

moecached_status fail(moecached_status status, std::string text) {
  g_error = std::move(text);
  return status;
}

struct Slot {
  int32_t expert = -1;
  uint64_t used = 0;
};

struct LayerState {
  std::vector<unsigned char> window;
  std::vector<Slot> slots;
  uint64_t stride = 0;
  std::vector<uint64_t> offsets;  // of each part in a record
};

std::set<moecached_model*> g_models;

}  // namespace

struct moecached_session {};

struct moecached_model {
  std::vector<int> files;
  std::vector<FakeLayer> layers;
  std::vector<LayerState> states;
  moecached_counters counters = {};
  uint64_t generation = 1;
  uint64_t now = 0;

  int32_t slot_of(uint32_t layer, int32_t expert) const {
    const std::vector<Slot>& slots = states[layer].slots;
    for (std::size_t i = 0; i < slots.size(); ++i) {
      if (slots[i].expert == expert) return static_cast<int32_t>(i);
    }
    return -1;
  }

  bool read(const FakePart& part, int32_t expert, void* out) const {
    const auto at = static_cast<off_t>(part.file_offset + static_cast<uint64_t>(expert) * part.expert_bytes);
    return pread(files[0], out, part.expert_bytes, at) == static_cast<ssize_t>(part.expert_bytes);
  }

  bool load(uint32_t layer, int32_t expert, std::size_t slot) {
    LayerState& state = states[layer];
    unsigned char* record = state.window.data() + slot * state.stride;
    for (std::size_t part = 0; part < layers[layer].parts.size(); ++part) {
      if (!read(layers[layer].parts[part], expert, record + state.offsets[part])) return false;
    }
    if (fake_daemon().flip_a_byte) {
      record[state.offsets[0] + 3] ^= 0x40;
      fake_daemon().flip_a_byte = false;
    }
    state.slots[slot].expert = expert;
    ++fake_daemon().reads;
    return true;
  }
};

struct StreamHalf {
  uint32_t layer = 0;
  uint32_t part = 0;
  std::vector<int32_t> experts;
  std::vector<unsigned char> data;
  bool begun = false;
};

struct moecached_lane {
  moecached_model* model;
  StreamHalf halves[2];
};

namespace moecached::testing {

FakeDaemon& fake_daemon() {
  static FakeDaemon daemon;
  return daemon;
}

moecached_status fake_fail(moecached_status status, std::string text) {
  return fail(status, std::move(text));
}

void reset_fake_daemon() { fake_daemon() = FakeDaemon(); }

void FakeDaemon::move_windows() {
  for (moecached_model* model : g_models) {
    for (LayerState& state : model->states) {
      std::vector<unsigned char> moved(state.window.size());
      std::fill(state.window.begin(), state.window.end(),
                static_cast<unsigned char>(0xee));  // for whoever still looks there
      state.window.swap(moved);
      for (Slot& slot : state.slots) slot.expert = -1;
    }
    ++model->generation;
  }
}

}  // namespace moecached::testing

moecached_status moecached_session_open(const char*, const char*, moecached_session** out) {
  if (fake_daemon().session_status != MOECACHED_OK)
    return fail(fake_daemon().session_status, "no daemon at the socket");
  *out = new moecached_session;
  return MOECACHED_OK;
}
void moecached_session_close(moecached_session* session) { delete session; }
int moecached_session_connected(const moecached_session*) { return fake_daemon().connected ? 1 : 0; }
moecached_status moecached_session_reconnect(moecached_session*) {
  ++fake_daemon().reconnects;
  fake_daemon().connected = true;
  return MOECACHED_OK;
}

moecached_status moecached_model_open(moecached_session*, const char* const* paths, size_t n_paths,
                                      moecached_model** out) {
  if (fake_daemon().model_status != MOECACHED_OK)
    return fail(fake_daemon().model_status, "the model was refused");
  auto model = std::make_unique<moecached_model>();
  for (size_t i = 0; i < n_paths; ++i) model->files.push_back(open(paths[i], O_RDONLY | O_CLOEXEC));
  model->layers = fake_daemon().layers;
  for (const FakeLayer& layer : model->layers) {
    LayerState state;
    for (const FakePart& part : layer.parts) {
      state.offsets.push_back(state.stride);
      state.stride += (part.expert_bytes + 63) / 64 * 64;
    }
    state.slots.resize(layer.n_slots);
    state.window.assign(state.stride * layer.n_slots, 0xcc);
    model->states.push_back(std::move(state));
  }
  *out = model.release();
  g_models.insert(*out);
  ++fake_daemon().open_models;
  return MOECACHED_OK;
}
void moecached_model_close(moecached_model* model) {
  g_models.erase(model);
  for (const int file : model->files) close(file);
  delete model;
  --fake_daemon().open_models;
}
uint32_t moecached_model_layers(const moecached_model* model) {
  return static_cast<uint32_t>(model->layers.size());
}
moecached_status moecached_model_layer(const moecached_model* model, uint32_t layer,
                                       moecached_layer_info* out) {
  const FakeLayer& from = model->layers[layer];
  *out = {from.block,
          from.n_experts,
          static_cast<uint32_t>(from.parts.size()),
          from.n_slots,
          from.n_slots,
          model->states[layer].stride,
          model->states[layer].window.data()};
  return MOECACHED_OK;
}
moecached_status moecached_model_part(const moecached_model* model, uint32_t layer, uint32_t part,
                                      moecached_part_info* out) {
  const FakePart& from = model->layers[layer].parts[part];
  *out = {from.name.c_str(),
          from.kind,
          from.ggml_type,
          from.ne0,
          from.ne1,
          from.expert_bytes,
          model->states[layer].offsets[part],
          0,
          from.file_offset};
  return MOECACHED_OK;
}
moecached_status moecached_model_find(const moecached_model* model, const char* tensor, uint32_t* layer,
                                      uint32_t* part) {
  for (std::size_t i = 0; i < model->layers.size(); ++i) {
    for (std::size_t j = 0; j < model->layers[i].parts.size(); ++j) {
      if (model->layers[i].parts[j].name != tensor) continue;
      *layer = static_cast<uint32_t>(i);
      *part = static_cast<uint32_t>(j);
      return MOECACHED_OK;
    }
  }
  return fail(MOECACHED_E_ARGUMENT, "no such tensor");
}
void moecached_model_counters(const moecached_model* model, moecached_counters* out) {
  *out = model->counters;
}
uint64_t moecached_model_generation(const moecached_model* model) { return model->generation; }

moecached_status moecached_lane_open(moecached_model* model, moecached_lane** out) {
  *out = new moecached_lane{model, {}};
  ++fake_daemon().open_lanes;
  return MOECACHED_OK;
}
void moecached_lane_close(moecached_lane* lane) {
  delete lane;
  --fake_daemon().open_lanes;
}
void moecached_lane_end(moecached_lane*) { ++fake_daemon().ends; }

moecached_status moecached_lane_resolve(moecached_lane* lane, uint32_t layer, const int32_t* ids, size_t rows,
                                        size_t cols, size_t row_stride_bytes, int32_t* slots_out) {
  moecached_model& model = *lane->model;
  if (fake_daemon().resolve_status != MOECACHED_OK)
    return fail(fake_daemon().resolve_status, "the resolve failed");
  std::set<int32_t> wanted;
  const auto id_at = [&](size_t row, size_t col) {
    return reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(ids) + row * row_stride_bytes)[col];
  };
  for (size_t row = 0; row < rows; ++row) {
    for (size_t col = 0; col < cols; ++col) wanted.insert(id_at(row, col));
  }
  std::vector<Slot>& slots = model.states[layer].slots;
  if (wanted.size() > slots.size()) return fail(MOECACHED_E_TOO_MANY, "more distinct experts than slots");
  ++model.now;
  for (const int32_t expert : wanted) {
    const int32_t slot = model.slot_of(layer, expert);
    if (slot >= 0) slots[static_cast<size_t>(slot)].used = model.now;
  }
  for (const int32_t expert : wanted) {
    if (model.slot_of(layer, expert) >= 0) continue;
    const auto oldest = std::min_element(slots.begin(), slots.end(), [](const Slot& left, const Slot& right) {
      return left.used < right.used;
    });
    if (!model.load(layer, expert, static_cast<size_t>(oldest - slots.begin())))
      return fail(MOECACHED_E_IO, "short read");
    oldest->used = model.now;
    ++model.counters.leases;
  }
  for (size_t row = 0; row < rows; ++row) {
    for (size_t col = 0; col < cols; ++col) *slots_out++ = model.slot_of(layer, id_at(row, col));
  }
  model.counters.lookups += rows * cols;
  return MOECACHED_OK;
}

moecached_status moecached_lane_resolve_resident(moecached_lane* lane, uint32_t layer, const int32_t* experts,
                                                 size_t n, int32_t* slots_out) {
  for (size_t i = 0; i < n; ++i) slots_out[i] = lane->model->slot_of(layer, experts[i]);
  return MOECACHED_OK;
}

size_t moecached_stream_capacity(const moecached_lane* lane, uint32_t layer, uint32_t part) {
  return fake_daemon().stream_half_bytes / lane->model->layers[layer].parts[part].expert_bytes;
}
moecached_status moecached_stream_begin(moecached_lane* lane, uint32_t layer, uint32_t part,
                                        const int32_t* experts, size_t n, uint32_t half) {
  if (n == 0 || n > moecached_stream_capacity(lane, layer, part))
    return fail(MOECACHED_E_ARGUMENT, "more than fit");
  if (lane->halves[half].begun) return fail(MOECACHED_E_ARGUMENT, "the half is still being read");
  lane->halves[half] = {layer, part, {experts, experts + n}, {}, true};
  return MOECACHED_OK;
}
moecached_status moecached_stream_wait(moecached_lane* lane, uint32_t half, const void** data_out) {
  StreamHalf& waited = lane->halves[half];
  if (!waited.begun) return fail(MOECACHED_E_ARGUMENT, "nothing was begun");
  waited.begun = false;
  if (fake_daemon().stream_status != MOECACHED_OK)
    return fail(fake_daemon().stream_status, "the stream failed");
  const FakePart& part = lane->model->layers[waited.layer].parts[waited.part];
  waited.data.resize(waited.experts.size() * part.expert_bytes);
  for (size_t i = 0; i < waited.experts.size(); ++i) {
    if (!lane->model->read(part, waited.experts[i], waited.data.data() + i * part.expert_bytes)) {
      return fail(MOECACHED_E_IO, "short read");
    }
    ++fake_daemon().streamed;
    ++lane->model->counters.streamed_experts;
  }
  *data_out = waited.data.data();
  return MOECACHED_OK;
}

const char* moecached_last_error(void) { return g_error.c_str(); }
