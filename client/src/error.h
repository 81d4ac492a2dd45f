// The sentence behind moecached_last_error(). Every function of the client that can fail returns a
// moecached_status and leaves its reason here; nothing throws across the C interface. Thread: each thread has
// its own sentence.
#pragma once

#include "client/include/moecached/moecached.h"

namespace moecached::client {

// Keeps the sentence and returns `status`, so that a failure is one line: return fail(MOECACHED_E_IO, "...").
[[gnu::format(printf, 2, 3)]] moecached_status fail(moecached_status status, const char* format,
                                                    ...) noexcept;

// strerror() without its shared buffer. `error` is an errno value; the text stays valid for this thread's
// next call.
const char* error_name(int error) noexcept;

const char* last_error() noexcept;

}  // namespace moecached::client
