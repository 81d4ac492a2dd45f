#include "tests/stress/kth_call.h"

namespace moecached::test {

bool has_gpu_runs() { return false; }
void run_on_gpu(const std::filesystem::path&, const std::filesystem::path&, std::uint64_t, bool, Tally*) {}

}  // namespace moecached::test
