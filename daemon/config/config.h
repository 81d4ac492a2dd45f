// Everything the daemon can be told, parsed and checked before anything starts; frozen afterwards. Sources:
// built-in defaults < TOML file < command line; within one, settings either singly or all of a tier in the
// tier string (tier_string.h). Sizes accept "4GiB", "512MiB", plain bytes or "25%" (of the machine's or
// cgroup's memory).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "daemon/base/result.h"
#include "daemon/base/slot_scope.h"
#include "daemon/tier/ssd_tier.h"

namespace moecached {

// How many slots a layer gets: absolute, a share of its experts, or as many as the budget allows.
struct SlotsSpec {
  enum class Kind : std::uint8_t { kAuto, kCount, kPercent } kind = Kind::kAuto;
  double value = 0;
};

// Where the experts of a model on a GPU are. Covered: RAM holds every one of them, VRAM a second copy of
// those used most. Spill: an expert is in VRAM, or in the RAM of the pool, or only on disk. Auto: covered, if
// that much memory can be pinned.
enum class GpuMode : std::uint8_t { kAuto, kCovered, kSpill };

// What models on GPUs may take. Device slots are added after a client's first graph, so that its own buffers
// come first.
struct GpuOptions {
  std::string devices = "auto";          // all GPUs; "none"; or UUIDs, separated by commas
  SlotsSpec slots;                       // device slots of each layer
  std::uint64_t bytes = 0;               // device memory for slots, each GPU; 0: no limit of its own
  std::uint64_t keep_free = 1ull << 30;  // device memory that stays free
  SlotScope scope = SlotScope::kLayer;
  GpuMode mode = GpuMode::kAuto;
  bool peers = true;  // GPUs read each other's slots
  std::string policy = "ewma";
  std::uint32_t max_slowdown_percent =
      5;  // of a decoding client, by uploads; 0: only free slots, 100: no limit
};

inline constexpr const char* kDefaultPool = "50%";  // of memory, for the slots of all models

struct Config {
  std::string runtime_directory = "/run/moecached";
  std::string control_socket;  // default runtime_directory/control.sock
  std::string handle_socket;   // default runtime_directory/handle.sock
  std::uint32_t socket_mode = 0660;
  std::string socket_group;  // empty: unchanged

  // Where hot lists are kept from one start to the next; "none" or empty: nowhere.
  std::string state_directory;

  std::uint64_t pool_bytes = 0;  // all slots of all models; derived from kDefaultPool
  SlotsSpec slots;               // per layer
  SlotScope slot_scope = SlotScope::kGlobal;
  std::string prefetch = "auto";  // of what decode is likely to use next, where that pays; or "off"
  std::string policy = "slru";
  std::string policy_directory;  // of policy libraries; empty: none are loaded
  std::uint64_t stream_bytes =
      32u << 20;  // upper bound of one lane's stream buffer, raised to twice the largest part

  SsdOptions ssd;
  GpuOptions gpu;

  // Whether slots still hold what the files say: each resident one is looked at once a period, unless that
  // were more bytes a second. 0: never; no limit.
  std::uint64_t scrub_period_ms = 1'800'000;
  std::uint64_t scrub_bytes_per_second = 16u << 20;

  std::uint32_t max_sessions = 64;
  std::uint32_t max_models = 16;
  // Of one user's sessions together; user_limits.h.
  std::uint32_t max_user_sessions = 48;
  std::uint32_t max_user_files = 512;
  std::uint64_t max_user_bytes = 0;  // 0: no limit of its own
  std::uint32_t hello_seconds = 10;  // a client that has not said hello by then is cut
  std::string model_roots;  // folders in which models and files of counts must lie, separated by colons;
                            // empty: anywhere
  bool reflection = false;  // gRPC server reflection
  bool route = false;       // routing decisions over gRPC
  std::uint32_t max_route_streams = 8;

  std::string log_level = "info";
  std::string log_format = "auto";  // auto | text | json | journald
};

struct ConfigRequest {
  enum class Action : std::uint8_t { kRun, kCheck, kPrint, kVersion, kHelp } action = Action::kRun;
  std::string config_file;  // the one that was read, absolute; empty: none (/etc/moecached/moecached.toml if
                            // it exists)
  std::string help;         // kHelp: the text
  std::vector<std::string> flag_keys;  // settings that a flag gave: "pool.bytes". A reload leaves them alone
};

// kInvalid: the text names file and line or flag, the value, what is allowed. argv as given to main.
[[nodiscard]] Result<Config> load_config(int argc, const char* const* argv, ConfigRequest* request);
// The file alone, for a reload; only log level and policy may change while running, `refused` names the rest.
[[nodiscard]] Result<Config> reload_config(const Config& running, const ConfigRequest& request,
                                           std::vector<std::string>* refused);
[[nodiscard]] std::string print_config(const Config& config);  // as TOML, every value; the tiers as a
                                                               // comment

}  // namespace moecached
