// Connections that have not said hello yet. They cost a descriptor each and may be anybody's: so there are
// few of them, each has a while in which to speak, and when there is no room for one more, the user with most
// of them makes it. It closes nothing itself. Pure: the time is an argument. Thread: one. Memory: kMax
// entries.
#pragma once

#include <cstdint>
#include <vector>

namespace moecached {

class UnheardClients {
 public:
  static constexpr std::size_t kMax = 32;
  // One that came just now is about to speak: it need not make room. Shorter than any patience.
  static constexpr std::uint64_t kYoungMs = 500;

  explicit UnheardClients(std::uint64_t patience_ms) : patience_ms_(patience_ms) {}

  [[nodiscard]] bool full() const { return clients_.size() == kMax; }
  void add(int fd, std::uint32_t uid, std::uint64_t now_ms);  // REQUIRES: not full
  void remove(int fd);  // it has spoken, or is closed; others are ignored
  [[nodiscard]] bool contains(int fd) const;
  [[nodiscard]] std::vector<int> all() const;
  // Who makes room: of the user with most of them, the one that came first. -1: it is too young, or it is not
  // full.
  [[nodiscard]] int in_the_way(std::uint64_t now_ms) const;
  // Those that were not heard for too long, the longest first.
  [[nodiscard]] std::vector<int> expired(std::uint64_t now_ms) const;
  // Until there is one; -1: there is none. one_more_waits: or until one may make room.
  [[nodiscard]] int wait_ms(std::uint64_t now_ms, bool one_more_waits) const;

 private:
  struct Client {
    int fd;
    std::uint32_t uid;
    std::uint64_t since_ms;
  };
  [[nodiscard]] const Client& first_of_the_greediest() const;

  const std::uint64_t patience_ms_;
  std::vector<Client> clients_;  // in the order of their arrival
};

}  // namespace moecached
