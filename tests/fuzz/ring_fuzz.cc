// Records of a lane's ring, as a client that does what it likes writes them. An input is a list of its moves.
#include <memory>
#include <set>

#include "daemon/ipc/ring_reader.h"
#include "tests/fuzz/fuzz.h"

namespace moecached::fuzz {
namespace {

constexpr LayerLimits kLimits[] = {{.n_experts = 4, .n_parts = 3},
                                   {.n_experts = 64, .n_parts = 8},
                                   {.n_experts = MOECACHED_MAX_EXPERTS, .n_parts = 1}};

enum Move : std::uint8_t { kPublish, kAnyHead, kAnyRecord, kGoodRecord, kRead, kMoves };

void check(const LaneMessage& message) {
  CHECK(message.kind >= MOECACHED_RECORD_ROUTE && message.kind <= MOECACHED_RECORD_STREAM);
  CHECK(message.layer.value < std::size(kLimits));
  const LayerLimits& limits = kLimits[message.layer.value];
  CHECK(message.part < limits.n_parts && message.half < 2);
  CHECK(!message.ids.empty() && message.ids.size() <= limits.n_experts);
  std::set<ExpertIndex> distinct;
  for (const ExpertIndex id : message.ids) CHECK(id.value < limits.n_experts && distinct.insert(id).second);
}

// One message; false when the ring is empty.
bool read_one(const moecached_shm_lane& lane, RingReader& reader) {
  const std::uint64_t tail = lane.tail;
  LaneMessage message;
  const RingOutcome outcome = reader.next(&message);
  if (outcome == RingOutcome::kEmpty) {
    CHECK(lane.head == tail);
    return false;
  }
  CHECK(lane.tail != tail);
  CHECK(lane.head - lane.tail <= MOECACHED_RING_RECORDS);
  CHECK(message.half < 2);  // an answer is written there, also to what is refused
  if (outcome == RingOutcome::kMessage) check(message);
  return true;
}

void run(Input input) {
  const auto lane = std::make_unique<moecached_shm_lane>();
  RingReader reader(*lane, kLimits);
  while (!input.empty()) {
    moecached_shm_record& next = lane->ring[lane->head % MOECACHED_RING_RECORDS];
    switch (input.take<std::uint8_t>() % kMoves) {
      case kPublish:
        lane->head += input.take<std::uint8_t>();
        break;
      case kAnyHead:
        lane->head = input.take<std::uint64_t>();
        break;
      case kAnyRecord:
        next = input.take<moecached_shm_record>();
        ++lane->head;
        break;
      case kGoodRecord:  // but for its ids, and where its chain ends
        next.kind = static_cast<std::uint16_t>(1 + input.take<std::uint8_t>() % 3);
        next.flags = input.take<std::uint8_t>();
        next.layer = input.take<std::uint8_t>() % std::size(kLimits);
        next.n_ids = static_cast<std::uint16_t>(1 + input.take<std::uint8_t>() % MOECACHED_RECORD_IDS);
        next.part = 0;
        next.half = 0;
        next.seq = 1;
        for (std::uint16_t i = 0; i < next.n_ids; ++i) next.ids[i] = input.take<std::uint8_t>();
        ++lane->head;
        break;
      default:
        (void)read_one(*lane, reader);
    }
  }
  // Whatever was written, the ring is empty after as many messages as it has records.
  std::size_t n_messages = 0;
  while (read_one(*lane, reader)) CHECK(++n_messages <= MOECACHED_RING_RECORDS);
}

}  // namespace
}  // namespace moecached::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  moecached::fuzz::run(moecached::fuzz::Input({data, size}));
  return 0;
}
