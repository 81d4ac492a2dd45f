// libmoecached_client: use the expert slots of a moecached daemon from any inference engine. Pure C11.
//
// What it is: a session with the daemon, models opened in it, and lanes that resolve (layer, expert ids) to
// slots of a window in shared memory. What it is not: a loader or a kernel library; it never copies weights on a
// hit and never talks gRPC (control and statistics are in proto/control/v1).
//
// A window of a layer is one range of addresses: slots kept by the daemon first, then a few private slots of
// this process, used only when the daemon cannot serve (gone, I/O error). Slot s of part p lies at
//   window + s * slot_stride + parts[p].slot_offset        (expert_bytes bytes, read-only)
//
// Threads: sessions and models may be used from any thread; a lane by one thread at a time. Memory: what a
// function returns stays valid until its owner is closed; close lanes before models, models before the session.
// Errors: functions return a moecached_status; moecached_last_error() gives the sentence for this thread.
#ifndef MOECACHED_MOECACHED_H_
#define MOECACHED_MOECACHED_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MOECACHED_API __attribute__((visibility("default")))
#define MOECACHED_CLIENT_VERSION 1

typedef enum moecached_status {
  MOECACHED_OK = 0,
  MOECACHED_E_UNAVAILABLE = 1,    // no daemon at the socket
  MOECACHED_E_VERSION = 2,        // daemon and client speak different versions
  MOECACHED_E_ARGUMENT = 3,       // out of range; nothing was changed
  MOECACHED_E_REFUSED = 4,        // the daemon said no: limits, budget, unusable model
  MOECACHED_E_IO = 5,             // neither the daemon nor this process could read the weights
  MOECACHED_E_MODEL_CHANGED = 6,  // the file is not the one that was opened: computing on would be wrong
  MOECACHED_E_TOO_MANY = 7,       // more distinct experts than the layer has slots for: use streaming
  MOECACHED_E_SYSTEM = 8,
  MOECACHED_E_SPILL = 9,          // RAM is not to hold every expert of the model: open it with moecached_spill_model_open
} moecached_status;

// What a part is of its expert. moecached_part_info.kind
typedef enum moecached_kind {
  MOECACHED_KIND_GATE = 0,
  MOECACHED_KIND_UP = 1,
  MOECACHED_KIND_DOWN = 2,
  MOECACHED_KIND_GATE_UP = 3,       // gate and up in one tensor
  MOECACHED_KIND_GATE_BIAS = 4,
  MOECACHED_KIND_UP_BIAS = 5,
  MOECACHED_KIND_DOWN_BIAS = 6,
  MOECACHED_KIND_GATE_UP_BIAS = 7,
} moecached_kind;

typedef struct moecached_session moecached_session;
typedef struct moecached_model moecached_model;
typedef struct moecached_lane moecached_lane;

typedef struct moecached_layer_info {
  uint32_t block;          // N of the "blk.N." or "layers.N." tensor names
  uint32_t n_experts;
  uint32_t n_parts;
  uint32_t n_slots;        // slots kept by the daemon now; layers may trade some later
  uint32_t n_window_slots; // all slot ids that resolve() may return: 0..n_window_slots-1
  uint64_t slot_stride;    // bytes
  const void* window;      // address of slot 0
} moecached_layer_info;

typedef struct moecached_part_info {
  const char* name;        // tensor name in the file; where each expert is a tensor of its own, "*" stands for the expert
  uint32_t kind;           // moecached_kind
  uint32_t ggml_type;      // enum ggml_type of ggml.h, which never renumbers: 0 F32, 1 F16, 8 Q8_0, 30 BF16
  uint64_t ne0, ne1;       // elements of a row, rows of one expert: the last dimension of the file, and the one before
  uint64_t expert_bytes;
  uint64_t slot_offset;    // bytes within a record
  uint32_t file;           // index into the files given to moecached_model_open
  uint64_t file_offset;    // bytes, of expert 0; of others see moecached_model_locate
} moecached_part_info;

