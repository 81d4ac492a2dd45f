// What the tests of the SSD tier share: files with known contents, memory to read into, and an engine between
// the tier and a real one that can be told to fail.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "daemon/tier/read_engine.h"
#include "daemon/tier/ssd_tier.h"
#include "tests/unit/platform/temp_folder.h"

namespace moecached {

inline constexpr std::size_t kBlock = 4096;  // a multiple of every alignment met in practice

// A file of random bytes, written through to the disk.
class ModelFile {
 public:
  ModelFile(const TempFolder& folder, const std::string& name, std::size_t n_bytes, std::uint64_t seed = 1)
      : contents_(n_bytes, '\0') {
    std::mt19937_64 random(seed);
    for (std::size_t i = 0; i < n_bytes; i += sizeof(std::uint64_t)) {
      const std::uint64_t word = random();
      std::memcpy(contents_.data() + i, &word, std::min(sizeof word, n_bytes - i));
    }
    path_ = folder.write(name, contents_);
    const UniqueFd fd = open(O_RDWR);
    EXPECT_EQ(::fsync(fd.get()), 0);
  }
  [[nodiscard]] UniqueFd open(int flags = O_RDONLY) const {
    return UniqueFd(::open(path_.c_str(), flags | O_CLOEXEC));
  }
  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] std::size_t size() const { return contents_.size(); }
  [[nodiscard]] const std::byte* data() const { return reinterpret_cast<const std::byte*>(contents_.data()); }
  [[nodiscard]] bool equal(std::uint64_t offset, const std::byte* bytes, std::size_t n) const {
    return std::memcmp(bytes, data() + offset, n) == 0;
  }
  void touch() const {
    const timespec times[2] = {{0, UTIME_OMIT}, {1'000'000, 1}};
    EXPECT_EQ(::utimensat(AT_FDCWD, path_.c_str(), times, 0), 0);
  }

 private:
  std::string contents_;
  std::string path_;
};

// Block-aligned memory, filled with a pattern.
class Memory {
 public:
  explicit Memory(std::size_t n_bytes)
      : n_bytes_((n_bytes + kBlock - 1) / kBlock * kBlock),
        bytes_(static_cast<std::byte*>(std::aligned_alloc(kBlock, n_bytes_)), &std::free) {
    std::memset(bytes_.get(), kPattern, n_bytes_);
  }
  [[nodiscard]] bool untouched(std::size_t begin, std::size_t end) const {
    static const std::string pattern(1u << 16, static_cast<char>(kPattern));
    while (begin < end) {
      const std::size_t n = std::min(end - begin, pattern.size());
      if (std::memcmp(bytes_.get() + begin, pattern.data(), n) != 0) return false;
      begin += n;
    }
    return true;
  }
  [[nodiscard]] std::byte* data() const { return bytes_.get(); }
  [[nodiscard]] std::span<std::byte> span() const { return {bytes_.get(), n_bytes_}; }

 private:
  static constexpr unsigned char kPattern = 0xa5;
  std::size_t n_bytes_;
  std::unique_ptr<std::byte, decltype(&std::free)> bytes_;
};

inline std::unique_ptr<SsdTier> value_of(Result<std::unique_ptr<SsdTier>> tier) {
  if (tier) return std::move(tier).value();
  ADD_FAILURE() << tier.error().text;
  return nullptr;
}

inline FileId add(SsdTier& tier, const ModelFile& file) {
  const Result<FileId> id = tier.add_file(file.open());
  if (id) return *id;
  ADD_FAILURE() << id.error().text;
  return {};
}

inline ReadRequest request_of(std::uint64_t tag, std::initializer_list<PartRead> parts) {
  ReadRequest request;
  request.tag = tag;
  for (const PartRead& part : parts) request.parts[request.n_parts++] = part;
  return request;
}

using Outcomes = std::map<std::uint64_t, ReadResult>;  // by tag

