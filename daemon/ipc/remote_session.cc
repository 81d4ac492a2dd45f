#include "daemon/ipc/remote_session.h"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <string_view>

#include "daemon/base/text.h"

namespace moecached {
namespace {

constexpr std::size_t kLabelBytes = 63;  // as in a hello

}  // namespace

Result<std::unique_ptr<RemoteSession>> RemoteSession::add(Core& core, std::uint64_t boot_epoch,
                                                          const std::string& label) {
  // gRPC does not say who called; whoever may use the control socket counts as the daemon's own user.
  auto session = Session::create(
      {.id = core.new_session_id(),
       .boot_epoch = boot_epoch,
       .peer = {.pid = 0, .uid = ::geteuid(), .gid = ::getegid()},
       .label = for_people(label.empty() ? "gRPC stream" : std::string_view(label).substr(0, kLabelBytes)),
       .pidfd = {}});
  if (!session) return std::move(session).error();
  if (auto added = core.call([&](Core& loop) { return loop.add_session(*session); }); !added)
    return std::move(added).error();
  spdlog::info("session opened id={} label={} by=grpc", (*session)->id().value, (*session)->label());
  return std::unique_ptr<RemoteSession>(new RemoteSession(core, *std::move(session)));
}

RemoteSession::~RemoteSession() {
  if (left_open_) return;
  core_.call([id = session_->id()](Core& loop) {
    loop.session_hung_up(id);
    return 0;
  });
  spdlog::info("session closed id={} label={}", session_->id().value, session_->label());
}

}  // namespace moecached
