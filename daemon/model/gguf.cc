#include "daemon/model/gguf.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <span>
#include <utility>

#include "daemon/base/text.h"
#include "daemon/model/checked_math.h"
#include "daemon/model/header_reader.h"

namespace moecached {
namespace {

constexpr std::uint64_t kKeyBytesMin = 8 + 1 + 4 + 1;         // length, one letter, type, a value of one byte
constexpr std::uint64_t kTensorBytesMin = 8 + 1 + 4 + 4 + 8;  // length, one letter, n_dims, type, offset
constexpr std::uint64_t kDimensionMax = std::numeric_limits<std::int64_t>::max();  // ggml's ne are int64

Fault invalid(std::string text) { return Fault{FaultCode::kInvalid, std::move(text)}; }
Fault over_limit(std::string text) { return Fault{FaultCode::kLimit, std::move(text)}; }

struct ScalarType {
  const char* name;
  std::uint32_t bytes;  // 0: no fixed size
  bool integer;
  bool is_signed;
};
constexpr ScalarType kScalarTypes[] = {
    {"uint8", 1, true, false},    {"int8", 1, true, true},    {"uint16", 2, true, false},
    {"int16", 2, true, true},     {"uint32", 4, true, false}, {"int32", 4, true, true},
    {"float32", 4, false, false}, {"bool", 1, false, false},  {"string", 0, false, false},
    {"array", 0, false, false},   {"uint64", 8, true, false}, {"int64", 8, true, true},
    {"float64", 8, false, false},
};

const ScalarType& scalar_type(GgufType type) { return kScalarTypes[static_cast<std::uint32_t>(type)]; }

std::int64_t decode_integer(const std::byte* bytes, const ScalarType& type) {
  std::uint64_t raw = 0;
  std::memcpy(&raw, bytes, type.bytes);
  if (type.is_signed) {
    const unsigned unused_bits = 64 - 8 * type.bytes;
    return static_cast<std::int64_t>(raw << unused_bits) >> unused_bits;
  }
  return static_cast<std::int64_t>(std::min(raw, kDimensionMax));
}

class Parser {
 public:
  explicit Parser(HeaderReader reader) : in_(std::move(reader)) { file_.file_bytes = in_.file_bytes(); }

  Result<GgufFile> parse() {
    if (auto done = preamble(); !done) return std::move(done).error();
    for (std::uint64_t i = 0; i < n_keys_; ++i) {
      if (auto done = key(i); !done) return std::move(done).error();
    }
    if (auto done = alignment(); !done) return std::move(done).error();
    for (std::uint64_t i = 0; i < n_tensors_; ++i) {
      if (auto done = tensor(i); !done) return std::move(done).error();
    }
    if (auto done = place_tensors(); !done) return std::move(done).error();
    if (auto done = check_names(); !done) return std::move(done).error();
    if (auto done = check_overlaps(); !done) return std::move(done).error();
    return std::move(file_);
  }

 private:
  Status preamble() {
    char magic[4] = {};
    if (!in_.read(std::as_writable_bytes(std::span(magic)))) return in_.fault("the first four bytes");
    if (std::memcmp(magic, "GGUF", 4) != 0) {
      return invalid("not a GGUF file: it starts with " + in_quotes({magic, 4}) + ", not with 'GGUF'");
    }
    if (!in_.read_u32(file_.version)) return in_.fault("GGUF version");
    if (file_.version != 0 && (file_.version & 0xffffu) == 0) {
      return Fault{FaultCode::kUnsupported, "a big-endian GGUF (version " +
                                                std::to_string(__builtin_bswap32(file_.version)) +
                                                "): only little-endian files are read, convert it first"};
    }
    if (file_.version != 2 && file_.version != 3) {
      return Fault{FaultCode::kUnsupported,
                   "GGUF version " + std::to_string(file_.version) + ": only versions 2 and 3 are read"};
    }
    if (!in_.read_u64(n_tensors_)) return in_.fault("tensor count");
    if (!in_.read_u64(n_keys_)) return in_.fault("key count");
    if (auto done = check_count("tensor", n_tensors_, kTensorBytesMin, kGgufTensorsMax); !done) return done;
    return check_count("key", n_keys_, kKeyBytesMin, kGgufKeysMax);
  }

