// What happened in a simulation, as a hash that two runs of one seed must share, and, for the run that
// explains a failure, as the last lines of text.
#pragma once

#include <cstdint>
#include <deque>
#include <initializer_list>
#include <string>
#include <string_view>

namespace moecached::sim {

class Trace {
 public:
  explicit Trace(bool keep_text) : keep_text_(keep_text) {}

  void note(std::string_view what, std::initializer_list<std::uint64_t> values) {
    for (char c : what) mix(static_cast<unsigned char>(c));
    for (std::uint64_t value : values) mix(value);
    if (!keep_text_) return;
    std::string line(what);
    for (std::uint64_t value : values) line.append(" ").append(std::to_string(value));
    lines_.push_back(std::move(line));
    if (lines_.size() > kLinesMax) lines_.pop_front();
  }
  [[nodiscard]] std::uint64_t hash() const { return hash_; }
  [[nodiscard]] std::string text() const {
    std::string all;
    for (const std::string& line : lines_) all.append("  ").append(line).append("\n");
    return all;
  }

 private:
  static constexpr std::size_t kLinesMax = 120;
  void mix(std::uint64_t value) {
    hash_ = (hash_ ^ value) * UINT64_C(0x100000001b3);  // FNV-1a over words
    hash_ ^= hash_ >> 29;
  }

  bool keep_text_;
  std::uint64_t hash_ = UINT64_C(0xcbf29ce484222325);
  std::deque<std::string> lines_;
};

}  // namespace moecached::sim
