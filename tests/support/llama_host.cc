// moecached_llama_host: a small host program over llama.h, run on any folder of prebuilt llama.cpp libraries.
//
// What it is: what the demo, the tests and the benchmarks use to run an unmodified llama.cpp with and without
// the plugin, and to write down logits, text, speed and memory. What it is not: linked to llama.cpp: libllama
// and ggml come from
// --libs at run time, so one binary runs on builds with different file names. The structures come from the
// llama.h of MOECACHED_LLAMA_DIR, which must be of the same release.
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "ggml-backend.h"
#include "llama.h"

namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

// Exit codes, so that a script can tell them apart.
constexpr int kUsage = 2;
constexpr int kNoLibraries = 3;
constexpr int kNoModel = 4;
constexpr int kDecodeFailed = 5;
constexpr int kNoPlugin = 6;

[[noreturn]] void die(int code, const std::string& text) {
  std::fprintf(stderr, "moecached_llama_host: %s\n", text.c_str());
  std::exit(code);
}

constexpr const char* kHelp =
    "usage: moecached_llama_host --libs DIR --model FILE [options]\n"
    "  --prompt TEXT | --prompt-file FILE   what to continue\n"
    "  --n-predict N         tokens to generate (64)\n"
    "  --temp T              temperature; 0: always the likeliest token (0)\n"
    "  --seed N              of the sampler (1)\n"
    "  --threads N           (number of cores)\n"
    "  --ctx N --batch N --ubatch N         context and batch sizes in tokens (1024, 512, 512)\n"
    "  --no-repack           weights stay in the layout of the file\n"
    "  --load MODE           auto, none, mmap, mlock, mmap+mlock or dio (auto)\n"
    "  --plugin FILE         load this backend library after those of --libs\n"
    "  --override REGEX=TYPE put tensors that match into this buffer type\n"
    "  --ignore-eog          go on behind the end of a text\n"
    "  --logits-out FILE     raw float32 logits, one row for every evaluated token\n"
    "  --routing-out FILE    raw int32 ids of the chosen experts: for every evaluated token, layer by layer\n"
    "  --json FILE           figures of the run\n"
    "  --wait                after loading, print `ready` and wait for a line on stdin\n";

struct Options {
  fs::path libs;
  std::string model;
  std::string prompt;
  int n_predict = 64;
  float temperature = 0;
  uint32_t seed = 1;
  int threads = 0;
  uint32_t context = 1024;
  uint32_t batch = 512;
  uint32_t ubatch = 512;
  bool repack = true;
  bool ignore_eog = false;
  bool wait = false;
  std::string load = "auto";
  std::string plugin;
  std::string override_pattern;
  std::string override_type;
  std::string logits_out;
  std::string routing_out;
  std::string json;
};

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) die(kUsage, "cannot read " + path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// Takes the value of each option from the command line; every option but the flags has one.
Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--help") {
      std::fputs(kHelp, stdout);
      std::exit(0);
    }
    if (name == "--no-repack") {
      options.repack = false;
      continue;
    }
    if (name == "--ignore-eog") {
      options.ignore_eog = true;
      continue;
    }
    if (name == "--wait") {
      options.wait = true;
      continue;
    }
    if (i + 1 == argc) die(kUsage, "unknown option, or no value: " + name + "\n" + kHelp);
    const std::string value = argv[++i];
    try {
      if (name == "--libs")
        options.libs = value;
      else if (name == "--model")
        options.model = value;
      else if (name == "--prompt")
        options.prompt = value;
      else if (name == "--prompt-file")
        options.prompt = read_file(value);
      else if (name == "--n-predict")
        options.n_predict = std::stoi(value);
      else if (name == "--temp")
        options.temperature = std::stof(value);
      else if (name == "--seed")
        options.seed = static_cast<uint32_t>(std::stoul(value));
      else if (name == "--threads")
        options.threads = std::stoi(value);
      else if (name == "--ctx")
        options.context = static_cast<uint32_t>(std::stoul(value));
      else if (name == "--batch")
        options.batch = static_cast<uint32_t>(std::stoul(value));
      else if (name == "--ubatch")
        options.ubatch = static_cast<uint32_t>(std::stoul(value));
      else if (name == "--load")
        options.load = value;
      else if (name == "--plugin")
        options.plugin = value;
      else if (name == "--logits-out")
        options.logits_out = value;
      else if (name == "--routing-out")
        options.routing_out = value;
      else if (name == "--json")
        options.json = value;
      else if (name == "--override") {
        const std::size_t equals = value.rfind('=');
        if (equals == std::string::npos) die(kUsage, "--override wants REGEX=TYPE");
        options.override_pattern = value.substr(0, equals);
        options.override_type = value.substr(equals + 1);
      } else {
        die(kUsage, "unknown option " + name + "\n" + kHelp);
      }
    } catch (const std::exception&) {
      die(kUsage, "not a number for " + name + ": " + value);
    }
  }
  if (options.libs.empty() || options.model.empty())
    die(kUsage, std::string("--libs and --model are needed\n") + kHelp);
  return options;
}

