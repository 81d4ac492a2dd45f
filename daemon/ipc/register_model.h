// Opens a model from descriptors, for the handle socket and the control plane. Reads headers, so it may block
// for seconds. Thread: any but the core loop's.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "daemon/ipc/core.h"

namespace moecached {

// session: who asks; 0: the control plane. gpu: of a spill model, else null.
Result<std::shared_ptr<SharedModel>> register_model(Core& core, std::vector<UniqueFd> shards,
                                                    std::string name, SessionId session, Gpu* gpu = nullptr);

}  // namespace moecached
