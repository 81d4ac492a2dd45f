#include "daemon/ipc/routing_tap.h"

#include <algorithm>
#include <bit>

namespace moecached {
namespace {

constexpr std::size_t kExpertsPerWord = 4;  // 16 bits each: a layer has at most MOECACHED_MAX_EXPERTS

std::size_t words_for(std::size_t n_experts) { return (n_experts + kExpertsPerWord - 1) / kExpertsPerWord; }

}  // namespace

RoutingTap::RoutingTap(ModelId model, std::size_t bytes)
    : model_(model),
      words_(std::bit_floor(std::max<std::size_t>(bytes / sizeof(std::uint64_t), 64))),
      mask_(words_.size() - 1) {}

void RoutingTap::put(const RoutingEvent& event, std::span<const ExpertIndex> experts) noexcept {
  std::uint64_t head = head_.load(std::memory_order_relaxed);
  const std::uint64_t n_words = kHeaderWords + words_for(experts.size());
  if (words_.size() - (head - tail_cached_) < n_words) {
    tail_cached_ = tail_.load(std::memory_order_acquire);
    if (words_.size() - (head - tail_cached_) < n_words) {
      dropped_.fetch_add(1, std::memory_order_relaxed);
      return;
    }
  }
  word(head++) = event.lane;
  word(head++) = event.graph;
  word(head++) = event.layer.value;
  word(head++) = event.token;
  word(head++) = std::uint64_t{event.n_tokens} << 1 | (event.prefill ? 1 : 0);
  word(head++) = experts.size();
  for (std::size_t i = 0; i < experts.size(); ++head) {
    std::uint64_t packed = 0;
    for (std::size_t place = 0; place < kExpertsPerWord && i < experts.size(); ++place, ++i)
      packed |= std::uint64_t{experts[i].value & 0xffff} << (16 * place);
    word(head) = packed;
  }
  head_.store(head, std::memory_order_release);
}

bool RoutingTap::take(RoutingEvent* event, std::vector<std::uint32_t>* experts) {
  std::uint64_t tail = tail_.load(std::memory_order_relaxed);
  if (tail == head_cached_) {
    head_cached_ = head_.load(std::memory_order_acquire);
    if (tail == head_cached_) return false;
  }
  event->lane = word(tail++);
  event->graph = word(tail++);
  event->layer = LayerIndex(static_cast<std::uint32_t>(word(tail++)));
  event->token = static_cast<std::uint32_t>(word(tail++));
  const std::uint64_t batch = word(tail++);
  event->n_tokens = static_cast<std::uint32_t>(batch >> 1);
  event->prefill = (batch & 1) != 0;
  const std::uint64_t n = word(tail++);
  experts->clear();
  for (std::uint64_t i = 0; i < n; ++tail) {
    for (std::uint64_t packed = word(tail), place = 0; place < kExpertsPerWord && i < n; ++place, ++i) {
      experts->push_back(static_cast<std::uint32_t>(packed & 0xffff));
      packed >>= 16;
    }
  }
  tail_.store(tail, std::memory_order_release);
  return true;
}

}  // namespace moecached
