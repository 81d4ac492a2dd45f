/* Computes the MoE layers of a model for a few tokens, on slots of a moecached daemon, and once more on bytes
 * that it reads from the file itself: the numbers must be equal, bit by bit.
 *
 *   cc -O2 moe_layer.c -o moe_layer $(pkg-config --cflags --libs moecached) -lm
 *   ./moe_layer model.gguf      # or all shards, in order; or *.safetensors with config.json and their index
 *
 * What an engine does with its own router and kernels in the place of these. $MOECACHED_SOCKET names another
 * daemon. moe_layer.cu is the same on a GPU. Exit status: 0 when all is equal, 1 when not, 2 on an error. */
#define _POSIX_C_SOURCE 200809L
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "weights.h"

enum { TOKENS = 6, EXPERTS = 4, PARTS_MAX = 8, EXIT_DIFFERENT = 1, EXIT_ERROR = 2 };

static void fail(const char* what, const char* why) {
  fprintf(stderr, "%s: %s\n", what, why);
  exit(EXIT_ERROR);
}

static void check(moecached_status status, const char* what) {
  if (status != MOECACHED_OK) fail(what, moecached_last_error());
}

static void* allocate(size_t bytes) {
  void* memory = malloc(bytes > 0 ? bytes : 1);
  if (memory == NULL) fail("memory", "there is none left");
  return memory;
}

/* What a router would choose: distinct experts, some of them again and again. */
static size_t route(uint32_t token, uint32_t layer, const moecached_layer_info* info, int32_t* ids,
                    float* shares) {
  size_t n = 0;
  for (uint32_t i = 0; n < EXPERTS && n < info->n_slots && i < info->n_experts; ++i) {
    const int32_t id = (int32_t)((token / 2 * 5 + layer + i * 3) % info->n_experts);
    int is_new = 1;
    for (size_t k = 0; k < n; ++k) is_new &= ids[k] != id;
    if (is_new) ids[n++] = id;
  }
  for (size_t k = 0; k < n; ++k) shares[k] = 1.0f / (float)(k + 2);
  return n;
}

/* y += share * down(silu(gate x) * (up x)). inner: room for as many floats as `gate` has rows. */
static void add_expert(const struct moe_layer* layer, const unsigned char* const* base, float share,
                       const float* x, float* inner, float* y) {
  for (uint64_t row = 0; row < layer->gate.n_rows; ++row) inner[row] = inner_row(layer, base, row, x);
  for (uint64_t row = 0; row < layer->down.n_rows; ++row)
    y[row] += share * row_times(&layer->down, base, row, inner);
}

/* One part of one expert, with no help of the daemon. */
static unsigned char* read_part(char** paths, uint32_t file, uint64_t offset, uint64_t size) {
  unsigned char* bytes = allocate(size);
  const int fd = open(paths[file], O_RDONLY | O_CLOEXEC);
  for (uint64_t got = 0; got < size;) {
    const ssize_t n = pread(fd, bytes + got, size - got, (off_t)(offset + got));
    if (n <= 0) fail(paths[file], "cannot be read");
    got += (uint64_t)n;
  }
  close(fd);
  return bytes;
}

/* Returns whether the two results are equal. */
static int compute_layer(moecached_model* model, moecached_lane* lane, char** paths, uint32_t token,
                         uint32_t index) {
  moecached_layer_info info;
  moecached_part_info parts[PARTS_MAX];
  struct moe_layer layer;
  check(moecached_model_layer(model, index, &info), "layer");
  for (uint32_t p = 0; p < info.n_parts; ++p) check(moecached_model_part(model, index, p, &parts[p]), "part");
  const char* why = describe_layer(parts, info.n_parts, &layer);
  if (why != NULL) fail("this example cannot compute the model", why);

  const uint64_t hidden = layer.down.n_rows;
  float* x = allocate(hidden * sizeof(float));
  float* inner = allocate(layer.gate.n_rows * sizeof(float));
  float* y = calloc(2 * hidden, sizeof(float)); /* of the slots, then of the file */
  if (y == NULL) fail("memory", "there is none left");
  for (uint64_t i = 0; i < hidden; ++i) x[i] = (float)((i * 7 + token * 13 + index) % 31) / 16.0f - 1.0f;

  int32_t ids[EXPERTS], slots[EXPERTS];
  float shares[EXPERTS];
  const size_t n = route(token, index, &info, ids, shares);
  /* Waits for what is not resident. From here to the next resolve, or moecached_lane_end, the slots are ours.
   */
  check(moecached_lane_resolve(lane, index, ids, 1, n, sizeof ids, slots), "resolve");
  for (size_t k = 0; k < n; ++k) {
    const unsigned char* base[PARTS_MAX];
    const unsigned char* slot = (const unsigned char*)info.window + (uint64_t)slots[k] * info.slot_stride;
    for (uint32_t p = 0; p < info.n_parts; ++p) base[p] = slot + parts[p].slot_offset;
    add_expert(&layer, base, shares[k], x, inner, y);
  }
  for (size_t k = 0; k < n; ++k) {
    unsigned char* base[PARTS_MAX];
    for (uint32_t p = 0; p < info.n_parts; ++p) {
      uint32_t file;
      uint64_t offset;
      check(moecached_model_locate(model, index, p, (uint32_t)ids[k], &file, &offset), "locate");
      base[p] = read_part(paths, file, offset, parts[p].expert_bytes);
    }
    add_expert(&layer, (const unsigned char* const*)base, shares[k], x, inner, y + hidden);
    for (uint32_t p = 0; p < info.n_parts; ++p) free(base[p]);
  }
  const int equal = memcmp(y, y + hidden, hidden * sizeof(float)) == 0;
  printf("token %" PRIu32 ", blk.%" PRIu32 ": %zu experts, y[0] %+.6e, %s\n", token, info.block, n,
         (double)y[0], equal ? "equal" : "DIFFERENT");
  free(x);
  free(inner);
  free(y);
  return equal;
}

int main(int argc, char** argv) {
  if (argc < 2) {
    fprintf(stderr, "usage: %s model.gguf [further shards...]\n", argv[0]);
    return EXIT_ERROR;
  }
  moecached_session* session = NULL;
  moecached_model* model = NULL;
  moecached_lane* lane = NULL;
  check(moecached_session_open(NULL, "moe_layer", &session), "no session");
  check(moecached_model_open(session, (const char* const*)argv + 1, (size_t)argc - 1, &model),
        "model refused");
  check(moecached_lane_open(model, &lane), "no lane");

  int equal = 1;
  for (uint32_t token = 0; token < TOKENS; ++token) {
    for (uint32_t layer = 0; layer < moecached_model_layers(model); ++layer)
      equal &= compute_layer(model, lane, argv + 1, token, layer);
    moecached_lane_end(lane); /* the token's graph is done: whoever waits for a slot need not wait for us */
  }
  moecached_counters counters;
  moecached_model_counters(model, &counters);
  printf("%s: lookups %" PRIu64 ", hits %" PRIu64 ", leases %" PRIu64
         ", read from the file by the client library %" PRIu64 "\n",
         equal ? "equal" : "DIFFERENT", counters.lookups, counters.hits, counters.leases,
         counters.fallback_reads);
  moecached_lane_close(lane);
  moecached_model_close(model);
  moecached_session_close(session);
  return equal ? EXIT_SUCCESS : EXIT_DIFFERENT;
}
