// The C interface of models on a GPU in a build without CUDA's headers: the names are there, a model is not.
#include "client/include/moecached/moecached.h"
#include "client/src/error.h"

using moecached::client::fail;

namespace {
moecached_status no_cuda() {
  return fail(MOECACHED_E_UNAVAILABLE,
              "this libmoecached_client was built without CUDA: models on a GPU are left out");
}
}  // namespace

moecached_status moecached_gpu_model_open(moecached_session*, const char* const*, size_t, const uint8_t*,
                                          moecached_gpu_model** out) {
  if (out != nullptr) *out = nullptr;
  return no_cuda();
}
void moecached_gpu_model_close(moecached_gpu_model*) {}
uint32_t moecached_gpu_model_layers(const moecached_gpu_model*) { return 0; }
uint32_t moecached_gpu_model_expert_used(const moecached_gpu_model*) { return 0; }
moecached_status moecached_gpu_model_layer(const moecached_gpu_model*, uint32_t, moecached_gpu_layer_info*) {
  return no_cuda();
}
moecached_status moecached_gpu_model_part(const moecached_gpu_model*, uint32_t, uint32_t,
                                          moecached_part_info*, uint64_t*) {
  return no_cuda();
}
moecached_status moecached_gpu_model_locate(const moecached_gpu_model*, uint32_t, uint32_t, uint32_t,
                                            uint32_t*, uint64_t*) {
  return no_cuda();
}
moecached_status moecached_gpu_model_find(const moecached_gpu_model*, const char*, uint32_t*, uint32_t*) {
  return no_cuda();
}
uint64_t moecached_gpu_model_generation(const moecached_gpu_model*) { return 0; }
moecached_status moecached_gpu_lane_open(moecached_gpu_model*, moecached_gpu_lane** out) {
  if (out != nullptr) *out = nullptr;
  return no_cuda();
}
void moecached_gpu_lane_close(moecached_gpu_lane*) {}
moecached_status moecached_gpu_lane_begin(moecached_gpu_lane*) { return no_cuda(); }
moecached_status moecached_gpu_lane_submit(moecached_gpu_lane*, const moecached_gpu_submit*) {
  return no_cuda();
}
moecached_status moecached_gpu_lane_scratch(moecached_gpu_lane*, uint32_t*) { return no_cuda(); }
moecached_status moecached_gpu_lane_fetch(moecached_gpu_lane*, const moecached_gpu_fetch*) {
  return no_cuda();
}
moecached_status moecached_spill_model_open(moecached_session*, const char* const*, size_t, const uint8_t*,
                                            moecached_model** out) {
  if (out != nullptr) *out = nullptr;
  return no_cuda();
}
moecached_status moecached_spill_lane_open(moecached_model*, moecached_spill_lane** out) {
  if (out != nullptr) *out = nullptr;
  return no_cuda();
}
void moecached_spill_lane_close(moecached_spill_lane*) {}
uint64_t moecached_spill_lane_generation(const moecached_spill_lane*) { return 0; }
moecached_status moecached_spill_lane_window(moecached_spill_lane*, uint32_t, uint32_t, uint64_t*,
                                             uint32_t*) {
  return no_cuda();
}
moecached_status moecached_spill_resolve(moecached_spill_lane*, uint32_t, const int32_t*, size_t, size_t,
                                         size_t, int32_t*, const moecached_spill_target*) {
  return no_cuda();
}
moecached_status moecached_spill_begin_layer(moecached_spill_lane*, uint32_t, const int32_t*, size_t) {
  return no_cuda();
}
moecached_status moecached_spill_load_part(moecached_spill_lane*, uint32_t, uint64_t, void*) {
  return no_cuda();
}
void moecached_spill_end(moecached_spill_lane*) {}
moecached_status moecached_spill_waits_reserve(moecached_spill_lane*, uint32_t) { return no_cuda(); }
moecached_status moecached_spill_waits_begin(moecached_spill_lane*, const uint32_t*, size_t, uint32_t,
                                            uint32_t) {
  return no_cuda();
}
moecached_status moecached_spill_wait_enqueue(moecached_spill_lane*, const moecached_spill_wait*) {
  return no_cuda();
}
moecached_status moecached_spill_waits_end(moecached_spill_lane*) { return no_cuda(); }