// The functions used, from libllama and, through its dependencies, from ggml.
class Libraries {
 public:
  explicit Libraries(const fs::path& folder) {
    // libllama names its ggml libraries, but without a search path of its own it needs them loaded before it.
    open(folder, "libggml-base");
    open(folder, "libggml-cpu");
    open(folder, "libggml");
    llama_ = open(folder, "libllama");
    if (llama_ == nullptr) die(kNoLibraries, "no libllama in " + folder.string() + ": " + error_);
  }

  template <typename Function>
  Function* get(const char* name) const {
    void* function = dlsym(llama_, name);
    if (function == nullptr) die(kNoLibraries, std::string("libllama and its libraries have no ") + name);
    return reinterpret_cast<Function*>(function);
  }

 private:
  // "libllama.so", or a name with a release in it such as "libllama.v0.5.0.so".
  void* open(const fs::path& folder, const std::string& stem) {
    std::vector<fs::path> candidates = {folder / (stem + ".so")};
    std::error_code error;
    for (const auto& entry : fs::directory_iterator(folder, error)) {
      const std::string name = entry.path().filename().string();
      if (name.starts_with(stem + ".v") && name.ends_with(".so")) candidates.push_back(entry.path());
    }
    for (const fs::path& path : candidates) {
      if (!fs::exists(path)) continue;
      if (void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL)) return handle;
      error_ = dlerror();
    }
    return nullptr;
  }

  void* llama_ = nullptr;
  std::string error_ = "no such file";
};

const Libraries* g_libraries = nullptr;
// A function of llama.h or ggml under its own name and type, looked up once.
#define LLAMA(function)                                                           \
  ([] {                                                                           \
    static auto* const found = g_libraries->get<decltype(::function)>(#function); \
    return found;                                                                 \
  }())

// A line of /proc/self/status in bytes.
uint64_t status_bytes(const std::string& field) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(field + ":"))
      return std::strtoull(line.c_str() + field.size() + 1, nullptr, 10) * 1024;
  }
  return 0;
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::string json_string(std::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char code[8];
      std::snprintf(code, sizeof code, "\\u%04x", static_cast<unsigned>(static_cast<unsigned char>(c)));
      quoted += code;
    } else {
      quoted += c;
    }
  }
  return quoted + "\"";
}

struct Figures {
  std::vector<llama_token> prompt_tokens;
  std::vector<llama_token> tokens;
  std::string text;
  double load_s = 0;
  double prompt_s = 0;
  double decode_s = 0;
  int decoded = 0;  // tokens evaluated one by one
  int n_vocabulary = 0;
};

void write_json(const std::string& path, const Figures& figures) {
  std::ofstream out(path);
  const auto rate = [](double n, double seconds) { return seconds > 0 ? n / seconds : 0; };
  out << "{\"prompt_tokens\":" << figures.prompt_tokens.size() << ",\"tokens\":[";
  for (std::size_t i = 0; i < figures.tokens.size(); ++i) out << (i > 0 ? "," : "") << figures.tokens[i];
  out << "],\"text\":" << json_string(figures.text) << ",\"load_s\":" << figures.load_s
      << ",\"prompt_tokens_per_s\":"
      << rate(static_cast<double>(figures.prompt_tokens.size()), figures.prompt_s)
      << ",\"n_vocabulary\":" << figures.n_vocabulary
      << ",\"decode_tokens_per_s\":" << rate(figures.decoded, figures.decode_s)
      << ",\"rss_peak_bytes\":" << status_bytes("VmHWM") << ",\"rss_anon_bytes\":" << status_bytes("RssAnon")
      << ",\"rss_file_bytes\":" << status_bytes("RssFile")
      << ",\"rss_shmem_bytes\":" << status_bytes("RssShmem") << "}\n";
  if (!out.flush()) die(kUsage, "cannot write " + path);
}

