// Any message of the protocol as JSON: field names as in the .proto, every field present, 64-bit numbers as
// numbers (the canonical protobuf mapping makes them strings and leaves zeros out, which is unhandy in jq).
// Thread: any.
#pragma once

#include <google/protobuf/message.h>

#include <nlohmann/json_fwd.hpp>

namespace moecached::ctl {

[[nodiscard]] nlohmann::ordered_json to_json(const google::protobuf::Message& message);
// Strings of clients and files may hold anything; what is no UTF-8 is replaced.
[[nodiscard]] std::string dump(const nlohmann::ordered_json& json, int indent);

}  // namespace moecached::ctl