typedef struct moecached_counters {
  uint64_t lookups;          // (token, expert) pairs resolved, streamed ones included
  uint64_t hits;             // resolved without a message
  uint64_t leases;           // requests that waited for the daemon
  uint64_t streamed_experts; // parts read into the stream buffer by the daemon
  uint64_t fallback_reads;   // experts or parts this process read from the file itself
  uint64_t fallback_bytes;
  uint64_t dropped_records;  // routing records lost to a full ring (harmless, counted)
  uint64_t reconnects;
} moecached_counters;

// -- session
// socket: path of the daemon's handle socket; NULL: $MOECACHED_SOCKET, else /run/moecached/handle.sock.
// label: who this is, for `moecachectl sessions`; NULL: the program's name.
MOECACHED_API moecached_status moecached_session_open(const char* socket, const char* label, moecached_session** out);
MOECACHED_API void moecached_session_close(moecached_session* session);
// 1 while the daemon lives, 0 when this process serves itself from the file.
MOECACHED_API int moecached_session_connected(const moecached_session* session);

// -- model
// paths: the GGUF file, or all shards of it in order; or all safetensors files of a model, its config.json and, if there is
// one, its model.safetensors.index.json, in any order; who names them in the same order shares the model. Opened by this
// process and passed as descriptors, so the daemon needs no right of its own to the path, nor the same mount namespace.
MOECACHED_API moecached_status moecached_model_open(moecached_session* session, const char* const* paths, size_t n_paths, moecached_model** out);
MOECACHED_API void moecached_model_close(moecached_model* model);
MOECACHED_API uint32_t moecached_model_layers(const moecached_model* model);
MOECACHED_API moecached_status moecached_model_layer(const moecached_model* model, uint32_t layer, moecached_layer_info* out);
MOECACHED_API moecached_status moecached_model_part(const moecached_model* model, uint32_t layer, uint32_t part, moecached_part_info* out);
// Where the part's bytes of one expert lie: index of the file, and bytes from its start.
MOECACHED_API moecached_status moecached_model_locate(const moecached_model* model, uint32_t layer, uint32_t part, uint32_t expert,
                                                      uint32_t* file, uint64_t* offset);
// Finds a part by its tensor name. MOECACHED_E_ARGUMENT when no expert tensor has it.
MOECACHED_API moecached_status moecached_model_find(const moecached_model* model, const char* tensor, uint32_t* layer, uint32_t* part);
MOECACHED_API void moecached_model_counters(const moecached_model* model, moecached_counters* out);
// After the daemon went away: tries to reach a daemon again and to move the windows to its pool. Call only while no
// lane of the session is between resolve and end. MOECACHED_OK: connected (layer infos may have changed, read
// them again when moecached_model_generation() has moved). Cheap when connected or tried within the last 2 s.
MOECACHED_API moecached_status moecached_session_reconnect(moecached_session* session);
MOECACHED_API uint64_t moecached_model_generation(const moecached_model* model);

// -- lane
MOECACHED_API moecached_status moecached_lane_open(moecached_model* model, moecached_lane** out);
MOECACHED_API void moecached_lane_close(moecached_lane* lane);

// Resolves expert ids of one layer to slots, waiting for those that are not resident. Ends the lane's previous
// epoch: slots of an earlier resolve may be reused by the daemon from here on.
// ids: rows x cols int32 in [0, n_experts), row r at (const char*)ids + r * row_stride_bytes; slots_out: rows * cols int32, dense.
// A hit takes no lock, no system call, no allocation.
// MOECACHED_E_TOO_MANY: more distinct experts than the layer has slots now, and nothing was waited for; or, as the daemon answered, than are
// left beside those kept for stalled processes or, with more than 32 rows (a prompt), beside those that decode uses. Use
// moecached_stream_*.
MOECACHED_API moecached_status moecached_lane_resolve(moecached_lane* lane, uint32_t layer, const int32_t* ids, size_t rows, size_t cols,
                                                      size_t row_stride_bytes, int32_t* slots_out);
// The lane has finished using the slots it resolved last. A quiescent point: call it when the graph is done.
MOECACHED_API void moecached_lane_end(moecached_lane* lane);

// Resolves what is resident and waits for nothing: slots_out[i] is the slot of experts[i], or -1. The slots stay
// valid until the lane's next resolve, resolve_resident or end. experts must be distinct.
MOECACHED_API moecached_status moecached_lane_resolve_resident(moecached_lane* lane, uint32_t layer, const int32_t* experts, size_t n,
                                                               int32_t* slots_out);

