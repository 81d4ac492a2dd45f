#include "client/ctl/record.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <ctime>
#include <memory>
#include <nlohmann/json.hpp>

#include "client/ctl/table.h"
#include "client/ctl/trace_file.h"
#include "client/ctl/trace_rows.h"

namespace moecached::ctl {
namespace {

using nlohmann::ordered_json;
using std::chrono::steady_clock;

std::atomic<bool> stop{false};
static_assert(std::atomic<bool>::is_always_lock_free);  // set by a signal handler

// One signal ends the recording; the handler is gone then, a second one ends the program.
class StopSignals {
 public:
  StopSignals() {
    stop = false;
    struct sigaction action {};
    action.sa_handler = [](int) { stop_recording(); };
    action.sa_flags = static_cast<int>(SA_RESETHAND);
    ::sigaction(SIGINT, &action, &before_[0]);
    ::sigaction(SIGTERM, &action, &before_[1]);
  }
  ~StopSignals() {
    ::sigaction(SIGINT, &before_[0], nullptr);
    ::sigaction(SIGTERM, &before_[1], nullptr);
  }
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

 private:
  struct sigaction before_[2]{};
};

std::string now_utc() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

class Recording {
 public:
  Recording(const RecordOptions& options) : options_(options) {}

  // False: enough, or it cannot go on.
  bool take(const control::v1::RoutingChunk& chunk) {
    if (chunk.has_model() && !begin(chunk.model())) return false;
    if (rows_ == nullptr) return false;  // a stream that does not begin with the model
    for (const control::v1::RoutingEvent& event : chunk.events()) {
      ++n_events_;
      if (!rows_->add(event)) ++n_strange_;
      if (options_.tokens > 0 && n_tokens_ >= options_.tokens) return false;
    }
    dropped_ = chunk.dropped();
    if (file_->is_full()) return false;
    const bool time_is_over = options_.seconds > 0 && steady_clock::now() - begun_ >= limit();
    if (!stop && !time_is_over) return true;
    // What the daemon had before it was told to stop is still to come: the second chunk that leaves nothing
    // behind was begun after this one was sent.
    return !chunk.drained() || ++n_drained_ < 2;
  }

  // What there is to say of it, or why the file could not be written.
  TraceFile::Problem finish(ordered_json* summary) {
    if (problem_ || rows_ == nullptr) return problem_ ? problem_ : "the daemon sent nothing";
    rows_->finish();
    about_["sequences"] = rows_->n_sequences();
    about_["rows"] = file_->n_rows();
    about_["batches"] = file_->n_batches();
    about_["dropped"] = dropped_ + n_strange_;
    *summary = {
        {"file", options_.path},           {"rows", file_->n_rows()}, {"sequences", rows_->n_sequences()},
        {"batches", file_->n_batches()},   {"left_out", n_left_out_}, {"events", n_events_},
        {"dropped", dropped_ + n_strange_}};
    return file_->close(about_);
  }

 private:
  [[nodiscard]] steady_clock::duration limit() const {
    return std::chrono::duration_cast<steady_clock::duration>(
        std::chrono::duration<double>(options_.seconds));
  }

  bool begin(const control::v1::Model& model) {
    const auto n_layers = static_cast<std::uint32_t>(model.layers_size());
    std::uint32_t n_experts = 0;
    std::uint64_t resident = 0;
    ordered_json slots = ordered_json::array(), blocks = ordered_json::array();
    for (const control::v1::Layer& layer : model.layers()) {
      n_experts = std::max(n_experts, layer.n_experts());
      resident += layer.resident();
      slots.push_back(layer.n_slots());
      blocks.push_back(layer.block());
    }
    about_ = {{"model", model.name()},
              {"layers", n_layers},
              {"experts", n_experts},
              {"k", 0},
              {"k_used", model.n_expert_used()},
              {"source", "moecachectl trace record " MOECACHED_VERSION},
              {"recorded", now_utc()},
              {"device", model.device()},
              {"policy", model.policy()},
              {"slots", slots},
              {"blocks", blocks},
              {"resident_at_start", resident},
              {"note",
               "seq is a lane (a context of a client). A row holds what the daemon was told together: one "
               "token, or "
               "the union of several (\"batches\" rows; the tok of the lane's next row says how many). "
               "Prompts that "
               "need more experts than there are slots list those that were resident. On a GPU: the last 32 "
               "tokens of "
               "a batch; layers that are wholly resident are not told."}};
    // A GPU model has no slots before its first graph; the file says only what a replay can use.
    if (std::ranges::any_of(model.layers(), [](const auto& layer) { return layer.n_slots() == 0; }))
      about_.erase("slots");
    file_ = std::make_unique<TraceFile>(options_.path, n_layers, model.n_expert_used());
    problem_ = file_->open();
    if (problem_) return false;
    rows_ = std::make_unique<TraceRows>(n_layers, [this](const TraceRow& row) {
      if (options_.tokens > 0 && n_tokens_ >= options_.tokens) return;
      if (options_.single_tokens && row.n_tokens > 1) {
        ++n_left_out_;
        return;
      }
      n_tokens_ += row.n_tokens;
      file_->add(row);
    });
    begun_ = steady_clock::now();
    return true;
  }

  const RecordOptions& options_;
  ordered_json about_;
  std::unique_ptr<TraceFile> file_;
  std::unique_ptr<TraceRows> rows_;
  TraceFile::Problem problem_;
  steady_clock::time_point begun_;
  std::uint64_t n_tokens_ = 0, n_left_out_ = 0, n_events_ = 0, dropped_ = 0;
  std::uint64_t n_strange_ = 0;  // events of layers that the model does not have
  int n_drained_ = 0;
};

}  // namespace

void stop_recording() noexcept { stop = true; }

int record_trace(ControlClient& client, const Output& output, const RecordOptions& options) {
  const StopSignals signals;
  Recording recording(options);
  control::v1::RecordRoutingRequest request;
  request.set_model(options.model);
  const auto failure =
      client.record(request, [&](const control::v1::RoutingChunk& chunk) { return recording.take(chunk); });
  ordered_json summary;
  const TraceFile::Problem problem = recording.finish(&summary);
  if (failure && summary.is_null()) return report(output, *failure);  // it never began
  if (problem) return report(output, {kExitInternal, *problem});
  if (output.json) {
    std::fputs((summary.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n").c_str(),
               stdout);
  } else {
    std::printf("%s: %llu rows of %llu lanes, %llu of them of several tokens; %llu events lost\n",
                printable(options.path).c_str(), summary["rows"].get<unsigned long long>(),
                summary["sequences"].get<unsigned long long>(), summary["batches"].get<unsigned long long>(),
                summary["dropped"].get<unsigned long long>());
  }
  if (failure) return report(output, *failure);  // what was recorded is in the file all the same
  return kExitOk;
}

}  // namespace moecached::ctl
