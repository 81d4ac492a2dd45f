// `moecachectl policy shadow` and `policy compare`: challengers of a model's policy. Thread: main. The texts
// are pure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "client/ctl/commands.h"

namespace moecached::ctl {

int shadow_policies(ControlClient& client, const Output& output, std::uint32_t model,
                    const std::vector<std::string>& specs);
int compare_policies(ControlClient& client, const Output& output, std::uint32_t model, bool layers);
[[nodiscard]] std::string render(const control::v1::PolicyComparison& comparison, bool layers);

}  // namespace moecached::ctl
