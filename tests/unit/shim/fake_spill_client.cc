// The functions of moecached.h for models that spill from a GPU: "device memory" is this process's, every
// expert has a slot of the window, which gets its bytes when it is resolved.
#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "tests/unit/shim/fake_client.h"

using moecached::testing::fake_daemon;
using moecached::testing::fake_fail;

namespace {

std::map<const moecached_model*, int> g_files;
std::set<moecached_spill_lane*> g_lanes;

}  // namespace

struct moecached_spill_lane {
  moecached_model* model;
  uint64_t generation = 1;
  std::map<std::pair<uint32_t, uint32_t>, std::vector<unsigned char>> windows;  // by layer and part
  uint32_t layer = 0;
  std::vector<int32_t> experts;   // of begin_layer
  std::vector<uint32_t> waiting;  // layers that have not asked yet

  moecached_layer_info layer_info(uint32_t of) const {
    moecached_layer_info info = {};
    moecached_model_layer(model, of, &info);
    return info;
  }
  moecached_part_info part_info(uint32_t of, uint32_t part) const {
    moecached_part_info info = {};
    moecached_model_part(model, of, part, &info);
    return info;
  }
  // From the last one down, so that no id is its own slot but by chance.
  int32_t slot_of(uint32_t of, int32_t expert) const {
    return static_cast<int32_t>(layer_info(of).n_experts + fake_daemon().gpu_gap) - 1 - expert;
  }
  std::vector<unsigned char>& window(uint32_t of, uint32_t part) {
    std::vector<unsigned char>& memory = windows[{of, part}];
    if (memory.empty())
      memory.assign((layer_info(of).n_experts + fake_daemon().gpu_gap) * part_info(of, part).expert_bytes,
                    0xcc);
    return memory;
  }
  void read(uint32_t of, uint32_t part, int32_t expert, void* to) const {
    const moecached_part_info info = part_info(of, part);
    const auto at = static_cast<off_t>(info.file_offset + static_cast<uint64_t>(expert) * info.expert_bytes);
    if (pread(g_files.at(model), to, info.expert_bytes, at) != static_cast<ssize_t>(info.expert_bytes))
      std::abort();
    if (fake_daemon().flip_a_byte) static_cast<unsigned char*>(to)[3] ^= 0x40;
    fake_daemon().flip_a_byte = false;
  }
};

namespace moecached::testing {

void FakeDaemon::move_spill_windows() {
  for (moecached_spill_lane* lane : g_lanes) {
    const auto before = std::move(lane->windows);  // other addresses for the new ones
    lane->windows.clear();
    for (const auto& [place, memory] : before) (void)lane->window(place.first, place.second);
    ++lane->generation;
  }
}

}  // namespace moecached::testing

