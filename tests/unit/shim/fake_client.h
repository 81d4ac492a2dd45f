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

// What the fake daemon serves and which faults it has. Set before the model is opened.
struct FakeDaemon {
  std::vector<FakeLayer> layers;
  uint64_t stream_half_bytes = 0;

  bool connected = true;
  moecached_status session_status = MOECACHED_OK;
  moecached_status model_status = MOECACHED_OK;
  moecached_status resolve_status = MOECACHED_OK;  // of every resolve from now on
  moecached_status stream_status = MOECACHED_OK;   // of every wait from now on
  bool flip_a_byte = false;                        // in the next record that is read into a slot

  // Moves all windows to new addresses, as a reconnect does.
  void move_windows();

  // Seen by the fake.
  uint64_t reconnects = 0;
  uint64_t reads = 0;
  uint64_t streamed = 0;
  uint64_t ends = 0;
  uint64_t open_models = 0;
  uint64_t open_lanes = 0;
};

FakeDaemon& fake_daemon();
void reset_fake_daemon();

}  // namespace moecached::testing
#endif  // MOECACHED_TESTS_UNIT_SHIM_FAKE_CLIENT_H_
