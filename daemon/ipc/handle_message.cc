#include "daemon/ipc/handle_message.h"

#include <algorithm>
#include <cstring>

#include "daemon/base/text.h"

namespace moecached {
namespace {

HandleRefusal refused(std::string text, moecached_handle_error_code code = MOECACHED_ERROR_MESSAGE) {
  return {code, std::move(text)};
}

HandleRefusal other_version(const char* what, std::uint32_t theirs, const char* verb, std::uint32_t ours) {
  return refused(std::string(what) + " version " + std::to_string(theirs) +
                     ", this daemon (" MOECACHED_VERSION ") " + verb + " " + std::to_string(ours) +
                     ": install matching versions",
                 MOECACHED_ERROR_VERSION);
}

// A C string of a client's message, cut at its array's end.
std::string text_of(std::span<const char> from) {
  return for_people(std::string_view(from.data(), ::strnlen(from.data(), from.size())));
}

template <typename T>
bool copy_whole(std::span<const std::byte> packet, T* out) {
  if (packet.size() != sizeof *out) return false;
  std::memcpy(out, packet.data(), sizeof *out);
  return true;
}

std::string expected_files() {
  return "1 to " + std::to_string(static_cast<int>(MOECACHED_MAX_FILES)) + " descriptors are expected";
}

bool are_shards(std::size_t n_fds) { return n_fds > 0 && n_fds <= MOECACHED_MAX_FILES; }

HandleMessage read_hello(std::span<const std::byte> packet, std::size_t n_fds) {
  moecached_handle_hello hello{};
  if (!copy_whole(packet, &hello) || n_fds > 1) return refused("malformed hello");
  if (hello.shm_version != MOECACHED_SHM_VERSION)
    return other_version("shared-memory layout", hello.shm_version, "uses", MOECACHED_SHM_VERSION);
  return HelloMessage{.label = text_of(hello.label)};
}

HandleMessage read_model_open(std::span<const std::byte> packet, std::size_t n_fds) {
  moecached_handle_model_open open{};
  if (!copy_whole(packet, &open) || !are_shards(n_fds))
    return refused("malformed model-open: " + expected_files());
  return ModelOpenMessage{.name = text_of(open.name)};
}

HandleMessage read_gpu_open(std::span<const std::byte> packet, std::size_t n_fds) {
  moecached_handle_gpu_open open{};
  if (!copy_whole(packet, &open) || !are_shards(n_fds))
    return refused("malformed gpu-open: " + expected_files());
  GpuOpenMessage message;
  message.name = text_of(open.name);
  message.reads_peers = (open.flags & MOECACHED_GPU_OPEN_PEERS) != 0;
  message.no_peers_reason = text_of(open.no_peers_reason);
  std::ranges::copy(open.uuid, message.uuid.begin());
  return message;
}

HandleMessage read_spill_open(std::span<const std::byte> packet, std::size_t n_fds) {
  moecached_handle_spill_open open{};
  if (!copy_whole(packet, &open) || !are_shards(n_fds))
    return refused("malformed spill-open: " + expected_files());
  GpuOpenMessage message;
  message.name = text_of(open.name);
  message.spill = true;
  std::ranges::copy(open.uuid, message.uuid.begin());
  return message;
}

HandleMessage read_gpu_probe(std::span<const std::byte> packet, std::size_t n_fds) {
  moecached_handle_gpu_probe probe{};
  if (!copy_whole(packet, &probe) || n_fds != 0) return refused("malformed gpu-probe");
  GpuProbeMessage message;
  std::ranges::copy(probe.uuid, message.uuid.begin());
  return message;
}

HandleMessage read_gpu_fetch(std::span<const std::byte> packet, std::size_t n_fds) {
  moecached_handle_gpu_fetch fetch{};
  if (!copy_whole(packet, &fetch) || n_fds != 0) return refused("malformed gpu-fetch");
  return GpuFetchMessage{
      .model_id = fetch.model_id, .memory = fetch.memory, .first = fetch.first, .count = fetch.count};
}

}  // namespace

HandleMessage read_handle_message(std::span<const std::byte> packet, std::size_t n_fds, bool greeted) {
  moecached_handle_header header{};
  if (packet.size() < sizeof header) return refused("message too short");
  std::memcpy(&header, packet.data(), sizeof header);
  if (header.magic != MOECACHED_HANDLE_MAGIC) return refused("not a moecached client");
  if (header.version != MOECACHED_HANDLE_VERSION)
    return other_version("handle protocol", header.version, "speaks", MOECACHED_HANDLE_VERSION);
  if (header.bytes != packet.size() || header.n_fds != n_fds)
    return refused("message and header disagree about size or descriptors");
  if (header.type == MOECACHED_HANDLE_HELLO)
    return greeted ? refused("hello twice") : read_hello(packet, n_fds);
  HandleMessage (*read)(std::span<const std::byte>, std::size_t) = nullptr;
  if (header.type == MOECACHED_HANDLE_MODEL_OPEN) read = read_model_open;
  if (header.type == MOECACHED_HANDLE_GPU_OPEN) read = read_gpu_open;
  if (header.type == MOECACHED_HANDLE_SPILL_OPEN) read = read_spill_open;
  if (header.type == MOECACHED_HANDLE_GPU_PROBE) read = read_gpu_probe;
  if (header.type == MOECACHED_HANDLE_GPU_FETCH) read = read_gpu_fetch;
  if (read == nullptr) return refused("unknown message type " + std::to_string(header.type));
  return greeted ? read(packet, n_fds) : refused("say hello first");
}

}  // namespace moecached