// Streaming: one part of many experts, for batches that need more experts than a layer has slots. The buffer
// has two halves, so that one is read while the other is used. How many experts of this part fit into a half:
MOECACHED_API size_t moecached_stream_capacity(const moecached_lane* lane, uint32_t layer, uint32_t part);
// Starts reading part `part` of experts[0..n) packed into half 0 or 1; n <= capacity. Returns at once.
MOECACHED_API moecached_status moecached_stream_begin(moecached_lane* lane, uint32_t layer, uint32_t part, const int32_t* experts, size_t n,
                                                      uint32_t half);
// Waits for the half; *data_out is the address of the first expert, expert i at + i * expert_bytes. The data stay valid until the
// next begin on the same half.
MOECACHED_API moecached_status moecached_stream_wait(moecached_lane* lane, uint32_t half, const void** data_out);

// -- models on a GPU (covered mode: VRAM and pinned RAM hold every expert; nobody waits for a miss)
// A window of a part is one range of device addresses: slot s lies at window + s * expert_bytes, for device slots and
// for host slots read over the link. Which slot an expert is in, kernels look up in `table` at the time they run.
// libcuda is loaded on the first call; the GPU's primary context is used. Same rules for threads and memory as above.
typedef struct moecached_gpu_model moecached_gpu_model;
typedef struct moecached_gpu_lane moecached_gpu_lane;

typedef struct moecached_gpu_layer_info {
  uint32_t block;          // N of the "blk.N." or "layers.N." tensor names
  uint32_t n_experts;
  uint32_t n_parts;
  uint32_t n_slots;        // slot ids in the table are 0..n_slots-1
  uint32_t all_resident;   // 1: every expert e is in device slot e and stays there; n_slots == n_experts
  uint32_t by_expert;      // 1: the slots of this shape are experts in host memory: OR MOECACHED_GPU_BY_EXPERT to submit's layers
  uint64_t table;          // CUdeviceptr of int32[n_experts], changed by the daemon at any time
  uint32_t n_slots_fetched;  // slot ids that moecached_gpu_lane_fetch writes are 0..n_slots_fetched-1; 0: no scratch slots
  uint32_t reserved0;
} moecached_gpu_layer_info;

#define MOECACHED_GPU_BY_EXPERT 0x8000

typedef struct moecached_gpu_submit {
  void* done_event;        // CUevent, recorded behind the last kernel of the graph
  void* logged_event;      // CUevent, recorded by this call when the slots have been read: wait for it before they are overwritten
  uint64_t slots;          // CUdeviceptr of int32[n_layers][layer_pitch_bytes / 4]: per token n_expert_used slots, dense
  uint64_t layer_pitch_bytes;
  const uint16_t* layers;  // of the rows of `slots`, with MOECACHED_GPU_BY_EXPERT where the layer's info said so
  uint32_t n_layers;       // 0: no rows
  const uint16_t* whole_layers;  // used while all_resident, where experts are slots and nothing was looked up
  uint32_t n_whole_layers;
  uint32_t n_tokens;       // of each row
  uint32_t is_prefill;     // 1: a prompt batch
} moecached_gpu_submit;

typedef struct moecached_gpu_fetch {
  void* stream;            // CUstream; a capturing one records the copy into its graph
  uint64_t slots;          // CUdeviceptr of int32[n_ids]: slots that an earlier kernel of the stream has looked up
  uint64_t fetched;        // CUdeviceptr of int32[n_ids], written: where to read these experts
  uint32_t n_ids;          // 1 to the number of scratch slots; ids of several tokens may repeat
  uint32_t layer;          // with MOECACHED_GPU_BY_EXPERT where the layer's info said so
} moecached_gpu_fetch;

// uuid: of the GPU, as cuDeviceGetUuid gives it. MOECACHED_E_REFUSED: the daemon does not serve that GPU.
MOECACHED_API moecached_status moecached_gpu_model_open(moecached_session* session, const char* const* paths, size_t n_paths,
                                                        const uint8_t uuid[16], moecached_gpu_model** out);
