#include "tests/unit/model/layout_testing.h"

namespace moecached::test {

const PartLayout* find_part(const ModelLayout& layout, std::string_view name) {
  for (const LayerLayout& layer : layout.layers) {
    for (const PartLayout& part : layer.parts) {
      if (part.name == name) return &part;
    }
  }
  return nullptr;
}

}  // namespace moecached::test
