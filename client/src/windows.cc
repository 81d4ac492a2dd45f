#include "client/src/windows.h"

#include <algorithm>
#include <cerrno>

#include "client/src/error.h"

namespace moecached::client {
namespace {

// Memory that a process without its daemon should be content with: as many slots as it had there, and enough
// that two lanes decoding at once do not evict each other.
std::uint32_t usual_private_slots(const moecached_shm_layer& layer, const moecached_shm_model& model) {
  return std::min(layer.n_experts, std::max(layer.n_slots_open, 2 * model.n_expert_used));
}

// The sizes of one window; false if they do not fit into 64 bits.
bool geometry_of(const moecached_shm_layer& layer, const moecached_shm_model& model,
                 PrivateSlots::Geometry* out) {
  const std::uint64_t page_bytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const std::uint64_t first =
      layer.window_bytes / layer.slot_stride + (layer.window_bytes % layer.slot_stride != 0);
  // One for every expert, so that resolve() keeps its promise (as many distinct experts as there are slots)
  // however many lanes hold others pinned. They are addresses; only those that get used take memory.
  out->n_slots = layer.n_experts;
  out->n_slots_usual = usual_private_slots(layer, model);
  const std::uint64_t n_window_slots = first + out->n_slots;
  std::uint64_t bytes = 0;
  // Slot ids are int32.
  if (n_window_slots > INT32_MAX || __builtin_mul_overflow(n_window_slots, layer.slot_stride, &bytes) ||
      __builtin_add_overflow(bytes, page_bytes - 1, &bytes)) {
    return false;
  }
  bytes -= bytes % page_bytes;
  out->slot_stride = layer.slot_stride;
  out->first_slot = static_cast<std::uint32_t>(first);
  out->n_experts = layer.n_experts;
  out->shared_bytes = layer.window_bytes;
  out->private_bytes = bytes - layer.window_bytes;
  return true;
}

}  // namespace

moecached_status WindowSet::map(const ModelLayout& layout, const UniqueFd& pool, WindowSet* out) {
  std::vector<PrivateSlots::Geometry> geometries(layout.layers.size());
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < layout.layers.size(); ++i) {
    PrivateSlots::Geometry& geometry = geometries[i];
    if (!geometry_of(layout.layers[i].layer, layout.model, &geometry) ||
        __builtin_add_overflow(total, geometry.shared_bytes + geometry.private_bytes, &total)) {
      return fail(MOECACHED_E_VERSION, "the windows of the model do not fit into the address space");
    }
  }
  WindowSet set;
  set.reservation_ =
      Mapping(::mmap(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0), total);
  if (!set.reservation_.valid()) {
    return fail(MOECACHED_E_SYSTEM,
                "cannot reserve %llu bytes of addresses: %s (is there a limit, ulimit -v?)",
                static_cast<unsigned long long>(total), error_name(errno));
  }

  std::byte* at = set.reservation_.data();
  for (std::size_t i = 0; i < layout.layers.size(); ++i) {
    PrivateSlots::Geometry& geometry = geometries[i];
    geometry.window = at;
    if (::mmap(at, geometry.shared_bytes, PROT_READ, MAP_SHARED | MAP_FIXED, pool.get(),
               static_cast<off_t>(layout.layers[i].layer.window_offset)) == MAP_FAILED) {
      return fail(MOECACHED_E_SYSTEM, "cannot map %llu bytes of the pool: %s",
                  static_cast<unsigned long long>(geometry.shared_bytes), error_name(errno));
    }
    at += geometry.shared_bytes + geometry.private_bytes;
    set.windows_.push_back(
        {geometry.window, geometry.first_slot + geometry.n_slots, std::make_unique<PrivateSlots>(geometry)});
  }
  // A core file of the engine should not carry gigabytes of weights. Advice only: a failure changes nothing.
  (void)::madvise(set.reservation_.data(), total, MADV_DONTDUMP);
  *out = std::move(set);
  return MOECACHED_OK;
}

}  // namespace moecached::client
