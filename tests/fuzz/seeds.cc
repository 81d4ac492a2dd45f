// Writes what fuzzers begin with and no person would write by hand: seeds DIR makes DIR/TARGET/NAME. The same
// files each time. Text seeds, and inputs that were found to be handled wrongly once, are in corpus/.
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <initializer_list>
#include <string>
#include <vector>

#include "proto/shm/layout.h"
#include "tests/fuzz/shard_set.h"
#include "tests/support/gguf_builder.h"
#include "tests/support/gguf_faults.h"
#include "tests/support/safetensors_builder.h"

namespace moecached::fuzz {
namespace {

using test::GgufBuilder;
using test::make_moe;

class Bytes {
 public:
  template <typename T>
  Bytes& put(const T& value) {
    const auto* at = reinterpret_cast<const std::byte*>(&value);
    bytes_.insert(bytes_.end(), at, at + sizeof value);
    return *this;
  }
  Bytes& text(std::string_view text) {
    for (const char c : text) put(c);
    return *this;
  }
  [[nodiscard]] const std::vector<std::byte>& get() const { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

class Folder {
 public:
  Folder(const std::filesystem::path& root, const char* target) : path_(root / target) {
    std::filesystem::create_directories(path_);
  }
  void add(const std::string& name, const std::vector<std::byte>& bytes) const {
    test::write_file(path_ / name, bytes);
  }

 private:
  std::filesystem::path path_;
};

constexpr auto u8 = [](auto value) { return static_cast<std::uint8_t>(value); };

void gguf(const Folder& folder) {
  const auto add = [&folder](const std::string& name, const std::vector<GgufBuilder>& builders) {
    std::vector<std::vector<std::byte>> files;
    for (const GgufBuilder& builder : builders) files.push_back(builder.build().bytes);
    folder.add(name, pack_shards(files));
  };
  const test::MoeSpec f32{.n_experts = 2,
                          .n_expert_used = 1,
                          .n_embd = 4,
                          .n_ff = 4,
                          .gate_type = 0,
                          .up_type = 0,
                          .down_type = 0};
  add("good", {make_moe(f32)});
  test::MoeSpec fused = f32;
  fused.fused_gate_up = fused.biases = true;
  fused.n_dense_layers = 1;
  add("good_fused", {make_moe(fused)});
  test::MoeSpec direct = f32;
  direct.n_embd = direct.n_ff = 32;
  direct.gate_type = direct.up_type = 2;  // q4_0
  add("good_direct", {make_moe(direct)});
  add("good_shards", make_moe(f32).split(2));
  for (const test::GgufFaultFile& file : test::gguf_fault_files())
    folder.add(file.name, pack_shards(file.shards));
}

void safetensors(const Folder& folder) {
  using Files = std::vector<std::vector<std::byte>>;
  const auto small = [](test::HfSpec spec) {
    spec.n_layers = 1;
    spec.n_experts = 2;
    spec.n_expert_used = 1;
    spec.hidden = spec.inner = 4;
    return test::make_hf(spec).files();
  };
  folder.add("good", pack_shards(small({})));
  folder.add("good_mixtral", pack_shards(small({.names = test::ExpertNames::kMixtral, .dtype = "BF16"})));
  folder.add("good_fused", pack_shards(small({.names = test::ExpertNames::kFused, .dtype = "F16"})));
  const Files shards = small({.n_shards = 2});
  folder.add("good_shards", pack_shards(shards));
  folder.add("shard_without_its_config", shards.front());
  Files reversed(shards.rbegin(), shards.rend());
  folder.add("good_reversed", pack_shards(reversed));
  const std::string odd = R"({"__metadata__":{"format":"pt"},"é\n":{"dtype":"F8_E4M3","shape":[0],)"
                          R"("data_offsets":[0,0]},"a":{"data_offsets":[0,8],"shape":[],"dtype":"I64"}}  )";
  folder.add("odd_but_allowed", pack_shards(Files{test::safetensors_with(odd, 8)}));
  folder.add("shape_that_wraps",
             pack_shards(Files{test::safetensors_with(
                 R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0)}));
  folder.add("offset_beyond_64_bits",
             pack_shards(Files{test::safetensors_with(
                 R"({"a":{"dtype":"U8","shape":[8],"data_offsets":[18446744073709551616,8]}})", 8)}));
  Bytes longest;
  folder.add("header_longer_than_the_file", longest.put(~std::uint64_t{0}).text("{}").get());
}

// As ring_fuzz.cc reads them: 2 any record, 3 a good one, 0 publish, 1 any head, 4 read.
void ring(const Folder& folder) {
  moecached_shm_record record{};
  record.kind = MOECACHED_RECORD_LEASE;
  record.layer = 1;
  record.n_ids = 3;
  record.seq = 7;
  for (std::uint16_t i = 0; i < 3; ++i) record.ids[i] = static_cast<std::uint16_t>(20 * i);
  folder.add("lease", Bytes().put(u8(2)).put(record).put(u8(4)).get());
  record.kind = MOECACHED_RECORD_STREAM;
  record.part = 2;
  record.half = 1;
  folder.add("stream", Bytes().put(u8(2)).put(record).put(u8(4)).get());
  record.kind = MOECACHED_RECORD_ROUTE;
  record.flags = MOECACHED_FLAG_MORE;
  moecached_shm_record rest = record;
  rest.flags = MOECACHED_FLAG_PREFILL;
  rest.ids[0] = 1;
  folder.add("chain", Bytes().put(u8(2)).put(record).put(u8(2)).put(rest).put(u8(4)).get());
  folder.add("chain_without_end", Bytes().put(u8(2)).put(record).put(u8(4)).get());
  folder.add("head_ahead", Bytes().put(u8(1)).put(std::uint64_t{5000}).put(u8(4)).get());
  folder.add("head_behind",
             Bytes().put(u8(0)).put(u8(9)).put(u8(4)).put(u8(1)).put(std::uint64_t{0}).put(u8(4)).get());
  folder.add(
      "good",
      Bytes().put(u8(3)).put(u8(0)).put(u8(0)).put(u8(1)).put(u8(1)).put(u8(3)).put(u8(40)).put(u8(4)).get());
}

void gpu_log(const Folder& folder) {
  const auto entry = [](std::uint64_t epoch, std::uint32_t n_layers, std::uint32_t n_whole,
                        std::uint32_t n_tokens) {
    moecached_shm_log_entry header{};
    header.epoch = epoch;
    header.n_layers = n_layers;
    header.n_whole = n_whole;
    header.n_tokens = header.n_tokens_all = n_tokens;
    return header;
  };
  constexpr std::uint16_t kByExpert = MOECACHED_LOG_BY_EXPERT;
  const auto layers = [](Bytes& bytes, std::uint16_t a, std::uint16_t b) -> Bytes& {
    return bytes.put(a).put(b);
  };
  Bytes good;  // two layers, top 2
  good.put(u8(1)).put(u8(1));
  layers(good.put(entry(0, 2, 0, 3)), 0, 1);
  layers(good.put(entry(1, 1, 1, 32)), kByExpert, 1);
  layers(good.put(entry(2, 0, 2, 1)), 1, 0);
  for (std::int32_t slot = 0; slot < 32; ++slot) good.put(slot);
  folder.add("good", good.get());
  Bytes bad;
  bad.put(u8(1)).put(u8(1));
  layers(bad.put(entry(0, 0xffffffff, 2, 1)), 0, 1);
  layers(bad.put(entry(1, 2, 0, 33)), 0, 1);
  layers(bad.put(entry(2, 1, 1, 1)), 2, kByExpert);
  layers(bad.put(entry(3, 3, 0, 1)), 0, 1);
  folder.add("out_of_range", bad.get());
}

void handle_message(const Folder& folder) {
  const auto header = [](moecached_handle_type type, std::size_t bytes, std::uint32_t n_fds) {
    return moecached_handle_header{MOECACHED_HANDLE_MAGIC, MOECACHED_HANDLE_VERSION,
                                   static_cast<std::uint16_t>(type), static_cast<std::uint32_t>(bytes),
                                   n_fds};
  };
  moecached_handle_hello hello{.header = header(MOECACHED_HANDLE_HELLO, sizeof hello, 1),
                               .shm_version = MOECACHED_SHM_VERSION,
                               .pid = 1,
                               .label = "llama-server"};
  folder.add("hello", Bytes().put(u8(1)).put(u8(0)).put(hello).get());
  std::memset(hello.label, 0xff, sizeof hello.label);
  folder.add("hello_label_without_end", Bytes().put(u8(1)).put(u8(0)).put(hello).get());
  const moecached_handle_model_open open{.header = header(MOECACHED_HANDLE_MODEL_OPEN, sizeof open, 2),
                                         .name = "model.gguf"};
  folder.add("model_open", Bytes().put(u8(2)).put(u8(1)).put(open).get());
  folder.add("model_open_before_hello", Bytes().put(u8(2)).put(u8(0)).put(open).get());
  const moecached_handle_gpu_open on_gpu{.header = header(MOECACHED_HANDLE_GPU_OPEN, sizeof on_gpu, 1),
                                         .name = "model.gguf",
                                         .uuid = {1, 2, 3},
                                         .flags = 0,
                                         .reserved0 = 0,
                                         .no_peers_reason = "no way to the other GPU"};
  folder.add("gpu_open", Bytes().put(u8(1)).put(u8(1)).put(on_gpu).get());
  const moecached_handle_spill_open spill{.header = header(MOECACHED_HANDLE_SPILL_OPEN, sizeof spill, 1),
                                          .name = "model.gguf",
                                          .uuid = {1, 2, 3}};
  folder.add("spill_open", Bytes().put(u8(1)).put(u8(1)).put(spill).get());
  const moecached_handle_gpu_probe probe{.header = header(MOECACHED_HANDLE_GPU_PROBE, sizeof probe, 0),
                                         .uuid = {1, 2, 3}};
  folder.add("gpu_probe", Bytes().put(u8(0)).put(u8(1)).put(probe).get());
  const moecached_handle_gpu_fetch fetch{.header = header(MOECACHED_HANDLE_GPU_FETCH, sizeof fetch, 0),
                                         .model_id = 1,
                                         .memory = MOECACHED_GPU_MEMORY_CHUNK,
                                         .first = 0xffffffff,
                                         .count = 2};
  folder.add("gpu_fetch", Bytes().put(u8(0)).put(u8(1)).put(fetch).get());
}

void policy_library(const Folder& folder) {
  // A spec and a library that is made; then experts until the layer is full, then answers.
  for (const std::uint8_t spec : std::initializer_list<std::uint8_t>{0, 2, 3}) {
    Bytes bytes;
    bytes.put(spec).put(u8(1));
    for (std::uint8_t expert = 0; expert < 64; ++expert) bytes.put(u8(expert * 5));
    folder.add("spec" + std::to_string(spec), bytes.get());
  }
  folder.add("refusal_without_end",
             Bytes().put(u8(0)).put(u8(0)).put(std::uint16_t{256}).text(std::string(256, '\xff')).get());
}

void use_list(const Folder& folder) {
  // An imatrix is a GGUF of F32 tensors.
  GgufBuilder imatrix;
  imatrix.key_text("general.type", "imatrix");
  for (const char* block : {"0", "1"})
    imatrix.tensor(std::string("blk.").append(block).append(".ffn_up_exps.weight.counts"), 0, {1, 4});
  folder.add("imatrix.gguf", imatrix.build().bytes);
  Bytes legacy;
  const std::string name = "blk.0.ffn_gate_exps.weight";
  legacy.put(std::uint32_t{1}).put(static_cast<std::uint32_t>(name.size())).text(name);
  legacy.put(std::uint32_t{10}).put(std::uint32_t{4});
  for (const float sum : {100.0f, 1.0f, 0.0f, 3000.0f}) legacy.put(sum);
  folder.add("imatrix.dat", legacy.get());
}

}  // namespace
}  // namespace moecached::fuzz

int main(int argc, char** argv) {
  using namespace moecached::fuzz;
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s DIR\n", argv[0]);
    return 2;
  }
  const std::filesystem::path root = argv[1];
  gguf({root, "gguf"});
  ring({root, "ring"});
  safetensors({root, "safetensors"});
  gpu_log({root, "gpu_log"});
  handle_message({root, "handle_message"});
  policy_library({root, "policy_library"});
  use_list({root, "use_list"});
  return 0;
}
