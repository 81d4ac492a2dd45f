// The segment of a model on a GPU: what is right is taken, every wrong value ends in a sentence.
#include "client/src/gpu_segment.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "tests/unit/client/fake_gpu.h"

namespace moecached::client::test {
namespace {

constexpr std::uint32_t kLanes = 4;

class GpuSegment : public ::testing::Test {
 protected:
  moecached_status check(std::function<void(GpuSegmentView)> spoil) {
    FakeGpuOptions options;
    options.spoil = std::move(spoil);
    gpu_ = std::make_unique<FakeGpu>(model_, options, 7, kLanes);
    GpuSegmentFacts facts;
    facts.boot_epoch = 7;
    facts.model_id = kGpuModelId;
    facts.n_lanes = kLanes;
    facts.log_bytes = gpu_->log_bytes();
    facts.uuid = options.uuid;
    for (const std::string& path : model_.paths())
      facts.file_bytes.push_back(std::filesystem::file_size(path));
    layout_ = GpuLayout{};
    return check_gpu_segment(gpu_->segment(), facts, &layout_, &words_);
  }
  moecached_status chunk(std::function<void(moecached_shm_chunk&)> spoil) {
    EXPECT_EQ(check([&](GpuSegmentView view) { spoil(view.chunks[0]); }), MOECACHED_OK);
    moecached_shm_chunk taken{};
    return take_chunk(layout_, words_, 0, &taken);
  }

