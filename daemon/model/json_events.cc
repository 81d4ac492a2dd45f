#include "daemon/model/json_events.h"

#include <iterator>
#include <span>
#include <utility>

#include "daemon/base/text.h"

namespace moecached {
namespace {

// What the parser reads from: one byte at a time, until the range ends or a read fails.
struct Source {
  HeaderReader& in;
  std::uint64_t left;
  char current = 0;
  bool ended = false;
  bool failed = false;

  void advance() {
    if (left == 0 || failed) {
      ended = true;
      return;
    }
    --left;
    if (!in.read(std::as_writable_bytes(std::span(&current, 1)))) failed = ended = true;
  }
};

struct SourceIterator {
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = char;

  Source* source = nullptr;  // null: the end

  char operator*() const { return source->current; }
  SourceIterator& operator++() {
    source->advance();
    return *this;
  }
  SourceIterator operator++(int) {
    SourceIterator before = *this;
    ++*this;
    return before;
  }
  bool operator==(const SourceIterator& other) const { return at_end() == other.at_end(); }
  [[nodiscard]] bool at_end() const { return source == nullptr || source->ended; }
};

}  // namespace

bool JsonEvents::string(string_t& value) { return unexpected(in_quotes(value)); }
bool JsonEvents::key(string_t& name) { return unexpected("key " + in_quotes(name)); }

bool JsonEvents::parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception&) {
  return refuse("it is not JSON near its byte " + std::to_string(position));
}

bool JsonEvents::refuse(Fault fault) {
  fault_ = std::move(fault);
  return false;
}

bool JsonEvents::unexpected(const std::string& what) {
  return refuse(where() + " has " + what + " where something else belongs");
}

Status read_json(HeaderReader& in, std::uint64_t bytes, JsonEvents& events) {
  Source source{in, bytes};
  source.advance();
  const bool read = nlohmann::json::sax_parse(SourceIterator{&source}, SourceIterator{}, &events);
  if (source.failed) return in.fault("the JSON text");
  if (!read) return events.fault();
  return ok();
}

}  // namespace moecached
