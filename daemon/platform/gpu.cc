#include "daemon/platform/gpu.h"

namespace moecached {

std::string to_string(const GpuId& id) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text = "GPU-";
  for (std::size_t i = 0; i < id.uuid.size(); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += kDigits[id.uuid[i] >> 4];
    text += kDigits[id.uuid[i] & 15];
  }
  return text;
}

}  // namespace moecached
