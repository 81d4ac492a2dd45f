// Packets of the handle socket. An input is how many descriptors came along, whether the client was greeted,
// the packet.
#include <vector>

#include "daemon/ipc/handle_message.h"
#include "tests/fuzz/fuzz.h"

namespace moecached::fuzz {
namespace {

void run(Input input) {
  const std::size_t n_fds = input.take<std::uint8_t>();
  const bool greeted = input.take<std::uint8_t>() % 2 == 1;
  const auto given = input.bytes(4096);
  // Of its own, so that a byte read behind it is one behind an allocation.
  const std::vector<std::byte> packet(given.begin(), given.end());
  const HandleMessage message = read_handle_message(packet, n_fds, greeted);
  const bool refused = std::holds_alternative<HandleRefusal>(message);
  CHECK(refused || greeted != std::holds_alternative<HelloMessage>(message));
  if (const auto* refusal = std::get_if<HandleRefusal>(&message)) {
    CHECK(!refusal->text.empty() && refusal->text.size() < MOECACHED_ERROR_TEXT);
    check_text(refusal->text);
  }
  if (const auto* hello = std::get_if<HelloMessage>(&message)) {
    CHECK(n_fds <= 1 && hello->label.size() <= sizeof(moecached_handle_hello::label));
    check_text(hello->label);
  }
  if (const auto* open = std::get_if<ModelOpenMessage>(&message)) {
    CHECK(n_fds >= 1 && n_fds <= MOECACHED_MAX_FILES);
    CHECK(open->name.size() <= sizeof(moecached_handle_model_open::name));
    check_text(open->name);
  }
  if (const auto* open = std::get_if<GpuOpenMessage>(&message)) {
    CHECK(n_fds >= 1 && n_fds <= MOECACHED_MAX_FILES);
    check_text(open->name);
  }
  if (const auto* fetch = std::get_if<GpuFetchMessage>(&message)) {
    CHECK(n_fds == 0);
    constexpr std::uint32_t kHandles = 200;
    if (fetch->lies_within(kHandles)) {
      const std::uint64_t end = std::uint64_t{fetch->first} + fetch->count;
      CHECK(fetch->count >= 1 && fetch->count <= MOECACHED_FETCH_MAX && end <= kHandles);
    }
  }
}

}  // namespace
}  // namespace moecached::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  moecached::fuzz::run(moecached::fuzz::Input({data, size}));
  return 0;
}
