// An implementation of moecached.h inside the test: slots in this process's memory, experts read from the
// file.
//
// What it is: a client with an exact, single-threaded LRU per layer, so that the plugin's code is tested
// against the C header without a daemon; faults are settings. What it is not: fast, or safe for threads.
#ifndef MOECACHED_TESTS_UNIT_SHIM_FAKE_CLIENT_H_
#define MOECACHED_TESTS_UNIT_SHIM_FAKE_CLIENT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "moecached/moecached.h"

namespace moecached::testing {

struct FakePart {
  std::string name;
  uint32_t kind = 0;
  uint32_t ggml_type = 0;
  uint64_t ne0 = 0;
  uint64_t ne1 = 0;
  uint64_t expert_bytes = 0;
  uint64_t file_offset = 0;
};

struct FakeLayer {
  uint32_t block = 0;
  uint32_t n_experts = 0;
  uint32_t n_slots = 0;
  std::vector<FakePart> parts;
};

// What a lane on a GPU was told at the end of an epoch.
struct FakeSubmit {
  bool has_events = false;
  uint32_t n_tokens = 0;
  bool is_prefill = false;
  std::vector<uint16_t> layers;
  std::vector<std::vector<int32_t>> slots;  // by row
  std::vector<uint16_t> whole_layers;
};

// What the fake daemon serves and which faults it has. Set before the model is opened.
struct FakeDaemon {
  std::vector<FakeLayer> layers;
  uint64_t stream_half_bytes = 0;

  bool connected = true;
  moecached_status session_status = MOECACHED_OK;
  moecached_status model_status = MOECACHED_OK;
  moecached_status resolve_status = MOECACHED_OK;  // of every resolve from now on
  // Of waits on the GPU: reserve, begin, one wait, the end.
  moecached_status waits_status = MOECACHED_OK, waits_begin_status = MOECACHED_OK, wait_status = MOECACHED_OK,
                   waits_end_status = MOECACHED_OK;
  moecached_status stream_status = MOECACHED_OK;  // of every wait from now on
  bool flip_a_byte = false;                       // in the next record that is read into a slot

  // Moves all windows to new addresses, as a reconnect does.
  void move_windows();

  // Models on a GPU.
  moecached_status gpu_status = MOECACHED_OK;    // of opening one
  moecached_status begin_status = MOECACHED_OK;  // of every epoch from now on
  bool all_resident = false;
  uint32_t gpu_gap = 3;        // slots that hold no expert
  bool move_in_begin = false;  // of the next epoch
  uint32_t scratch_slots = 0;  // that a lane gets
  moecached_status fetch_status = MOECACHED_OK;
  bool spoil_fetch = false;  // flips a byte of what is fetched
  std::vector<moecached_gpu_fetch> fetches;
  void move_gpu_windows();
  // Models that spill.
  void move_spill_windows();

  // Seen by the fake.
  uint64_t reconnects = 0;
  uint64_t reads = 0;
  uint64_t streamed = 0;
  uint64_t ends = 0;
  uint64_t open_models = 0;
  uint64_t open_lanes = 0;
  std::vector<std::string> calls;  // of GPU lanes, and what the mini GPU adds
  std::vector<FakeSubmit> submits;
  std::vector<uint8_t> opened_uuids;  // first bytes
};

FakeDaemon& fake_daemon();
void reset_fake_daemon();
// Sets the text of moecached_last_error().
moecached_status fake_fail(moecached_status status, std::string text);

}  // namespace moecached::testing
#endif  // MOECACHED_TESTS_UNIT_SHIM_FAKE_CLIENT_H_