  TestModel model_;
  std::unique_ptr<FakeGpu> gpu_;
  GpuLayout layout_;
  GpuSegmentWords words_;
};

TEST_F(GpuSegment, IsTakenWhenRight) {
  ASSERT_EQ(check(nullptr), MOECACHED_OK) << moecached_last_error();
  EXPECT_EQ(layout_.model.layers.size(), 3u);
  EXPECT_EQ(layout_.windows.size(), 9u);
  EXPECT_EQ(layout_.part_index(2, 1), 7u);
  EXPECT_EQ(layout_.model.layers[2].layer.table_first, 32u);
  EXPECT_EQ(words_.gpu->load_state, MOECACHED_COVERED);
}

TEST_F(GpuSegment, EveryWrongValueIsRefused) {
  using View = GpuSegmentView;
  const std::vector<std::pair<const char*, std::function<void(View)>>> spoilers{
      {"kind", [](View v) { v.header->kind = MOECACHED_SEGMENT_MODEL; }},
      {"boot epoch", [](View v) { v.header->boot_epoch = 8; }},
      {"version", [](View v) { v.header->version = 1; }},
      {"model id", [](View v) { v.model->model_id = 1; }},
      {"no layers", [](View v) { v.model->n_layers = 0; }},
      {"too many layers", [](View v) { v.model->n_layers = MOECACHED_MAX_LAYERS + 1; }},
      {"layers end behind the segment", [](View v) { v.model->n_layers = 200; }},
      {"files", [](View v) { v.model->n_files = 3; }},
      {"top-k of 0", [](View v) { v.model->n_expert_used = 0; }},
      {"layers offset", [](View v) { v.model->layers_offset = UINT64_MAX - 7; }},
      {"parts offset", [](View v) { v.model->parts_offset = v.header->bytes; }},
      {"parts alignment", [](View v) { v.model->parts_offset += 4; }},
      {"uuid", [](View v) { v.gpu->uuid[3] ^= 1; }},
      {"granularity 0", [](View v) { v.gpu->granularity = 0; }},
      {"granularity no power of two", [](View v) { v.gpu->granularity = 3 << 20; }},
      {"granularity below windows", [](View v) { v.gpu->granularity = std::uint64_t{1} << 40; }},
      {"table", [](View v) { v.gpu->table_bytes = 4 * 3 * 16 - 1; }},
      {"windows", [](View v) { v.gpu->windows_offset = v.header->bytes - 8; }},
      {"chunks", [](View v) { v.gpu->chunks_offset += 8; }},
      {"number of chunks", [](View v) { v.gpu->n_chunks_max = UINT32_MAX; }},
      {"log entries", [](View v) { v.gpu->log_entries = 7; }},
      {"no log entries", [](View v) { v.gpu->log_entries = 0; }},
      {"more log entries", [](View v) { v.gpu->log_entries = 64; }},
      {"log entry bytes", [](View v) { v.gpu->log_entry_bytes -= 4; }},
      {"log entry too small", [](View v) { v.gpu->log_entry_bytes -= 64; }},
      {"log slots over layers", [](View v) { v.gpu->log_slots_offset = 64; }},
      {"log slots alignment", [](View v) { v.gpu->log_slots_offset += 2; }},
      {"log layer", [](View v) { v.gpu->log_layer_bytes -= 4; }},
      {"log lane", [](View v) { v.gpu->log_bytes_per_lane += 4096; }},
      {"log lane alignment", [](View v) { v.gpu->log_bytes_per_lane -= 8; }},
      {"no experts", [](View v) { v.layers[1].n_experts = 0; }},
      {"experts of the file", [](View v) { v.layers[2].n_experts = 17; }},
      {"no parts", [](View v) { v.layers[0].n_parts = 0; }},
      {"a part of two layers", [](View v) { v.layers[1].first_part = 2; }},
      {"a part of no layer", [](View v) { v.layers[2].n_parts = 2; }},
      {"slots", [](View v) { v.layers[0].n_slots = 17; }},
      {"table entries", [](View v) { v.layers[2].table_first = UINT32_MAX; }},
      {"host slots in the device part", [](View v) { v.layers[0].host_first -= 1; }},
      {"host slots behind the window", [](View v) { v.layers[0].host_first += 4096; }},
      {"device slots among host slots",
       [](View v) {
         v.layers[0].device_first = v.layers[0].host_first;
         v.layers[0].n_slots = 1;
       }},
      {"device slots beyond all", [](View v) { v.layers[0].device_first = UINT32_MAX; }},
      {"slot ids beyond int32", [](View v) { v.layers[0].host_first = INT32_MAX; }},
      {"part of 0 bytes", [](View v) { v.parts[4].expert_bytes = 0; }},
      {"huge part", [](View v) { v.parts[4].expert_bytes = UINT64_MAX; }},
      {"part beyond the file", [](View v) { v.parts[8].file_offset += 1; }},
      {"file of a part", [](View v) { v.parts[0].file = 2; }},
      {"slot offset", [](View v) { v.parts[0].slot_offset = 32; }},
      {"name", [](View v) { std::fill(std::begin(v.parts[0].name), std::end(v.parts[0].name), 'x'); }},
      {"device bytes", [](View v) { v.windows[3].device_bytes -= 4096; }},
      {"device bytes below the slots", [](View v) { v.windows[3].device_bytes = 0; }},
      {"host bytes", [](View v) { v.windows[3].host_bytes -= kGranularity; }},
      {"no host bytes", [](View v) { v.windows[3].host_bytes = 0; }},
      {"huge window", [](View v) { v.windows[3].host_bytes = UINT64_MAX - kGranularity + 1; }},
  };
  for (const auto& [what, spoil] : spoilers) {
    EXPECT_EQ(check(spoil), MOECACHED_E_VERSION) << what;
  }
}

TEST_F(GpuSegment, ChunksLieWithinTheDevicesPartOfTheirWindow) {
  EXPECT_EQ(chunk([](moecached_shm_chunk&) {}), MOECACHED_OK);
  EXPECT_EQ(chunk([](auto& c) { c.part = 9; }), MOECACHED_E_VERSION);
  EXPECT_EQ(chunk([](auto& c) { c.bytes = 0; }), MOECACHED_E_VERSION);
  EXPECT_EQ(chunk([](auto& c) { c.bytes = kGranularity - 4096; }), MOECACHED_E_VERSION);
  EXPECT_EQ(chunk([](auto& c) { c.bytes = 3 * kGranularity; }), MOECACHED_E_VERSION);
  EXPECT_EQ(chunk([](auto& c) { c.offset = 2 * kGranularity; }), MOECACHED_E_VERSION);
  EXPECT_EQ(chunk([](auto& c) { c.offset = UINT64_MAX - kGranularity + 1; }), MOECACHED_E_VERSION);
  moecached_shm_chunk taken{};
  EXPECT_EQ(take_chunk(layout_, words_, layout_.gpu.n_chunks_max, &taken), MOECACHED_E_VERSION);
}

}  // namespace
}  // namespace moecached::client::test
