// JSON from a hostile file, as a row of events: no tree in memory, keys that come twice are both seen. Reads
// a range of the file through HeaderReader. A reader of one kind of file derives from JsonEvents, overrides
// the events that it expects and refuses the others. Thread: any. Memory: the longest string, and a bit for
// each level of nesting.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "daemon/base/result.h"
#include "daemon/model/header_reader.h"

namespace moecached {

class JsonEvents : public nlohmann::json_sax<nlohmann::json> {
 public:
  bool null() override { return unexpected("null"); }
  bool boolean(bool) override { return unexpected("true or false"); }
  bool number_integer(number_integer_t value) override { return unexpected(std::to_string(value)); }
  bool number_unsigned(number_unsigned_t value) override { return unexpected(std::to_string(value)); }
  bool number_float(number_float_t, const string_t& text) override { return unexpected(text); }
  bool string(string_t& value) override;
  bool binary(binary_t&) override { return unexpected("binary data"); }
  bool start_object(std::size_t) override { return unexpected("an object"); }
  bool end_object() override { return unexpected("the end of an object"); }
  bool start_array(std::size_t) override { return unexpected("an array"); }
  bool end_array() override { return unexpected("the end of an array"); }
  bool key(string_t& name) override;
  bool parse_error(std::size_t position, const std::string& last_token,
                   const nlohmann::detail::exception& error) override;

  [[nodiscard]] const Fault& fault() const { return fault_; }

 protected:
  // Where the reader is, for messages: "tensor 'x'".
  [[nodiscard]] virtual std::string where() const = 0;
  bool refuse(Fault fault);
  bool refuse(std::string text) { return refuse(Fault{FaultCode::kInvalid, std::move(text)}); }
  bool unexpected(const std::string& what);

 private:
  Fault fault_;
};

// Reads one JSON value of `bytes` bytes from where `in` stands, nothing but white space behind it.
[[nodiscard]] Status read_json(HeaderReader& in, std::uint64_t bytes, JsonEvents& events);

}  // namespace moecached
