/* LRU-2 as a policy library: the victim is the expert whose last use but one lies furthest back (E. O'Neil,
 * P. O'Neil, G. Weikum, "The LRU-K Page Replacement Algorithm", SIGMOD 1993). Uses within `period` steps
 * count as one. Absent experts are remembered, so that gains can be told.
 *
 *   cc -O2 -shared -fPIC -I/usr/include/moecached lru2.c -o lru2.so
 *   install -o root -m 644 lru2.so /usr/lib/moecached/policies/       # [policy] directory in moecached.toml
 *   moecachectl policy set lib:lru2:period=2 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "moecached_policy.h"

#define PERIOD_MAX 1000u

typedef struct {
  uint64_t last, before; /* steps of the last use and of the one before; 0: never */
} history;

typedef struct {
  uint32_t n_experts;
  uint64_t period, now;
  history experts[];
} lru2;

static void use(lru2* policy, uint32_t expert, uint64_t step) {
  history* seen = &policy->experts[expert];
  if (step > policy->now) policy->now = step;
  if (step <= seen->last) return; /* the same event, or one that seed told of */
  if (seen->last == 0 || step - seen->last > policy->period) seen->before = seen->last;
  seen->last = step;
}

static void* create(const moecached_policy_shape* shape, const char* options, char* error,
                    size_t error_bytes) {
  unsigned period = 0;
  if (*options != '\0') {
    char rest = 0;
    if (sscanf(options, "period=%u%c", &period, &rest) != 1 || period > PERIOD_MAX) {
      snprintf(error, error_bytes, "period must be a whole number from 0 to %u", PERIOD_MAX);
      return NULL;
    }
  }
  lru2* policy = calloc(1, sizeof *policy + shape->n_experts * sizeof policy->experts[0]);
  if (policy == NULL) {
    snprintf(error, error_bytes, "no memory");
    return NULL;
  }
  policy->n_experts = shape->n_experts;
  policy->period = period;
  return policy;
}

static void destroy(void* policy) { free(policy); }
static void on_use(void* policy, uint32_t expert, uint64_t step) { use(policy, expert, step); }
static void on_remove(void* policy, uint32_t expert) { /* what was learnt about it stays */
  (void)policy;
  (void)expert;
}

/* The older last use but one goes first; then the older last use; then the lower id, so that there are no
 * ties. */
static int goes_before(const lru2* policy, uint32_t a, uint32_t b) {
  const history *x = &policy->experts[a], *y = &policy->experts[b];
  if (x->before != y->before) return x->before < y->before;
  if (x->last != y->last) return x->last < y->last;
  return a < b;
}

/* Insertion into the best n so far: n is a handful, and there is nothing to allocate. */
static size_t rank(void* self, const uint32_t* candidates, size_t n_candidates, uint32_t* victims,
                   size_t n_victims) {
  const lru2* policy = self;
  size_t n = 0;
  for (size_t i = 0; i < n_candidates && n_victims > 0; ++i) {
    if (n == n_victims && !goes_before(policy, candidates[i], victims[n - 1])) continue;
    size_t at = n < n_victims ? n++ : n - 1;
    for (; at > 0 && goes_before(policy, candidates[i], victims[at - 1]); --at) victims[at] = victims[at - 1];
    victims[at] = candidates[i];
  }
  return n;
}

/* Two uses since the last but one: that is its rate. */
static double rate(const lru2* policy, uint32_t expert) {
  const history* seen = &policy->experts[expert];
  return seen->before == 0 ? 0 : 2.0 / (double)(policy->now - seen->before + 1);
}
static double gain(void* policy, uint32_t newcomer, uint32_t victim) {
  return rate(policy, newcomer) - rate(policy, victim);
}

static void seed(void* self, const moecached_policy_past* past, uint32_t n_experts, uint64_t now) {
  lru2* policy = self;
  policy->now = now;
  for (uint32_t i = 0; i < n_experts; ++i) {
    history* seen = &policy->experts[i];
    seen->last = past[i].last_step;
    const double apart = past[i].uses_per_step > 0 ? 1 / past[i].uses_per_step : 0;
    seen->before = apart > 0 && apart < (double)seen->last ? seen->last - (uint64_t)apart : 0;
  }
}

__attribute__((visibility("default"))) const moecached_policy_api* moecached_policy_entry(void) {
  static const moecached_policy_api api = {
      .abi = MOECACHED_POLICY_ABI,
      .struct_bytes = sizeof(moecached_policy_api),
      .name = "LRU-2",
      .options = "period (0 to 1000 steps)",
      .create = create,
      .destroy = destroy,
      .on_insert = on_use,
      .on_access = on_use,
      .on_miss = on_use,
      .on_remove = on_remove,
      .rank = rank,
      .gain = gain,
      .seed = seed,
  };
  return &api;
}