  Status check_count(const char* what, std::uint64_t count, std::uint64_t bytes_min, std::uint64_t limit) {
    if (count > in_.remaining() / bytes_min) {
      return in_.too_long(std::string(what) + " count " + std::to_string(count) + " of " +
                          std::to_string(bytes_min) + " bytes or more each");
    }
    if (count > limit) {
      return over_limit(std::string(what) + " count " + std::to_string(count) + " is above the limit of " +
                        std::to_string(limit));
    }
    return ok();
  }

  // REQUIRES: limit is small; this much memory is taken.
  Result<std::string> short_string(const std::string& what, std::uint64_t limit) {
    std::uint64_t length = 0;
    if (!in_.read_u64(length)) return in_.fault("length of " + what);
    if (length == 0) return invalid(what + " is empty");
    if (length > in_.remaining()) return too_long(what, length);
    if (length > limit) {
      return over_limit(what + " has " + std::to_string(length) + " bytes, the limit is " +
                        std::to_string(limit));
    }
    std::string text(static_cast<std::size_t>(length), '\0');
    if (!in_.read(std::as_writable_bytes(std::span(text)))) return in_.fault(what);
    return text;
  }

  Fault too_long(const std::string& what, std::uint64_t length) const {
    return in_.too_long(what + " has " + std::to_string(length) + " bytes");
  }

  bool take_budget(std::uint64_t bytes) {
    if (bytes > budget_) return false;
    budget_ -= bytes;
    return true;
  }

  Result<GgufType> value_type(const std::string& what) {
    std::uint32_t raw = 0;
    if (!in_.read_u32(raw)) return in_.fault("type of " + what);
    if (raw >= std::size(kScalarTypes)) {
      return invalid(what + " has type " + std::to_string(raw) + ", the highest known is " +
                     std::to_string(std::size(kScalarTypes) - 1));
    }
    return static_cast<GgufType>(raw);
  }

  Status key(std::uint64_t index) {
    auto name = short_string("name of key " + std::to_string(index), kGgufKeyBytesMax);
    if (!name) return std::move(name).error();
    const std::string what = "key " + in_quotes(*name);
    auto type = value_type(what);
    if (!type) return std::move(type).error();
    GgufValue value;
    value.type = value.element = *type;
    if (*type == GgufType::kArray) {
      auto element = value_type("the elements of " + what);
      if (!element) return std::move(element).error();
      if (*element == GgufType::kArray)
        return invalid(what + " is an array of arrays, which GGUF readers refuse");
      value.element = *element;
      if (!in_.read_u64(value.count)) return in_.fault("element count of " + what);
    }
    if (auto done = value.element == GgufType::kString ? strings(what, value) : scalars(what, value); !done)
      return done;
    if (!file_.values.emplace(std::move(*name), std::move(value)).second)
      return invalid(what + " appears twice");
    return ok();
  }

  Status strings(const std::string& what, GgufValue& value) {
    if (value.count > in_.remaining() / 8) {
      return in_.too_long(what + " has " + std::to_string(value.count) + " strings of 8 bytes or more");
    }
    for (std::uint64_t i = 0; i < value.count; ++i) {
      std::uint64_t length = 0;
      if (!in_.read_u64(length)) return in_.fault("a string of " + what);
      if (length > in_.remaining()) return too_long("string " + std::to_string(i) + " of " + what, length);
      value.kept = value.type == GgufType::kString && length <= kGgufKeptTextBytesMax && take_budget(length);
      if (!value.kept) {
        if (!in_.skip(length)) return in_.fault(what);
        continue;
      }
      value.text.resize(static_cast<std::size_t>(length));
      if (!in_.read(std::as_writable_bytes(std::span(value.text)))) return in_.fault(what);
    }
    return ok();
  }