MOECACHED_API void moecached_gpu_model_close(moecached_gpu_model* model);
MOECACHED_API uint32_t moecached_gpu_model_layers(const moecached_gpu_model* model);
MOECACHED_API uint32_t moecached_gpu_model_expert_used(const moecached_gpu_model* model);
MOECACHED_API moecached_status moecached_gpu_model_layer(const moecached_gpu_model* model, uint32_t layer, moecached_gpu_layer_info* out);
// window: CUdeviceptr of slot 0 of the part; part->slot_offset is 0.
MOECACHED_API moecached_status moecached_gpu_model_part(const moecached_gpu_model* model, uint32_t layer, uint32_t part,
                                                        moecached_part_info* out, uint64_t* window);
MOECACHED_API moecached_status moecached_gpu_model_locate(const moecached_gpu_model* model, uint32_t layer, uint32_t part,
                                                          uint32_t expert, uint32_t* file, uint64_t* offset);
MOECACHED_API moecached_status moecached_gpu_model_find(const moecached_gpu_model* model, const char* tensor, uint32_t* layer, uint32_t* part);
// Moves when windows, tables or all_resident changed: take the layer and part infos again, after begin, and once more if it
// moved while they were taken (lanes of other threads begin as well).
MOECACHED_API uint64_t moecached_gpu_model_generation(const moecached_gpu_model* model);

MOECACHED_API moecached_status moecached_gpu_lane_open(moecached_gpu_model* model, moecached_gpu_lane** out);
// Waits for what the lane submitted.
MOECACHED_API void moecached_gpu_lane_close(moecached_gpu_lane* lane);
// Begins an epoch: the graph launched next may use every layer. Waits while the daemon still loads the model, maps memory
// that was added since. On a loaded model with nothing new: no lock, no system call, no allocation. After a failure no
// epoch has begun: do not launch.
MOECACHED_API moecached_status moecached_gpu_lane_begin(moecached_gpu_lane* lane);
// Ends the epoch when done_event has fired, on the GPU; returns at once.
MOECACHED_API moecached_status moecached_gpu_lane_submit(moecached_gpu_lane* lane, const moecached_gpu_submit* submit);

// Scratch slots: memory of this process on the GPU, behind the windows, for what moecached_gpu_lane_fetch copies. Optional:
// experts read in place need none, and are read at four fifths of the speed. Allocated by the first call, for one lane of
// the model at a time (*n_slots is 0 for others); lost when the generation moves: ask again then. *n_slots is 0 as well
// where there is no memory for it, or where experts are so large that it would not pay.
MOECACHED_API moecached_status moecached_gpu_lane_scratch(moecached_gpu_lane* lane, uint32_t* n_slots);
// Enqueues a copy of those of the layer's experts in `slots` that are in RAM, all parts, to scratch slots, and writes slots
// for the kernels behind it to use, until the lane's next fetch. Within an epoch. No lock, no allocation, no waiting.
MOECACHED_API moecached_status moecached_gpu_lane_fetch(moecached_gpu_lane* lane, const moecached_gpu_fetch* fetch);

// -- models on a GPU that spill: VRAM and RAM hold a part of the experts, each in one place; the others are on disk
// What is open is a model as above, whose lanes resolve layer by layer; around it, a spill lane places what was resolved where
// kernels can use it: experts in device slots stay where they are, others are copied to scratch slots behind them. The engine
// stops at each MoE layer: launches what comes before it, waits, reads the router's ids, resolves, launches on.
typedef struct moecached_spill_lane moecached_spill_lane;

// uuid: of the GPU. MOECACHED_E_REFUSED: the daemon does not serve that GPU, or no model may spill.
MOECACHED_API moecached_status moecached_spill_model_open(moecached_session* session, const char* const* paths, size_t n_paths,
                                                          const uint8_t uuid[16], moecached_model** out);
// model: of moecached_spill_model_open. Takes device memory for scratch slots; page-locks the RAM slots at the first lane.
MOECACHED_API moecached_status moecached_spill_lane_open(moecached_model* model, moecached_spill_lane** out);
MOECACHED_API void moecached_spill_lane_close(moecached_spill_lane* lane);
// Moves when windows do: ask for them again, after resolve as well.
MOECACHED_API uint64_t moecached_spill_lane_generation(const moecached_spill_lane* lane);
// window: CUdeviceptr of slot 0 of the part, slot s is at + s * expert_bytes. Slots that resolve returns are below n_slots.
MOECACHED_API moecached_status moecached_spill_lane_window(moecached_spill_lane* lane, uint32_t layer, uint32_t part,
                                                           uint64_t* window, uint32_t* n_slots);