ggml_backend_buffer_type_t buffer_type_by_name(const std::string& name) {
  for (std::size_t i = 0; i < LLAMA(ggml_backend_dev_count)(); ++i) {
    ggml_backend_buffer_type_t type = LLAMA(ggml_backend_dev_buffer_type)(LLAMA(ggml_backend_dev_get)(i));
    if (type != nullptr && name == LLAMA(ggml_backend_buft_name)(type)) return type;
  }
  die(kUsage, "no device has a buffer type named " + name);
}

llama_load_mode load_mode(const std::string& name) {
  const std::map<std::string, llama_load_mode> modes = {{"auto", LLAMA_LOAD_MODE_AUTO},
                                                        {"none", LLAMA_LOAD_MODE_NONE},
                                                        {"mmap", LLAMA_LOAD_MODE_MMAP},
                                                        {"mlock", LLAMA_LOAD_MODE_MLOCK},
                                                        {"mmap+mlock", LLAMA_LOAD_MODE_MMAP_MLOCK},
                                                        {"dio", LLAMA_LOAD_MODE_DIRECT_IO}};
  const auto found = modes.find(name);
  if (found == modes.end()) die(kUsage, "no load mode " + name);
  return found->second;
}

// The experts that every layer chose for the tokens of one batch, seen through llama.cpp's evaluation
// callback.
class RoutingLog {
 public:
  explicit RoutingLog(const std::string& path) : path_(path) {
    if (path_.empty()) return;
    file_ = std::fopen(path_.c_str(), "wb");
    if (file_ == nullptr) die(kUsage, "cannot write " + path_);
  }
  ~RoutingLog() {
    if (file_ != nullptr) std::fclose(file_);
  }
  RoutingLog(const RoutingLog&) = delete;
  RoutingLog& operator=(const RoutingLog&) = delete;

  bool active() const { return file_ != nullptr; }

  static bool observe(ggml_tensor* tensor, bool ask, void* self) {
    constexpr std::string_view kName = "ffn_moe_topk-";
    const std::string_view name = tensor->name;
    if (!name.starts_with(kName)) return !ask;
    if (!ask) static_cast<RoutingLog*>(self)->take(std::atoi(tensor->name + kName.size()), tensor);
    return true;
  }

  // Writes what was seen of the last batch, or the last part of it.
  void end_batch() {
    for (int32_t token = 0; token < n_tokens_; ++token) {
      for (const auto& [layer, ids] : layers_) {
        const std::size_t k = ids.size() / static_cast<std::size_t>(n_tokens_);
        const int32_t* row = ids.data() + static_cast<std::size_t>(token) * k;
        if (std::fwrite(row, sizeof *row, k, file_) != k) die(kUsage, "cannot write " + path_);
      }
    }
    layers_.clear();
    n_tokens_ = 0;
  }

 private:
  void take(int layer, const ggml_tensor* tensor) {
    if (layers_.contains(layer)) end_batch();  // the batch went through in parts
    // The ids are a view: the first k of all experts, sorted.
    const auto k = static_cast<std::size_t>(tensor->ne[0]);
    n_tokens_ = static_cast<int32_t>(tensor->ne[1]);
    std::vector<int32_t>& ids = layers_[layer];
    ids.resize(k * static_cast<std::size_t>(n_tokens_));
    for (std::size_t token = 0; token < static_cast<std::size_t>(n_tokens_); ++token) {
      LLAMA(ggml_backend_tensor_get)
      (tensor, ids.data() + token * k, token * tensor->nb[1], k * sizeof(int32_t));
    }
  }

  std::string path_;
  std::FILE* file_ = nullptr;
  std::map<int, std::vector<int32_t>> layers_;
  int32_t n_tokens_ = 0;
};

class Host {
 public:
  explicit Host(const Options& options) : options_(options), routing_(options.routing_out) { load(); }
  ~Host() {
    LLAMA(llama_sampler_free)(sampler_);
    LLAMA(llama_free)(context_);
    LLAMA(llama_model_free)(model_);
    if (logits_ != nullptr) std::fclose(logits_);
  }
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;

