// Waits of a spill lane on the GPU: a graph that is launched whole asks for each layer's experts by itself,
// and its stream waits for the answer. A thread of this class looks at what is asked and answers as
// SpillDevice::place says.
//
//   GPU:  ask                | stream waits |  take, bring: RAM -> scratch slots | the layer's kernels
//           \ box: n, ids    |              /
//   CPU:     sees n, resolves -> places, answered = 1
//
// Why: a graph that is cut costs a synchronisation and a launch at each layer, 16 to 20 us on an H200,
// this 7. The stream waits for a word in memory, not a kernel: the GPU is free for others meanwhile. The
// answering thread makes no CUDA call: while the stream waits, any other thread of the process may hold a
// lock of the driver until the GPU goes on.
//
// An answer ends the epoch before and begins the next, as a cut does: when a layer asks, what came before it
// is computed. What a layer reads stays until the next one asks, or the graph ends.
//
// Thread: the lane's, but for the answering one between begin() and end(). Memory: boxes and room for experts
// that come from no pinned slot, page-locked; the answer in device memory.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "client/include/moecached/moecached.h"
#include "client/src/cuda_driver.h"
#include "client/src/resources.h"
#include "client/src/spill_device.h"

namespace moecached::client {

class SpillWaits {
 public:
  static constexpr std::uint32_t kIdsMax = 64;  // of one layer of a graph

  // MOECACHED_E_UNAVAILABLE: this driver or this model cannot do it; all goes on with graphs that are cut.
  [[nodiscard]] static moecached_status open(SpillDevice& device, std::unique_ptr<SpillWaits>* out);
  ~SpillWaits();
  SpillWaits(const SpillWaits&) = delete;
  SpillWaits& operator=(const SpillWaits&) = delete;

  // Makes room for so many ids a layer. MOECACHED_E_TOO_MANY: more than can be waited for. REQUIRES: no graph
  // is under way.
  [[nodiscard]] moecached_status reserve(std::uint32_t n_ids);

  // The layers that the graph launched next asks for, each once, in this order; the ids of each at most, and
  // of each token. MOECACHED_E_TOO_MANY: more than could be leased together; MOECACHED_E_UNAVAILABLE: the
  // daemon's memory of now cannot be waited for.
  struct Width {
    std::uint32_t n_ids = 0;
    std::uint32_t n_ids_of_token = 0;
  };
  [[nodiscard]] moecached_status begin(std::span<const std::uint32_t> layers, Width width);
  // On the stream of the graph, which may be capturing. Makes no other call than launches.
  [[nodiscard]] moecached_status enqueue(const moecached_spill_wait& request) const;
  // REQUIRES: the graph is computed, or was never launched. The first failure of an answer; a layer that has
  // not asked is one.
  [[nodiscard]] moecached_status end();

 private:
  struct Box;
  explicit SpillWaits(SpillDevice& device) : device_(device) {}
  moecached_status load_kernels();
  moecached_status allocate();
  moecached_status try_out();
  [[nodiscard]] Box& box(std::uint32_t layer) const;
  [[nodiscard]] CUdeviceptr box_address(std::uint32_t layer) const;
  void run() noexcept;
  [[nodiscard]] bool wait_for_ask(const Box& box) const noexcept;
  void answer(std::uint32_t layer);

  SpillDevice& device_;
  std::uint32_t n_layers_ = 0;
  CUmodule module_ = nullptr;
  CUfunction ask_ = nullptr, take_ = nullptr, bring_ = nullptr;
  Mapping boxes_, bounce_;
  std::shared_ptr<HostRegistration> boxes_pin_, bounce_pin_;
  CUdeviceptr boxes_address_ = 0, bounce_address_ = 0;
  CUdeviceptr taken_ = 0;
  std::uint32_t n_ids_max_ = 0;  // what there is room for

  std::thread thread_;
  std::uint32_t n_ids_of_token_ = 0;        // of the graph under way
  std::vector<std::uint32_t> layers_;       // of the graph under way
  std::vector<std::int32_t> ids_;           // of the answering thread, as all below until `answered_`
  moecached_status failed_ = MOECACHED_OK;  // the first one
  std::string failure_;
  std::atomic<std::uint32_t> begun_{0}, answered_{0};  // graphs; equal: the answering thread is at rest
  std::atomic<bool> over_{false};                      // nothing more is going to ask
  std::atomic<bool> stop_{false};
};

}  // namespace moecached::client
