#include "daemon/model/safetensors.h"

#include <algorithm>
#include <span>
#include <string_view>
#include <utility>

#include "daemon/base/text.h"
#include "daemon/model/checked_math.h"
#include "daemon/model/header_reader.h"
#include "daemon/model/json_events.h"

namespace moecached {
namespace {

constexpr std::uint64_t kLengthBytes = 8;

Fault invalid(std::string text) { return Fault{FaultCode::kInvalid, std::move(text)}; }

struct Dtype {
  const char* name;
  std::uint32_t bits;
  std::int32_t ggml;  // -1: none
};
constexpr Dtype kDtypes[] = {
    {"F32", 32, 0},         {"F16", 16, 1},         {"BF16", 16, 30},   {"F64", 64, 28},
    {"I8", 8, 24},          {"I16", 16, 25},        {"I32", 32, 26},    {"I64", 64, 27},
    {"U8", 8, -1},          {"U16", 16, -1},        {"U32", 32, -1},    {"U64", 64, -1},
    {"BOOL", 8, -1},        {"F8_E4M3", 8, -1},     {"F8_E5M2", 8, -1}, {"F8_E8M0", 8, -1},
    {"F4", 4, -1},          {"F6_E2M3", 6, -1},     {"F6_E3M2", 6, -1}, {"C64", 64, -1},
    {"F8_E4M3FNUZ", 8, -1}, {"F8_E5M2FNUZ", 8, -1},
};

class HeaderEvents : public JsonEvents {
 public:
  HeaderEvents(std::uint64_t data_offset, SafetensorsFile& file) : data_offset_(data_offset), file_(file) {}

  bool start_object(std::size_t n) override {
    switch (state_) {
      case State::kStart:
        return go(State::kTop);
      case State::kMetadataValue:
        return go(State::kMetadata);
      case State::kTensorValue:
        return go(State::kTensor);
      default:
        return JsonEvents::start_object(n);
    }
  }

  bool end_object() override {
    switch (state_) {
      case State::kTop:
        return go(State::kEnd);
      case State::kMetadata:
        return go(State::kTop);
      case State::kTensor:
        return finish_tensor() && go(State::kTop);
      default:
        return JsonEvents::end_object();
    }
  }

  bool key(string_t& name) override {
    if (state_ == State::kTop) return name == "__metadata__" ? go(State::kMetadataValue) : start_tensor(name);
    if (state_ == State::kMetadata) return true;  // for people: any text
    if (state_ != State::kTensor) return JsonEvents::key(name);
    if (name == "dtype") return start_field(State::kDtype, dtype_ != nullptr, name);
    if (name == "shape") return start_field(State::kShape, has_shape_, name);
    if (name == "data_offsets") return start_field(State::kOffsets, has_offsets_, name);
    return JsonEvents::key(name);
  }

  bool string(string_t& value) override {
    if (state_ == State::kMetadata) return true;
    if (state_ != State::kDtype) return JsonEvents::string(value);
    const auto* found = std::ranges::find(kDtypes, std::string_view(value), &Dtype::name);
    if (found == std::end(kDtypes))
      return refuse(where() + " has dtype " + in_quotes(value) + ", which is not known");
    dtype_ = found;
    return go(State::kTensor);
  }

  bool start_array(std::size_t n) override {
    if ((state_ != State::kShape && state_ != State::kOffsets) || in_array_)
      return JsonEvents::start_array(n);
    in_array_ = true;
    return true;
  }

  bool number_unsigned(number_unsigned_t value) override {
    if (!in_array_) return JsonEvents::number_unsigned(value);
    if (state_ == State::kShape) {
      if (tensor_.n_dims == kSafetensorsDimensionsMax) {
        return refuse(where() + " has more than " + std::to_string(kSafetensorsDimensionsMax) +
                      " dimensions");
      }
      tensor_.shape[tensor_.n_dims++] = value;
      return true;
    }
    if (n_offsets_ == offsets_.size()) return refuse(where() + " has more than two data_offsets");
    offsets_[n_offsets_++] = value;
    return true;
  }

  bool end_array() override {
    if (!in_array_) return JsonEvents::end_array();
    in_array_ = false;
    (state_ == State::kShape ? has_shape_ : has_offsets_) = true;
    return go(State::kTensor);
  }

 protected:
  std::string where() const override {
    return state_ == State::kStart || state_ == State::kTop || state_ == State::kEnd ? "the header"
           : state_ == State::kMetadataValue || state_ == State::kMetadata
               ? "__metadata__"
               : "tensor " + in_quotes(tensor_.name);
  }

 private:
  enum class State {
    kStart,
    kTop,
    kMetadataValue,
    kMetadata,
    kTensorValue,
    kTensor,
    kDtype,
    kShape,
    kOffsets,
    kEnd
  };

  bool go(State state) {
    state_ = state;
    return true;
  }

  bool start_field(State state, bool again, const std::string& name) {
    return again ? refuse(where() + " has " + in_quotes(name) + " twice") : go(state);
  }

  bool start_tensor(std::string& name) {
    const auto shown = [&] { return "tensor " + in_quotes(name); };
    if (file_.tensors.size() == kSafetensorsTensorsMax) {
      return refuse({FaultCode::kLimit, "more than " + std::to_string(kSafetensorsTensorsMax) + " tensors"});
    }
    if (name.empty() || name.find('\0') != std::string::npos)
      return refuse(shown() + " has an empty name, or a zero byte in it");
    if (name.size() > kSafetensorsNameBytesMax) {
      return refuse({FaultCode::kLimit, shown() + " has a name of " + std::to_string(name.size()) +
                                            " bytes, the limit is " +
                                            std::to_string(kSafetensorsNameBytesMax)});
    }
    tensor_ = {};
    tensor_.name = std::move(name);
    dtype_ = nullptr;
    has_shape_ = has_offsets_ = false;
    n_offsets_ = 0;
    return go(State::kTensorValue);
  }

