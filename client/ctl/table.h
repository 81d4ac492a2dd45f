// Text for people: aligned tables, sizes in IEC units, shares in percent. Pure. Thread: any.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace moecached::ctl {

[[nodiscard]] std::string human_size(std::uint64_t bytes);                   // "1.50 GiB", "512 B"
[[nodiscard]] std::string percent(std::uint64_t part, std::uint64_t whole);  // "93.2 %", "-" of nothing
[[nodiscard]] std::string human_seconds(double seconds);  // "3d 04h", "2h 05m", "1m 07s", "4.2s"
// What a client or a file named, safe for a terminal: control characters become '?'.
[[nodiscard]] std::string printable(const std::string& text);

class Table {
 public:
  // A heading that starts with '>' is printed without it, and its column is right-aligned.
  explicit Table(std::vector<std::string> headings);
  void add(std::vector<std::string> row);  // REQUIRES: as many cells as headings
  [[nodiscard]] std::string text() const;  // lines end in '\n', no trailing blanks

 private:
  std::vector<bool> right_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace moecached::ctl
