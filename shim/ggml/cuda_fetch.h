// Runs the client's kernels inside graphs that ggml-cuda computes and captures.
//
// What it is: a way to enqueue work of ours between two operations of stock's, on stock's stream, with no cut
// of the graph. cuda_plan.h and spill_wait_plan.h put a CONT there, for which ggml-cuda calls
// cudaMemcpyAsync; that import of its library is replaced, and the copies that belong to a plan become what
// the scope enqueues. While a graph is captured that is captured with it. What it is not: needed. Where
// ggml-cuda carries the CUDA runtime in itself there is no import to replace: experts are read in place, and
// graphs of models that spill are cut. Thread: any; a scope belongs to its thread.
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

// The fetch kernel in place of a copy. False, which has been said: the copy is to be made, and the experts
// are read in place.
bool fetch_on(moecached_gpu_lane* lane, const PlannedFetch& fetch, void* stream);

// While it lives, `enqueue` is called for this thread's copies to the places of `fetches`, sorted by
// `fetched`, and says whether the copy is done with.
class FetchScope {
 public:
  using Enqueue = std::function<bool(const PlannedFetch& fetch, void* stream)>;
  FetchScope(std::span<const PlannedFetch> fetches, const Enqueue& enqueue);
  ~FetchScope();
  FetchScope(const FetchScope&) = delete;
  FetchScope& operator=(const FetchScope&) = delete;

  // Whether a copy to `destination` belongs to the plan and was replaced. For the hook and for tests.
  static bool take(const void* destination, std::size_t bytes, void* stream);

 private:
  std::span<const PlannedFetch> fetches_;
  const Enqueue& enqueue_;
};

}  // namespace moecached::shim
#endif  // MOECACHED_SHIM_GGML_CUDA_FETCH_H_
