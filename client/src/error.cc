#include "client/src/error.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace moecached::client {
namespace {

constexpr std::size_t kSentenceBytes = 1024;
thread_local char sentence[kSentenceBytes] = "";
thread_local char error_text[128] = "";

}  // namespace

moecached_status fail(moecached_status status, const char* format, ...) noexcept {
  char text[kSentenceBytes];  // an argument may be the old sentence itself
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  std::memcpy(sentence, text, sizeof sentence);
  return status;
}

const char* error_name(int error) noexcept { return strerror_r(error, error_text, sizeof error_text); }

const char* last_error() noexcept { return sentence; }

}  // namespace moecached::client
