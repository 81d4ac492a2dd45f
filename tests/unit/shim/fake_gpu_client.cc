// The functions of moecached.h for models on a GPU: "device memory" is this process's, windows and tables
// hold every expert at all times.
#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <set>

#include "tests/unit/shim/fake_client.h"

using moecached::testing::fake_daemon;
using moecached::testing::fake_fail;
using moecached::testing::FakeLayer;
using moecached::testing::FakePart;
using moecached::testing::FakeSubmit;

namespace {

struct GpuLayer {
  std::vector<int32_t> table;
  std::vector<std::vector<unsigned char>> windows;  // by part
  uint32_t n_slots = 0;
};

std::set<moecached_gpu_model*> g_gpu_models;

}  // namespace

struct moecached_gpu_model {
  int file = -1;
  std::vector<FakeLayer> layers;
  std::vector<GpuLayer> states;
  uint64_t generation = 1;
  uint32_t scratch_slots = 0;  // behind the windows

  // Experts from the last slot down, so that no id is its own slot but by chance; wholly resident: each its
  // own.
  void lay_out() {
    states.assign(layers.size(), {});
    for (std::size_t l = 0; l < layers.size(); ++l) {
      GpuLayer& state = states[l];
      const uint32_t n = layers[l].n_experts;
      state.n_slots = fake_daemon().all_resident ? n : n + fake_daemon().gpu_gap;
      for (uint32_t e = 0; e < n; ++e) {
        state.table.push_back(static_cast<int32_t>(fake_daemon().all_resident ? e : state.n_slots - 1 - e));
      }
      for (const FakePart& part : layers[l].parts) {
        auto& window = state.windows.emplace_back((state.n_slots + scratch_slots) * part.expert_bytes, 0xcc);
        for (uint32_t e = 0; e < n; ++e) {
          const auto at = static_cast<off_t>(part.file_offset + e * part.expert_bytes);
          unsigned char* slot = window.data() + static_cast<uint64_t>(state.table[e]) * part.expert_bytes;
          if (pread(file, slot, part.expert_bytes, at) != static_cast<ssize_t>(part.expert_bytes))
            std::abort();
        }
      }
    }
    if (fake_daemon().flip_a_byte)
      states[0].windows[0][static_cast<uint64_t>(states[0].table[1]) * layers[0].parts[0].expert_bytes + 3] ^=
          0x40;
  }
};

struct moecached_gpu_lane {
  moecached_gpu_model* model;
};

namespace moecached::testing {

void FakeDaemon::move_gpu_windows() {
  for (moecached_gpu_model* model : g_gpu_models) {
    const std::vector<GpuLayer> before = model->states;  // other addresses for the new ones
    model->lay_out();
    ++model->generation;
  }
}

}  // namespace moecached::testing

moecached_status moecached_gpu_model_open(moecached_session*, const char* const* paths, size_t,
                                          const uint8_t uuid[16], moecached_gpu_model** out) {
  if (fake_daemon().gpu_status != MOECACHED_OK)
    return fake_fail(fake_daemon().gpu_status, "the GPU is not served");
  auto model = std::make_unique<moecached_gpu_model>();
  model->file = open(paths[0], O_RDONLY | O_CLOEXEC);
  model->layers = fake_daemon().layers;
  model->lay_out();
  fake_daemon().opened_uuids.push_back(uuid[0]);
  *out = model.release();
  g_gpu_models.insert(*out);
  ++fake_daemon().open_models;
  return MOECACHED_OK;
}
void moecached_gpu_model_close(moecached_gpu_model* model) {
  g_gpu_models.erase(model);
  close(model->file);
  delete model;
  --fake_daemon().open_models;
}
uint32_t moecached_gpu_model_layers(const moecached_gpu_model* model) {
  return static_cast<uint32_t>(model->layers.size());
}
uint32_t moecached_gpu_model_expert_used(const moecached_gpu_model*) { return 2; }
moecached_status moecached_gpu_model_layer(const moecached_gpu_model* model, uint32_t layer,
                                           moecached_gpu_layer_info* out) {
  const FakeLayer& from = model->layers[layer];
  const GpuLayer& state = model->states[layer];
  *out = {from.block,
          from.n_experts,
          static_cast<uint32_t>(from.parts.size()),
          state.n_slots,
          fake_daemon().all_resident ? 1u : 0u,
          0,
          reinterpret_cast<uint64_t>(state.table.data()),
          model->scratch_slots > 0 ? state.n_slots + model->scratch_slots : 0,
          0};
  return MOECACHED_OK;
}
moecached_status moecached_gpu_model_part(const moecached_gpu_model* model, uint32_t layer, uint32_t part,
                                          moecached_part_info* out, uint64_t* window) {
  const FakePart& from = model->layers[layer].parts[part];
  *out = {from.name.c_str(), from.kind, from.ggml_type, from.ne0, from.ne1, from.expert_bytes, 0, 0,
          from.file_offset};
  *window = reinterpret_cast<uint64_t>(model->states[layer].windows[part].data());
  return MOECACHED_OK;
}
moecached_status moecached_gpu_model_find(const moecached_gpu_model* model, const char* tensor,
                                          uint32_t* layer, uint32_t* part) {
  for (std::size_t i = 0; i < model->layers.size(); ++i) {
    for (std::size_t j = 0; j < model->layers[i].parts.size(); ++j) {
      if (model->layers[i].parts[j].name != tensor) continue;
      *layer = static_cast<uint32_t>(i);
      *part = static_cast<uint32_t>(j);
      return MOECACHED_OK;
    }
  }
  return fake_fail(MOECACHED_E_ARGUMENT, "no such tensor");
}
uint64_t moecached_gpu_model_generation(const moecached_gpu_model* model) { return model->generation; }

