// Shared-memory layout between the daemon and its clients, plain C so that any engine can map it.
//
// Three kinds of segment, each a sealed memfd made by the daemon:
//
//   model segment   read-only in clients, one per registered model
//     [moecached_shm_header][moecached_shm_model][layers...][parts...][extents...][slot table: int32 per (layer, expert)]
//   pool segment    read-only in clients, one per model: the slots themselves, one window per layer
//     window of layer l: room for n_slots records of slot_stride bytes, of which n_slots_open have memory (layers of one slot
//     class may trade slots; which of them are open, only the daemon knows); part p of slot s lies at
//     window_offset + s * slot_stride + part.slot_offset
//   session segment read-write in ONE client, one per session
//     [moecached_shm_header][moecached_shm_session][lane 0][lane 1]...
//     lane: words written by the client | words written by the daemon | ring of 64-byte records
//   stream segment  read-only in ONE client, one per (session, model): lane i owns bytes
//     [i * stream_bytes_per_lane, (i + 1) * stream_bytes_per_lane), split in two halves; where experts lie in a half: stream_place.h
//
// A model on a GPU has the same model segment, and instead of pool and stream:
//   table memory    device memory, read-only in clients: int32 slot[layer][expert], as in the model segment, but
//                   always valid ("covered": VRAM and RAM hold every expert)
//   windows         one range of addresses per part: device slots, then host slots, dense like the tensor in the file
//                     0                    device_bytes
//                     | device slots of GPU 0 |gap| of GPU 1 |gap| ... | slot host_first + e: expert e in pinned RAM |
//                   slot s at s * expert_bytes; the GPU's own from device_first on, the others are those of its peers, GPUs whose
//                   memory its kernels can read, and name the same memory in the windows of all of them; device_bytes is a multiple of `granularity`, and host_first * expert_bytes
//                   >= device_bytes for every part of the layer. Host memory is mapped from device_bytes on. Device memory comes in
//                   chunks, listed in the segment; a client maps the chunks below `n_chunks` before it begins an epoch.
//   log segment     read-write in ONE client: lane i owns bytes [i * log_bytes_per_lane, ...), a ring of log_entries entries;
//                   entry of epoch n is n % log_entries: [moecached_shm_log_entry][uint16 layers...][int32 slots...];
//                   a layer with MOECACHED_LOG_BY_EXPERT was computed in the shape HOST_ONLY
//
// A model of which VRAM and RAM hold a part ("spill") has model, pool and stream segments, and the protocol of a lane in RAM,
// where an epoch is one layer. Besides, once moecached_shm_spill.state says so, device slots: an entry of
// MOECACHED_DEVICE_SLOT + s is device slot s of the layer. An expert is in one slot, of RAM or of the device.
//   array           device memory, read-only in clients: one part of all layers of a slot class, dense; slot s of a layer lies
//                   at (class_index * n_device_slots + s) * expert_bytes of array first_array + part
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
//      An epoch that a record names uses no expert of its layer but those: the daemon does not wait for it on
//      account of others. So an epoch whose lease was not granted is begun, and ended, by who gives up as well.
// The daemon, to reuse a slot of layer l: entry = -1 (release and a full fence, or sequentially consistent), then for each lane of that model
// read begun; a lane whose begun names another layer is quiescent for l (should it begin l later it sees the
// flip: x86 orders store-load only across a full fence, hence one on both sides); a lane that names l must
// reach completed >= its begun epoch first. Lanes that use all layers in one epoch (GPU graphs) write
// MOECACHED_LAYER_ALL.
//
// The protocol of a lane on a GPU: one epoch is one graph.
//   1. begun = (epoch + 1) << 16 | MOECACHED_LAYER_ALL, then a full fence
//   2. load n_chunks; more than are mapped: completed = epoch + 1, map them, go to 1 with the next epoch
//   3. launch the graph; its kernels look entries up in the table in device memory
//   4. behind the last kernel, on the GPU: copy the slots that the graph used into the log entry (if the daemon has
//      drained epoch - log_entries, that is `tail` >= epoch - log_entries), then completed = epoch
// The daemon flips an entry on the GPU, waits until that write is done, and only then reads `begun`: a launch whose begun
// it missed starts after the flip reached the GPU's memory. A slot names one expert in one epoch: whoever could read
// the old one has completed, and its log entry has been drained, before the slot is given to another.
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
  MOECACHED_SHM_VERSION = 7,      // of this file; the two sides must be equal
  MOECACHED_MAX_LANES = 16,       // per session
  MOECACHED_RING_RECORDS = 2048,  // per lane, a power of two
  MOECACHED_RECORD_IDS = 20,      // expert ids in one record; longer lists continue in the next one
  MOECACHED_MAX_EXPERTS = 4096,   // per layer
  MOECACHED_MAX_LAYERS = 4096,    // MoE layers of a model
  MOECACHED_MAX_PARTS = 8,        // parts of one layer
  MOECACHED_MAX_FILES = 250,      // of a model; the kernel passes 253 descriptors with one message
  MOECACHED_LAYER_ALL = 0xffff,   // in `begun`: this epoch may use every layer
  MOECACHED_ABSENT = -1,          // in the slot table: not resident
  MOECACHED_DEVICE_SLOT = 1 << 20,  // in the slot table of a spill model: the first device slot
  MOECACHED_LOG_TOKENS = 32,      // of one epoch, the last ones of a batch, in a log entry
  MOECACHED_UUID_BYTES = 16,      // of a GPU
};

