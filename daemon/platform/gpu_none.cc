// Stands in for gpu_cuda.cc in builds made without the CUDA toolkit's headers.
#include "daemon/platform/gpu.h"

namespace moecached {

std::vector<std::unique_ptr<Gpu>> list_gpus(std::string* reason) {
  *reason = "this program was built without cuda.h";
  return {};
}

}  // namespace moecached
