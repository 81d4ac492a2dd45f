#include "daemon/ipc/unheard_clients.h"

#include <algorithm>

namespace moecached {

bool UnheardClients::add(int fd, std::uint32_t uid, std::uint64_t now_ms) {
  const auto of_user = static_cast<std::size_t>(std::ranges::count(clients_, uid, &Client::uid));
  if (clients_.size() >= kMax || of_user >= kMaxOfUser) return false;
  clients_.push_back({fd, uid, now_ms + patience_ms_});
  return true;
}

void UnheardClients::remove(int fd) {
  std::erase_if(clients_, [fd](const Client& client) { return client.fd == fd; });
}

bool UnheardClients::contains(int fd) const {
  return std::ranges::find(clients_, fd, &Client::fd) != clients_.end();
}

std::vector<int> UnheardClients::expired(std::uint64_t now_ms) const {
  std::vector<int> fds;
  for (const Client& client : clients_) {
    if (client.until_ms <= now_ms) fds.push_back(client.fd);
  }
  return fds;
}

int UnheardClients::wait_ms(std::uint64_t now_ms) const {
  if (clients_.empty()) return -1;
  const std::uint64_t until_ms = clients_.front().until_ms;
  return until_ms <= now_ms ? 0 : static_cast<int>(until_ms - now_ms);
}

}  // namespace moecached
