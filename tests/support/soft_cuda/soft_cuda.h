// What tests ask the soft CUDA driver besides CUDA's own functions; look these up with dlsym in the library
// that $MOECACHED_LIBCUDA names. Thread: any.
#pragma once

extern "C" {
// Starts a new list of the driver functions called in this process.
void soft_cuda_trace_start(void);
// Their names, one a line, without version suffix. Valid until the next call of either function.
const char* soft_cuda_trace_stop(void);
// The next call of the function (name without version suffix) returns `result` and does nothing.
void soft_cuda_fail_next(const char* function, int result);
// From now on the k-th call of any driver function returns `result` and does nothing, and so does every k-th
// behind it if `each`; k 0: none.
void soft_cuda_fail_each(unsigned long long k, int each, int result);
// Calls since then, and of those that failed so.
void soft_cuda_fail_counts(unsigned long long* seen, unsigned long long* failed);
// The next call of the function waits, before it does anything, until soft_cuda_release.
void soft_cuda_hold_next(const char* function);
// Whether one waits.
int soft_cuda_holds(void);
void soft_cuda_release(void);
// From now on every call with this device's context fails; -1: no device is lost any more.
void soft_cuda_lose(int device);
// Bytes of device memory that this process has created and not freed.
unsigned long long soft_cuda_vram_used(void);
// Reservations, mappings, registrations and references to the context that exist: 0 when all was given back.
unsigned long long soft_cuda_objects(void);
}
