/* Reads experts through a moecached daemon and compares every byte with the model file.
 *
 *   cc read_expert.c -o read_expert $(pkg-config --cflags --libs moecached)
 *   ./read_expert model.gguf    # or all shards, in order; or *.safetensors with config.json and their index
 *
 * $MOECACHED_SOCKET names another daemon. It is the whole life of a client: session, model, lane, resolve,
 * use, end, close. A run-time does the same, with a matrix product in place of the comparison. Exit status: 0
 * when every byte is right, 1 when not, 2 on an error. */
#define _POSIX_C_SOURCE 200809L
#include <fcntl.h>
#include <inttypes.h>
#include <moecached/moecached.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { EXPERTS = 4, EXIT_DIFFERENT = 1, EXIT_ERROR = 2 };

static void check(moecached_status status, const char* what) {
  if (status == MOECACHED_OK) return;
  fprintf(stderr, "%s: %s\n", what, moecached_last_error());
  exit(EXIT_ERROR);
}

/* The same bytes, read from the file with no help. */
static int equals_file(const char* path, uint64_t offset, const void* bytes, size_t size) {
  char* expected = malloc(size);
  int fd = open(path, O_RDONLY);
  size_t got = 0;
  while (expected != NULL && fd >= 0 && got < size) {
    ssize_t n = pread(fd, expected + got, size - got, (off_t)(offset + got));
    if (n <= 0) break;
    got += (size_t)n;
  }
  int equal = got == size && memcmp(expected, bytes, size) == 0;
  if (fd >= 0) close(fd);
  free(expected);
  return equal;
}

int main(int argc, char** argv) {
  if (argc < 2) {
    fprintf(stderr, "usage: %s model.gguf [further shards...]\n", argv[0]);
    return EXIT_ERROR;
  }

  /* A session is one connection to the daemon; NULL: $MOECACHED_SOCKET, or the system's daemon. */
  moecached_session* session = NULL;
  moecached_model* model = NULL;
  moecached_lane* lane = NULL;
  check(moecached_session_open(NULL, "read_expert", &session), "no session");
  check(moecached_model_open(session, (const char* const*)argv + 1, (size_t)argc - 1, &model),
        "model refused");
  /* A lane is one thread of computation. */
  check(moecached_lane_open(model, &lane), "no lane");

  const uint32_t layer = 0;
  moecached_layer_info info;
  check(moecached_model_layer(model, layer, &info), "layer");
  printf("%" PRIu32 " MoE layers; blk.%" PRIu32 ": %" PRIu32 " experts, %" PRIu32 " slots of %" PRIu64
         " bytes\n",
         moecached_model_layers(model), info.block, info.n_experts, info.n_slots, info.slot_stride);

  /* What a router would have chosen for one token. No more than the layer has slots; a larger set is
   * streamed. */
  int32_t ids[EXPERTS];
  int32_t slots[EXPERTS];
  size_t n = 0;
  while (n < EXPERTS && n < info.n_slots && n < info.n_experts) {
    ids[n] = (int32_t)(n * info.n_experts / EXPERTS);
    if (n > 0 && ids[n] == ids[n - 1]) break;
    ++n;
  }
  check(moecached_lane_resolve(lane, layer, ids, 1, n, sizeof ids, slots), "resolve");

  /* From here to moecached_lane_end() the slots are ours: nobody overwrites them. */
  int different = 0;
  for (size_t i = 0; i < n; ++i) {
    for (uint32_t p = 0; p < info.n_parts; ++p) {
      moecached_part_info part;
      check(moecached_model_part(model, layer, p, &part), "part");
      const char* bytes = (const char*)info.window + (uint64_t)slots[i] * info.slot_stride + part.slot_offset;
      uint32_t file;
      uint64_t offset;
      check(moecached_model_locate(model, layer, p, (uint32_t)ids[i], &file, &offset), "locate");
      int equal = equals_file(argv[1 + file], offset, bytes, part.expert_bytes);
      printf("expert %3" PRId32 " in slot %3" PRId32 ": %-40s %9" PRIu64 " bytes, %s\n", ids[i], slots[i],
             part.name, part.expert_bytes, equal ? "equal" : "DIFFERENT");
      different |= !equal;
    }
  }
  moecached_lane_end(lane);

  moecached_counters counters;
  moecached_model_counters(model, &counters);
  printf("lookups %" PRIu64 ", hits %" PRIu64 ", leases %" PRIu64
         ", read from the file by this process %" PRIu64 "\n",
         counters.lookups, counters.hits, counters.leases, counters.fallback_reads);

  /* In this order: lanes, models, session. */
  moecached_lane_close(lane);
  moecached_model_close(model);
  moecached_session_close(session);
  return different ? EXIT_DIFFERENT : EXIT_SUCCESS;
}
