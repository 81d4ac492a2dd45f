// Names of things. An index, a count and a size are different types: indexes are strong, counts are uint32_t,
// sizes are uint64_t bytes.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace moecached {

template <typename Tag, typename Rep = std::uint32_t>
struct Index {
  Rep value = 0;
  constexpr Index() = default;
  constexpr explicit Index(Rep v) : value(v) {}
  constexpr auto operator<=>(const Index&) const = default;
};

using ModelId = Index<struct ModelTag>;
using LayerIndex = Index<struct LayerTag>;    // dense over the MoE layers of one model
using ExpertIndex = Index<struct ExpertTag>;  // within one layer
using SlotIndex = Index<struct SlotTag>;      // within one layer's window
using LaneId = Index<struct LaneTag>;         // dense over all lanes of all sessions
using SessionId = Index<struct SessionTag, std::uint64_t>;

}  // namespace moecached

template <typename Tag, typename Rep>
struct std::hash<moecached::Index<Tag, Rep>> {
  std::size_t operator()(moecached::Index<Tag, Rep> i) const noexcept { return std::hash<Rep>{}(i.value); }
};
