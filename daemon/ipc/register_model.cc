#include "daemon/ipc/register_model.h"

#include <fcntl.h>

#include <cerrno>
#include <utility>

namespace moecached {

Result<std::shared_ptr<SharedModel>> register_model(Core& core, std::vector<UniqueFd> shards,
                                                    std::string name, SessionId session, Gpu* gpu) {
  // The SSD tier takes the given descriptors; the layout is read from duplicates.
  std::vector<UniqueFd> readers;
  std::vector<int> fds;
  for (const UniqueFd& shard : shards) {
    readers.emplace_back(::fcntl(shard.get(), F_DUPFD_CLOEXEC, 0));
    if (!readers.back()) return system_fault("duplicating a model's descriptor", errno);
    fds.push_back(readers.back().get());
  }
  auto files = core.call([&](Core& c) { return c.begin_model(std::move(shards), session, gpu); });
  if (!files) return std::move(files).error();
  if (files->existing) return files->existing;
  Result<ModelLayout> layout = read_model_layout(fds, {.direct_alignment = files->direct_alignment});
  WarmStart warm;
  if (layout) warm = core.warmth().load(*layout, files->identity);
  return core.call([&](Core& c) {
    return c.finish_model(*std::move(files), std::move(layout), std::move(name), std::move(warm));
  });
}

}  // namespace moecached
