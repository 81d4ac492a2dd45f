#include "daemon/ipc/handle_message.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

namespace moecached {
namespace {

using ::testing::HasSubstr;

template <typename T>
T message(moecached_handle_type type, std::uint32_t n_fds) {
  T out{};
  out.header = {MOECACHED_HANDLE_MAGIC, MOECACHED_HANDLE_VERSION, static_cast<std::uint16_t>(type),
                sizeof out, n_fds};
  return out;
}

template <typename T>
HandleMessage read(const T& message, std::size_t n_fds, bool greeted = true) {
  return read_handle_message(std::as_bytes(std::span(&message, 1)), n_fds, greeted);
}

std::string refusal(const HandleMessage& message) {
  const auto* refused = std::get_if<HandleRefusal>(&message);
  return refused == nullptr ? "not refused" : refused->text;
}

TEST(HandleMessage, ALabelIsCutAtItsEndAndMadeFitForGrpc) {
  auto hello = message<moecached_handle_hello>(MOECACHED_HANDLE_HELLO, 0);
  hello.shm_version = MOECACHED_SHM_VERSION;
  std::memcpy(hello.label, "a\nb\0c", 6);
  EXPECT_EQ(std::get<HelloMessage>(read(hello, 0, false)).label, "a?b");
  std::memset(hello.label, 0xff, sizeof hello.label);
  EXPECT_EQ(std::get<HelloMessage>(read(hello, 0, false)).label, std::string(sizeof hello.label, '?'));
}

TEST(HandleMessage, AFewDescriptorsMoreOrLessAreRefused) {
  const auto open = message<moecached_handle_model_open>(MOECACHED_HANDLE_MODEL_OPEN, 2);
  EXPECT_TRUE(std::holds_alternative<ModelOpenMessage>(read(open, 2)));
  EXPECT_THAT(refusal(read(open, 1)), HasSubstr("disagree about size or descriptors"));
  const auto none = message<moecached_handle_model_open>(MOECACHED_HANDLE_MODEL_OPEN, 0);
  EXPECT_THAT(refusal(read(none, 0)), HasSubstr("1 to 250 descriptors"));
  const auto many = message<moecached_handle_gpu_open>(MOECACHED_HANDLE_GPU_OPEN, MOECACHED_MAX_FILES + 1);
  EXPECT_THAT(refusal(read(many, MOECACHED_MAX_FILES + 1)), HasSubstr("1 to 250 descriptors"));
  const auto fetch = message<moecached_handle_gpu_fetch>(MOECACHED_HANDLE_GPU_FETCH, 1);
  EXPECT_THAT(refusal(read(fetch, 1)), HasSubstr("malformed gpu-fetch"));
}

TEST(HandleMessage, AModelIsAskedForOnAGpuOrToSpillFromIt) {
  auto spill = message<moecached_handle_spill_open>(MOECACHED_HANDLE_SPILL_OPEN, 1);
  std::memcpy(spill.name, "model.gguf", 11);
  spill.uuid[15] = 7;
  const GpuOpenMessage opened = std::get<GpuOpenMessage>(read(spill, 1));
  EXPECT_TRUE(opened.spill);
  EXPECT_EQ(opened.name, "model.gguf");
  EXPECT_EQ(opened.uuid[15], 7);
  EXPECT_THAT(refusal(read(message<moecached_handle_spill_open>(MOECACHED_HANDLE_SPILL_OPEN, 0), 0)),
              HasSubstr("malformed spill-open: 1 to 250 descriptors"));
  EXPECT_EQ(refusal(read(spill, 1, false)), "say hello first");
  EXPECT_FALSE(
      std::get<GpuOpenMessage>(read(message<moecached_handle_gpu_open>(MOECACHED_HANDLE_GPU_OPEN, 1), 1))
          .spill);
}

TEST(HandleMessage, HelloComesOnceAndFirst) {
  const auto open = message<moecached_handle_model_open>(MOECACHED_HANDLE_MODEL_OPEN, 1);
  EXPECT_EQ(refusal(read(open, 1, false)), "say hello first");
  auto hello = message<moecached_handle_hello>(MOECACHED_HANDLE_HELLO, 0);
  EXPECT_EQ(refusal(read(hello, 0)), "hello twice");
  hello.shm_version = 99;
  EXPECT_THAT(refusal(read(hello, 0, false)), HasSubstr("version 99"));
}

TEST(HandleMessage, AFetchWhoseEndWrapsLiesNowhere) {
  GpuFetchMessage fetch{.first = 3, .count = 5};
  EXPECT_TRUE(fetch.lies_within(8));
  EXPECT_FALSE(fetch.lies_within(7));
  fetch = {.first = 0xffffffff, .count = 2};
  EXPECT_FALSE(fetch.lies_within(8));
  fetch = {.first = 0, .count = 0};
  EXPECT_FALSE(fetch.lies_within(8));
  fetch = {.first = 0, .count = MOECACHED_FETCH_MAX + 1};
  EXPECT_FALSE(fetch.lies_within(1000));
}

}  // namespace
}  // namespace moecached
