#include "daemon/platform/unix_socket.h"

#include <fcntl.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/unit/platform/temp_folder.h"

namespace moecached {
namespace {

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

// Short, whatever the build folder is: a socket's path has 107 bytes.
class UnixSocket : public testing::Test {
 protected:
  [[nodiscard]] std::string path() const { return folder_.file("s.sock"); }

  PacketListener listen() {
    Result<PacketListener> listener = PacketListener::listen({.path = path()});
    if (!listener) throw std::runtime_error(listener.error().text);
    return std::move(listener).value();
  }

  // client_, server_: the two ends of one connection.
  void connect_both(PacketListener& listener) {
    Result<UniqueFd> client = connect_packet_socket(path(), 10'000);
    ASSERT_TRUE(client) << client.error().text;
    client_ = std::move(client).value();
    Result<UniqueFd> server = listener.accept();
    ASSERT_TRUE(server) << server.error().text;
    ASSERT_TRUE(*server);
    server_ = std::move(server).value();
  }

  TempFolder folder_{"/tmp"};
  UniqueFd client_, server_;
  std::array<std::byte, 256> buffer_{};
};

struct Pipe {
  Pipe() {
    std::array<int, 2> fds{};
    if (::pipe2(fds.data(), O_CLOEXEC) != 0) throw std::runtime_error("pipe2");
    read_end = UniqueFd(fds[0]);
    write_end = UniqueFd(fds[1]);
  }
  // True when every copy of the write end is closed.
  [[nodiscard]] bool closed() const {
    ::fcntl(read_end.get(), F_SETFL, O_NONBLOCK);
    char unused = 0;
    return ::read(read_end.get(), &unused, 1) == 0;
  }
  UniqueFd read_end, write_end;
};

TEST_F(UnixSocket, CarriesPacketsWithTheirBoundsAndDescriptors) {
  PacketListener listener = listen();
  connect_both(listener);
  const Pipe pipe;
  const std::array<int, 1> fds{pipe.write_end.get()};
  ASSERT_TRUE(send_packet(client_.get(), bytes_of("hello"), fds));
  ASSERT_TRUE(send_packet(client_.get(), bytes_of("again")));
  Result<ReceivedPacket> first = receive_packet(server_.get(), buffer_, 4);
  ASSERT_TRUE(first) << first.error().text;
  EXPECT_EQ(first->outcome, PacketOutcome::kDone);
  ASSERT_EQ(first->n_bytes, 5u);
  EXPECT_EQ(std::memcmp(buffer_.data(), "hello", 5), 0);
  ASSERT_EQ(first->fds.size(), 1u);
  EXPECT_NE(::fcntl(first->fds[0].get(), F_GETFD) & FD_CLOEXEC, 0);
  ASSERT_EQ(::write(first->fds[0].get(), "x", 1), 1);
  char seen = 0;
  ASSERT_EQ(::read(pipe.read_end.get(), &seen, 1), 1);
  EXPECT_EQ(seen, 'x');
  const Result<ReceivedPacket> second = receive_packet(server_.get(), buffer_, 4);
  ASSERT_TRUE(second);
  EXPECT_EQ(second->n_bytes, 5u);
  EXPECT_TRUE(second->fds.empty());
}

TEST_F(UnixSocket, SaysWouldBlockAndClosed) {
  PacketListener listener = listen();
  connect_both(listener);
  Result<ReceivedPacket> nothing = receive_packet(server_.get(), buffer_, 0);
  ASSERT_TRUE(nothing);
  EXPECT_EQ(nothing->outcome, PacketOutcome::kWouldBlock);
  client_.reset();
  Result<ReceivedPacket> end = receive_packet(server_.get(), buffer_, 0);
  ASSERT_TRUE(end);
  EXPECT_EQ(end->outcome, PacketOutcome::kClosed);
  const Result<PacketOutcome> sent = send_packet(server_.get(), bytes_of("x"));
  ASSERT_TRUE(sent);
  EXPECT_EQ(*sent, PacketOutcome::kClosed);
}

TEST_F(UnixSocket, SendingToAClientThatDoesNotReadSaysWouldBlock) {
  PacketListener listener = listen();
  connect_both(listener);
  PacketOutcome outcome = PacketOutcome::kDone;
  for (int i = 0; i < 1'000'000 && outcome == PacketOutcome::kDone; ++i) {
    const Result<PacketOutcome> sent = send_packet(server_.get(), bytes_of("x"));
    ASSERT_TRUE(sent) << sent.error().text;
    outcome = *sent;
  }
  EXPECT_EQ(outcome, PacketOutcome::kWouldBlock);
}

TEST_F(UnixSocket, RefusesMoreDescriptorsThanAskedForAndClosesThemAll) {
  PacketListener listener = listen();
  for (const std::size_t n_sent : {2u, 3u, 8u}) {
    for (const std::size_t n_allowed : {0u, 1u}) {
      connect_both(listener);
      Pipe pipe;
      const std::vector<int> fds(n_sent, pipe.write_end.get());
      ASSERT_TRUE(send_packet(client_.get(), bytes_of("x"), fds));
      pipe.write_end.reset();
      const Result<ReceivedPacket> packet = receive_packet(server_.get(), buffer_, n_allowed);
      ASSERT_FALSE(packet) << n_sent << " of " << n_allowed;
      EXPECT_EQ(packet.error().code, FaultCode::kInvalid);
      EXPECT_TRUE(pipe.closed()) << "a descriptor leaked";
    }
  }
}

TEST_F(UnixSocket, RefusesAPacketWhoseDescriptorsCannotAllBeOpened) {
  PacketListener listener = listen();
  connect_both(listener);
  Pipe pipe;
  const std::vector<int> fds(8, pipe.write_end.get());
  ASSERT_TRUE(send_packet(client_.get(), bytes_of("x"), fds));
  pipe.write_end.reset();
  // The lowest free number is given out first, so this leaves room for three.
  const UniqueFd lowest(::fcntl(server_.get(), F_DUPFD_CLOEXEC, 0));
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit few = before;
  few.rlim_cur = static_cast<rlim_t>(lowest.get()) + 4;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  const Result<ReceivedPacket> packet = receive_packet(server_.get(), buffer_, 8);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  ASSERT_FALSE(packet);
  EXPECT_EQ(packet.error().code, FaultCode::kInvalid);
  EXPECT_TRUE(pipe.closed()) << "a descriptor leaked";
}

TEST_F(UnixSocket, RefusesAPacketLongerThanTheBufferAndClosesItsDescriptors) {
  PacketListener listener = listen();
  connect_both(listener);
  Pipe pipe;
  const std::array<int, 1> fds{pipe.write_end.get()};
  ASSERT_TRUE(send_packet(client_.get(), bytes_of(std::string(buffer_.size() + 1, 'y')), fds));
  pipe.write_end.reset();
  const Result<ReceivedPacket> packet = receive_packet(server_.get(), buffer_, 4);
  ASSERT_FALSE(packet);
  EXPECT_EQ(packet.error().code, FaultCode::kInvalid);
  EXPECT_TRUE(pipe.closed());
}

TEST_F(UnixSocket, CarriesAsManyDescriptorsAsTheKernelDoes) {
  PacketListener listener = listen();
  connect_both(listener);
  const Pipe pipe;
  const std::vector<int> fds(kMaxPacketFds, pipe.write_end.get());
  ASSERT_TRUE(send_packet(client_.get(), bytes_of("x"), fds));
  const Result<ReceivedPacket> packet = receive_packet(server_.get(), buffer_, kMaxPacketFds);
  ASSERT_TRUE(packet) << packet.error().text;
  EXPECT_EQ(packet->fds.size(), kMaxPacketFds);
}

TEST_F(UnixSocket, KnowsWhoIsAtTheOtherEnd) {
  PacketListener listener = listen();
  connect_both(listener);
  const Result<PeerCredentials> peer = peer_credentials(server_.get());
  ASSERT_TRUE(peer);
  EXPECT_EQ(peer->pid, ::getpid());
  EXPECT_EQ(peer->uid, ::getuid());
  EXPECT_EQ(peer->gid, ::getgid());
}

TEST_F(UnixSocket, AcceptsNobodyWhenNobodyWaits) {
  PacketListener listener = listen();
  const Result<UniqueFd> nobody = listener.accept();
  ASSERT_TRUE(nobody);
  EXPECT_FALSE(*nobody);
}

TEST_F(UnixSocket, RefusesToListenWhereAnotherListens) {
  PacketListener first = listen();
  const Result<PacketListener> second = PacketListener::listen({.path = path()});
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, FaultCode::kLimit);
  EXPECT_NE(second.error().text.find(path()), std::string::npos);
  connect_both(first);  // the first is unharmed (the probe waits in its backlog too)
}

TEST_F(UnixSocket, ReplacesAStaleSocketFile) {
  {
    const UniqueFd dead(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, path().c_str(), sizeof address.sun_path - 1);
    ASSERT_EQ(::bind(dead.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    ASSERT_EQ(::listen(dead.get(), 1), 0);
  }
  ASSERT_TRUE(std::filesystem::exists(path()));
  PacketListener listener = listen();
  connect_both(listener);
}

TEST_F(UnixSocket, NeverRemovesWhatIsNotASocket) {
  folder_.write("s.sock", "precious");
  const Result<PacketListener> listener = PacketListener::listen({.path = path()});
  ASSERT_FALSE(listener);
  EXPECT_EQ(listener.error().code, FaultCode::kInvalid);
  EXPECT_EQ(std::filesystem::file_size(path()), 8u);
}

TEST_F(UnixSocket, NamesTheLimitWhenThePathIsTooLong) {
  const std::string longest = folder_.file(std::string(107 - folder_.path().size() - 1, 'p'));
  ASSERT_EQ(longest.size(), 107u);
  EXPECT_TRUE(PacketListener::listen({.path = longest}));
  for (const std::string& bad : {longest + "p", std::string()}) {
    const Result<PacketListener> listener = PacketListener::listen({.path = bad});
    ASSERT_FALSE(listener);
    EXPECT_EQ(listener.error().code, FaultCode::kInvalid);
    EXPECT_EQ(listener.error().text.find("107") != std::string::npos, !bad.empty()) << listener.error().text;
    EXPECT_FALSE(connect_packet_socket(bad, 1000));
  }
}

TEST_F(UnixSocket, SetsModeAndGroup) {
  const group* const own = ::getgrgid(::getgid());
  ASSERT_NE(own, nullptr);
  const Result<PacketListener> listener =
      PacketListener::listen({.path = path(), .mode = 0640, .group = own->gr_name});
  ASSERT_TRUE(listener) << listener.error().text;
  struct stat status {};
  ASSERT_EQ(::stat(path().c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777u, 0640u);
  EXPECT_EQ(status.st_gid, ::getgid());
}

TEST_F(UnixSocket, RefusesAGroupThatDoesNotExistAndLeavesNothingBehind) {
  const Result<PacketListener> listener =
      PacketListener::listen({.path = path(), .group = "no-such-group-here"});
  ASSERT_FALSE(listener);
  EXPECT_EQ(listener.error().code, FaultCode::kInvalid);
  EXPECT_NE(listener.error().text.find("no-such-group-here"), std::string::npos);
  EXPECT_FALSE(std::filesystem::exists(path()));
}

TEST_F(UnixSocket, TheListenerRemovesItsOwnFileAndNoOther) {
  { const PacketListener listener = listen(); }
  EXPECT_FALSE(std::filesystem::exists(path()));
  {
    const PacketListener listener = listen();
    std::filesystem::remove(path());
    folder_.write("s.sock", "somebody else's");
  }
  EXPECT_TRUE(std::filesystem::exists(path()));
}

TEST_F(UnixSocket, ConnectingWhereNobodyListensIsNotFound) {
  const Result<UniqueFd> nobody = connect_packet_socket(path(), 1000);
  ASSERT_FALSE(nobody);
  EXPECT_EQ(nobody.error().code, FaultCode::kNotFound);
}

TEST_F(UnixSocket, ConnectingToADaemonThatDoesNotAcceptEndsAfterTheTimeout) {
  Result<PacketListener> listener = PacketListener::listen({.path = path(), .backlog = 0});
  ASSERT_TRUE(listener);
  std::vector<UniqueFd> waiting;
  for (int i = 0; i < 16; ++i) {
    Result<UniqueFd> client = connect_packet_socket(path(), 1);
    if (!client) {
      EXPECT_EQ(client.error().code, FaultCode::kLimit) << client.error().text;
      return;
    }
    waiting.push_back(std::move(client).value());
  }
  FAIL() << "a full backlog took 16 connections";
}

}  // namespace
}  // namespace moecached
