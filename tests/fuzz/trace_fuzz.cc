// Routing traces, plain or zstd.
#include "bench/replay/trace.h"
#include "tests/fuzz/fuzz.h"

namespace moecached::fuzz {
namespace {

void run(std::span<const std::uint8_t> bytes) {
  const UniqueFd file = file_of(std::as_bytes(bytes));
  const Result<replay::Trace> trace = replay::Trace::read(path_of(file), {.bytes = 1u << 20});
  if (!trace) return check_fault(trace.error());
  CHECK(trace->size() > 0);
  for (std::size_t row = 0; row < trace->size(); ++row) {
    for (std::uint32_t layer = 0; layer < trace->header().n_layers; ++layer) {
      const auto event = trace->event(row, layer);
      CHECK(event.size() <= trace->header().k);
      for (std::size_t i = 0; i < event.size(); ++i) {
        CHECK(event[i] < trace->header().n_experts);
        CHECK(std::ranges::find(event.first(i), event[i]) == event.begin() + static_cast<std::ptrdiff_t>(i));
      }
    }
  }
}

}  // namespace
}  // namespace moecached::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  moecached::fuzz::run({data, size});
  return 0;
}
