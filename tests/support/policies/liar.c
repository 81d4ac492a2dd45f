/* A policy library that answers wrongly, as its options say, and is an honest "lowest id first" otherwise. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "moecached_policy.h"

typedef enum { HONEST, FEWER, MORE, FOREIGN, HUGE_ID, TWICE, NOT_A_NUMBER } lie;
typedef struct {
  lie lie;
} liar;

static void* create(const moecached_policy_shape* shape, const char* options, char* error,
                    size_t error_bytes) {
  static const char* const names[] = {"",         "lie=fewer", "lie=more", "lie=foreign",
                                      "lie=huge", "lie=twice", "lie=nan"};
  (void)shape;
  for (int i = 0; i < (int)(sizeof names / sizeof names[0]); ++i) {
    if (strcmp(options, names[i]) != 0) continue;
    liar* self = malloc(sizeof *self);
    self->lie = (lie)i;
    return self;
  }
  if (strcmp(options, "lie=noise") == 0)
    memset(error, 0xff, error_bytes); /* no text, and no end */
  else if (strcmp(options, "lie=silent") != 0)
    snprintf(error, error_bytes, "it knows no such lie");
  return NULL;
}
static void destroy(void* self) { free(self); }
static void on_use(void* self, uint32_t expert, uint64_t step) {
  (void)self;
  (void)expert;
  (void)step;
}
static void on_remove(void* self, uint32_t expert) {
  (void)self;
  (void)expert;
}
static size_t rank(void* self, const uint32_t* candidates, size_t n_candidates, uint32_t* victims,
                   size_t n_victims) {
  const lie lie = ((liar*)self)->lie;
  size_t n = 0;
  for (uint64_t least = 0; n < n_victims && n < n_candidates; ++n) {
    uint64_t next = UINT32_MAX;
    for (size_t i = 0; i < n_candidates; ++i)
      if (candidates[i] >= least && candidates[i] < next) next = candidates[i];
    victims[n] = (uint32_t)next;
    least = next + 1;
  }
  if (lie == FEWER) return n - 1;
  if (lie == MORE) return n + 1;
  if (lie == FOREIGN) victims[0] = 7; /* the tests keep it out of the candidates */
  if (lie == HUGE_ID) victims[0] = UINT32_MAX;
  if (lie == TWICE && n > 1) victims[1] = victims[0];
  return n;
}
static double gain(void* self, uint32_t newcomer, uint32_t victim) {
  if (((liar*)self)->lie == NOT_A_NUMBER) return NAN;
  return (double)newcomer - (double)victim;
}

const moecached_policy_api* moecached_policy_entry(void) {
  static const moecached_policy_api api = {
      .abi = MOECACHED_POLICY_ABI,
      .struct_bytes = sizeof(moecached_policy_api),
      .name = "liar",
      .options = "lie",
      .create = create,
      .destroy = destroy,
      .on_insert = on_use,
      .on_access = on_use,
      .on_remove = on_remove,
      .rank = rank,
      .gain = gain,
  };
  return &api;
}
