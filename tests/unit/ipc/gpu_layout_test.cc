// Where device and host slots lie, and how many fit: properties over odd sizes, and a few layouts by hand.
#include "daemon/ipc/gpu_layout.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace moecached {
namespace {

constexpr std::uint64_t kGranularity = 2u << 20;
constexpr std::uint64_t kReadPast = 4096;  // as kernels read past the last row of an expert

constexpr GpuSections kAlone{.own = 0, .n = 1};

using Slots = std::vector<std::uint32_t>;

LayerLayout layer_of(std::uint32_t n_experts, std::initializer_list<std::uint64_t> expert_bytes) {
  LayerLayout layer;
  layer.n_experts = n_experts;
  for (std::uint64_t bytes : expert_bytes) layer.parts.emplace_back().expert_bytes = bytes;
  return layer;
}

ModelLayout model_of(std::vector<LayerLayout> layers) {
  ModelLayout layout;
  layout.layers = std::move(layers);
  return layout;
}

std::vector<LayerLayout> odd_layers() {
  return {
      layer_of(1, {32}),
      layer_of(8, {kGranularity, kGranularity, kGranularity}),
      layer_of(16, {kGranularity - 32, kGranularity + 32, 576}),
      layer_of(32, {900000, 900000, 1100000, 2880, 4096}),
      layer_of(128, {1 << 20, 860160}),
      layer_of(5, {(100u << 20) + 144}),
      layer_of(256, {64, 3}),
  };
}

std::vector<GpuLayerPlan> plans_of(const ModelLayout& layout) {
  std::vector<GpuLayerPlan> plans;
  for (const LayerLayout& layer : layout.layers)
    plans.push_back(plan_gpu_layer(layer, layer.n_experts, kAlone, kGranularity));
  return plans;
}

std::uint64_t bytes_of(const ModelLayout& layout, const Slots& n_slots) {
  return gpu_device_bytes(layout, plans_of(layout), n_slots, kGranularity);
}

Slots fitting(const ModelLayout& layout, const Slots& wanted, std::uint64_t budget) {
  return gpu_slots_that_fit(layout, plans_of(layout), wanted, budget, kGranularity);
}

SlotsSpec spec(SlotsSpec::Kind kind, double value = 0) { return {.kind = kind, .value = value}; }

template <typename Check>
void for_each_plan(Check check) {
  for (const LayerLayout& layer : odd_layers()) {
    for (std::uint32_t n_device : {0u, 1u, layer.n_experts / 2, layer.n_experts}) {
      SCOPED_TRACE(std::to_string(layer.n_experts) + " experts, " + std::to_string(n_device) +
                   " device slots");
      const GpuLayerPlan plan = plan_gpu_layer(layer, n_device, kAlone, kGranularity);
      ASSERT_EQ(plan.parts.size(), layer.parts.size());
      check(layer, plan);
    }
  }
}

TEST(PlanGpuLayer, TheDevicePartReachesToTheLastGranuleBeforeTheHostSlots) {
  for_each_plan([](const LayerLayout& layer, const GpuLayerPlan& plan) {
    for (std::size_t p = 0; p < plan.parts.size(); ++p) {
      const std::uint64_t slots = plan.n_device_max * layer.parts[p].expert_bytes;
      EXPECT_EQ(plan.parts[p].device_bytes % kGranularity, 0u);
      EXPECT_GE(plan.parts[p].device_bytes, slots);
      const std::uint64_t host = plan.host_first * layer.parts[p].expert_bytes;
      EXPECT_LE(plan.parts[p].device_bytes, host);
      EXPECT_LT(host - plan.parts[p].device_bytes, kGranularity) << "the gap would be pinned memory";
    }
  });
}

TEST(PlanGpuLayer, TheFirstHostSlotLiesBehindTheDeviceSlotsOfEveryPartAndOfOneOnlyJust) {
  for_each_plan([](const LayerLayout& layer, const GpuLayerPlan& plan) {
    bool is_needed = plan.host_first == 0;
    const auto round_up = [](std::uint64_t bytes) {
      return (bytes + kGranularity - 1) / kGranularity * kGranularity;
    };
    for (std::size_t p = 0; p < plan.parts.size(); ++p) {
      const std::uint64_t bytes = layer.parts[p].expert_bytes;
      EXPECT_GE(plan.host_first * bytes, plan.parts[p].device_bytes) << p;
      if (plan.host_first > 0 && (plan.host_first - 1) * bytes < round_up(plan.n_device_max * bytes))
        is_needed = true;
    }
    EXPECT_TRUE(is_needed) << "a smaller host_first would do for all parts";
    EXPECT_GE(plan.host_first, plan.n_device_max);
  });
}

TEST(PlanGpuLayer, HostMemoryHoldsEveryExpertAndWhatIsReadPastTheLast) {
  for_each_plan([](const LayerLayout& layer, const GpuLayerPlan& plan) {
    for (std::size_t p = 0; p < plan.parts.size(); ++p) {
      const std::uint64_t end =
          (std::uint64_t{plan.host_first} + layer.n_experts) * layer.parts[p].expert_bytes + kReadPast;
      EXPECT_EQ(plan.parts[p].host_bytes % kGranularity, 0u);
      EXPECT_GE(plan.parts[p].device_bytes + plan.parts[p].host_bytes, end);
      EXPECT_LT(plan.parts[p].device_bytes + plan.parts[p].host_bytes - end, kGranularity);
    }
  });
}

TEST(PlanGpuLayer, WithoutDeviceSlotsAWindowIsHostMemoryFromItsBeginning) {
  const GpuLayerPlan plan = plan_gpu_layer(layer_of(4, {1 << 20, 64}), 0, kAlone, kGranularity);
  EXPECT_EQ(plan.host_first, 0u);
  EXPECT_EQ(plan.parts[0].device_bytes, 0u);
  EXPECT_EQ(plan.parts[0].host_bytes, 6u << 20);  // 4 MiB, and what is read past them
  EXPECT_EQ(plan.parts[1].host_bytes, kGranularity);
}

TEST(PlanGpuLayer, TheSmallestPartDecidesWhereAllHostSlotsBegin) {
  // 4 slots of 1 MiB fill 2 granules; 4 of 64 bytes a granule, which has room for 32768.
  const GpuLayerPlan plan = plan_gpu_layer(layer_of(4, {1 << 20, 64}), 4, kAlone, kGranularity);
  EXPECT_EQ(plan.n_device_max, 4u);
  EXPECT_EQ(plan.host_first, kGranularity / 64);
  EXPECT_EQ(plan.parts[0].device_bytes, std::uint64_t{32768} << 20) << "the gap is addresses";
  EXPECT_EQ(plan.parts[1].device_bytes, kGranularity);
  EXPECT_EQ(plan.parts[0].host_bytes, (4u << 20) + kGranularity) << "and not pinned memory";
}

TEST(PlanGpuLayer, SectionsLieAtTheSamePlaceForAllWhoseTheyAreAndDoNotTouch) {
  for (const LayerLayout& layer : odd_layers()) {
    for (const std::uint32_t n_sections : {2u, 4u, 8u}) {
      const std::uint32_t n_device = (layer.n_experts + 1) / 2;
      const GpuLayerPlan first = plan_gpu_layer(layer, n_device, {.own = 0, .n = n_sections}, kGranularity);
      ASSERT_EQ(first.first.size(), n_sections);
      EXPECT_EQ(first.first[0], 0u);
      for (std::uint32_t own = 0; own < n_sections; ++own) {
        SCOPED_TRACE(std::to_string(layer.n_experts) + " experts, section " + std::to_string(own));
        const GpuLayerPlan plan =
            plan_gpu_layer(layer, n_device, {.own = own, .n = n_sections}, kGranularity);
        EXPECT_EQ(plan.first, first.first);
        EXPECT_EQ(plan.host_first, first.host_first);
        for (std::size_t p = 0; p < layer.parts.size(); ++p) {
          const PartLayout& part = layer.parts[p];
          const std::uint64_t begin = plan.parts[p].begin[own];
          const std::uint64_t backed = gpu_part_bytes(plan, p, part, n_device, kGranularity);
          EXPECT_EQ(plan.parts[p].begin, first.parts[p].begin);
          EXPECT_EQ(begin % kGranularity, 0u);
          EXPECT_LE(begin, plan.own_first() * part.expert_bytes);
          const std::uint64_t slots_end = (std::uint64_t{plan.own_first()} + n_device) * part.expert_bytes;
          const bool is_last = own + 1 == n_sections;
          EXPECT_GE(begin + backed, slots_end + (is_last ? 0 : kReadPast)) << "nothing need be behind it";
          EXPECT_LE(begin + backed, is_last ? plan.parts[p].device_bytes : plan.parts[p].begin[own + 1]);
        }
      }
    }
  }
}

TEST(GpuSections, AreFewerWhereWindowsWouldHaveTooManySlots) {
  const auto fit = [](std::uint32_t n_experts, std::uint32_t room, std::uint32_t n_gpus) {
    return gpu_sections_that_fit(model_of({layer_of(n_experts, {kGranularity})}), {room}, n_gpus,
                                 kGranularity);
  };
  EXPECT_EQ(fit(256, 64, 8), 8u);
  EXPECT_EQ(fit(256, 256, 8), 3u) << "a slot for every expert on each of them";
  EXPECT_EQ(fit(256, 256, 2), 2u);
  EXPECT_EQ(fit(32, 32, 8), 8u) << "few slots are not counted";
  EXPECT_EQ(fit(32, 0, 1), 1u);
}

TEST(GpuPartBytes, BacksTheSlotsAndWhatIsReadPastThemButNeverMoreThanThereAreAddresses) {
  for_each_plan([](const LayerLayout& layer, const GpuLayerPlan& plan) {
    for (std::size_t p = 0; p < plan.parts.size(); ++p) {
      const PartLayout& part = layer.parts[p];
      EXPECT_EQ(gpu_part_bytes(plan, p, part, 0, kGranularity), 0u);
      std::uint64_t before = 0;
      for (std::uint32_t n = 1; n <= plan.n_device_max; ++n) {
        const std::uint64_t bytes = gpu_part_bytes(plan, p, part, n, kGranularity);
        ASSERT_EQ(bytes % kGranularity, 0u);
        ASSERT_GE(bytes, n * part.expert_bytes);
        ASSERT_LE(bytes, plan.parts[p].device_bytes);
        // Behind the last address there is host memory; behind anything else, nothing.
        if (bytes < plan.parts[p].device_bytes) {
          ASSERT_GE(bytes, n * part.expert_bytes + kReadPast);
        }
        ASSERT_GE(bytes, before) << "memory is added, never moved";
        before = bytes;
      }
      EXPECT_LE(before, plan.parts[p].device_bytes);
      EXPECT_LT(before, plan.n_device_max * part.expert_bytes + kReadPast + kGranularity);
    }
  });
}

TEST(GpuPartBytes, ASlotThatEndsAtAGranuleTakesTheNextOneForWhatIsReadPastIt) {
  const LayerLayout layer = layer_of(4, {1 << 20});
  const GpuLayerPlan plan = plan_gpu_layer(layer, 4, kAlone, kGranularity);
  const auto bytes = [&](std::uint32_t n) {
    return gpu_part_bytes(plan, 0, layer.parts[0], n, kGranularity);
  };
  EXPECT_EQ(bytes(1), kGranularity);
  EXPECT_EQ(bytes(2), 2 * kGranularity);
  EXPECT_EQ(bytes(3), 2 * kGranularity);
  EXPECT_EQ(bytes(4), 2 * kGranularity);
}

TEST(GpuDeviceBytes, IsTheSumOverLayersAndParts) {
  const ModelLayout layout = model_of({layer_of(4, {1 << 20, 64}), layer_of(2, {kGranularity})});
  EXPECT_EQ(bytes_of(layout, {0, 0}), 0u);
  EXPECT_EQ(bytes_of(layout, {1, 0}), 2 * kGranularity);
  EXPECT_EQ(bytes_of(layout, {4, 0}),
            4 * kGranularity);  // behind the last slot there is the gap, not host memory
  EXPECT_EQ(bytes_of(layout, {0, 1}), 2 * kGranularity);  // and what is read past it
  EXPECT_EQ(bytes_of(layout, {4, 2}), 6 * kGranularity);
  EXPECT_EQ(bytes_of(model_of({}), {}), 0u);
}

TEST(GpuSlotsAt, RoundsEachLayersShareDownAndStaysBetweenNoneAndAll) {
  const ModelLayout layout = model_of({layer_of(8, {64}), layer_of(10, {64}), layer_of(1, {64})});
  EXPECT_EQ(gpu_slots_at(layout, 0), (Slots{0, 0, 0}));
  EXPECT_EQ(gpu_slots_at(layout, 0.5), (Slots{4, 5, 0}));
  EXPECT_EQ(gpu_slots_at(layout, 0.99), (Slots{7, 9, 0}));
  EXPECT_EQ(gpu_slots_at(layout, 1), (Slots{8, 10, 1}));
  EXPECT_EQ(gpu_slots_at(layout, 7), (Slots{8, 10, 1}));
  EXPECT_EQ(gpu_slots_at(layout, -1), (Slots{0, 0, 0}));
}

TEST(GpuSlotsAt, AShareOfWholeSlotsIsNotOneLessForItsBinaryFraction) {
  for (std::uint32_t n_experts = 1; n_experts <= 256; ++n_experts) {
    const ModelLayout layout = model_of({layer_of(n_experts, {64})});
    for (std::uint32_t n = 0; n <= n_experts; ++n)
      ASSERT_EQ(gpu_slots_at(layout, static_cast<double>(n) / n_experts), Slots{n})
          << n << " of " << n_experts;
  }
}

TEST(GpuSlotsWanted, IsAllOrAShareOrACountOfAtMostAll) {
  const ModelLayout layout = model_of({layer_of(8, {64}), layer_of(40, {64})});
  EXPECT_EQ(gpu_slots_wanted(layout, spec(SlotsSpec::Kind::kAuto)), (Slots{8, 40}));
  EXPECT_EQ(gpu_slots_wanted(layout, spec(SlotsSpec::Kind::kPercent, 25)), (Slots{2, 10}));
  EXPECT_EQ(gpu_slots_wanted(layout, spec(SlotsSpec::Kind::kPercent, 100)), (Slots{8, 40}));
  EXPECT_EQ(gpu_slots_wanted(layout, spec(SlotsSpec::Kind::kCount, 16)), (Slots{8, 16}));
  EXPECT_EQ(gpu_slots_wanted(layout, spec(SlotsSpec::Kind::kCount, 0)), (Slots{0, 0}));
}

TEST(GpuSlotsThatFit, IsWhatIsWantedWhenThatFitsExactlyAndLessForOneByteLess) {
  const ModelLayout layout = model_of({layer_of(16, {1 << 20, 1 << 20, 64}), layer_of(32, {3 << 20})});
  for (const Slots& wanted : {Slots{16, 32}, Slots{16, 3}, Slots{1, 0}, Slots{0, 0}}) {
    const std::uint64_t bytes = bytes_of(layout, wanted);
    EXPECT_EQ(fitting(layout, wanted, bytes), wanted);
    EXPECT_EQ(fitting(layout, wanted, UINT64_MAX), wanted);
    if (bytes == 0) continue;
    EXPECT_NE(fitting(layout, wanted, bytes - 1), wanted);
    EXPECT_LE(bytes_of(layout, fitting(layout, wanted, bytes - 1)), bytes - 1);
  }
}

TEST(GpuSlotsThatFit, IsNothingWithoutABudgetOrWithLessThanOneSlotTakes) {
  const ModelLayout layout = model_of({layer_of(16, {1 << 20, 64}), layer_of(16, {1 << 20, 64})});
  EXPECT_EQ(fitting(layout, {16, 16}, 0), (Slots{0, 0}));
  EXPECT_EQ(fitting(layout, {16, 16}, bytes_of(layout, {1, 1}) - 1), (Slots{0, 0}));
  EXPECT_EQ(fitting(layout, {16, 16}, bytes_of(layout, {1, 1})), (Slots{1, 1}))
      << "the granule of one slot has room for a second, but not for what is read past it";
}

// Over layers of different sizes: never more than the budget, never fewer slots than the largest share that
// fits. More is possible: where the shares of two layers meet, one may be rounded up before the other.
TEST(GpuSlotsThatFit, IsTheLargestShareOfEveryLayerThatFits) {
  const ModelLayout layout = model_of({layer_of(8, {5 << 20, 2880}), layer_of(64, {700000, 700000}),
                                       layer_of(48, {1 << 20}), layer_of(1, {64})});
  std::vector<double> shares;
  for (const LayerLayout& layer : layout.layers) {
    for (std::uint32_t n = 0; n <= layer.n_experts; ++n)
      shares.push_back(static_cast<double>(n) / layer.n_experts);
  }
  std::sort(shares.begin(), shares.end());
  for (const Slots& wanted : {Slots{8, 64, 48, 1}, Slots{8, 10, 48, 0}}) {
    const std::uint64_t all = bytes_of(layout, wanted);
    for (std::uint64_t budget = 0; budget < all; budget += all / 97) {
      const Slots n = fitting(layout, wanted, budget);
      ASSERT_LE(bytes_of(layout, n), budget);
      Slots fits(wanted.size()), does_not = wanted;
      for (double share : shares) {
        Slots at = gpu_slots_at(layout, share);
        for (std::size_t l = 0; l < at.size(); ++l) at[l] = std::min(at[l], wanted[l]);
        if (bytes_of(layout, at) > budget) {
          does_not = at;
          break;
        }
        fits = at;
      }
      for (std::size_t l = 0; l < n.size(); ++l) {
        ASSERT_GE(n[l], fits[l]) << "layer " << l << ", budget " << budget;
        ASSERT_LE(n[l], does_not[l]) << "layer " << l << ", budget " << budget;
      }
    }
  }
}

}  // namespace
}  // namespace moecached
