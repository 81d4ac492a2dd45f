// The parts of the fake daemon that are no behaviour: sockets, packets, and the segments it hands out.
// Written against proto/shm/layout.h alone, with no code of the client, so that a mistake in the client's
// reading of it is not repeated here. Thread: any. Memory: callers own what is returned.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "client/src/resources.h"
#include "proto/shm/layout.h"
#include "tests/unit/client/fake_daemon.h"
#include "tests/unit/client/test_model.h"

namespace moecached::client::test {

inline constexpr std::uint64_t kSessionId = 77;
inline constexpr std::uint32_t kModelId = 5;

// -- sockets
UniqueFd listen_at(const std::string& path);  // replaces what is there

struct Packet {
  std::uint32_t type = 0;  // 0: end of file or nonsense
  std::vector<std::byte> bytes;
  template <typename T>
  [[nodiscard]] T as() const {
    T value{};
    std::memcpy(&value, bytes.data(), std::min(bytes.size(), sizeof value));
    return value;
  }
};
Packet receive_packet(int socket, std::vector<UniqueFd>* fds);
void send_packet(int socket, const void* message, std::size_t bytes, const std::vector<int>& fds);
void send_error(int socket, std::uint32_t code, const char* text);
moecached_handle_header frame(moecached_handle_type type, std::size_t bytes, std::uint32_t n_fds);
bool pidfd_names_this_process(int pidfd);
void ring(const UniqueFd& eventfd);
void drain_eventfd(const UniqueFd& eventfd);

// -- segments
Mapping make_segment(std::uint64_t bytes, UniqueFd* fd);
void write_session_segment(const Mapping& segment, const FakeOptions& options);
moecached_shm_lane* lanes_of(const Mapping& segment);
Mapping write_model_segment(const TestModel& model, const FakeOptions& options, std::uint64_t pool_bytes,
                            UniqueFd* fd, std::uint64_t* table_offset);

}  // namespace moecached::client::test
