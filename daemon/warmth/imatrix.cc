#include "daemon/warmth/imatrix.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <string_view>
#include <vector>

#include "daemon/base/text.h"
#include "daemon/model/gguf.h"
#include "daemon/model/header_reader.h"

namespace moecached {
namespace {

constexpr std::uint32_t kEntriesMax = 1u << 17;
constexpr std::uint32_t kNameBytesMax = 256;
constexpr std::uint64_t kFileBytesMax = 16ull << 30;

Fault invalid(std::string text) { return {FaultCode::kInvalid, std::move(text)}; }

// The block of "blk.N.ffn_X_exps.weight", of whatever X.
std::optional<std::uint32_t> expert_block(std::string_view name) {
  constexpr std::string_view kPrefix = "blk.", kMiddle = ".ffn_", kSuffix = "_exps.weight";
  if (!name.starts_with(kPrefix) || !name.ends_with(kSuffix)) return std::nullopt;
  name.remove_prefix(kPrefix.size());
  std::uint32_t block = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), block);
  if (error != std::errc() || block >= kUseBlocksMax) return std::nullopt;
  name.remove_prefix(static_cast<std::size_t>(end - name.data()));
  return name.starts_with(kMiddle) ? std::optional(block) : std::nullopt;
}

LayerUses* layer_of(UseList* list, std::uint32_t block) {
  const auto place = std::ranges::lower_bound(list->layers, block, {}, &LayerUses::block);
  if (place != list->layers.end() && place->block == block) return nullptr;
  return &*list->layers.insert(place, {.block = block, .counts = {}});
}

Result<std::uint64_t> count_of(float value, const std::string& tensor, std::size_t expert) {
  if (!(value >= 0) || value > static_cast<float>(kUseCountMax))
    return invalid("tensor " + in_quotes(tensor) + ": the count of expert " + std::to_string(expert) +
                   " is not a number from 0 to 2^51");
  return static_cast<std::uint64_t>(value);
}

Status read_at(int fd, std::uint64_t offset, std::span<std::byte> out) {
  while (!out.empty()) {
    const ssize_t got = ::pread(fd, out.data(), out.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return system_fault("pread", errno);
    if (got == 0) return Fault{FaultCode::kChanged, "the file became shorter while it was read"};
    out = out.subspan(static_cast<std::size_t>(got));
    offset += static_cast<std::uint64_t>(got);
  }
  return ok();
}

}  // namespace

Result<UseList> read_imatrix_gguf(int fd) {
  auto file = read_gguf(fd);
  if (!file) return std::move(file).error();
  constexpr std::string_view kCounts = ".counts";
  UseList out{.label = "imatrix", .layers = {}};
  for (const GgufTensor& tensor : file->tensors) {
    std::string_view name = tensor.name;
    if (!name.ends_with(kCounts)) continue;
    name.remove_suffix(kCounts.size());
    const auto block = expert_block(name);
    if (!block) continue;
    const std::uint64_t n = tensor.ne[1];
    if (std::string_view(tensor.type->name) != "f32" || tensor.ne[0] != 1 || tensor.ne[2] != 1 ||
        tensor.ne[3] != 1)
      return invalid("tensor " + in_quotes(tensor.name) + " is not a row of F32 counts, one an expert");
    if (n > kUseExpertsMax) {
      return Fault{FaultCode::kLimit, "tensor " + in_quotes(tensor.name) + " counts " + std::to_string(n) +
                                          " experts; a layer has at most " + std::to_string(kUseExpertsMax)};
    }
    LayerUses* layer = layer_of(&out, *block);
    if (layer == nullptr) continue;
    std::vector<float> values(n);
    if (Status read = read_at(fd, tensor.offset, std::as_writable_bytes(std::span(values))); !read)
      return std::move(read).error().with_context("tensor " + in_quotes(tensor.name));
    for (std::size_t e = 0; e < n; ++e) {
      const auto count = count_of(values[e], tensor.name, e);
      if (!count) return Fault(count.error());
      layer->counts.push_back(*count);
    }
  }
  if (out.layers.empty()) {
    return Fault{FaultCode::kNotFound,
                 "this GGUF has no tensor blk.N.ffn_*_exps.weight.counts: it is not the imatrix of a "
                 "Mixture-of-Experts model"};
  }
  return out;
}