  bool finish_tensor() {
    if (dtype_ == nullptr || !has_shape_ || n_offsets_ != offsets_.size())
      return refuse(where() + " needs a dtype, a shape and two data_offsets");
    std::uint64_t elements = 1;
    std::uint64_t bits = 0;
    bool fits = true;
    for (std::size_t d = 0; d < tensor_.n_dims; ++d)
      fits = fits && checked_multiply(elements, tensor_.shape[d], elements);
    if (!fits || !checked_multiply(elements, dtype_->bits, bits))
      return refuse(where() + " has more elements than a file can hold");
    if (bits % 8 != 0) return refuse(where() + " does not fill its last byte");
    const auto [begin, end] = offsets_;
    const std::uint64_t data_bytes = file_.file_bytes - data_offset_;
    if (begin > end || end > data_bytes) {
      return refuse(where() + " has data_offsets " + std::to_string(begin) + " to " + std::to_string(end) +
                    "; the file has " + std::to_string(data_bytes) + " bytes of data");
    }
    if (end - begin != bits / 8) {
      return refuse(where() + " has " + std::to_string(end - begin) + " bytes, its shape and dtype " +
                    dtype_->name + " need " + std::to_string(bits / 8));
    }
    tensor_.dtype = dtype_->name;
    tensor_.type = dtype_->ggml < 0 ? nullptr : find_ggml_type(static_cast<std::uint32_t>(dtype_->ggml));
    tensor_.offset = data_offset_ + begin;
    tensor_.bytes = end - begin;
    file_.tensors.push_back(std::move(tensor_));
    return true;
  }

  const std::uint64_t data_offset_;
  SafetensorsFile& file_;
  State state_ = State::kStart;
  bool in_array_ = false;
  SafetensorsTensor tensor_;
  const Dtype* dtype_ = nullptr;
  bool has_shape_ = false, has_offsets_ = false;
  std::array<std::uint64_t, 2> offsets_{};
  std::size_t n_offsets_ = 0;
};

Status check_names(const SafetensorsFile& file) {
  std::vector<std::string_view> names(file.tensors.size());
  std::ranges::transform(file.tensors, names.begin(), &SafetensorsTensor::name);
  std::ranges::sort(names);
  const auto twice = std::ranges::adjacent_find(names);
  if (twice != names.end()) return invalid("tensor " + in_quotes(*twice) + " appears twice");
  return ok();
}

Status check_coverage(const SafetensorsFile& file, std::uint64_t data_offset) {
  std::vector<const SafetensorsTensor*> order(file.tensors.size());
  std::ranges::transform(file.tensors, order.begin(),
                         [](const SafetensorsTensor& tensor) { return &tensor; });
  // Empty tensors first: they may lie where another one begins.
  std::ranges::sort(order, {}, [](const SafetensorsTensor* t) { return std::pair(t->offset, t->bytes); });
  std::uint64_t covered = data_offset;
  for (const SafetensorsTensor* tensor : order) {
    if (tensor->offset != covered) {
      return invalid("tensor " + in_quotes(tensor->name) + " starts at byte " +
                     std::to_string(tensor->offset) + ", " +
                     (tensor->offset < covered ? "inside the one before, which ends" : "behind a gap") +
                     " at byte " + std::to_string(covered));
    }
    covered += tensor->bytes;
  }
  if (covered == file.file_bytes) return ok();
  return invalid("the last tensor ends at byte " + std::to_string(covered) + ", the file has " +
                 std::to_string(file.file_bytes) + " bytes");
}

}  // namespace

Result<std::uint64_t> safetensors_header_bytes(int fd) {
  auto in = HeaderReader::open(fd, kLengthBytes + 1);
  if (!in) return std::move(in).error();
  if (in->remaining() < kLengthBytes + 1) return std::uint64_t{0};
  std::uint64_t length = 0;
  char first = 0;
  if (!in->read_u64(length) || !in->read(std::as_writable_bytes(std::span(&first, 1))))
    return in->fault("its first bytes");
  // No text begins with such a length: white space and '{' are large numbers in its upper bytes.
  return length <= in->file_bytes() - kLengthBytes && first == '{' ? length : 0;
}

Result<SafetensorsFile> read_safetensors(int fd, std::uint64_t header_bytes_max) {
  auto in = HeaderReader::open(fd, kLengthBytes + std::min(header_bytes_max, kSafetensorsHeaderBytesMax));
  if (!in) return std::move(in).error();
  SafetensorsFile file;
  file.file_bytes = in->file_bytes();
  std::uint64_t length = 0;
  if (!in->read_u64(length)) return in->fault("the length of the header");
  if (length > in->remaining()) return in->too_long("the header has " + std::to_string(length) + " bytes");
  HeaderEvents events(kLengthBytes + length, file);
  if (auto done = read_json(*in, length, events); !done)
    return std::move(done).error().with_context("safetensors header");
  if (auto done = check_names(file); !done) return std::move(done).error();
  if (auto done = check_coverage(file, kLengthBytes + length); !done) return std::move(done).error();
  return file;
}

}  // namespace moecached
