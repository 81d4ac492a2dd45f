#include "daemon/ipc/remote_lane.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>

namespace moecached {
namespace {

// A lease that was granted and is absent again would be a fault of the core loop.
constexpr int kLeaseAttempts = 3;

Fault too_many(std::size_t n_distinct, std::uint32_t layer, std::uint32_t n_slots) {
  return {FaultCode::kLimit, std::to_string(n_distinct) +
                                 " distinct experts do not fit into what is free of the " +
                                 std::to_string(n_slots) + " slots of layer " + std::to_string(layer) +
                                 ": send fewer tokens at once, or raise pool.slots"};
}

LaneWriter::Batch batch_of(const RouteDecision& decision) {
  return {.layer = decision.layer, .n_tokens = std::max(decision.n_tokens, 1u), .prefill = decision.prefill};
}

}  // namespace

Result<std::unique_ptr<RouteLane>> RemoteLane::open(Core& core, std::uint64_t boot_epoch,
                                                    std::shared_ptr<SharedModel> model,
                                                    const RouteOpen& open) {
  auto segment = RouteSegment::map(model->segment_fd(), model->segment_bytes());
  if (!segment) return std::move(segment).error();
  auto session = RemoteSession::add(core, boot_epoch, open.label);
  if (!session) return std::move(session).error();
  // Without a stream segment: such a lane asks for none of its parts.
  auto opened = core.call([&](Core& loop) { return loop.open_in_session((*session)->id(), model, nullptr); });
  if (!opened) return std::move(opened).error();
  std::unique_ptr<RemoteLane> lane(
      new RemoteLane(*std::move(session), std::move(model), *std::move(segment)));
  lane->geometry_ = lane->segment_.describe(boot_epoch);
  for (const RouteLayer& layer : lane->geometry_.layers)
    lane->known_.emplace_back(layer.n_experts, MOECACHED_ABSENT);
  if (open.memory == RouteMemory::kPool) {
    if (Status described = lane->describe_pool(); !described) return std::move(described).error();
  }
  return std::unique_ptr<RouteLane>(std::move(lane));
}

RemoteLane::RemoteLane(std::unique_ptr<RemoteSession> session, std::shared_ptr<SharedModel> model,
                       RouteSegment segment)
    : session_(std::move(session)),
      model_(std::move(model)),
      segment_(std::move(segment)),
      lane_(session_->session(), model_->id().value),
      ids_(model_->limits()),
      slot_of_(segment_.n_experts_max(), MOECACHED_ABSENT) {}

RemoteLane::~RemoteLane() {
  if (!session_->is_left_open()) lane_.close();
}

// A path instead of a descriptor, which gRPC cannot carry. The kernel lets the daemon's user and root open
// it, and nobody else; and what it opens by this path is for reading, whatever the daemon's own descriptor is
// for.
Status RemoteLane::describe_pool() {
  const int fd = model_->pool().export_fd();
  struct stat facts {};
  if (::fstat(fd, &facts) != 0) return system_fault("fstat of the pool", errno);
  geometry_.pool = {.path = "/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(fd),
                    .bytes = model_->pool().bytes(),
                    .device = facts.st_dev,
                    .inode = facts.st_ino};
  return ok();
}

Status RemoteLane::decide(const RouteDecision& decision, const std::function<bool()>& gone,
                          RouteAnswer* out) {
  lane_.complete();
  if (Status taken = ids_.take(decision); !taken) return taken;
  const std::span<const std::uint16_t> distinct = ids_.distinct();
  lane_.begin(decision.layer);
  const std::uint32_t n_absent = load_entries(decision.layer);
  if (n_absent == 0) {
    lane_.post_route(batch_of(decision), distinct);
  } else if (Status served = wait_for_absent(decision, gone); !served) {
    lane_.complete();
    return served;
  }
  out->n_distinct = static_cast<std::uint32_t>(distinct.size());
  out->n_absent = n_absent;
  out->slots.clear();
  for (const std::uint32_t expert : decision.experts)
    out->slots.push_back(static_cast<std::uint32_t>(slot_of_[expert]));
  tell_changes(decision.layer, out);
  lane_.count_lookups(decision.experts.size());
  return ok();
}

// Returns how many are absent.
std::uint32_t RemoteLane::load_entries(std::uint32_t layer) {
  std::uint32_t absent = 0;
  for (const std::uint16_t expert : ids_.distinct()) {
    slot_of_[expert] = segment_.entry(layer, expert);
    absent += slot_of_[expert] < 0 ? 1 : 0;
  }
  return absent;
}

// As Lane::serve_absent of the client library, without a file to fall back on.
Status RemoteLane::wait_for_absent(const RouteDecision& decision, const std::function<bool()>& gone) {
  const std::span<const std::uint16_t> distinct = ids_.distinct();
  const auto n_open = [&] { return segment_.n_slots_open(decision.layer); };
  for (int attempt = 0; attempt < kLeaseAttempts; ++attempt) {
    // The epoch used nothing. Holding it during the wait could block the very eviction that the lease needs.
    lane_.complete();
    if (distinct.size() > n_open()) return too_many(distinct.size(), decision.layer, n_open());
    const auto answer = lane_.lease(batch_of(decision), distinct, gone);
    if (!answer) return Fault{FaultCode::kNotFound, "the stream has ended"};
    lane_.begin(decision.layer);
    if (*answer == MOECACHED_GRANT_MODEL_CHANGED) {
      return Fault{FaultCode::kChanged, model_->name() + " has changed on disk: open it again"};
    }
    if (load_entries(decision.layer) == 0) return ok();
    if (*answer == MOECACHED_GRANT_NO_ROOM || *answer == MOECACHED_GRANT_REFUSED)
      return too_many(distinct.size(), decision.layer, n_open());
    if (*answer == MOECACHED_GRANT_IO_ERROR) break;
  }
  return Fault{FaultCode::kSystem,
               "experts of layer " + std::to_string(decision.layer) + " could not be read from the file"};
}

void RemoteLane::tell_changes(std::uint32_t layer, RouteAnswer* out) {
  out->changed.clear();
  out->has_more = false;
  std::vector<std::int32_t>& known = known_[layer];
  for (std::uint32_t expert = 0; expert < known.size(); ++expert) {
    const std::int32_t entry = segment_.entry(layer, expert);
    if (entry == known[expert]) continue;
    if (out->changed.size() == kRouteChangesMax) {
      out->has_more = true;
      return;
    }
    known[expert] = entry;
    out->changed.push_back({expert, entry});
  }
}

}  // namespace moecached
