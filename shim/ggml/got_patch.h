// Replaces imported functions of the shared objects loaded in this process, by writing into their global
// offset tables.
//
// What it is: the one way to change a library call of an unmodified host without preloading. What it is not:
// a way to catch calls inside libc, calls through pointers taken before, or objects loaded later. Thread:
// any; loaders are kept out while the tables are walked (dl_iterate_phdr holds the loader's lock).
#ifndef MOECACHED_SHIM_GGML_GOT_PATCH_H_
#define MOECACHED_SHIM_GGML_GOT_PATCH_H_

#include <cstddef>
#include <span>
#include <string_view>

namespace moecached::shim {

struct Replacement {
  std::string_view symbol;
  void* function;
};

// Writes the replacements into every table slot bound to one of the symbols, in all loaded objects but the C
// and C++ runtime and the object that contains this code. Returns how many slots now point to a replacement.
std::size_t patch_imports(std::span<const Replacement> replacements);
// The same in the one object that contains `code`.
std::size_t patch_imports_of(const void* code, std::span<const Replacement> replacements);

}  // namespace moecached::shim
#endif  // MOECACHED_SHIM_GGML_GOT_PATCH_H_
