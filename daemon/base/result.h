// Result<T>: a value or a Fault, with the member names of std::expected (C++23; GCC 12 lacks it under C++20).
// Faults are failures of the outside world. Outcomes are enums of their module; bugs are CHECK.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace moecached {

enum class FaultCode : std::uint8_t {
  kInvalid,      // bad input: the text names the thing, the limit and what to do
  kNotFound,
  kLimit,        // a configured or built-in bound
  kUnsupported,  // this kernel, file system or machine cannot
  kSystem,       // a system call failed
  kChanged,      // a file is not the one it was
  kSpill,        // RAM is not to hold every expert of a model: ask for one of which it holds a part
};

struct Fault {
  FaultCode code = FaultCode::kSystem;
  std::string text;  // a sentence for people

  // "while opening model x: " + text
  [[nodiscard]] Fault with_context(std::string_view context) && {
    text.insert(0, ": ").insert(0, context);
    return std::move(*this);
  }
};

// "open /x: No such file or directory (errno 2)"
[[nodiscard]] Fault system_fault(std::string_view what, int error_number);

template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}      // NOLINT(google-explicit-constructor)
  Result(Fault fault) : state_(std::in_place_index<1>, std::move(fault)) {}  // NOLINT(google-explicit-constructor)
  [[nodiscard]] bool has_value() const { return state_.index() == 0; }
  explicit operator bool() const { return has_value(); }
  T& value() & { return std::get<0>(state_); }
  const T& value() const& { return std::get<0>(state_); }
  T&& value() && { return std::get<0>(std::move(state_)); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(*this).value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }
  Fault& error() & { return std::get<1>(state_); }
  const Fault& error() const& { return std::get<1>(state_); }
  Fault&& error() && { return std::get<1>(std::move(state_)); }

 private:
  std::variant<T, Fault> state_;
};

struct Done {};
using Status = Result<Done>;
inline Status ok() { return Done{}; }

}  // namespace moecached
