// The run on a GPU made of host memory (tests/support/soft_cuda): each call of the CUDA driver, the daemon's
// and the client's, may be the one that fails.
#include <cuda.h>
#include <moecached/moecached.h>

#include <array>
#include <random>
#include <string>

#include "daemon/ipc/daemon.h"
#include "daemon/platform/gpu.h"
#include "tests/stress/kth_call.h"
#include "tests/support/soft_cuda/library.h"

namespace moecached::test {
namespace {

constexpr int kGraphsMax = 400, kGraphsMin = 20, kGraphsASession = 10;

class GpuRun {
 public:
  GpuRun(const SoftCuda& cuda, std::string socket, std::string model, Tally* tally)
      : cuda_(cuda), socket_(std::move(socket)), model_path_(std::move(model)), tally_(tally) {
    std::string reason;
    const auto gpus = list_gpus(&reason);
    if (!gpus.empty()) uuid_ = gpus.front()->id().uuid;
    CUcontext context = nullptr;
    cuda_.get<CUresult(CUcontext*, CUdevice)>("cuDevicePrimaryCtxRetain")(&context, 0);
    cuda_.get<CUresult(CUcontext)>("cuCtxPushCurrent_v2")(context);
    cuda_.get<CUresult(CUevent*, unsigned)>("cuEventCreate")(&done_, CU_EVENT_DISABLE_TIMING);
    cuda_.get<CUresult(CUevent*, unsigned)>("cuEventCreate")(&logged_, CU_EVENT_DISABLE_TIMING);
    record_ = cuda_.get<CUresult(CUevent, CUstream)>("cuEventRecord");
  }

  void session(unsigned seed) {
    std::mt19937 random(seed);
    moecached_session* session = nullptr;
    const char* const path = model_path_.c_str();
    bool is_open = moecached_session_open(socket_.c_str(), "kth", &session) == MOECACHED_OK &&
                   moecached_gpu_model_open(session, &path, 1, uuid_.data(), &model_) == MOECACHED_OK &&
                   moecached_gpu_lane_open(model_, &lane_) == MOECACHED_OK;
    if (!is_open) tell_failure();
    for (int i = 0; is_open && i < kGraphsASession; ++i) is_open = graph(random);
    if (lane_ != nullptr) moecached_gpu_lane_close(lane_);
    if (model_ != nullptr) moecached_gpu_model_close(model_);
    if (session != nullptr) moecached_session_close(session);
    lane_ = nullptr;
    model_ = nullptr;
  }

 private:
  void tell_failure() {
    ++tally_->errors;
    if (moecached_last_error()[0] == '\0') ++tally_->errors_without_words;
  }

  // False: an engine would end here.
  bool graph(std::mt19937& random) {
    if (moecached_gpu_lane_begin(lane_) != MOECACHED_OK) {
      tell_failure();
      return false;
    }
    std::array<std::uint16_t, kRunLayers> rows{}, whole{};
    std::uint32_t n_rows = 0, n_whole = 0;
    for (std::uint32_t layer = 0; layer < kRunLayers; ++layer) {
      moecached_gpu_layer_info info{};
      if (moecached_gpu_model_layer(model_, layer, &info) != MOECACHED_OK) {
        tell_failure();
        return false;
      }
      const auto name =
          static_cast<std::uint16_t>(layer | (info.by_expert != 0 ? MOECACHED_GPU_BY_EXPERT : 0));
      const bool is_whole = info.all_resident != 0;
      const std::uint32_t row = n_rows;
      if (is_whole) {
        whole[n_whole++] = name;
      } else {
        rows[n_rows++] = name;
      }
      const auto* table = reinterpret_cast<const std::int32_t*>(info.table);
      const auto first = static_cast<std::uint32_t>(random());
      for (std::uint32_t i = 0; i < kRunTopK; ++i) {
        const std::uint32_t expert = (first + i) % kRunExperts;
        const std::int32_t slot =
            is_whole ? static_cast<std::int32_t>(expert) : __atomic_load_n(table + expert, __ATOMIC_ACQUIRE);
        if (!is_whole) slots_[row * kRunTopK + i] = slot;
        compare(layer, info, expert, slot);
      }
    }
    if (record_(done_, nullptr) != CUDA_SUCCESS) return false;
    const moecached_gpu_submit submit{.done_event = done_,
                                      .logged_event = logged_,
                                      .slots = reinterpret_cast<std::uint64_t>(slots_.data()),
                                      .layer_pitch_bytes = kRunTopK * sizeof(std::int32_t),
                                      .layers = rows.data(),
                                      .n_layers = n_rows,
                                      .whole_layers = whole.data(),
                                      .n_whole_layers = n_whole,
                                      .n_tokens = 1,
                                      .is_prefill = 0};
    if (moecached_gpu_lane_submit(lane_, &submit) != MOECACHED_OK) {
      tell_failure();
      return false;
    }
    ++tally_->served;
    return true;
  }

