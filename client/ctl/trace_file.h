// A moetrace-csv v1 file that is written row by row, plain or zstd by its name. Its first lines say how wide
// the widest row is and what was lost, which is known at the end: so rows are kept in an unnamed file beside
// it first. The file appears whole, under its name, with close(). Thread: one. Memory: one row and buffers.
#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "client/ctl/trace_rows.h"

namespace moecached::ctl {

class TraceFile {
 public:
  static constexpr std::uint64_t kSpoolBytesMax = 16ull << 30;
  using Problem = std::optional<std::string>;  // a sentence for people

  TraceFile(std::string path, std::uint32_t n_layers, std::uint32_t k);
  [[nodiscard]] Problem open();
  void add(const TraceRow& row);  // problems are kept for close()
  [[nodiscard]] bool is_full() const { return spooled_ >= kSpoolBytesMax; }
  // `about` is the JSON of the first line; layers, experts and such are the caller's, k is set here.
  [[nodiscard]] Problem close(nlohmann::ordered_json about);

  [[nodiscard]] std::uint64_t n_rows() const { return n_rows_; }
  [[nodiscard]] std::uint64_t n_batches() const { return n_batches_; }  // rows that stand for several tokens

 private:
  struct Closer {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  class Writer;
  [[nodiscard]] Problem write_rows(Writer& writer);

  const std::string path_;
  const std::uint32_t n_layers_;
  std::uint32_t k_;  // experts of a token, then of the widest row
  std::unique_ptr<std::FILE, Closer> spool_;
  std::uint64_t n_rows_ = 0, n_batches_ = 0, spooled_ = 0;
  bool failed_ = false;
};

}  // namespace moecached::ctl
