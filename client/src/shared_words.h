// Atomic access to words that two processes map. Builtins instead of std::atomic_ref, because the slot table
// is const here and C++20 has no atomic_ref of a const type. No fences: thread sanitizers cannot see them,
// and a sequentially consistent exchange is a full barrier as well (x86: xchg; arm64: swpal) at the same
// price. Thread: any. Memory: owns none.
#pragma once

#include <cstdint>

namespace moecached::client {

template <typename T>
[[nodiscard]] inline T load_relaxed(const T* word) noexcept {
  return __atomic_load_n(word, __ATOMIC_RELAXED);
}

template <typename T>
[[nodiscard]] inline T load_acquire(const T* word) noexcept {
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

template <typename T>
[[nodiscard]] inline T load_seq_cst(const T* word) noexcept {
  return __atomic_load_n(word, __ATOMIC_SEQ_CST);
}

template <typename T>
inline void store_relaxed(T* word, T value) noexcept {
  __atomic_store_n(word, value, __ATOMIC_RELAXED);
}

template <typename T>
inline void store_release(T* word, T value) noexcept {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

// A store with a full barrier behind it: no later load of this thread is satisfied before it is visible.
template <typename T>
inline void store_then_fence(T* word, T value) noexcept {
  (void)__atomic_exchange_n(word, value, __ATOMIC_SEQ_CST);
}

// For words with one writer, which is the caller: no locked instruction needed.
inline void add_to_own_word(std::uint64_t* word, std::uint64_t amount) noexcept {
  store_relaxed(word, load_relaxed(word) + amount);
}

}  // namespace moecached::client