  void compare(std::uint32_t layer, const moecached_gpu_layer_info& info, std::uint32_t expert,
               std::int32_t slot) {
    ++tally_->compared;
    if (slot < 0 || slot >= static_cast<std::int32_t>(info.n_slots)) {
      ++tally_->wrong;
      return;
    }
    for (std::uint32_t p = 0; p < info.n_parts; ++p) {
      moecached_part_info part{};
      std::uint64_t window = 0, offset = 0;
      std::uint32_t shard = 0;
      if (moecached_gpu_model_part(model_, layer, p, &part, &window) != MOECACHED_OK ||
          moecached_gpu_model_locate(model_, layer, p, expert, &shard, &offset) != MOECACHED_OK)
        return tell_failure();
      const auto* at =
          reinterpret_cast<const std::byte*>(window) + static_cast<std::uint64_t>(slot) * part.expert_bytes;
      tally_->wrong += wrong_bytes(at, offset, part.expert_bytes);
    }
  }

  const SoftCuda& cuda_;
  const std::string socket_, model_path_;
  Tally* const tally_;
  decltype(GpuId::uuid) uuid_{};
  moecached_gpu_model* model_ = nullptr;
  moecached_gpu_lane* lane_ = nullptr;
  CUevent done_ = nullptr, logged_ = nullptr;
  CUresult (*record_)(CUevent, CUstream) = nullptr;
  std::array<std::int32_t, kRunLayers * kRunTopK> slots_{};
};

}  // namespace

bool has_gpu_runs() { return true; }

void run_on_gpu(const std::filesystem::path& folder, const std::filesystem::path& model, std::uint64_t k,
                bool each, Tally* tally) {
  ::setenv("MOECACHED_TEST_CHURN", "1", 1);  // swaps at every turn
  const SoftCuda cuda;
  const auto fail_each = cuda.get<decltype(soft_cuda_fail_each)>("soft_cuda_fail_each");
  const auto fail_counts = cuda.get<decltype(soft_cuda_fail_counts)>("soft_cuda_fail_counts");
  Config config;
  config.handle_socket = folder / "handle.sock";
  config.pool_bytes = 64u << 20;
  config.gpu.slots = {.kind = SlotsSpec::Kind::kCount, .value = 6};
  config.gpu.keep_free = 0;
  config.gpu.max_slowdown_percent = 100;
  config.scrub_period_ms = 0;
  // Loaded before: the list of GPUs is made once, and a driver that does not start is another test's.
  GpuRun lane(cuda, config.handle_socket, model, tally);
  // Memory runs out, or the driver says what nobody expects.
  const auto result = static_cast<int>(k % 3 == 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_UNKNOWN);
  const bool is_late = k % 2 == 0;
  if (!is_late) fail_each(k, each ? 1 : 0, result);
  auto daemon = Daemon::start(config);
  if (!daemon) {
    ++tally->errors;
    return;
  }
  if (is_late) {
    lane.session(1);
    fail_each(k, each ? 1 : 0, result);
  }
  unsigned long long seen = 0, failed = 0;
  for (int graphs = 0; graphs < kGraphsMax && (graphs < kGraphsMin || seen < tally->enough);
       graphs += kGraphsASession) {
    lane.session(static_cast<unsigned>(k) + static_cast<unsigned>(graphs));
    fail_counts(&seen, &failed);
  }
  tally->calls_seen = seen;
  tally->calls_failed = failed;
  fail_each(0, 0, 0);
}

}  // namespace moecached::test