moecached_status moecached_spill_model_open(moecached_session* session, const char* const* paths,
                                            size_t n_paths, const uint8_t uuid[16], moecached_model** out) {
  const moecached_status status = moecached_model_open(session, paths, n_paths, out);
  if (status != MOECACHED_OK) return status;
  fake_daemon().opened_uuids.push_back(uuid[0]);
  g_files[*out] = open(paths[0], O_RDONLY | O_CLOEXEC);
  return MOECACHED_OK;
}
moecached_status moecached_spill_lane_open(moecached_model* model, moecached_spill_lane** out) {
  *out = new moecached_spill_lane{model, 1, {}, 0, {}, {}};
  g_lanes.insert(*out);
  ++fake_daemon().open_lanes;
  return MOECACHED_OK;
}
void moecached_spill_lane_close(moecached_spill_lane* lane) {
  g_lanes.erase(lane);
  close(g_files.at(lane->model));
  g_files.erase(lane->model);
  delete lane;
  --fake_daemon().open_lanes;
}
uint64_t moecached_spill_lane_generation(const moecached_spill_lane* lane) { return lane->generation; }
moecached_status moecached_spill_lane_window(moecached_spill_lane* lane, uint32_t layer, uint32_t part,
                                             uint64_t* window, uint32_t* n_slots) {
  *window = reinterpret_cast<uint64_t>(lane->window(layer, part).data());
  *n_slots = lane->layer_info(layer).n_experts + fake_daemon().gpu_gap;
  return MOECACHED_OK;
}
moecached_status moecached_spill_resolve(moecached_spill_lane* lane, uint32_t layer, const int32_t* ids,
                                         size_t rows, size_t cols, size_t row_stride_bytes,
                                         int32_t* slots_out, const moecached_spill_target* target) {
  fake_daemon().calls.emplace_back("resolve");
  if (fake_daemon().resolve_status != MOECACHED_OK)
    return fake_fail(fake_daemon().resolve_status, "not resolved");
  for (size_t row = 0; row < rows; ++row) {
    const auto* at =
        reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(ids) + row * row_stride_bytes);
    for (size_t col = 0; col < cols; ++col) {
      const int32_t slot = lane->slot_of(layer, at[col]);
      slots_out[row * cols + col] = slot;
      for (uint32_t part = 0; part < lane->layer_info(layer).n_parts; ++part) {
        lane->read(layer, part, at[col],
                   lane->window(layer, part).data() +
                       static_cast<uint64_t>(slot) * lane->part_info(layer, part).expert_bytes);
      }
    }
  }
  std::memcpy(reinterpret_cast<void*>(target->slots), slots_out, rows * cols * sizeof(int32_t));
  return MOECACHED_OK;
}
moecached_status moecached_spill_waits_reserve(moecached_spill_lane*, uint32_t n_ids) {
  if (fake_daemon().waits_status != MOECACHED_OK) return fake_fail(fake_daemon().waits_status, "no waits");
  return n_ids <= 64 ? MOECACHED_OK : fake_fail(MOECACHED_E_TOO_MANY, "too many to wait for");
}
moecached_status moecached_spill_waits_begin(moecached_spill_lane* lane, const uint32_t* layers, size_t n,
                                             uint32_t n_ids, uint32_t n_ids_of_token) {
  if (n_ids == 0 || n_ids > 64 || n_ids_of_token == 0 || n_ids % n_ids_of_token != 0) std::abort();
  if (fake_daemon().waits_begin_status != MOECACHED_OK)
    return fake_fail(fake_daemon().waits_begin_status, "no graph may wait");
  fake_daemon().calls.emplace_back("waits_begin");
  lane->waiting.assign(layers, layers + n);
  return MOECACHED_OK;
}
moecached_status moecached_spill_wait_enqueue(moecached_spill_lane* lane, const moecached_spill_wait* wait) {
  if (lane->waiting.empty() || lane->waiting.front() != wait->layer) std::abort();  // not in the order told
  lane->waiting.erase(lane->waiting.begin());
  if (fake_daemon().wait_status != MOECACHED_OK) {
    const moecached_status status = std::exchange(fake_daemon().wait_status, MOECACHED_OK);  // the next one would do
    return fake_fail(status, "no wait");
  }
  const moecached_spill_target target = {wait->slots, nullptr};
  std::vector<int32_t> slots(wait->n_ids);
  return moecached_spill_resolve(lane, wait->layer, reinterpret_cast<const int32_t*>(wait->ids), 1,
                                 wait->n_ids, 0, slots.data(), &target);
}
moecached_status moecached_spill_waits_end(moecached_spill_lane*) {
  fake_daemon().calls.emplace_back("waits_end");
  return fake_daemon().waits_end_status == MOECACHED_OK
             ? MOECACHED_OK
             : fake_fail(fake_daemon().waits_end_status, "an expert could not be read");
}
moecached_status moecached_spill_begin_layer(moecached_spill_lane* lane, uint32_t layer,
                                             const int32_t* experts, size_t n) {
  fake_daemon().calls.emplace_back("begin_layer");
  lane->layer = layer;
  lane->experts.assign(experts, experts + n);
  return MOECACHED_OK;
}
moecached_status moecached_spill_load_part(moecached_spill_lane* lane, uint32_t part, uint64_t destination,
                                           void*) {
  fake_daemon().calls.emplace_back("load_part");
  if (fake_daemon().stream_status != MOECACHED_OK) return fake_fail(fake_daemon().stream_status, "not read");
  for (const int32_t expert : lane->experts) {
    lane->read(lane->layer, part, expert,
               reinterpret_cast<unsigned char*>(destination) +
                   static_cast<uint64_t>(expert) * lane->part_info(lane->layer, part).expert_bytes);
  }
  return MOECACHED_OK;
}
void moecached_spill_end(moecached_spill_lane*) { fake_daemon().calls.emplace_back("end"); }
