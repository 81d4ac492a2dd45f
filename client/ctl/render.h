// Messages of the protocol as text for people. Pure. Thread: any.
#pragma once

#include <string>

#include "proto/control/v1/control.pb.h"

namespace moecached::ctl {

[[nodiscard]] std::string render(const control::v1::Status& status);
[[nodiscard]] std::string render(const control::v1::ListModelsResponse& models, bool layers);
[[nodiscard]] std::string render(const control::v1::ListSessionsResponse& sessions);
// `before`: an earlier snapshot of the same daemon, for rates; null: none.
[[nodiscard]] std::string render(const control::v1::Stats& stats, const control::v1::Stats* before);
[[nodiscard]] std::string render(const control::v1::ListPoliciesResponse& response);
[[nodiscard]] std::string render(const control::v1::DoctorResponse& doctor);

}  // namespace moecached::ctl
