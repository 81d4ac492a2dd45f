#include "client/ctl/json.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "proto/control/v1/control.pb.h"

namespace moecached::ctl {
namespace {

TEST(ToJson, HasEveryFieldEvenWhenEmpty) {
  const nlohmann::ordered_json json = to_json(control::v1::Status());
  EXPECT_EQ(json.size(), static_cast<std::size_t>(control::v1::Status::descriptor()->field_count()));
  EXPECT_EQ(json["version"], "");
  EXPECT_EQ(json["devices"], nlohmann::ordered_json::array());
  EXPECT_EQ(json["ssd"]["direct"], false);
}

TEST(ToJson, KeepsNumbersNumbersOf64Bits) {
  control::v1::Status status;
  status.set_boot_epoch(UINT64_MAX);
  status.set_uptime_seconds(1.5);
  status.add_devices("host");
  const nlohmann::ordered_json json = nlohmann::ordered_json::parse(dump(to_json(status), -1));
  EXPECT_EQ(json["boot_epoch"].get<std::uint64_t>(), UINT64_MAX);
  EXPECT_EQ(json["uptime_seconds"], 1.5);
  EXPECT_EQ(json["devices"][0], "host");
}

TEST(ToJson, NestsRepeatedMessages) {
  control::v1::ListSessionsResponse response;
  control::v1::Session* session = response.add_sessions();
  session->add_models(4);
  session->add_models(5);
  const nlohmann::ordered_json json = to_json(response);
  EXPECT_EQ(json["sessions"][0]["models"], nlohmann::ordered_json::array({4, 5}));
}

TEST(Dump, ReplacesWhatIsNoUtf8) {
  EXPECT_EQ(dump(nlohmann::ordered_json("a\xff"), -1), "\"a\xef\xbf\xbd\"");
}

}  // namespace
}  // namespace moecached::ctl
