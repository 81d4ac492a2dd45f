// Keeps the host's default load from reading every expert once.
//
// llama.cpp maps a model with MAP_POPULATE and advises WILLNEED on the whole file before any backend hears of
// a tensor; with
// --mlock it locks it too. The hook replaces mmap, munmap, posix_madvise and mlock in the host's objects: for
// a mapping of a GGUF file with experts, only the ranges of the other tensors are read ahead or locked. All
// other calls pass through. Thread: any.
#ifndef MOECACHED_SHIM_GGML_LOAD_HOOK_H_
#define MOECACHED_SHIM_GGML_LOAD_HOOK_H_

namespace moecached::shim {

// Patches the objects loaded by now; may be called again when more have been loaded. False when no object
// imports mmap: loads then read experts once, and release_mapped() is what gives the memory back.
bool install_load_hook();

// Drops the pages of a read-only file mapping from this process. Whole pages inside [data, data + bytes)
// only.
void release_mapped(const void* data, unsigned long bytes);

}  // namespace moecached::shim
#endif  // MOECACHED_SHIM_GGML_LOAD_HOOK_H_