// Waits until n_more requests are done.
inline void collect(SsdTier& tier, std::size_t n_more, Outcomes& outcomes) {
  std::vector<ReadDone> done(7);  // fewer than there may be, so that polling again is exercised
  while (n_more > 0) {
    pollfd event{tier.event_fd(), POLLIN, 0};
    ASSERT_EQ(::poll(&event, 1, 60'000), 1) << n_more << " requests are not done after a minute";
    const std::size_t n = tier.poll(std::span(done).first(std::min(done.size(), n_more)));
    for (std::size_t i = 0; i < n; ++i) {
      ASSERT_TRUE(outcomes.emplace(done[i].tag, done[i].result).second)
          << "request " << done[i].tag << " was done twice";
    }
    n_more -= n;
  }
}

inline Outcomes run(SsdTier& tier, std::span<const ReadRequest> requests) {
  Outcomes outcomes;
  EXPECT_EQ(tier.submit(requests), requests.size());
  collect(tier, requests.size(), outcomes);
  return outcomes;
}

inline ReadResult run_one(SsdTier& tier, const ReadRequest& request) {
  return run(tier, {&request, 1}).at(request.tag);
}

// Sits between the tier and a real engine. Hooks run on the io thread.
struct EngineHooks {
  std::function<void(EngineRead&)> before;                      // may ask for less
  std::function<void(const EngineRead&, std::int32_t&)> after;  // may change the result
  std::function<std::int32_t(const EngineRead&)> instead;       // not 0: the result, and nothing is read
  std::function<void(std::size_t n_in_flight)> on_destruction;
};

class HookedEngine final : public ReadEngine {
 public:
  HookedEngine(std::unique_ptr<ReadEngine> real, EngineHooks& hooks)
      : real_(std::move(real)), hooks_(hooks) {}
  ~HookedEngine() override {
    if (hooks_.on_destruction) hooks_.on_destruction(reads_.size());
  }
  std::string_view name() const override { return real_->name(); }
  std::uint32_t depth_max() const override { return real_->depth_max(); }
  void add_file(std::uint32_t file, int fd, bool is_copied) override { real_->add_file(file, fd, is_copied); }
  void remove_file(std::uint32_t file) override { real_->remove_file(file); }
  bool can_register_memory() const override { return real_->can_register_memory(); }
  Status register_memory(std::span<std::byte> memory) override { return real_->register_memory(memory); }
  void unregister_memory(std::span<std::byte> memory) override { real_->unregister_memory(memory); }
  void wake() override { real_->wake(); }

  void start(const EngineRead& read) override {
    EngineRead asked = read;
    if (hooks_.before) hooks_.before(asked);
    EXPECT_TRUE(reads_.emplace(read.id, asked).second) << "an id is used twice at once";
    if (hooks_.instead) {
      if (const std::int32_t result = hooks_.instead(asked); result != 0) {
        made_up_.push_back({read.id, result});
        return;
      }
    }
    real_->start(asked);
  }

  std::size_t wait(std::span<EngineDone> done, bool block) override {
    std::size_t n = 0;
    while (!made_up_.empty() && n < done.size()) {
      done[n++] = made_up_.back();
      made_up_.pop_back();
    }
    n += real_->wait(done.subspan(n), block && n == 0);
    for (EngineDone& entry : done.first(n)) {
      const EngineRead read = reads_.at(entry.id);
      reads_.erase(entry.id);
      if (hooks_.after) hooks_.after(read, entry.result);
    }
    return n;
  }

 private:
  std::unique_ptr<ReadEngine> real_;
  EngineHooks& hooks_;
  std::map<std::uint32_t, EngineRead> reads_;
  std::vector<EngineDone> made_up_;
};

inline EngineFactory hooked(EngineHooks& hooks) {
  return [&hooks](const SsdOptions& options, std::string& why) -> Result<std::unique_ptr<ReadEngine>> {
    Result<std::unique_ptr<ReadEngine>> real = make_engine(options, why);
    if (!real) return real;
    return std::unique_ptr<ReadEngine>(std::make_unique<HookedEngine>(std::move(real).value(), hooks));
  };
}

// Whether this machine lets us use io_uring; containers often do not.
inline bool has_io_uring() {
  static const bool has = make_uring_engine(1).has_value();
  return has;
}

}  // namespace moecached
