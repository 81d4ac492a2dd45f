// Several shards in one file, so that a fuzzer can change them together; and files without the zeros at their
// end, of which the data of tensors is most. What does not begin with the magic is one shard, as it is.
//
//   "SHARDS" u16 n | n times: u32 bytes, u32 file_bytes (more: zeros follow) | the bytes of each
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace moecached::fuzz {

struct Shard {
  std::span<const std::byte> bytes;
  std::uint64_t file_bytes = 0;
};

inline constexpr std::array<char, 6> kShardsMagic = {'S', 'H', 'A', 'R', 'D', 'S'};
inline constexpr std::size_t kShardsMax = 8;
inline constexpr std::uint32_t kShardBytesMax = 1u << 20;

inline std::vector<Shard> unpack_shards(std::span<const std::byte> input) {
  std::uint16_t n = 0;
  const std::size_t table = kShardsMagic.size() + sizeof n;
  if (input.size() < table || std::memcmp(input.data(), kShardsMagic.data(), kShardsMagic.size()) != 0)
    return {{input, input.size()}};
  std::memcpy(&n, input.data() + kShardsMagic.size(), sizeof n);
  std::vector<Shard> shards;
  std::span<const std::byte> sizes = input.subspan(table);
  const std::size_t n_shards = std::min({std::size_t{n}, kShardsMax, sizes.size() / 8});
  std::span<const std::byte> rest = sizes.subspan(n_shards * 8);
  for (std::size_t i = 0; i < n_shards; ++i) {
    std::uint32_t words[2];
    std::memcpy(words, sizes.data() + i * sizeof words, sizeof words);
    const auto bytes = rest.first(std::min<std::size_t>(words[0], rest.size()));
    rest = rest.subspan(bytes.size());
    shards.push_back({bytes, std::max<std::uint64_t>(bytes.size(), std::min(words[1], kShardBytesMax))});
  }
  return shards;
}

// Zeros at the end of each are left out.
inline std::vector<std::byte> pack_shards(std::span<const std::vector<std::byte>> files) {
  std::vector<std::byte> out;
  const auto append = [&out](const void* from, std::size_t n) {
    out.resize(out.size() + n);
    std::memcpy(out.data() + out.size() - n, from, n);
  };
  append(kShardsMagic.data(), kShardsMagic.size());
  const auto n = static_cast<std::uint16_t>(files.size());
  append(&n, sizeof n);
  const auto kept = [](const std::vector<std::byte>& file) {
    return static_cast<std::size_t>(
        std::find_if(file.rbegin(), file.rend(), [](std::byte b) { return b != std::byte{0}; }).base() -
        file.begin());
  };
  for (const std::vector<std::byte>& file : files) {
    const std::uint32_t words[] = {static_cast<std::uint32_t>(kept(file)),
                                   static_cast<std::uint32_t>(file.size())};
    append(words, sizeof words);
  }
  for (const std::vector<std::byte>& file : files) append(file.data(), kept(file));
  return out;
}

}  // namespace moecached::fuzz
