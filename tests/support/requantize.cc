// moecached_requantize: writes a GGUF in another type with the host's own llama_model_quantize, so that the
// tests have models in types that the repo does not carry. Quality is lost; the tests compare runs of one
// file, so it does not matter.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <string>

#include "llama.h"

namespace {

void* open_library(const std::filesystem::path& folder, const char* stem) {
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::string name = entry.path().filename();
    if (name.starts_with(stem) && name.find(".so") != std::string::npos) {
      if (void* handle = ::dlopen(entry.path().c_str(), RTLD_NOW | RTLD_GLOBAL)) return handle;
    }
  }
  std::fprintf(stderr, "moecached_requantize: no %s*.so in %s: %s\n", stem, folder.c_str(), ::dlerror());
  std::exit(3);
}

// Types that need no importance matrix.
struct Kind {
  const char* name;
  llama_ftype ftype;
};
constexpr Kind kKinds[] = {
    {"f32", LLAMA_FTYPE_ALL_F32},          {"f16", LLAMA_FTYPE_MOSTLY_F16},
    {"bf16", LLAMA_FTYPE_MOSTLY_BF16},     {"q8_0", LLAMA_FTYPE_MOSTLY_Q8_0},
    {"q4_0", LLAMA_FTYPE_MOSTLY_Q4_0},     {"q4_1", LLAMA_FTYPE_MOSTLY_Q4_1},
    {"q5_0", LLAMA_FTYPE_MOSTLY_Q5_0},     {"q5_1", LLAMA_FTYPE_MOSTLY_Q5_1},
    {"q2_k", LLAMA_FTYPE_MOSTLY_Q2_K},     {"q3_k", LLAMA_FTYPE_MOSTLY_Q3_K_M},
    {"q5_k", LLAMA_FTYPE_MOSTLY_Q5_K_M},   {"q6_k", LLAMA_FTYPE_MOSTLY_Q6_K},
    {"iq4_nl", LLAMA_FTYPE_MOSTLY_IQ4_NL}, {"iq4_xs", LLAMA_FTYPE_MOSTLY_IQ4_XS},
    {"iq3_s", LLAMA_FTYPE_MOSTLY_IQ3_S},   {"mxfp4", LLAMA_FTYPE_MOSTLY_MXFP4_MOE},
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6 || std::strcmp(argv[1], "--libs") != 0) {
    std::fprintf(stderr, "usage: moecached_requantize --libs DIR IN.gguf OUT.gguf TYPE; TYPE:");
    for (const Kind& one : kKinds) std::fprintf(stderr, " %s", one.name);
    std::fprintf(stderr, "\n");
    return 2;
  }
  const std::filesystem::path libs = argv[2];
  const Kind* kind = std::find_if(std::begin(kKinds), std::end(kKinds),
                                  [&](const Kind& one) { return argv[5] == std::string(one.name); });
  if (kind == std::end(kKinds)) {
    std::fprintf(stderr, "moecached_requantize: no type %s\n", argv[5]);
    return 2;
  }
  void* ggml = open_library(libs, "libggml.");
  void* llama = open_library(libs, "libllama.");
  auto load_all = reinterpret_cast<void (*)(const char*)>(::dlsym(ggml, "ggml_backend_load_all_from_path"));
  auto defaults = reinterpret_cast<decltype(&llama_model_quantize_default_params)>(
      ::dlsym(llama, "llama_model_quantize_default_params"));
  auto quantize = reinterpret_cast<decltype(&llama_model_quantize)>(::dlsym(llama, "llama_model_quantize"));
  if (load_all == nullptr || defaults == nullptr || quantize == nullptr) {
    std::fprintf(stderr, "moecached_requantize: this libllama has no llama_model_quantize\n");
    return 3;
  }
  load_all(libs.c_str());
  llama_model_quantize_params params = defaults();
  params.allow_requantize = true;
  params.nthread = 2;
  params.ftype = kind->ftype;
  return quantize(argv[3], argv[4], &params) == 0 ? 0 : 1;
}
