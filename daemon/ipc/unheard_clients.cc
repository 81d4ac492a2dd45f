#include "daemon/ipc/unheard_clients.h"

#include <algorithm>

#include "daemon/base/check.h"

namespace moecached {

void UnheardClients::add(int fd, std::uint32_t uid, std::uint64_t now_ms) {
  CHECK(!full());
  clients_.push_back({fd, uid, now_ms});
}

void UnheardClients::remove(int fd) {
  std::erase_if(clients_, [fd](const Client& client) { return client.fd == fd; });
}

bool UnheardClients::contains(int fd) const {
  return std::ranges::find(clients_, fd, &Client::fd) != clients_.end();
}

std::vector<int> UnheardClients::all() const {
  std::vector<int> fds;
  for (const Client& client : clients_) fds.push_back(client.fd);
  return fds;
}

const UnheardClients::Client& UnheardClients::first_of_the_greediest() const {
  return *std::ranges::max_element(clients_, {}, [this](const Client& client) {
    return std::ranges::count(clients_, client.uid, &Client::uid);
  });
}

int UnheardClients::in_the_way(std::uint64_t now_ms) const {
  if (!full()) return -1;
  const Client& client = first_of_the_greediest();
  return client.since_ms + kYoungMs <= now_ms ? client.fd : -1;
}

std::vector<int> UnheardClients::expired(std::uint64_t now_ms) const {
  std::vector<int> fds;
  for (const Client& client : clients_) {
    if (client.since_ms + patience_ms_ <= now_ms) fds.push_back(client.fd);
  }
  return fds;
}

int UnheardClients::wait_ms(std::uint64_t now_ms, bool one_more_waits) const {
  if (clients_.empty()) return -1;
  std::uint64_t until_ms = clients_.front().since_ms + patience_ms_;
  if (one_more_waits && full()) until_ms = std::min(until_ms, first_of_the_greediest().since_ms + kYoungMs);
  return until_ms <= now_ms ? 0 : static_cast<int>(until_ms - now_ms);
}

}  // namespace moecached
