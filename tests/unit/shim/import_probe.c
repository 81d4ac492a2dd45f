// Calls what the plugin hooks, through the import table of an object of its own.
#define _GNU_SOURCE
#include <stddef.h>
#include <sys/mman.h>
#include <sys/types.h>

void* probe_mmap(size_t bytes, int flags, int fd);
int probe_munmap(void* address, size_t bytes);
int probe_mlock(const void* address, size_t bytes);
int probe_advise(void* address, size_t bytes, int advice);

void* probe_mmap(size_t bytes, int flags, int fd) { return mmap(NULL, bytes, PROT_READ, flags, fd, 0); }
int probe_munmap(void* address, size_t bytes) { return munmap(address, bytes); }
int probe_mlock(const void* address, size_t bytes) { return mlock(address, bytes); }
int probe_advise(void* address, size_t bytes, int advice) { return posix_madvise(address, bytes, advice); }