typedef struct moecached_spill_target {
  uint64_t slots;  // CUdeviceptr of int32[rows * cols], written; 0: not wanted
  void* ready;     // CUevent, recorded behind everything that the call has enqueued: wait for it before the layer is computed
} moecached_spill_target;

// As moecached_lane_resolve, for kernels: slots_out and target->slots name slots of the windows. Ends the epoch before.
// REQUIRES: what the lane computed of earlier layers is done.
// MOECACHED_E_TOO_MANY: more distinct experts than there are scratch slots, or than can be leased: load parts.
MOECACHED_API moecached_status moecached_spill_resolve(moecached_spill_lane* lane, uint32_t layer, const int32_t* ids, size_t rows,
                                                       size_t cols, size_t row_stride_bytes, int32_t* slots_out,
                                                       const moecached_spill_target* target);
// For large batches: the distinct experts that the layer is about to use, ascending; then, for each part, all of them are
// copied to where the file has them: expert e to destination + e * expert_bytes. ready: a CUevent, as above. Same REQUIRES.
MOECACHED_API moecached_status moecached_spill_begin_layer(moecached_spill_lane* lane, uint32_t layer, const int32_t* experts,
                                                           size_t n);
MOECACHED_API moecached_status moecached_spill_load_part(moecached_spill_lane* lane, uint32_t part, uint64_t destination,
                                                         void* ready);
// The lane has finished with what it resolved or loaded last. REQUIRES: it is computed.
MOECACHED_API void moecached_spill_end(moecached_spill_lane* lane);

// The same without stops, where the driver can do it: a graph is launched whole, and its stream waits at each layer until a
// thread of the library has resolved what the layer's router chose. For a few tokens, the most ids of a layer being 64.
typedef struct moecached_spill_wait {
  void* stream;    // CUstream; a capturing one records the wait into its graph
  uint64_t ids;    // CUdeviceptr of int32[n_ids]: experts, written by an earlier kernel of the stream; they may repeat
  uint64_t slots;  // CUdeviceptr of int32[n_ids], written: where kernels behind it read these experts, as resolve says
  uint32_t n_ids;
  uint32_t layer;
} moecached_spill_wait;

// Makes room for waits of so many ids a layer. MOECACHED_E_UNAVAILABLE: waits are not possible here, the reason says why;
// MOECACHED_E_TOO_MANY: not of as many ids. REQUIRES, as for all below but wait_enqueue: no graph of the lane is under way.
MOECACHED_API moecached_status moecached_spill_waits_reserve(moecached_spill_lane* lane, uint32_t n_ids);
// Begins a graph that waits in these layers, each once, in this order, for at most n_ids in each, n_ids_of_token of each token.
// Until waits_end nothing else may be called for the lane but generation, window and wait_enqueue. MOECACHED_E_UNAVAILABLE: the daemon is gone,
// or its memory cannot be waited for; MOECACHED_E_TOO_MANY: a layer has fewer slots. Resolve serves then.
MOECACHED_API moecached_status moecached_spill_waits_begin(moecached_spill_lane* lane, const uint32_t* layers, size_t n,
                                                            uint32_t n_ids, uint32_t n_ids_of_token);
// Enqueues a wait; captured ones are good until the generation moves. No lock, no allocation.
MOECACHED_API moecached_status moecached_spill_wait_enqueue(moecached_spill_lane* lane, const moecached_spill_wait* wait);
// Ends the graph and what it used. REQUIRES: it is computed, or was not launched. A failure is the first of any layer, one that
// has not asked included: what the graph has computed is to be thrown away. When an enqueue failed, the layers behind it must
// not be enqueued: nobody would answer them.
MOECACHED_API moecached_status moecached_spill_waits_end(moecached_spill_lane* lane);

// The reason of the last failure on this thread, one sentence; "" if none.
MOECACHED_API const char* moecached_last_error(void);

#ifdef __cplusplus
}  // extern "C"
#endif
#endif  // MOECACHED_MOECACHED_H_
