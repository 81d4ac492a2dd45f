#include "daemon/ipc/session.h"

#include "daemon/base/check.h"
#include "daemon/platform/huge_pages.h"

namespace moecached {

namespace {
constexpr std::uint64_t kLanesOffset = 4096;
}

Result<std::shared_ptr<Session>> Session::create(Parameters parameters) {
  const std::uint64_t bytes =
      (kLanesOffset + MOECACHED_MAX_LANES * sizeof(moecached_shm_lane) + 4095) / 4096 * 4096;
  auto segment = Memfd::create("session", bytes, ClientAccess::kReadWrite);
  if (!segment) return std::move(segment).error();
  auto doorbell = EventFd::create();
  if (!doorbell) return std::move(doorbell).error();

  std::byte* base = segment->bytes().data();
  *reinterpret_cast<moecached_shm_header*>(base) = moecached_shm_header{.magic = MOECACHED_SHM_MAGIC,
                                                                        .version = MOECACHED_SHM_VERSION,
                                                                        .kind = MOECACHED_SEGMENT_SESSION,
                                                                        .bytes = bytes,
                                                                        .boot_epoch = parameters.boot_epoch,
                                                                        .reserved = {}};
  *reinterpret_cast<moecached_shm_session*>(base + sizeof(moecached_shm_header)) =
      moecached_shm_session{.session_id = parameters.id.value,
                            .n_lanes = MOECACHED_MAX_LANES,
                            .ring_records = MOECACHED_RING_RECORDS,
                            .lanes_offset = kLanesOffset,
                            .lane_stride = sizeof(moecached_shm_lane)};
  return std::shared_ptr<Session>(
      new Session(std::move(parameters), *std::move(segment), *std::move(doorbell)));
}

Session::Session(Parameters parameters, Memfd segment, EventFd doorbell)
    : p_(std::move(parameters)), segment_(std::move(segment)), doorbell_(std::move(doorbell)) {}

moecached_shm_lane& Session::lane(std::uint32_t index) {
  CHECK(index < MOECACHED_MAX_LANES);
  return reinterpret_cast<moecached_shm_lane*>(segment_.bytes().data() + kLanesOffset)[index];
}

Result<std::shared_ptr<Memfd>> make_stream_segment(const SharedModel& model) {
  auto memory =
      Memfd::create("stream", MOECACHED_MAX_LANES * model.stream_bytes_per_lane(), ClientAccess::kReadOnly);
  if (!memory) return std::move(memory).error();
  if (model.device() != nullptr) {
    // Direct reads go straight there. Now, since a client pins its lane's share as it opens the lane, and
    // pages that are pinned stay as small as they are. Most clients open one lane; small pages are slower,
    // not wrong.
    HugePages pages(memory->bytes());
    (void)pages.prepare(memory->bytes().data(), model.stream_bytes_per_lane());
  }
  return std::make_shared<Memfd>(*std::move(memory));
}

}  // namespace moecached
