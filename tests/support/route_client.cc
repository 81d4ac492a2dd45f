#include "tests/support/route_client.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "proto/control/v1/unix_target.h"

namespace moecached::test {
namespace {

[[noreturn]] void die(const char* text) {
  std::perror(text);
  std::abort();
}

}  // namespace

RouteClient::RouteClient(const std::string& control_socket)
    : stub_(control::v1::Control::NewStub(
          grpc::CreateChannel(control::unix_target(control_socket), grpc::InsecureChannelCredentials()))),
      stream_(stub_->Route(&context_)) {}

RouteClient::~RouteClient() {
  if (!finished_) (void)finish();
  if (!pool_.empty()) ::munmap(const_cast<std::byte*>(pool_.data()), pool_.size());
}

bool RouteClient::open(const control::v1::RouteOpen& request) {
  control::v1::RouteRequest first;
  *first.mutable_open() = request;
  if (!send(first) || !receive()) return false;
  geometry_ = response_.geometry();
  if (geometry_.has_pool()) map_pool();
  return true;
}

void RouteClient::map_pool() {
  const control::v1::RoutePool& pool = geometry_.pool();
  const int fd = ::open(pool.path().c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) die(pool.path().c_str());
  struct stat facts {};
  if (::fstat(fd, &facts) != 0) die("fstat");
  if (facts.st_dev != pool.device() || facts.st_ino != pool.inode()) die("the pool is another file");
  void* const at = ::mmap(nullptr, pool.bytes(), PROT_READ, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) die("mmap of the pool");
  ::close(fd);
  pool_ = {static_cast<const std::byte*>(at), pool.bytes()};
}

bool RouteClient::decide(std::uint32_t layer, const std::vector<std::uint32_t>& experts,
                         std::uint32_t n_tokens, bool prefill) {
  control::v1::RouteDecision& decision = *request_.mutable_decision();
  decision.set_sequence(++sequence_);
  decision.set_layer(layer);
  decision.mutable_experts()->Clear();
  decision.mutable_experts()->Add(experts.begin(), experts.end());
  decision.set_n_tokens(n_tokens);
  decision.set_prefill(prefill);
  response_.Clear();
  if (!send(request_) || !receive()) return false;
  if (response_.has_refused()) return false;
  if (slots().sequence() != sequence_) die("an answer to another decision");
  return true;
}

bool RouteClient::release() {
  control::v1::RouteRequest request;
  request.mutable_release();
  return send(request);
}

grpc::Status RouteClient::finish() {
  finished_ = true;
  stream_->WritesDone();
  while (receive()) continue;
  return stream_->Finish();
}

std::span<const std::byte> RouteClient::part(std::uint32_t layer, std::uint32_t slot, int part) const {
  const control::v1::RouteLayer& of = geometry_.layers(static_cast<int>(layer));
  const control::v1::RoutePart& wanted = of.parts(part);
  return pool_.subspan(of.window_offset() + slot * of.slot_stride() + wanted.slot_offset(),
                       wanted.expert_bytes());
}

}  // namespace moecached::test
