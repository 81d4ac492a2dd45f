// What clients may say on the handle socket: the bytes of a packet become one of these structs, or a refusal.
// Every field was written by a client; what comes out is in range, and text is fit for logs and for gRPC. It
// does not know what exists: whether a model is open, or a handle is there, is handle_server's business.
// Pure. Thread: any.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <variant>

#include "proto/shm/layout.h"

namespace moecached {

struct HelloMessage {
  std::string label;
};
struct ModelOpenMessage {  // with the descriptors of 1 to MOECACHED_MAX_FILES shards
  std::string name;
};
struct GpuOpenMessage {  // the same, on a GPU
  std::string name;
  std::array<std::uint8_t, MOECACHED_UUID_BYTES> uuid{};
  bool spill = false;        // VRAM and RAM hold a part of it
  bool reads_peers = false;  // slots of other GPUs; else the reason says why not
  std::string no_peers_reason;
};
struct GpuProbeMessage {
  std::array<std::uint8_t, MOECACHED_UUID_BYTES> uuid{};
};
struct GpuFetchMessage {
  std::uint32_t model_id = 0;
  std::uint32_t memory = 0;  // any number
  std::uint32_t first = 0, count = 0;
  // Whether it asks for some of `n` handles, and for no more than one reply carries.
  [[nodiscard]] bool lies_within(std::uint32_t n) const {
    return count > 0 && count <= MOECACHED_FETCH_MAX && first < n && count <= n - first;
  }
};
struct HandleRefusal {  // the connection is not worth keeping
  moecached_handle_error_code code = MOECACHED_ERROR_MESSAGE;
  std::string text;
};
using HandleMessage = std::variant<HandleRefusal, HelloMessage, ModelOpenMessage, GpuOpenMessage,
                                   GpuProbeMessage, GpuFetchMessage>;

// n_fds: descriptors that came with the packet; greeted: whether this client has said hello.
[[nodiscard]] HandleMessage read_handle_message(std::span<const std::byte> packet, std::size_t n_fds,
                                                bool greeted);

}  // namespace moecached
