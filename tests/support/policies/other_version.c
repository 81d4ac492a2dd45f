/* Made for another version of the interface, which this daemon must not call into. */
#include <stdlib.h>

#include "moecached_policy.h"

static void* create(const moecached_policy_shape* shape, const char* options, char* error,
                    size_t error_bytes) {
  (void)shape;
  (void)options;
  (void)error;
  (void)error_bytes;
  abort();
}

const moecached_policy_api* moecached_policy_entry(void) {
  static const moecached_policy_api api = {
      .abi = 7, .struct_bytes = 16, .create = create};
  return &api;
}