moecached_status moecached_gpu_lane_open(moecached_gpu_model* model, moecached_gpu_lane** out) {
  *out = new moecached_gpu_lane{model};
  ++fake_daemon().open_lanes;
  return MOECACHED_OK;
}
void moecached_gpu_lane_close(moecached_gpu_lane* lane) {
  fake_daemon().calls.push_back("close");
  delete lane;
  --fake_daemon().open_lanes;
}
moecached_status moecached_gpu_lane_begin(moecached_gpu_lane*) {
  fake_daemon().calls.push_back("begin");
  if (fake_daemon().move_in_begin) {
    fake_daemon().move_in_begin = false;
    fake_daemon().move_gpu_windows();
  }
  if (fake_daemon().begin_status != MOECACHED_OK)
    return fake_fail(fake_daemon().begin_status, "loading failed");
  return MOECACHED_OK;
}
moecached_status moecached_gpu_lane_submit(moecached_gpu_lane*, const moecached_gpu_submit* submit) {
  fake_daemon().calls.push_back("submit");
  FakeSubmit& seen = fake_daemon().submits.emplace_back();
  seen.has_events = submit->done_event != nullptr && submit->logged_event != nullptr;
  seen.n_tokens = submit->n_tokens;
  seen.is_prefill = submit->is_prefill != 0;
  for (uint32_t i = 0; i < submit->n_layers; ++i) {
    seen.layers.push_back(submit->layers[i]);
    const auto* row = reinterpret_cast<const int32_t*>(submit->slots + i * submit->layer_pitch_bytes);
    seen.slots.emplace_back(row, row + submit->n_tokens * 2);
  }
  for (uint32_t i = 0; i < submit->n_whole_layers; ++i) seen.whole_layers.push_back(submit->whole_layers[i]);
  return MOECACHED_OK;
}

moecached_status moecached_gpu_lane_scratch(moecached_gpu_lane* lane, uint32_t* n_slots) {
  fake_daemon().calls.push_back("scratch");
  moecached_gpu_model& model = *lane->model;
  if (model.scratch_slots == 0 && fake_daemon().scratch_slots > 0) {
    model.scratch_slots = fake_daemon().scratch_slots;
    fake_daemon().move_gpu_windows();
  }
  *n_slots = model.scratch_slots;
  return MOECACHED_OK;
}
// Every second slot is taken for one in RAM.
moecached_status moecached_gpu_lane_fetch(moecached_gpu_lane* lane, const moecached_gpu_fetch* fetch) {
  if (fake_daemon().fetch_status != MOECACHED_OK) return fake_fail(fake_daemon().fetch_status, "no kernel");
  fake_daemon().fetches.push_back(*fetch);
  if (g_gpu_models.empty()) return MOECACHED_OK;  // a test of the hook alone
  const FakeLayer& layer = lane->model->layers[fetch->layer];
  GpuLayer& state = lane->model->states[fetch->layer];
  const auto* slots = reinterpret_cast<const int32_t*>(fetch->slots);
  auto* fetched = reinterpret_cast<int32_t*>(fetch->fetched);
  for (uint32_t i = 0; i < fetch->n_ids; ++i) {
    fetched[i] = slots[i];
    if (slots[i] % 2 == 0) continue;
    fetched[i] = static_cast<int32_t>(state.n_slots + i);
    for (std::size_t p = 0; p < layer.parts.size(); ++p) {
      const std::size_t bytes = layer.parts[p].expert_bytes;
      std::memcpy(state.windows[p].data() + static_cast<std::size_t>(fetched[i]) * bytes,
                  state.windows[p].data() + static_cast<std::size_t>(slots[i]) * bytes, bytes);
      if (fake_daemon().spoil_fetch)
        state.windows[p][static_cast<std::size_t>(fetched[i]) * bytes + 3] ^= 0x40;
    }
  }
  return MOECACHED_OK;
}
