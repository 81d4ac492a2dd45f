#include "daemon/model/shards.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>

#include "daemon/base/text.h"
#include "proto/shm/layout.h"

namespace moecached {
namespace {

constexpr std::string_view kNumber = "split.no";
constexpr std::string_view kCount = "split.count";
constexpr std::string_view kTensorCount = "split.tensors.count";
constexpr std::string_view kArchitecture = "general.architecture";

std::string shard_text(std::size_t index, std::size_t n) {
  return "shard " + std::to_string(index + 1) + " of " + std::to_string(n);
}

Fault invalid(std::string text) { return Fault{FaultCode::kInvalid, std::move(text)}; }

// A missing split key means a file that belongs to no set: bad input here, not something to look for
// elsewhere.
Result<std::uint64_t> split_value(const GgufFile& file, std::string_view key, std::uint64_t high) {
  auto value = integer_value(file, key, 0, high);
  if (!value && value.error().code == FaultCode::kNotFound) value.error().code = FaultCode::kInvalid;
  return value;
}

Status check_single(const GgufFile& file) {
  if (file.find(kCount) == nullptr) return ok();
  auto count = split_value(file, kCount, kGgufTensorsMax);
  if (!count) return std::move(count).error();
  if (*count <= 1) return ok();
  return invalid("key 'split.count' is " + std::to_string(*count) +
                 ", but 1 file was given: pass every shard, in order");
}

// `first` is null for shard 0 itself.
Status check_shard(const GgufFile& file, const GgufFile* first, std::size_t index, std::size_t n) {
  auto number = split_value(file, kNumber, kGgufTensorsMax);
  if (!number) return std::move(number).error();
  auto count = split_value(file, kCount, kGgufTensorsMax);
  if (!count) return std::move(count).error();
  auto tensors = split_value(file, kTensorCount, kGgufTensorsMax);
  if (!tensors) return std::move(tensors).error();
  if (*count != n) {
    return invalid("key 'split.count' is " + std::to_string(*count) + ", but " + std::to_string(n) +
                   " files were given");
  }
  if (*number != index) {
    return invalid("key 'split.no' is " + std::to_string(*number) + ", it must be " + std::to_string(index) +
                   " here: the shards are not in order, or one is there twice");
  }
  if (first == nullptr) return ok();
  auto expected = split_value(*first, kTensorCount, kGgufTensorsMax);
  if (!expected) return std::move(expected).error();
  if (*tensors != *expected) {
    return invalid("key 'split.tensors.count' is " + std::to_string(*tensors) + ", the first shard says " +
                   std::to_string(*expected) + ": these are shards of two models");
  }
  const GgufValue* own = file.find(kArchitecture);
  const GgufValue* other = first->find(kArchitecture);
  if (own != nullptr && (other == nullptr || own->text != other->text)) {
    return invalid("key 'general.architecture' is " + in_quotes(own->text) + ", the first shard says " +
                   in_quotes(other == nullptr ? "" : other->text) + ": these are shards of two models");
  }
  return ok();
}

Status check_names(const ShardSet& set) {
  std::vector<const ShardTensor*> order(set.tensors.size());
  std::ranges::transform(set.tensors, order.begin(), [](const ShardTensor& t) { return &t; });
  const auto name = [](const ShardTensor* t) -> const std::string& { return t->tensor.name; };
  std::ranges::sort(order, {}, name);
  const auto twice = std::ranges::adjacent_find(order, {}, name);
  if (twice == order.end()) return ok();
  const auto [low, high] = std::minmax((*twice)->file, (*std::next(twice))->file);
  return invalid("tensor " + in_quotes(name(*twice)) + " is in shard " + std::to_string(low + 1) +
                 " and in shard " + std::to_string(high + 1));
}

}  // namespace

Result<ShardSet> read_shards(std::span<const int> fds) {
  if (fds.empty()) return invalid("no file was given");
  if (fds.size() > MOECACHED_MAX_FILES) {
    return Fault{FaultCode::kLimit, std::to_string(fds.size()) + " shards were given, the limit is " +
                                        std::to_string(static_cast<int>(MOECACHED_MAX_FILES))};
  }
  ShardSet set;
  set.n_files = static_cast<std::uint32_t>(fds.size());
  for (std::size_t i = 0; i < fds.size(); ++i) {
    const auto in_shard = [&](Fault fault) {
      return fds.size() == 1 ? std::move(fault) : std::move(fault).with_context(shard_text(i, fds.size()));
    };
    auto file = read_gguf(fds[i]);
    if (!file) return in_shard(std::move(file).error());
    auto done = fds.size() == 1 ? check_single(*file)
                                : check_shard(*file, i == 0 ? nullptr : &set.first, i, fds.size());
    if (!done) return in_shard(std::move(done).error());
    if (set.tensors.size() + file->tensors.size() > kGgufTensorsMax) {
      return in_shard(Fault{FaultCode::kLimit,
                            "more than " + std::to_string(kGgufTensorsMax) + " tensors in all shards"});
    }
    for (GgufTensor& tensor : file->tensors)
      set.tensors.push_back({std::move(tensor), static_cast<std::uint32_t>(i)});
    file->tensors.clear();
    if (i == 0) set.first = std::move(*file);
  }
  if (fds.size() == 1) return set;
  auto expected = split_value(set.first, kTensorCount, kGgufTensorsMax);
  if (!expected) return std::move(expected).error();
  if (set.tensors.size() != *expected) {
    return invalid("key 'split.tensors.count' is " + std::to_string(*expected) + ", the shards hold " +
                   std::to_string(set.tensors.size()) + " tensors");
  }
  if (auto done = check_names(set); !done) return std::move(done).error();
  return set;
}

}  // namespace moecached
