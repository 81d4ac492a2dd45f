/* The public headers in a plain C program, compiled as C11 with -pedantic; the same text compiles as C++17
 * (header_test.cc). Compiling is half the test; running it shows that a C program can link and call the
 * library. */
#include <moecached/moecached.h>
#include <stdio.h>
#include <string.h>

#include "proto/shm/layout.h"
#include "proto/shm/stream_place.h"

int main(void) {
  moecached_session* session = NULL;
  moecached_status status =
      moecached_session_open("/nonexistent/moecached/handle.sock", "abi test", &session);
  if (status != MOECACHED_E_UNAVAILABLE || session != NULL || strlen(moecached_last_error()) == 0) {
    fprintf(stderr, "no daemon: status %d, sentence \"%s\"\n", (int)status, moecached_last_error());
    return 1;
  }
  if (sizeof(struct moecached_shm_record) != 64) return 1;
  moecached_session_close(NULL);
  return 0;
}
