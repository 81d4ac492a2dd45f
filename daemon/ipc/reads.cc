#include "daemon/ipc/reads.h"

#include <algorithm>

#include "daemon/base/check.h"
#include "proto/shm/stream_place.h"

namespace moecached {

namespace {
constexpr std::size_t kBulkMax =
    32;  // requests of up to 8 parts at once: enough to keep the disk's queue full
}

ReadTable::ReadTable(SsdTier& ssd, const SsdOptions& options)
    : ssd_(ssd),
      read_bytes_max_(options.max_read_bytes),
      ahead_reads_max_(std::max<std::uint64_t>(1, options.queue_depth / 2)) {}

// Not fewer than the tier makes of it: it joins parts that touch.
std::uint64_t ReadTable::reads_of(const ReadRequest& request) const {
  std::uint64_t n = 0;
  for (std::uint32_t p = 0; p < request.n_parts; ++p)
    n += (request.parts[p].bytes + read_bytes_max_ - 1) / read_bytes_max_;
  return n;
}

std::uint32_t ReadTable::allocate() {
  ++in_flight_;
  if (!free_.empty()) {
    const std::uint32_t index = free_.back();
    free_.pop_back();
    operations_[index] = Operation{};
    return index;
  }
  operations_.emplace_back();
  return static_cast<std::uint32_t>(operations_.size() - 1);
}

void ReadTable::start(SlotRead read) {
  const std::uint32_t index = allocate();
  SharedModel& model = *read.model;
  const LayerLayout& layer = model.layout().layers[read.layer.value];
  static_assert(kMaxPartReads >= MOECACHED_MAX_PARTS);
  ReadRequest request;
  request.tag = index;
  request.n_parts = static_cast<std::uint32_t>(layer.parts.size());
  std::byte* record = model.slot(read.layer, read.slot);
  std::uint64_t bytes = 0;
  for (std::size_t p = 0; p < layer.parts.size(); ++p) {
    const PartLayout& part = layer.parts[p];
    const PartExtent from = part.extent(read.expert.value);
    request.parts[p] = PartRead{model.file(from.file), from.offset, part.expert_bytes,
                                record + part.slot_offset, from.direct};
    bytes += part.expert_bytes;
  }
  Operation& operation = operations_[index];
  ++model.reads_in_flight;
  operation.slot = std::move(read);
  operation.requests_left = 1;
  operation.bytes = bytes;
  (operation.slot.is_ahead ? ahead_backlog_ : backlog_).push_back(request);
}

void ReadTable::hasten(ModelId model, LayerIndex layer, SlotIndex slot) {
  const auto found = std::ranges::find_if(ahead_backlog_, [&](const ReadRequest& request) {
    const SlotRead& read = operations_[request.tag].slot;
    return read.slot == slot && read.layer == layer && read.model->id() == model;
  });
  if (found == ahead_backlog_.end()) return;
  backlog_.push_back(*found);
  ahead_backlog_.erase(found);
}

void ReadTable::start(StreamRead read, std::span<const ExpertIndex> experts) {
  CHECK(!experts.empty());
  const std::uint32_t index = allocate();
  SharedModel& model = *read.model;
  const PartLayout& part = model.layout().layers[read.layer.value].parts[read.part];
  Operation& operation = operations_[index];
  operation.kind = Operation::Kind::kStream;
  operation.parts = static_cast<std::uint32_t>(experts.size());
  operation.bytes = experts.size() * part.expert_bytes;
  std::uint64_t packed = 0;
  moecached_stream_end end{};
  for (std::size_t first = 0; first < experts.size(); first += kMaxPartReads) {
    ReadRequest request;
    request.tag = index;
    request.n_parts = static_cast<std::uint32_t>(std::min(kMaxPartReads, experts.size() - first));
    for (std::uint32_t i = 0; i < request.n_parts; ++i) {
      const PartExtent from = part.extent(experts[first + i].value);
      const FileId file = model.file(from.file);
      std::uint64_t at = packed;
      packed += part.expert_bytes;
      if (read.in_place) at = moecached_stream_place(&end, from.file, from.offset, part.expert_bytes);
      // There is a page of padding at most. Of a file with larger blocks experts are copied out of staging.
      const bool direct = read.in_place && ssd_.direct_alignment(file) <= MOECACHED_STREAM_PAGE;
      request.parts[i] = PartRead{file, from.offset, part.expert_bytes, read.destination + at, direct};
    }
    ++operation.requests_left;
    backlog_.push_back(request);
  }
  ++model.reads_in_flight;
  operation.stream = std::move(read);
}

void ReadTable::start(BulkRead read, std::span<const PartRead> parts) {
  CHECK(!parts.empty() && parts.size() <= kMaxPartReads);
  const std::uint32_t index = allocate();
  ReadRequest request;
  request.tag = index;
  request.n_parts = static_cast<std::uint32_t>(parts.size());
  std::ranges::copy(parts, request.parts);
  Operation& operation = operations_[index];
  operation.kind = Operation::Kind::kBulk;
  operation.bulk = std::move(read);
  operation.requests_left = 1;
  for (const PartRead& part : parts) operation.bytes += part.bytes;
  bulk_backlog_.push_back(request);
}

void ReadTable::flush() {
  std::vector<ReadRequest> batch;
  while (!backlog_.empty()) {
    const std::size_t n = std::min<std::size_t>(backlog_.size(), 256);
    batch.assign(backlog_.begin(), backlog_.begin() + static_cast<std::ptrdiff_t>(n));
    const std::size_t taken = ssd_.submit(batch);
    backlog_.erase(backlog_.begin(), backlog_.begin() + static_cast<std::ptrdiff_t>(taken));
    if (taken < n) return;  // full: poll() makes room, the next flush goes on
  }
  submit_ahead();
  // A model that is being loaded must not stand before a client that waits for an expert.
  while (!bulk_backlog_.empty() && bulk_submitted_ < kBulkMax) {
    const std::size_t n = std::min(bulk_backlog_.size(), kBulkMax - bulk_submitted_);
    batch.assign(bulk_backlog_.begin(), bulk_backlog_.begin() + static_cast<std::ptrdiff_t>(n));
    const std::size_t taken = ssd_.submit(batch);
    bulk_backlog_.erase(bulk_backlog_.begin(), bulk_backlog_.begin() + static_cast<std::ptrdiff_t>(taken));
    bulk_submitted_ += taken;
    if (taken < n) return;
  }
}

void ReadTable::submit_ahead() {
  while (!ahead_backlog_.empty()) {
    const ReadRequest& request = ahead_backlog_.front();
    const std::uint64_t n_reads = reads_of(request);
    // An expert of more reads than that goes alone: it must go some time.
    if (ahead_reads_ > 0 && ahead_reads_ + n_reads > ahead_reads_max_) return;
    if (ssd_.submit({&request, 1}) == 0) return;
    operations_[request.tag].ahead_reads = n_reads;
    ahead_reads_ += n_reads;
    ahead_backlog_.pop_front();
  }
}

void ReadTable::poll(std::vector<SlotDone>* slots, std::vector<StreamDone>* streams,
                     std::vector<BulkDone>* bulk) {
  ReadDone done[64];
  for (;;) {
    const std::size_t n = ssd_.poll(done);
    for (std::size_t i = 0; i < n; ++i) {
      const auto index = static_cast<std::uint32_t>(done[i].tag);
      CHECK(index < operations_.size() && operations_[index].requests_left > 0);
      Operation& operation = operations_[index];
      if (done[i].result > operation.result) operation.result = done[i].result;
      if (--operation.requests_left > 0) continue;
      ahead_reads_ -= operation.ahead_reads;
      switch (operation.kind) {
        case Operation::Kind::kSlot:
          --operation.slot.model->reads_in_flight;
          slots->push_back({std::move(operation.slot), operation.result});
          break;
        case Operation::Kind::kStream:
          --operation.stream.model->reads_in_flight;
          streams->push_back(
              {std::move(operation.stream), operation.result, operation.bytes, operation.parts});
          break;
        case Operation::Kind::kBulk:
          --bulk_submitted_;
          bulk->push_back({std::move(operation.bulk), operation.result, operation.bytes});
          break;
      }
      operation = Operation{};
      free_.push_back(index);
      --in_flight_;
    }
    if (n < std::size(done)) return;
  }
}

}  // namespace moecached
