// Sentences for people on stderr. Not a logger: a host program owns its log, and the plugin speaks seldom.
// Thread: any.
#ifndef MOECACHED_SHIM_GGML_LOG_H_
#define MOECACHED_SHIM_GGML_LOG_H_

namespace moecached::shim {

// Always printed: something was refused, left out or lost. printf format, without a newline.
void say(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Printed with MOECACHED_LOG=debug.
void debug(const char* format, ...) __attribute__((format(printf, 1, 2)));
bool debug_enabled();

}  // namespace moecached::shim
#endif  // MOECACHED_SHIM_GGML_LOG_H_