  Status scalars(const std::string& what, GgufValue& value) {
    const ScalarType& type = scalar_type(value.element);
    if (value.count > in_.remaining() / type.bytes) {
      return in_.too_long(what + " has " + std::to_string(value.count) + " elements of " +
                          std::to_string(type.bytes) + " bytes");
    }
    value.kept = type.integer && value.count <= kGgufKeptElementsMax &&
                 take_budget(value.count * sizeof(std::int64_t));
    if (!value.kept) return in_.skip(value.count * type.bytes) ? ok() : Status(in_.fault(what));
    value.integers.reserve(static_cast<std::size_t>(value.count));
    for (std::uint64_t i = 0; i < value.count; ++i) {
      std::byte raw[8] = {};
      if (!in_.read(std::span(raw).first(type.bytes))) return in_.fault(what);
      value.integers.push_back(decode_integer(raw, type));
    }
    return ok();
  }

  Status alignment() {
    constexpr std::string_view kKey = "general.alignment";
    if (file_.find(kKey) == nullptr) return ok();  // 32
    auto value = integer_value(file_, kKey, 1, std::numeric_limits<std::uint32_t>::max());
    if (!value) return std::move(value).error();
    if (!is_power_of_two(*value))
      return invalid("key 'general.alignment' is " + std::to_string(*value) + ", not a power of two");
    file_.alignment = *value;
    return ok();
  }

  Status tensor(std::uint64_t index) {
    GgufTensor tensor;
    auto name = short_string("name of tensor " + std::to_string(index), kGgufTensorNameBytesMax);
    if (!name) return std::move(name).error();
    const std::string what = "tensor " + in_quotes(*name);
    // ggml stops at the zero: two readers would see two different names.
    if (name->find('\0') != std::string::npos) return invalid(what + " has a zero byte in its name");
    tensor.name = std::move(*name);
    if (!in_.read_u32(tensor.n_dims)) return in_.fault("dimension count of " + what);
    if (tensor.n_dims > tensor.ne.size()) {
      return invalid(what + " has " + std::to_string(tensor.n_dims) + " dimensions, the limit is 4");
    }
    for (std::uint32_t d = 0; d < tensor.n_dims; ++d) {
      if (!in_.read_u64(tensor.ne[d])) return in_.fault("dimensions of " + what);
      if (tensor.ne[d] > kDimensionMax) {
        return invalid(what + " has " + std::to_string(tensor.ne[d]) + " elements in dimension " +
                       std::to_string(d) + ", the limit is " + std::to_string(kDimensionMax));
      }
    }
    std::uint32_t type = 0;
    if (!in_.read_u32(type)) return in_.fault("type of " + what);
    tensor.type = find_ggml_type(type);
    if (tensor.type == nullptr) {
      return invalid(what + " has ggml type " + std::to_string(type) +
                     ", which is removed or newer than type " + std::to_string(ggml_types().back().id) +
                     " (" + ggml_types().back().name + "), the last one known");
    }
    if (tensor.ne[0] % tensor.type->block_elements != 0) {
      return invalid(what + " has rows of " + std::to_string(tensor.ne[0]) + " elements, not a multiple of " +
                     std::to_string(tensor.type->block_elements) + ", the block of " + tensor.type->name);
    }
    std::uint64_t elements = 1;
    bool fits = true;
    for (const std::uint64_t n : tensor.ne) fits = fits && checked_multiply(elements, n, elements);
    fits = fits &&
           checked_multiply(elements / tensor.type->block_elements, tensor.type->block_bytes, tensor.bytes);
    if (!fits || elements > kDimensionMax) {
      return invalid(what + " has " + shape(tensor) + " elements, more than a file can hold");
    }
    if (!in_.read_u64(tensor.offset))
      return in_.fault("offset of " + what);  // from data_offset, until place_tensors
    file_.tensors.push_back(std::move(tensor));
    return ok();
  }

  static std::string shape(const GgufTensor& tensor) {
    std::string text;
    for (const std::uint64_t n : tensor.ne) text += (text.empty() ? "" : " x ") + std::to_string(n);
    return text;
  }

