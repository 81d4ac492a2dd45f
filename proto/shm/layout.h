// Shared-memory layout between the daemon and its clients, plain C so that any engine can map it.
//
// Three kinds of segment, each a sealed memfd made by the daemon:
//
//   model segment   read-only in clients, one per registered model
//     [moecached_shm_header][moecached_shm_model][layers...][parts...][slot table: int32 per (layer, expert)]
//   pool segment    read-only in clients, one per model: the slots themselves, one window per layer
//     window of layer l: n_slots records of slot_stride bytes; part p of slot s lies at
//     window_offset + s * slot_stride + part.slot_offset
//   session segment read-write in ONE client, one per session
//     [moecached_shm_header][moecached_shm_session][lane 0][lane 1]...
//     lane: words written by the client | words written by the daemon | ring of 64-byte records
//   stream segment  read-only in ONE client, one per (session, model): lane i owns bytes
//     [i * stream_bytes_per_lane, (i + 1) * stream_bytes_per_lane), split in two halves
//
// Everything a client writes is hostile: the daemon copies a record once, then range-checks the copy.
//
// The protocol of a lane (one backend instance of a client, one thread at a time), for layer l:
//   1. completed = epoch                (release; everything the last epoch read is no longer used)
//   2. begun = (epoch + 1) << 16 | l    (relaxed), then a full fence
//   3. load the slot table entries      (acquire)
//   4. all present: compute, post a ROUTE record. Nobody waits, nothing is called.
//      one absent:  completed = epoch + 1 (it used nothing), post a LEASE record with the epoch in which it
//      is going to compute (epoch + 2), ring the doorbell, futex-wait on lease_done, go to 2.
// The daemon, to reuse a slot of layer l: entry = -1 (release and a full fence, or sequentially consistent), then for each lane of that model
// read begun; a lane whose begun names another layer is quiescent for l (should it begin l later it sees the
// flip: x86 orders store-load only across a full fence, hence one on both sides); a lane that names l must
// reach completed >= its begun epoch first. Lanes that use all layers in one epoch (GPU graphs) write
// MOECACHED_LAYER_ALL.
#ifndef MOECACHED_SHM_LAYOUT_H_
#define MOECACHED_SHM_LAYOUT_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#define MOECACHED_STATIC_ASSERT(condition, text) static_assert(condition, text)
extern "C" {
#else
#define MOECACHED_STATIC_ASSERT(condition, text) _Static_assert(condition, text)
#endif

enum {
  MOECACHED_SHM_VERSION = 1,      // of this file; the two sides must be equal
  MOECACHED_MAX_LANES = 16,       // per session
  MOECACHED_RING_RECORDS = 2048,  // per lane, a power of two
  MOECACHED_RECORD_IDS = 20,      // expert ids in one record; longer lists continue in the next one
  MOECACHED_MAX_EXPERTS = 4096,   // per layer
  MOECACHED_MAX_LAYERS = 4096,    // MoE layers of a model
  MOECACHED_MAX_PARTS = 8,        // parts of one layer
  MOECACHED_MAX_FILES = 128,      // shards of a model
  MOECACHED_LAYER_ALL = 0xffff,   // in `begun`: this epoch may use every layer
  MOECACHED_ABSENT = -1,          // in the slot table: not resident
};

#define MOECACHED_SHM_MAGIC UINT64_C(0x3148434143454f4d) /* "MOECACH1" little-endian */

enum moecached_segment_kind { MOECACHED_SEGMENT_MODEL = 1, MOECACHED_SEGMENT_SESSION = 2 };

struct moecached_shm_header {
  uint64_t magic;
  uint32_t version;       // MOECACHED_SHM_VERSION
  uint32_t kind;          // moecached_segment_kind
  uint64_t bytes;         // of the segment
  uint64_t boot_epoch;    // random per daemon start: a quick restart is never mistaken for the same daemon
  uint64_t reserved[4];
};
MOECACHED_STATIC_ASSERT(sizeof(struct moecached_shm_header) == 64, "header");

// ---------------------------------------------------------------------------------------------- model segment
struct moecached_shm_model {
  uint32_t model_id;
  uint32_t n_layers;               // MoE layers, dense index; layer.block is the N of "blk.N."
  uint32_t n_parts;                // over all layers
  uint32_t n_files;
  uint32_t n_expert_used;          // top-k
  uint32_t reserved0;
  uint64_t layers_offset;          // bytes from the start of the segment
  uint64_t parts_offset;
  uint64_t table_offset;           // int32 entries, layer l starts at entry layers[l].table_first
  uint64_t pool_bytes;             // of the pool segment
  uint64_t stream_bytes_per_lane;  // a multiple of 4096 * 2; half of it holds at least one expert of any part
  char name[256];                  // for people; zero-terminated
};

struct moecached_shm_layer {
  uint32_t block;          // N of "blk.N."
  uint32_t n_experts;
  uint32_t n_parts;
  uint32_t first_part;     // index into the parts array
  uint32_t slot_class;     // layers of equal part types and sizes share it
  uint32_t n_slots;        // resident records this layer can hold; <= n_experts
  uint32_t table_first;    // first entry of this layer in the slot table
  uint32_t reserved0;
  uint64_t window_offset;  // in the pool segment, a multiple of 4096
  uint64_t window_bytes;   // a multiple of 4096, >= n_slots * slot_stride
  uint64_t slot_stride;    // bytes of one record
};
MOECACHED_STATIC_ASSERT(sizeof(struct moecached_shm_layer) == 56, "layer");

enum moecached_part_kind {
  MOECACHED_PART_GATE = 0,
  MOECACHED_PART_UP = 1,
  MOECACHED_PART_DOWN = 2,
  MOECACHED_PART_GATE_UP = 3,
  MOECACHED_PART_GATE_BIAS = 4,
  MOECACHED_PART_UP_BIAS = 5,
  MOECACHED_PART_DOWN_BIAS = 6,
  MOECACHED_PART_GATE_UP_BIAS = 7,
};

struct moecached_shm_part {
  uint32_t kind;          // moecached_part_kind
  uint32_t ggml_type;
  uint32_t file;          // index of the shard
  uint32_t reserved0;
  uint64_t ne0;           // elements of one row
  uint64_t ne1;           // rows of one expert (1 for biases)
  uint64_t file_offset;   // bytes, of expert 0; expert e at file_offset + e * expert_bytes
  uint64_t expert_bytes;
  uint64_t slot_offset;   // bytes within a record
  char name[72];          // tensor name in the GGUF, zero-terminated
};
MOECACHED_STATIC_ASSERT(sizeof(struct moecached_shm_part) == 128, "part");

// -------------------------------------------------------------------------------------------- session segment
struct moecached_shm_session {
  uint64_t session_id;
  uint32_t n_lanes;        // MOECACHED_MAX_LANES
  uint32_t ring_records;   // MOECACHED_RING_RECORDS
  uint64_t lanes_offset;
  uint64_t lane_stride;    // sizeof(struct moecached_shm_lane)
};

enum moecached_record_kind {
  MOECACHED_RECORD_ROUTE = 1,   // ids were used and were all resident
  MOECACHED_RECORD_LEASE = 2,   // make these resident and keep them until `completed` reaches `epoch`
  MOECACHED_RECORD_STREAM = 3,  // read one part of these experts into a half of the lane's stream buffer, packed
};

enum moecached_record_flags {
  MOECACHED_FLAG_MORE = 1,      // the id list continues in the next record of the ring
  MOECACHED_FLAG_PREFILL = 2,   // ids come from a prompt batch
};

// One cache line. Written by the client, then published by `head` (release).
struct moecached_shm_record {
  uint16_t kind;
  uint16_t flags;
  uint16_t layer;
  uint16_t n_ids;          // in this record, 1..MOECACHED_RECORD_IDS
  uint32_t seq;            // LEASE, STREAM: the value that lease_done / stream_done[half] gets
  uint16_t part;           // STREAM: 0..layer.n_parts-1
  uint16_t half;           // STREAM: 0 or 1
  uint64_t epoch;          // ROUTE: the epoch that uses the ids; LEASE: the one that is going to
  uint16_t ids[MOECACHED_RECORD_IDS];
};
MOECACHED_STATIC_ASSERT(sizeof(struct moecached_shm_record) == 64, "one cache line");

enum moecached_grant_status {
  MOECACHED_GRANT_OK = 0,
  MOECACHED_GRANT_IO_ERROR = 1,       // the read failed: the client may read the file itself
  MOECACHED_GRANT_MODEL_CHANGED = 2,  // the file is not the registered one any more: do not compute
  MOECACHED_GRANT_REFUSED = 3,        // the record was not valid, or more experts than slots
};

struct moecached_shm_lane {
  // Written by the client.
  uint64_t begun;             // epoch << 16 | layer
  uint64_t completed;         // epoch
  uint32_t state;             // 0 closed, 1 open
  uint32_t model_id;          // set before state = 1
  uint64_t head;              // records published, monotonic
  uint64_t dropped;           // ROUTE records not posted because the ring was full
  uint64_t fallback_reads;    // experts (or parts) the client read from the file itself
  uint64_t fallback_bytes;
  uint64_t lookups;           // (token, expert) pairs resolved, for status displays only
  // Written by the daemon.
  uint64_t tail;              // records consumed, monotonic
  uint32_t lease_done;        // futex word: seq of the last finished LEASE
  uint32_t lease_status;      // moecached_grant_status, valid once lease_done has its seq
  uint32_t stream_done[2];    // futex words
  uint32_t stream_status[2];
  uint32_t want_doorbell;     // 1: the daemon sleeps and waits for an epoch or a record of this lane
  uint32_t reserved0[7];
  struct moecached_shm_record ring[MOECACHED_RING_RECORDS];
};
MOECACHED_STATIC_ASSERT(offsetof(struct moecached_shm_lane, tail) == 64, "one line per writer");
MOECACHED_STATIC_ASSERT(offsetof(struct moecached_shm_lane, ring) == 128, "records are cache lines");

// --------------------------------------------------------------------------------------------- handle socket
// SOCK_SEQPACKET Unix socket; one message a packet, file descriptors ride along (SCM_RIGHTS). A client sends
// HELLO once, then any number of MODEL_OPEN; the socket stays open as long as the session lives.
#define MOECACHED_HANDLE_MAGIC UINT32_C(0x4843454d) /* "MECH" */

enum {
  MOECACHED_HANDLE_VERSION = 1,
  MOECACHED_ERROR_TEXT = 512,
};

enum moecached_handle_type {
  MOECACHED_HANDLE_HELLO = 1,         // client -> daemon, fds: [own pidfd] (optional, needed across PID namespaces)
  MOECACHED_HANDLE_WELCOME = 2,       // daemon -> client, fds: [session segment, doorbell eventfd]
  MOECACHED_HANDLE_MODEL_OPEN = 3,    // client -> daemon, fds: [shard 0, shard 1, ...] opened read-only
  MOECACHED_HANDLE_MODEL_OPENED = 4,  // daemon -> client, fds: [model segment, pool segment, stream segment]
  MOECACHED_HANDLE_ERROR = 5,         // daemon -> client
};

struct moecached_handle_header {
  uint32_t magic;
  uint16_t version;
  uint16_t type;
  uint32_t bytes;       // of the whole message
  uint32_t n_fds;
};

struct moecached_handle_hello {
  struct moecached_handle_header header;
  uint32_t shm_version;
  uint32_t pid;          // in the client's own namespace, for people
  char label[64];        // zero-terminated, for people: "llama-server"
};

struct moecached_handle_welcome {
  struct moecached_handle_header header;
  uint64_t boot_epoch;
  uint64_t session_id;
  uint64_t session_bytes;
};

struct moecached_handle_model_open {
  struct moecached_handle_header header;
  char name[256];        // zero-terminated, for people
};

struct moecached_handle_model_opened {
  struct moecached_handle_header header;
  uint32_t model_id;
  uint32_t reserved0;
  uint64_t model_bytes;
  uint64_t pool_bytes;
  uint64_t stream_bytes;
};

struct moecached_handle_error {
  struct moecached_handle_header header;
  uint32_t code;         // moecached_handle_error_code
  char text[MOECACHED_ERROR_TEXT];
};

enum moecached_handle_error_code {
  MOECACHED_ERROR_VERSION = 1,
  MOECACHED_ERROR_MESSAGE = 2,   // malformed
  MOECACHED_ERROR_LIMIT = 3,     // sessions, models, lanes
  MOECACHED_ERROR_MODEL = 4,     // the file was refused
  MOECACHED_ERROR_BUDGET = 5,    // no memory left for its slots
  MOECACHED_ERROR_SYSTEM = 6,
};

#ifdef __cplusplus
}  // extern "C"
#endif
#endif  // MOECACHED_SHM_LAYOUT_H_