namespace {

// From the 10th to the 90th percentile: means of activations differ little between experts, counts of uses
// much.
constexpr double kSpreadOfMeansMax = 2;
constexpr double kUsesOfALayer = 1e6;

double spread(std::vector<double> sums) {
  std::erase(sums, 0.0);
  if (sums.size() < 2) return std::numeric_limits<double>::infinity();  // no mean is 0
  std::ranges::sort(sums);
  return sums[sums.size() * 9 / 10] / sums[sums.size() / 10];
}

Status read_sums(HeaderReader& reader, const std::string& name, std::uint32_t n_values,
                 std::vector<double>* sums) {
  const std::size_t per_expert = n_values / sums->size();
  std::vector<float> values(std::min<std::size_t>(per_expert, 4096));
  for (std::size_t e = 0; e < sums->size(); ++e) {
    for (std::size_t left = per_expert; left > 0;) {
      const std::span some = std::span(values).first(std::min(left, values.size()));
      if (!reader.read(std::as_writable_bytes(some))) return reader.fault("entry '" + name + "'");
      for (const float value : some) {
        if (!(value >= 0) || !std::isfinite(value))
          return invalid("entry '" + name + "' has a value that is not a sum of squares, of expert " +
                         std::to_string(e));
        (*sums)[e] += value;
      }
      left -= some.size();
    }
  }
  return ok();
}

}  // namespace

Result<UseList> read_imatrix_legacy(int fd, std::span<const BlockShape> shapes) {
  auto opened = HeaderReader::open(fd, kFileBytesMax);
  if (!opened) return std::move(opened).error();
  HeaderReader& reader = *opened;
  std::uint32_t n_entries = 0;
  if (!reader.read_u32(n_entries)) return reader.fault("number of entries");
  if (n_entries == 0 || n_entries > kEntriesMax)
    return invalid("the number of entries is " + std::to_string(n_entries) + ", not 1 to " +
                   std::to_string(kEntriesMax) + ": this is no imatrix file, nor counts as CSV");
  UseList out{.label = "imatrix", .layers = {}};
  std::vector<double> spreads;
  for (std::uint32_t i = 0; i < n_entries; ++i) {
    const std::string place = "entry " + std::to_string(i + 1) + " of " + std::to_string(n_entries);
    std::uint32_t length = 0, n_calls = 0, n_values = 0;
    if (!reader.read_u32(length)) return reader.fault(place);
    if (length == 0 || length > kNameBytesMax)
      return invalid(place + ": its name has " + std::to_string(length) + " bytes, not 1 to " +
                     std::to_string(kNameBytesMax));
    std::string name(length, '\0');
    if (!reader.read(std::as_writable_bytes(std::span(name)))) return reader.fault(place);
    if (!reader.read_u32(n_calls) || !reader.read_u32(n_values)) return reader.fault(place);
    const std::uint64_t bytes = std::uint64_t{n_values} * sizeof(float);
    if (bytes > reader.remaining())
      return reader.too_long(place + ": its " + std::to_string(n_values) + " values take " +
                             std::to_string(bytes) + " bytes");
    const auto block = expert_block(name);
    const auto shape = std::ranges::find(shapes, block.value_or(UINT32_MAX), &BlockShape::block);
    // What `down` sees differs in size from expert to expert, whatever their use.
    const bool is_down = name.find(".ffn_down_") != std::string::npos;
    LayerUses* layer = shape == shapes.end() || is_down ? nullptr : layer_of(&out, *block);
    if (layer == nullptr) {
      if (!reader.skip(bytes)) return reader.fault(place);
      continue;
    }
    if (n_values == 0 || n_values % shape->n_experts != 0)
      return invalid(place + ": its " + std::to_string(n_values) + " values are not those of " +
                     std::to_string(shape->n_experts) + " experts: another model's");
    std::vector<double> sums(shape->n_experts);
    if (Status read = read_sums(reader, "blk." + std::to_string(*block), n_values, &sums); !read)
      return std::move(read).error();
    double total = 0;
    for (const double sum : sums) total += sum;
    for (const double sum : sums)
      layer->counts.push_back(total > 0 ? static_cast<std::uint64_t>(sum / total * kUsesOfALayer) : 0);
    spreads.push_back(spread(std::move(sums)));
  }
  if (out.layers.empty())
    return Fault{FaultCode::kNotFound,
                 "it has no blk.N.ffn_gate_exps.weight or ffn_up_exps of this model's layers"};
  std::ranges::sort(spreads);
  if (spreads[spreads.size() / 2] < kSpreadOfMeansMax) {
    return Fault{
        FaultCode::kUnsupported,
        "this legacy imatrix holds means, from which the use of experts cannot be told: make it again "
        "with a llama-imatrix that writes GGUF, which has their counts"};
  }
  return out;
}

}  // namespace moecached