  Status place_tensors() {
    if (!checked_align_up(in_.position(), file_.alignment, file_.data_offset)) {
      return invalid("the padding before the data wraps: alignment " + std::to_string(file_.alignment));
    }
    if (file_.tensors.empty()) return ok();  // the first shard may carry keys alone, unpadded
    if (file_.data_offset > file_.file_bytes) {
      return invalid("the data would start at byte " + std::to_string(file_.data_offset) + " (alignment " +
                     std::to_string(file_.alignment) + "), the file has " + std::to_string(file_.file_bytes) +
                     " bytes");
    }
    for (GgufTensor& tensor : file_.tensors) {
      const std::string what = "tensor " + in_quotes(tensor.name);
      if (tensor.offset % file_.alignment != 0) {
        return invalid(what + " has offset " + std::to_string(tensor.offset) +
                       ", not a multiple of the alignment " + std::to_string(file_.alignment));
      }
      std::uint64_t start = 0;
      std::uint64_t end = 0;
      if (!checked_add(file_.data_offset, tensor.offset, start) || !checked_add(start, tensor.bytes, end) ||
          end > file_.file_bytes) {
        return invalid(what + " has offset " + std::to_string(tensor.offset) + " and " +
                       std::to_string(tensor.bytes) + " bytes, behind " + std::to_string(file_.data_offset) +
                       " bytes of header; the file has " + std::to_string(file_.file_bytes));
      }
      tensor.offset = start;
    }
    return ok();
  }

  Status check_names() const {
    std::vector<std::string_view> names(file_.tensors.size());
    std::ranges::transform(file_.tensors, names.begin(), &GgufTensor::name);
    std::ranges::sort(names);
    const auto twice = std::ranges::adjacent_find(names);
    if (twice != names.end()) return invalid("tensor " + in_quotes(*twice) + " appears twice");
    return ok();
  }

  Status check_overlaps() const {
    std::vector<const GgufTensor*> order;
    for (const GgufTensor& tensor : file_.tensors) {
      if (tensor.bytes != 0) order.push_back(&tensor);
    }
    std::ranges::sort(order, {}, &GgufTensor::offset);
    for (std::size_t i = 1; i < order.size(); ++i) {
      const GgufTensor& before = *order[i - 1];
      const GgufTensor& after = *order[i];
      if (before.offset + before.bytes > after.offset) {
        return invalid("tensor " + in_quotes(after.name) + " starts at byte " + std::to_string(after.offset) +
                       ", inside tensor " + in_quotes(before.name) + ", which ends at byte " +
                       std::to_string(before.offset + before.bytes));
      }
    }
    return ok();
  }

  HeaderReader in_;
  GgufFile file_;
  std::uint64_t n_tensors_ = 0;
  std::uint64_t n_keys_ = 0;
  std::uint64_t budget_ = kGgufKeptBytesMax;
};

}  // namespace

const char* gguf_type_name(GgufType type) { return scalar_type(type).name; }

const GgufValue* GgufFile::find(std::string_view key) const {
  const auto found = values.find(key);
  return found == values.end() ? nullptr : &found->second;
}

Result<GgufFile> read_gguf(int fd) {
  auto reader = HeaderReader::open(fd, kGgufHeaderBytesMax);
  if (!reader) return std::move(reader).error();
  return Parser(std::move(*reader)).parse();
}

Result<std::uint64_t> integer_value(const GgufFile& file, std::string_view key, std::uint64_t low,
                                    std::uint64_t high) {
  const GgufValue* value = file.find(key);
  if (value == nullptr) return Fault{FaultCode::kNotFound, "key " + in_quotes(key) + " is missing"};
  if (!scalar_type(value->type).integer) {
    return invalid("key " + in_quotes(key) + " is of type " + gguf_type_name(value->type) +
                   ", an integer is needed");
  }
  if (!value->kept)
    return Fault{FaultCode::kLimit, "key " + in_quotes(key) + " comes behind too many other values"};
  const std::int64_t integer = value->integers.front();
  if (integer < 0 || static_cast<std::uint64_t>(integer) < low ||
      static_cast<std::uint64_t>(integer) > high) {
    return invalid("key " + in_quotes(key) + " is " + std::to_string(integer) + ", it must be from " +
                   std::to_string(low) + " to " + std::to_string(high));
  }
  return static_cast<std::uint64_t>(integer);
}

}  // namespace moecached