#define MOECACHED_SHM_MAGIC UINT64_C(0x3148434143454f4d) /* "MOECACH1" little-endian */

enum moecached_segment_kind {
  MOECACHED_SEGMENT_MODEL = 1,
  MOECACHED_SEGMENT_SESSION = 2,
  MOECACHED_SEGMENT_GPU_MODEL = 3,
  MOECACHED_SEGMENT_SPILL_MODEL = 4,
};

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
  uint32_t n_extents;              // over all parts
  uint64_t layers_offset;          // bytes from the start of the segment
  uint64_t parts_offset;
  uint64_t table_offset;           // int32 entries, layer l starts at entry layers[l].table_first
  uint64_t pool_bytes;             // of the pool segment
  uint64_t stream_bytes_per_lane;  // a multiple of 4096 * 2; half of it holds at least one expert of any part and a page
  char name[256];                  // for people; zero-terminated
};

// Follows moecached_shm_model in the segment of a model on a GPU. There, pool_bytes and stream_bytes_per_lane are 0.
enum moecached_load_state {
  MOECACHED_LOADING = 0,       // RAM does not hold every expert yet: no epoch may begin
  MOECACHED_COVERED = 1,
  MOECACHED_LOAD_FAILED = 2,   // the file could not be read
  MOECACHED_GPU_LOST = 3,      // the daemon cannot flip entries any more, which name slots of other GPUs: no epoch may begin
};

// Which part of a window a graph should use. Each is right at any time; they differ in speed, and prompt kernels add up
// in another order when a tensor has more slots than experts.
enum moecached_gpu_shape {
  MOECACHED_SHAPE_MIXED = 0,         // the whole window, by the layer's table
  MOECACHED_SHAPE_ALL_RESIDENT = 1,  // device slots alone: expert e is in slot e and stays there, no table is needed
  MOECACHED_SHAPE_HOST_ONLY = 2,     // host slots alone, from host_first on, by the identity table: before device slots exist
};

enum { MOECACHED_LOG_BY_EXPERT = 0x8000 };  // in a log entry's layer: the row holds experts, read from host memory

struct moecached_shm_gpu {
  uint8_t uuid[MOECACHED_UUID_BYTES];
  uint64_t granularity;         // bytes; device memory and host memory come in multiples of it
  uint64_t table_bytes;         // of the table memory; entries as in layers[l].table_first
  uint64_t windows_offset;      // moecached_shm_window[n_parts], parallel to the parts array
  uint64_t chunks_offset;       // moecached_shm_chunk[n_chunks_max]
  uint64_t identity_first;      // entry of the table memory from where on entry i is i, as many as a layer has experts
  uint64_t log_bytes_per_lane;  // a multiple of 4096
  uint32_t log_entries;         // a power of two
  uint32_t log_entry_bytes;     // a multiple of 64
  uint32_t log_slots_offset;    // bytes, within an entry
  uint32_t log_layer_bytes;     // bytes of one layer in the slots of an entry: LOG_TOKENS * n_expert_used * 4
  uint32_t n_chunks_max;
  // Written by the daemon while clients look.
  uint32_t load_state;          // futex word, moecached_load_state
  uint32_t n_chunks;            // chunks to map before an epoch begins; only grows
  uint32_t shapes;              // grows when layers[].shape changed
};

struct moecached_shm_window {
  uint64_t device_bytes;  // address space for device slots
  uint64_t host_bytes;    // of the host memory behind it
};

enum moecached_chunk_flags {
  MOECACHED_CHUNK_PEER = 1,  // memory of another GPU; a client that did not say MOECACHED_GPU_OPEN_PEERS leaves it unmapped
  MOECACHED_CHUNK_GONE = 2,  // of a GPU that was lost: no entry names it, nobody maps it; its handle is of no use
};

