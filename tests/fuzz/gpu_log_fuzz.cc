// Entries of a lane's log on a GPU. An input is the shape of a model, then the bytes of a log.
#include <vector>

#include "daemon/ipc/gpu_log.h"
#include "tests/fuzz/fuzz.h"

namespace moecached::fuzz {
namespace {

constexpr std::uint32_t kEntries = 4;

void run(Input input) {
  const std::uint32_t n_layers = 1 + input.take<std::uint8_t>() % 6;
  const std::uint32_t k = 1 + input.take<std::uint8_t>() % 4;
  moecached_shm_gpu geometry{};
  geometry.log_entries = kEntries;
  geometry.log_layer_bytes = MOECACHED_LOG_TOKENS * k * sizeof(std::int32_t);
  geometry.log_slots_offset = sizeof(moecached_shm_log_entry) + 64;
  geometry.log_entry_bytes = geometry.log_slots_offset + n_layers * geometry.log_layer_bytes;
  std::vector<std::byte> log(std::size_t{kEntries} * geometry.log_entry_bytes);
  GpuLogReader reader(geometry, n_layers, k);
  // Headers first, so that a short input reaches all of them.
  for (std::uint32_t entry = 0; entry < kEntries; ++entry) {
    const auto front = input.bytes(sizeof(moecached_shm_log_entry) + 2 * n_layers);
    std::memcpy(log.data() + entry * geometry.log_entry_bytes, front.data(), front.size());
  }
  const auto slots = input.bytes(geometry.log_entry_bytes - geometry.log_slots_offset);
  std::memcpy(log.data() + geometry.log_slots_offset, slots.data(), slots.size());
  for (std::uint64_t epoch = 0; epoch < 2 * kEntries; ++epoch) {
    if (reader.read(log, epoch) != GpuLogOutcome::kEntry) continue;
    CHECK(reader.n_tokens() >= 1 && reader.n_tokens() <= MOECACHED_LOG_TOKENS);
    CHECK(!reader.whole().empty() || !reader.rows().empty());
    CHECK(reader.whole().size() + reader.rows().size() <= n_layers);
    for (const LayerIndex layer : reader.whole()) CHECK(layer.value < n_layers);
    const std::byte* const in_log =
        log.data() + (epoch % kEntries) * geometry.log_entry_bytes + geometry.log_slots_offset;
    for (std::size_t row = 0; row < reader.rows().size(); ++row) {
      CHECK(reader.rows()[row].layer.value < n_layers);
      for (std::uint32_t token = 0; token < reader.n_tokens(); ++token) {
        const auto got = reader.slots(row, token);
        CHECK(got.size() == k);
        CHECK(std::memcmp(got.data(), in_log + row * geometry.log_layer_bytes + token * got.size_bytes(),
                          got.size_bytes()) == 0);
      }
    }
  }
}

}  // namespace
}  // namespace moecached::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  moecached::fuzz::run(moecached::fuzz::Input({data, size}));
  return 0;
}
