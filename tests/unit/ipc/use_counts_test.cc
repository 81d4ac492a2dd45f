#include "daemon/ipc/use_counts.h"

#include <gtest/gtest.h>

#include <vector>

namespace moecached {
namespace {

std::vector<ExpertIndex> some(std::initializer_list<std::uint32_t> experts) {
  return {experts.begin(), experts.end()};
}

TEST(UseCounts, ModelsOfOneKeyAreCountedTogether) {
  UseCounts counts;
  const std::vector<BlockShape> shapes{{.block = 0, .n_experts = 8}};
  counts.add_model(ModelId(1), 42, "model", shapes, {});
  counts.add_model(ModelId(2), 42, "model", shapes, {});
  counts.of_label(ModelId(1), "a")->add(LayerIndex(0), some({1, 2}));
  counts.of_label(ModelId(2), "a")->add(LayerIndex(0), some({2, 3}));
  const auto saved = counts.take_changed();
  ASSERT_EQ(saved.size(), 1u);
  ASSERT_EQ(saved[0].lists.size(), 1u);
  EXPECT_EQ(saved[0].lists[0].layers[0].counts, (std::vector<std::uint64_t>{0, 1, 2, 1, 0, 0, 0, 0}));
}

// The key is a hash of names that clients choose.
TEST(UseCounts, AModelOfAnotherShapeUnderTheSameKeyIsCountedByItself) {
  UseCounts counts;
  const std::vector<BlockShape> small{{.block = 0, .n_experts = 4}};
  const std::vector<BlockShape> large{{.block = 0, .n_experts = 4096}, {.block = 1, .n_experts = 4096}};
  counts.add_model(ModelId(1), 42, "model", small, {});
  counts.add_model(ModelId(2), 42, "model", large, {});
  EXPECT_EQ(counts.shapes(ModelId(1)).size(), 1u);
  EXPECT_EQ(counts.shapes(ModelId(2)).size(), 2u);
  counts.of_label(ModelId(2), "a")->add(LayerIndex(1), some({4095}));
  counts.of_label(ModelId(1), "a")->add(LayerIndex(0), some({3}));
  counts.remove_model(ModelId(2));
  counts.remove_model(ModelId(1));
  EXPECT_EQ(counts.take_changed().size(), 2u);
}

}  // namespace
}  // namespace moecached