  Figures run();

 private:
  void load();
  std::vector<llama_token> tokenize(const std::string& text) const;
  std::string piece(llama_token token) const;
  void evaluate(std::vector<llama_token>& tokens, int first_position);

  const Options& options_;
  RoutingLog routing_;
  llama_model* model_ = nullptr;
  const llama_vocab* vocabulary_ = nullptr;
  llama_context* context_ = nullptr;
  llama_sampler* sampler_ = nullptr;
  std::FILE* logits_ = nullptr;
  double load_s_ = 0;
};

void Host::load() {
  const auto start = Clock::now();
  llama_model_params model_params = LLAMA(llama_model_default_params)();
  model_params.use_extra_bufts = options_.repack;
  model_params.load_mode = load_mode(options_.load);
  std::vector<llama_model_tensor_buft_override> overrides;
  if (!options_.override_pattern.empty()) {
    overrides = {{options_.override_pattern.c_str(), buffer_type_by_name(options_.override_type)},
                 {nullptr, nullptr}};
    model_params.tensor_buft_overrides = overrides.data();
  }
  model_ = LLAMA(llama_model_load_from_file)(options_.model.c_str(), model_params);
  if (model_ == nullptr) die(kNoModel, "cannot load " + options_.model);
  vocabulary_ = LLAMA(llama_model_get_vocab)(model_);

  llama_context_params params = LLAMA(llama_context_default_params)();
  params.n_ctx = options_.context;
  params.n_batch = options_.batch;
  params.n_ubatch = options_.ubatch;
  // llama.cpp's default is 4, which on fewer cores spends the time in its barriers.
  params.n_threads = params.n_threads_batch =
      options_.threads > 0 ? options_.threads
                           : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  if (routing_.active()) {
    params.cb_eval = RoutingLog::observe;
    params.cb_eval_user_data = &routing_;
  }
  context_ = LLAMA(llama_init_from_model)(model_, params);
  if (context_ == nullptr) die(kNoModel, "cannot make a context for " + options_.model);
  load_s_ = seconds_since(start);

  sampler_ = LLAMA(llama_sampler_chain_init)(LLAMA(llama_sampler_chain_default_params)());
  if (options_.temperature > 0) {
    // llama.cpp's usual chain, without the penalties.
    LLAMA(llama_sampler_chain_add)(sampler_, LLAMA(llama_sampler_init_top_k)(40));
    LLAMA(llama_sampler_chain_add)(sampler_, LLAMA(llama_sampler_init_top_p)(0.95f, 1));
    LLAMA(llama_sampler_chain_add)(sampler_, LLAMA(llama_sampler_init_min_p)(0.05f, 1));
    LLAMA(llama_sampler_chain_add)(sampler_, LLAMA(llama_sampler_init_temp)(options_.temperature));
    LLAMA(llama_sampler_chain_add)(sampler_, LLAMA(llama_sampler_init_dist)(options_.seed));
  } else {
    LLAMA(llama_sampler_chain_add)(sampler_, LLAMA(llama_sampler_init_greedy)());
  }
  if (!options_.logits_out.empty()) {
    logits_ = std::fopen(options_.logits_out.c_str(), "wb");
    if (logits_ == nullptr) die(kUsage, "cannot write " + options_.logits_out);
  }
}

std::vector<llama_token> Host::tokenize(const std::string& text) const {
  std::vector<llama_token> tokens(text.size() + 8);
  const int n = LLAMA(llama_tokenize)(vocabulary_, text.data(), static_cast<int32_t>(text.size()),
                                      tokens.data(), static_cast<int32_t>(tokens.size()), true, true);
  if (n <= 0) die(kUsage, "the prompt has no tokens");
  tokens.resize(static_cast<std::size_t>(n));
  return tokens;
}

std::string Host::piece(llama_token token) const {
  char text[256];
  const int n = LLAMA(llama_token_to_piece)(vocabulary_, token, text, sizeof text, 0, false);
  return n > 0 ? std::string(text, static_cast<std::size_t>(n)) : std::string();
}

