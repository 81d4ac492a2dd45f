// Runs the client's fetch kernel inside graphs that ggml-cuda computes and captures.
//
// What it is: a way to launch one kernel of ours between two operations of stock's, on stock's stream, with
// no cut of the graph. cuda_plan.h puts a CONT there, for which ggml-cuda calls cudaMemcpyAsync; that import
// of its library is replaced, and the copies that belong to a plan become launches. While a graph is captured
// the launch is captured with it. What it is not: needed. Where ggml-cuda carries the CUDA runtime in itself
// there is no import to replace, and experts are read in place. Thread: any; a scope belongs to its thread.
#ifndef MOECACHED_SHIM_GGML_CUDA_FETCH_H_
#define MOECACHED_SHIM_GGML_CUDA_FETCH_H_

#include <functional>
#include <span>

#include "moecached/moecached.h"
#include "shim/ggml/cuda_plan.h"

namespace moecached::shim {

// code: any function of the library that holds ggml-cuda. False: fetching is not possible there, or
// $MOECACHED_FETCH is 0.
bool install_fetch_hook(const void* code);
bool can_fetch();

// While it lives, this thread's copies to the places of `fetches` are fetches. lane_of gives the lane of a
// share.
class FetchScope {
 public:
  using LaneOf = std::function<moecached_gpu_lane*(std::size_t share)>;
  FetchScope(std::span<const PlannedFetch> fetches, const LaneOf& lane_of);
  ~FetchScope();
  FetchScope(const FetchScope&) = delete;
  FetchScope& operator=(const FetchScope&) = delete;

  // Whether a copy to `destination` is to be a fetch, and its launch succeeded. For the hook and for tests.
  static bool take(const void* destination, std::size_t bytes, void* stream);

 private:
  std::span<const PlannedFetch> fetches_;
  const LaneOf& lane_of_;
};

}  // namespace moecached::shim
#endif  // MOECACHED_SHIM_GGML_CUDA_FETCH_H_
