#include "shim/ggml/log.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace moecached::shim {
namespace {

void print(const char* format, va_list arguments) {
  char line[2048];
  std::vsnprintf(line, sizeof line, format, arguments);
  std::fprintf(stderr, "moecache: %s\n", line);  // one call, so that lines of several threads do not mix
}

}  // namespace

void say(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  print(format, arguments);
  va_end(arguments);
}

bool debug_enabled() {
  static const bool enabled = [] {
    const char* level = std::getenv("MOECACHED_LOG");
    return level != nullptr && std::strcmp(level, "debug") == 0;
  }();
  return enabled;
}

void debug(const char* format, ...) {
  if (!debug_enabled()) return;
  va_list arguments;
  va_start(arguments, format);
  print(format, arguments);
  va_end(arguments);
}

}  // namespace moecached::shim