// Evaluates tokens as one batch. With --logits-out every position gives its logits, else the last one; with
// --routing-out too, since the last layer leaves out tokens whose logits nobody wants.
void Host::evaluate(std::vector<llama_token>& tokens, int first_position) {
  const auto n = static_cast<int32_t>(tokens.size());
  llama_batch batch = LLAMA(llama_batch_init)(n, 0, 1);
  batch.n_tokens = n;
  for (int32_t i = 0; i < n; ++i) {
    batch.token[i] = tokens[static_cast<std::size_t>(i)];
    batch.pos[i] = first_position + i;
    batch.n_seq_id[i] = 1;
    batch.seq_id[i][0] = 0;
    batch.logits[i] = logits_ != nullptr || routing_.active() || i + 1 == n;
  }
  const int status = LLAMA(llama_decode)(context_, batch);
  LLAMA(llama_batch_free)(batch);
  if (status != 0) die(kDecodeFailed, "llama_decode returned " + std::to_string(status));
  if (routing_.active()) routing_.end_batch();
  if (logits_ == nullptr) return;
  const auto n_vocabulary = static_cast<std::size_t>(LLAMA(llama_vocab_n_tokens)(vocabulary_));
  for (int32_t i = 0; i < n; ++i) {
    const float* row = LLAMA(llama_get_logits_ith)(context_, i);
    if (std::fwrite(row, sizeof(float), n_vocabulary, logits_) != n_vocabulary) {
      die(kUsage, "cannot write " + options_.logits_out);
    }
  }
}

Figures Host::run() {
  Figures figures;
  figures.load_s = load_s_;
  figures.n_vocabulary = LLAMA(llama_vocab_n_tokens)(vocabulary_);
  figures.prompt_tokens = tokenize(options_.prompt);
  const int n_prompt = static_cast<int>(figures.prompt_tokens.size());
  if (n_prompt + options_.n_predict > static_cast<int>(options_.context)) {
    die(kUsage, "a prompt of " + std::to_string(n_prompt) + " tokens and the text do not fit into --ctx");
  }
  auto start = Clock::now();
  for (std::size_t at = 0; at < figures.prompt_tokens.size(); at += options_.batch) {
    const std::size_t end = std::min<std::size_t>(at + options_.batch, figures.prompt_tokens.size());
    std::vector<llama_token> part(figures.prompt_tokens.begin() + static_cast<std::ptrdiff_t>(at),
                                  figures.prompt_tokens.begin() + static_cast<std::ptrdiff_t>(end));
    evaluate(part, static_cast<int>(at));
  }
  figures.prompt_s = seconds_since(start);

  start = Clock::now();
  for (int i = 0; i < options_.n_predict; ++i) {
    const llama_token token = LLAMA(llama_sampler_sample)(sampler_, context_, -1);
    if (!options_.ignore_eog && LLAMA(llama_vocab_is_eog)(vocabulary_, token)) break;
    figures.tokens.push_back(token);
    const std::string text = piece(token);
    figures.text += text;
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
    if (i + 1 == options_.n_predict) break;
    std::vector<llama_token> one = {token};
    evaluate(one, n_prompt + i);
    ++figures.decoded;
  }
  figures.decode_s = seconds_since(start);
  std::printf("\n");
  return figures;
}

void load_plugin(const std::string& path) {
  if (path.empty()) return;
  if (LLAMA(ggml_backend_load)(path.c_str()) == nullptr)
    die(kNoPlugin, "the plugin " + path + " was not loaded");
}

void quiet(ggml_log_level level, const char* text, void*) {
  if (level == GGML_LOG_LEVEL_ERROR || std::getenv("MOECACHED_HOST_LOG") != nullptr) std::fputs(text, stderr);
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  const Libraries libraries(options.libs);
  g_libraries = &libraries;
  LLAMA(llama_log_set)(quiet, nullptr);
  LLAMA(ggml_backend_load_all_from_path)(options.libs.c_str());
  load_plugin(options.plugin);
  LLAMA(llama_backend_init)();
  {
    Host host(options);
    if (options.wait) {
      std::printf("ready\n");
      std::fflush(stdout);
      if (std::getchar() == EOF) return 0;
    }
    const Figures figures = host.run();
    if (!options.json.empty()) write_json(options.json, figures);
  }
  LLAMA(llama_backend_free)();
  return 0;
}