struct moecached_shm_chunk {
  uint32_t part;          // index into the parts array
  uint32_t flags;         // moecached_chunk_flags
  uint64_t offset;        // bytes from the start of the window
  uint64_t bytes;
};

// Follows moecached_shm_model in the segment of a spill model.
struct moecached_shm_spill {
  uint8_t uuid[MOECACHED_UUID_BYTES];
  uint64_t arrays_offset;   // moecached_shm_array[n_arrays]
  uint32_t n_arrays;        // parts of all slot classes
  // Written by the daemon while clients look: first the others, then `has_slots`.
  uint32_t n_device_slots;  // of each layer
  uint32_t has_slots;       // 0: none yet; 1: the arrays are there, and stay as they are
  uint32_t reserved0;
};

struct moecached_shm_array {
  uint64_t expert_bytes;
  uint64_t bytes;           // a multiple of 2 MiB, valid once has_slots is 1
};

// Written by the client before it submits the epoch; the slots behind it are written by the GPU.
struct moecached_shm_log_entry {
  uint64_t epoch;
  uint32_t n_layers;      // rows of slots; layers[i] says which layer row i is
  uint32_t n_tokens;      // in the entry, 1..MOECACHED_LOG_TOKENS
  uint32_t n_tokens_all;  // of the epoch
  uint32_t flags;         // moecached_record_flags
  uint32_t n_whole;       // layers[n_layers..] that were used in the shape ALL_RESIDENT: counted, without a row
  uint32_t reserved0[9];
};
MOECACHED_STATIC_ASSERT(sizeof(struct moecached_shm_log_entry) == 64, "log entry");

struct moecached_shm_layer {
  uint32_t block;          // N of "blk.N."
  uint32_t n_experts;
  uint32_t n_parts;
  uint32_t first_part;     // index into the parts array
  uint32_t slot_class;     // layers of equal part types and sizes share it
  uint32_t n_slots;        // slot ids are 0..n_slots-1, on a GPU from device_first on; <= n_experts
  uint32_t table_first;    // first entry of this layer in the slot table
  union {
    uint32_t host_first;   // on a GPU: slot of expert 0 in host memory
    uint32_t class_index;  // of a spill model: which layer of its slot class this is
  };
  uint64_t window_offset;  // in the pool segment, a multiple of 4096
  uint64_t window_bytes;   // a multiple of 4096, >= n_slots * slot_stride
  uint64_t slot_stride;    // bytes of one record; on a GPU 0, as are window_offset and window_bytes
  union {
    uint32_t shape;        // on a GPU: moecached_gpu_shape; written by the daemon while clients look
    uint32_t first_array;  // of a spill model: array of part 0
  };
  union {
    uint32_t n_slots_open;  // in RAM: resident records this layer can hold now, 1..n_slots. Written by the daemon while clients look: a hint
    uint32_t device_first;  // on a GPU: the first of its own n_slots device slots; others below host_first are those of its peers
  };
};
MOECACHED_STATIC_ASSERT(sizeof(struct moecached_shm_layer) == 64, "layer");

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
  uint32_t first_extent;  // 0: the experts lie one behind the other; else 1 + index of the extent of expert 0
  uint64_t ne0;           // elements of one row
  uint64_t ne1;           // rows of one expert (1 for biases)
  uint64_t file_offset;   // bytes, of expert 0; without extents expert e is at file_offset + e * expert_bytes
  uint64_t expert_bytes;
  uint64_t slot_offset;   // bytes within a record
  char name[72];          // tensor name in the file, zero-terminated; with extents "*" stands for the expert
};
MOECACHED_STATIC_ASSERT(sizeof(struct moecached_shm_part) == 128, "part");

// Where one expert of a part lies, where experts are tensors of their own. The array follows that of the parts.
struct moecached_shm_extent {
  uint32_t file;          // index of the shard
  uint32_t reserved0;
  uint64_t offset;        // bytes
};

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
  MOECACHED_RECORD_STREAM = 3,  // read one part of these experts into a half of the lane's stream buffer, packed or FLAG_IN_PLACE
};

enum moecached_record_flags {
  MOECACHED_FLAG_MORE = 1,      // the id list continues in the next record of the ring
  MOECACHED_FLAG_PREFILL = 2,   // ids come from a prompt batch: they evict nothing that decode uses, no policy learns from them
  MOECACHED_FLAG_IN_PLACE = 4,  // STREAM: experts lie as stream_place.h says, so that direct reads need no copy
};

