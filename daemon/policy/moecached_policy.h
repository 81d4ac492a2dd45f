/* A policy as a shared library: which of the resident experts of one layer is the cheapest to lose. Pure C.
 *
 * The library exports one function, moecached_policy_entry, which returns a table of functions. The daemon
 * loads NAME.so from its policy.directory when an administrator says `moecachectl policy set lib:NAME`, or
 * `lib:NAME:KEY=VALUE,KEY=VALUE`; `admit=` among the options is the daemon's own and never seen here. One
 * policy is created for each MoE layer of each model. A library stays loaded until the daemon ends; a newer
 * one needs another name.
 *
 * What a policy is not: it frees nothing, starts no read and does not decide when anything is evicted. The
 * daemon checks each answer: a wrong one costs an LRU choice for that call, is counted and reported. It
 * cannot check memory: a library that crashes, hangs or writes where it should not takes the daemon with it.
 *
 * Threads: create and all calls on one thread at a time, the daemon's core loop, which serves every client:
 * each call has microseconds. Memory: allocate in create, nothing in the other calls. Pointers that are
 * passed in are valid during the call. */
#ifndef MOECACHED_POLICY_H
#define MOECACHED_POLICY_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MOECACHED_POLICY_ABI 2u /* of moecached_policy_api; another one is refused */

typedef struct moecached_policy_shape {
  uint32_t n_experts; /* ids are 0..n_experts-1 */
  uint32_t n_slots; /* how many can be resident at first, 1..n_experts. Where layers trade slots (pool.scope =
                     * global) it changes later, up to n_experts, which shows in the number of candidates alone */
} moecached_policy_shape;

/* What was seen of an expert before the policy was created. */
typedef struct moecached_policy_past {
  double uses_per_step; /* 0..1, newer steps weighing more */
  uint64_t last_step;   /* 0: never used */
} moecached_policy_past;

/* A step is one routed token set of the layer: steps grow from 1, experts of one step count as simultaneous.
 */
typedef struct moecached_policy_api {
  uint32_t abi;          /* MOECACHED_POLICY_ABI */
  uint32_t struct_bytes; /* sizeof(moecached_policy_api) */
  const char* name;      /* for people */
  const char* options;   /* for people: "period=0..1000 (0), ..."; "" or NULL: it has none */

  /* options: "KEY=VALUE,KEY=VALUE" or "". NULL: refused; write why into error, a string of less than
   * error_bytes. */
  void* (*create)(const moecached_policy_shape* shape, const char* options, char* error, size_t error_bytes);
  void (*destroy)(void* policy);

  /* The expert became resident because of `step`; it was not. */
  void (*on_insert)(void* policy, uint32_t expert, uint64_t step);
  /* A resident expert was used. */
  void (*on_access)(void* policy, uint32_t expert, uint64_t step);
  /* An absent expert was used; on_insert need not follow. May be NULL. */
  void (*on_miss)(void* policy, uint32_t expert, uint64_t step);
  /* A resident expert was removed, by rank's choice or another reason. */
  void (*on_remove)(void* policy, uint32_t expert);

  /* Writes victims, the best first; returns how many: the smaller of n_candidates and n_victims. Each must be
   * one of the candidates, which are resident and distinct, and none may come twice. */
  size_t (*rank)(void* policy, const uint32_t* candidates, size_t n_candidates, uint32_t* victims,
                 size_t n_victims);

  /* What is gained, in uses per step, by the absent newcomer in place of the resident victim; 0 or less:
   * leave it. Asked where a miss is read in place (GPUs). NULL: every miss is worth it. */
  double (*gain)(void* policy, uint32_t newcomer, uint32_t victim);

  /* Warm start, before the first event: past[0..n_experts-1], as of step `now`. Events of older steps that
   * follow are part of it. May be NULL. */
  void (*seed)(void* policy, const moecached_policy_past* past, uint32_t n_experts, uint64_t now);
} moecached_policy_api;

/* What the library exports. The table lives as long as the library. */
#define MOECACHED_POLICY_ENTRY "moecached_policy_entry"
const moecached_policy_api* moecached_policy_entry(void);

#ifdef __cplusplus
}
#endif

#endif
