// Connections that have not said hello yet. They cost a descriptor each and may be anybody's: so there are
// few of them, fewer of one user, and each has a while in which to speak. It closes nothing itself. Pure: the
// time is an argument. Thread: one. Memory: kMax entries.
#pragma once

#include <cstdint>
#include <vector>

namespace moecached {

class UnheardClients {
 public:
  static constexpr std::size_t kMax = 32;
  static constexpr std::size_t kMaxOfUser = 8;

  explicit UnheardClients(std::uint64_t patience_ms) : patience_ms_(patience_ms) {}

  // False: there are too many, it is to be closed.
  [[nodiscard]] bool add(int fd, std::uint32_t uid, std::uint64_t now_ms);
  void remove(int fd);  // it has spoken, or is closed; others are ignored
  [[nodiscard]] bool contains(int fd) const;
  // Those that were not heard for too long, the longest first.
  [[nodiscard]] std::vector<int> expired(std::uint64_t now_ms) const;
  // Until there is one; -1: there is none.
  [[nodiscard]] int wait_ms(std::uint64_t now_ms) const;

 private:
  struct Client {
    int fd;
    std::uint32_t uid;
    std::uint64_t until_ms;
  };
  const std::uint64_t patience_ms_;
  std::vector<Client> clients_;  // in the order of their arrival, hence of their end
};

}  // namespace moecached