// One cache line. Written by the client, then published by `head` (release).
struct moecached_shm_record {
  uint16_t kind;
  uint16_t flags;
  uint16_t layer;
  uint16_t n_ids;          // in this record, 1..MOECACHED_RECORD_IDS
  uint32_t seq;            // LEASE, STREAM: the value that lease_done / stream_done[half] gets
  uint16_t part;           // STREAM: 0..layer.n_parts-1; ROUTE, LEASE: tokens that the ids are the union of, 0: not told
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
  MOECACHED_GRANT_NO_ROOM = 4,        // too many slots of the layer are kept for lanes that do not move or, for a LEASE with
                                      // FLAG_PREFILL, by what decode uses: stream. An older client takes it for a refusal
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
  uint64_t tail;              // records consumed, monotonic; on a GPU the newest epoch whose log entry was drained
  uint32_t lease_done;        // futex word: seq of the last finished LEASE
  uint32_t lease_status;      // moecached_grant_status, valid once lease_done has its seq
  uint32_t stream_done[2];    // futex words
  uint32_t stream_status[2];
  uint32_t reserved0[8];
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
  MOECACHED_HANDLE_GPU_OPEN = 6,      // client -> daemon, fds as MODEL_OPEN
  MOECACHED_HANDLE_GPU_OPENED = 7,    // daemon -> client, fds: [model segment, log segment, table memory]
  MOECACHED_HANDLE_GPU_FETCH = 8,     // client -> daemon: memory of a model on a GPU
  MOECACHED_HANDLE_GPU_FETCHED = 9,   // daemon -> client, fds: handles first .. first + n_fds - 1
  MOECACHED_HANDLE_GPU_PROBE = 10,    // client -> daemon: memory to try out whether this process can map that of other GPUs
  MOECACHED_HANDLE_GPU_PROBED = 11,   // daemon -> client, fds: MOECACHED_PROBE_BYTES of device memory on each of them
  MOECACHED_HANDLE_SPILL_OPEN = 12,   // client -> daemon, fds as MODEL_OPEN; answered by MODEL_OPENED
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

struct moecached_handle_gpu_probe {
  struct moecached_handle_header header;
  uint8_t uuid[MOECACHED_UUID_BYTES];  // of the GPU that is to read the others' memory
};

enum { MOECACHED_PROBE_BYTES = 2 << 20 };

struct moecached_handle_gpu_probed {
  struct moecached_handle_header header;
};

enum moecached_gpu_open_flags {
  MOECACHED_GPU_OPEN_PEERS = 1,  // the client mapped all that GPU_PROBE gave: entries may name slots of other GPUs
};

struct moecached_handle_gpu_open {
  struct moecached_handle_header header;
  char name[256];        // zero-terminated, for people
  uint8_t uuid[MOECACHED_UUID_BYTES];
  uint32_t flags;        // moecached_gpu_open_flags
  uint32_t reserved0;
  char no_peers_reason[128];  // zero-terminated, for people: why MOECACHED_GPU_OPEN_PEERS is not set
};

struct moecached_handle_spill_open {
  struct moecached_handle_header header;
  char name[256];        // zero-terminated, for people
  uint8_t uuid[MOECACHED_UUID_BYTES];
};

struct moecached_handle_gpu_opened {
  struct moecached_handle_header header;
  uint32_t model_id;
  uint32_t host_memory;  // moecached_host_memory
  uint64_t model_bytes;
  uint64_t log_bytes;
};

enum moecached_host_memory {
  MOECACHED_HOST_MEMORY_VMM = 1,    // handles of GPU_FETCH are allocations: cuMemImportFromShareableHandle
  MOECACHED_HOST_MEMORY_MEMFD = 2,  // they are memfds: mmap behind the device part, cuMemHostRegister
};

enum moecached_gpu_memory {
  MOECACHED_GPU_MEMORY_HOST = 1,    // handle i: host memory of part i
  MOECACHED_GPU_MEMORY_CHUNK = 2,   // handle i: device memory of chunk i
  MOECACHED_GPU_MEMORY_ARRAY = 3,   // handle i: array i of a spill model
};

enum { MOECACHED_FETCH_MAX = 128 };  // handles in one reply

struct moecached_handle_gpu_fetch {
  struct moecached_handle_header header;
  uint32_t model_id;
  uint32_t memory;       // moecached_gpu_memory
  uint32_t first;
  uint32_t count;        // 1..MOECACHED_FETCH_MAX
};

struct moecached_handle_gpu_fetched {
  struct moecached_handle_header header;
  uint32_t first;
  uint32_t reserved0;
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
  MOECACHED_ERROR_SPILL = 7,     // to GPU_OPEN: RAM is not to hold every expert; ask with SPILL_OPEN
};

#ifdef __cplusplus
}  // extern "C"
#endif
#endif  // MOECACHED_SHM_LAYOUT_H_
