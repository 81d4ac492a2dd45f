#include "shim/ggml/got_patch.h"

#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

namespace moecached::shim {
namespace {

#if defined(__x86_64__)
constexpr uint32_t kJumpSlot = R_X86_64_JUMP_SLOT;
constexpr uint32_t kGlobData = R_X86_64_GLOB_DAT;
#elif defined(__aarch64__)
constexpr uint32_t kJumpSlot = R_AARCH64_JUMP_SLOT;
constexpr uint32_t kGlobData = R_AARCH64_GLOB_DAT;
#else
#error "got_patch.cc knows the relocation numbers of x86-64 and aarch64 only"
#endif

struct Walk {
  std::span<const Replacement> replacements;
  const void* only = nullptr;  // code of the one object to patch
  std::size_t patched = 0;
};

// The runtime's own calls must reach the kernel: the dynamic loader maps libraries through these very
// functions, and an allocator that comes back to us would recurse.
bool is_runtime(std::string_view path) {
  const std::string_view name = path.substr(path.rfind('/') + 1);
  for (const std::string_view runtime :
       {"libc.so", "libc-", "ld-linux", "libstdc++", "libgcc_s", "libm.so", "libdl.so", "libpthread",
        "linux-vdso", "linux-gate", "libasan", "libtsan", "libubsan", "liblsan"}) {
    if (name.starts_with(runtime)) return true;
  }
  return false;
}

bool contains(const dl_phdr_info& info, const void* code) {
  const auto here = reinterpret_cast<ElfW(Addr)>(code);
  for (int i = 0; i < info.dlpi_phnum; ++i) {
    const ElfW(Phdr)& segment = info.dlpi_phdr[i];
    const ElfW(Addr) begin = info.dlpi_addr + segment.p_vaddr;
    if (segment.p_type == PT_LOAD && here >= begin && here < begin + segment.p_memsz) return true;
  }
  return false;
}

bool write_slot(void** slot, void* function, const dl_phdr_info& info) {
  if (*slot == function) return true;
  const auto address = reinterpret_cast<ElfW(Addr)>(slot);
  bool read_only = false;  // behind RELRO, which the loader has sealed by now
  for (int i = 0; i < info.dlpi_phnum; ++i) {
    const ElfW(Phdr)& segment = info.dlpi_phdr[i];
    const ElfW(Addr) begin = info.dlpi_addr + segment.p_vaddr;
    if (segment.p_type == PT_GNU_RELRO && address >= begin && address < begin + segment.p_memsz)
      read_only = true;
  }
  const auto page_bytes = static_cast<ElfW(Addr)>(sysconf(_SC_PAGESIZE));
  void* page = reinterpret_cast<void*>(address & ~(page_bytes - 1));
  if (read_only && mprotect(page, page_bytes, PROT_READ | PROT_WRITE) != 0) return false;
  __atomic_store_n(slot, function, __ATOMIC_RELEASE);  // another thread may be calling through it
  if (read_only) mprotect(page, page_bytes, PROT_READ);
  return true;
}

struct Tables {
  const ElfW(Sym) * symbols = nullptr;
  const char* strings = nullptr;
  const ElfW(Rela) * calls = nullptr;
  std::size_t call_bytes = 0;
  const ElfW(Rela) * data = nullptr;
  std::size_t data_bytes = 0;
};

// glibc relocates these addresses in place in all objects but the vdso.
template <typename T>
const T* at(ElfW(Addr) value, const dl_phdr_info& info) {
  return reinterpret_cast<const T*>(value < info.dlpi_addr ? value + info.dlpi_addr : value);
}

Tables find_tables(const dl_phdr_info& info) {
  Tables tables;
  for (int i = 0; i < info.dlpi_phnum; ++i) {
    if (info.dlpi_phdr[i].p_type != PT_DYNAMIC) continue;
    const auto* entry = reinterpret_cast<const ElfW(Dyn)*>(info.dlpi_addr + info.dlpi_phdr[i].p_vaddr);
    for (; entry->d_tag != DT_NULL; ++entry) {
      switch (entry->d_tag) {
        case DT_SYMTAB:
          tables.symbols = at<ElfW(Sym)>(entry->d_un.d_ptr, info);
          break;
        case DT_STRTAB:
          tables.strings = at<char>(entry->d_un.d_ptr, info);
          break;
        case DT_JMPREL:
          tables.calls = at<ElfW(Rela)>(entry->d_un.d_ptr, info);
          break;
        case DT_PLTRELSZ:
          tables.call_bytes = entry->d_un.d_val;
          break;
        case DT_RELA:
          tables.data = at<ElfW(Rela)>(entry->d_un.d_ptr, info);
          break;
        case DT_RELASZ:
          tables.data_bytes = entry->d_un.d_val;
          break;
        default:
          break;
      }
    }
  }
  return tables;
}

void patch_table(const ElfW(Rela) * relocations, std::size_t bytes, const Tables& tables,
                 const dl_phdr_info& info, Walk& walk) {
  for (std::size_t i = 0; i < bytes / sizeof(ElfW(Rela)); ++i) {
    const auto type = static_cast<uint32_t>(ELF64_R_TYPE(relocations[i].r_info));
    if (type != kJumpSlot && type != kGlobData) continue;
    const std::string_view symbol =
        tables.strings + tables.symbols[ELF64_R_SYM(relocations[i].r_info)].st_name;
    for (const Replacement& replacement : walk.replacements) {
      if (symbol != replacement.symbol) continue;
      if (write_slot(reinterpret_cast<void**>(info.dlpi_addr + relocations[i].r_offset), replacement.function,
                     info)) {
        ++walk.patched;
      }
    }
  }
}

int patch_object(dl_phdr_info* info, std::size_t, void* argument) {
  Walk& walk = *static_cast<Walk*>(argument);
  const bool wanted =
      walk.only != nullptr
          ? contains(*info, walk.only)
          : !is_runtime(info->dlpi_name) && !contains(*info, reinterpret_cast<const void*>(&patch_imports));
  if (!wanted) return 0;
  const Tables tables = find_tables(*info);
  if (tables.symbols == nullptr || tables.strings == nullptr) return 0;
  patch_table(tables.calls, tables.calls == nullptr ? 0 : tables.call_bytes, tables, *info, walk);
  patch_table(tables.data, tables.data == nullptr ? 0 : tables.data_bytes, tables, *info, walk);
  return 0;
}

}  // namespace

std::size_t patch_imports(std::span<const Replacement> replacements) {
  Walk walk{replacements, nullptr};
  dl_iterate_phdr(patch_object, &walk);
  return walk.patched;
}

std::size_t patch_imports_of(const void* code, std::span<const Replacement> replacements) {
  Walk walk{replacements, code};
  dl_iterate_phdr(patch_object, &walk);
  return walk.patched;
}

}  // namespace moecached::shim
