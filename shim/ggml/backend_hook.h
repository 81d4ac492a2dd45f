// One hooked CPU backend of the host: a lane for each model it computes with, and the graph compute in front
// of stock's.
//
// A graph is planned (graph_plan.h) and given to the stock graph_compute of the same backend object, so
// threads, thread pool and work buffer stay the host's. When a layer turns out to need more experts than it
// has slots, the stock run is stopped right behind the layer's resolving node by the backend's abort
// callback, its expert operations are computed in waves (waves.h), and the rest of the graph goes on from
// there. Stopping needs the abort callback; the host's own is called from ours. Thread: one graph at a time,
// as for any ggml backend.
#ifndef MOECACHED_SHIM_GGML_BACKEND_HOOK_H_
#define MOECACHED_SHIM_GGML_BACKEND_HOOK_H_

#include <cstddef>
#include <memory>
#include <vector>

#include "ggml-backend-impl.h"
#include "moecached/moecached.h"
#include "shim/ggml/graph_plan.h"
#include "shim/ggml/waves.h"

namespace moecached::shim {

class BackendHook : private NodeComputer {
 public:
  using GraphCompute = ggml_status (*)(ggml_backend_t, ggml_cgraph*);

  BackendHook(ggml_backend_t backend, GraphCompute stock) : backend_(backend), stock_(stock) {}
  ~BackendHook();
  BackendHook(const BackendHook&) = delete;
  BackendHook& operator=(const BackendHook&) = delete;

  ggml_status compute(ggml_cgraph* graph);

  // The host's abort callback; ours (abort_callback below, with this object as data) is the one the backend
  // has.
  void set_host_abort(ggml_abort_callback callback, void* data);
  static bool abort_callback(void* hook);

 private:
  struct Lane {
    std::shared_ptr<Model> model;
    moecached_lane* lane;
  };

  static void resolve_callback(ggml_tensor* tensor, int thread, int n_threads, void* node);
  void resolve(ResolveNode& node);
  moecached_lane* lane_of(const ServedTensor& served);
  bool assign_lanes();
  ggml_status run();
  ggml_status run_range(std::size_t begin, std::size_t end);
  ggml_status run_in_waves(const ResolveNode& node, std::size_t& at);
  ggml_status compute_node(ggml_tensor& node) override;

  const ggml_backend_t backend_;
  const GraphCompute stock_;
  ggml_abort_callback host_abort_ = nullptr;
  void* host_abort_data_ = nullptr;
  std::vector<Lane> lanes_;  // a backend computes with one model, seldom two
  GraphPlan plan_;
  WaveRunner waves_;
  // Why the stock run is to stop. Written by the backend's thread 0 inside a node, read by it behind the
  // node.
  const ResolveNode* stopped_at_ = nullptr;
  moecached_status stop_status_ = MOECACHED_OK;
};

}  // namespace moecached::shim
#endif  // MOECACHED_SHIM_GGML_BACKEND_HOOK_H_
