#include "tests/unit/client/fake_segments.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <stdexcept>

namespace moecached::client::test {
namespace {

constexpr std::uint64_t kLanesOffset = 128;

void require(bool ok, const char* what) {
  if (!ok) throw std::runtime_error(std::string("fake daemon: ") + what);
}

}  // namespace

UniqueFd listen_at(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  require(path.size() < sizeof address.sun_path, "socket path too long");
  std::copy(path.begin(), path.end(), address.sun_path);
  ::unlink(path.c_str());
  UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  require(::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0, "bind");
  require(::listen(fd.get(), 8) == 0, "listen");
  return fd;
}

Packet receive_packet(int socket, std::vector<UniqueFd>* fds) {
  Packet packet;
  packet.bytes.resize(4096);
  alignas(cmsghdr) char control[CMSG_SPACE(MOECACHED_MAX_FILES * sizeof(int))];
  iovec part{packet.bytes.data(), packet.bytes.size()};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof control;
  const ssize_t n = ::recvmsg(socket, &header, MSG_CMSG_CLOEXEC);
  packet.bytes.resize(n > 0 ? static_cast<std::size_t>(n) : 0);
  for (cmsghdr* c = CMSG_FIRSTHDR(&header); n > 0 && c != nullptr; c = CMSG_NXTHDR(&header, c)) {
    for (std::size_t at = CMSG_LEN(0); at + sizeof(int) <= c->cmsg_len; at += sizeof(int)) {
      int fd = -1;
      std::memcpy(&fd, reinterpret_cast<const char*>(c) + at, sizeof fd);
      fds->emplace_back(fd);
    }
  }
  const auto head = packet.as<moecached_handle_header>();
  const bool sound = head.magic == MOECACHED_HANDLE_MAGIC && head.version == MOECACHED_HANDLE_VERSION &&
                     head.bytes == packet.bytes.size() && head.n_fds == fds->size();
  packet.type = sound ? head.type : 0u;
  return packet;
}

void send_packet(int socket, const void* message, std::size_t bytes, const std::vector<int>& fds) {
  alignas(cmsghdr) char control[CMSG_SPACE(MOECACHED_FETCH_MAX * sizeof(int))] = {};
  iovec part{const_cast<void*>(message), bytes};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (fds.size() > 0) {
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
    std::memcpy(CMSG_DATA(rights), fds.data(), fds.size() * sizeof(int));
  }
  require(::sendmsg(socket, &header, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes), "sendmsg");
}

void send_error(int socket, std::uint32_t code, const char* text) {
  moecached_handle_error message{};
  message.header = frame(MOECACHED_HANDLE_ERROR, sizeof message, 0);
  message.code = code;
  std::copy_n(text, std::strlen(text), message.text);
  send_packet(socket, &message, sizeof message, {});
}

moecached_handle_header frame(moecached_handle_type type, std::size_t bytes, std::uint32_t n_fds) {
  return {MOECACHED_HANDLE_MAGIC, MOECACHED_HANDLE_VERSION, static_cast<std::uint16_t>(type),
          static_cast<std::uint32_t>(bytes), n_fds};
}

bool pidfd_names_this_process(int pidfd) {
  std::ifstream info("/proc/self/fdinfo/" + std::to_string(pidfd));
  std::string word;
  while (info >> word) {
    if (word == "Pid:") return (info >> word) && word == std::to_string(::getpid());
  }
  return false;
}

void ring(const UniqueFd& eventfd) {
  const std::uint64_t one = 1;
  require(::write(eventfd.get(), &one, sizeof one) == sizeof one, "eventfd");
}

void drain_eventfd(const UniqueFd& eventfd) {
  std::uint64_t ignored = 0;
  [[maybe_unused]] const ssize_t n = ::read(eventfd.get(), &ignored, sizeof ignored);
}

Mapping make_segment(std::uint64_t bytes, UniqueFd* fd) {
  *fd = UniqueFd(::memfd_create("moecached-fake", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  require(fd->valid() && ::ftruncate(fd->get(), static_cast<off_t>(bytes)) == 0, "memfd");
  require(::fcntl(fd->get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0, "seals");
  Mapping mapping(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd->get(), 0), bytes);
  require(mapping.valid(), "mmap");
  return mapping;
}

void write_session_segment(const Mapping& segment, const FakeOptions& options) {
  auto* header = reinterpret_cast<moecached_shm_header*>(segment.data());
  auto* session = reinterpret_cast<moecached_shm_session*>(header + 1);
  *header = {MOECACHED_SHM_MAGIC, MOECACHED_SHM_VERSION, MOECACHED_SEGMENT_SESSION,
             segment.bytes(),     options.boot_epoch,    {}};
  *session = {kSessionId, options.n_lanes, MOECACHED_RING_RECORDS, kLanesOffset, sizeof(moecached_shm_lane)};
  if (options.spoil_session) options.spoil_session(*header, *session);
}

moecached_shm_lane* lanes_of(const Mapping& segment) {
  return reinterpret_cast<moecached_shm_lane*>(segment.data() + kLanesOffset);
}

Mapping write_model_segment(const TestModel& model, const FakeOptions& options, std::uint64_t pool_bytes,
                            UniqueFd* fd, std::uint64_t* table_offset) {
  const TestModel::Shape& shape = model.shape();
  const std::uint32_t n_parts = static_cast<std::uint32_t>(shape.part_bytes.size());
  const std::uint64_t layers_at = sizeof(moecached_shm_header) + sizeof(moecached_shm_model);
  const std::uint64_t parts_at = layers_at + shape.n_layers * sizeof(moecached_shm_layer);
  const std::uint64_t extents_at = parts_at + shape.n_layers * n_parts * sizeof(moecached_shm_part);
  const std::uint32_t n_extents = shape.scattered ? shape.n_layers * n_parts * shape.n_experts : 0;
  *table_offset = extents_at + n_extents * sizeof(moecached_shm_extent);
  const std::uint64_t entries = std::uint64_t{shape.n_layers} * shape.n_experts;
  Mapping segment = make_segment(*table_offset + entries * sizeof(std::int32_t), fd);

  ModelSegmentView view{};
  view.header = reinterpret_cast<moecached_shm_header*>(segment.data());
  view.model = reinterpret_cast<moecached_shm_model*>(view.header + 1);
  view.layers = reinterpret_cast<moecached_shm_layer*>(segment.data() + layers_at);
  view.parts = reinterpret_cast<moecached_shm_part*>(segment.data() + parts_at);
  view.extents = reinterpret_cast<moecached_shm_extent*>(segment.data() + extents_at);
  *view.header = {MOECACHED_SHM_MAGIC, MOECACHED_SHM_VERSION, MOECACHED_SEGMENT_MODEL,
                  segment.bytes(),     options.boot_epoch,    {}};
  view.model->model_id = kModelId;
  view.model->n_layers = shape.n_layers;
  view.model->n_parts = shape.n_layers * n_parts;
  view.model->n_files = shape.n_files;
  view.model->n_expert_used = shape.n_expert_used;
  view.model->layers_offset = layers_at;
  view.model->parts_offset = parts_at;
  view.model->n_extents = n_extents;
  view.model->table_offset = *table_offset;
  view.model->pool_bytes = pool_bytes;
  view.model->stream_bytes_per_lane = 2 * shape.stream_half_bytes;
  for (std::uint32_t l = 0; l < shape.n_layers; ++l) {
    moecached_shm_layer& layer = view.layers[l];
    layer.block = l + 1;
    layer.n_experts = shape.n_experts;
    layer.n_parts = n_parts;
    layer.first_part = l * n_parts;
    layer.n_slots = shape.n_slots;
    layer.n_slots_open = shape.n_slots;
    layer.table_first = l * shape.n_experts;
    layer.window_offset = l * model.window_bytes();
    layer.window_bytes = model.window_bytes();
    layer.slot_stride = model.slot_stride();
    for (std::uint32_t p = 0; p < n_parts; ++p) {
      moecached_shm_part& part = view.parts[l * n_parts + p];
      part.kind = p;
      part.file = model.file_of(l);
      part.ne0 = shape.part_bytes[p];
      part.ne1 = 1;
      part.file_offset = model.expert_offset(l, p, 0);
      if (shape.scattered) part.first_extent = 1 + (l * n_parts + p) * shape.n_experts;
      for (std::uint32_t e = 0; shape.scattered && e < shape.n_experts; ++e)
        view.extents[part.first_extent - 1 + e] = {part.file, 0, model.expert_offset(l, p, e)};
      part.expert_bytes = shape.part_bytes[p];
      part.slot_offset = model.slot_offset(p);
      const std::string name = TestModel::part_name(l, p);
      std::copy(name.begin(), name.end(), part.name);
    }
  }
  auto* table = reinterpret_cast<std::int32_t*>(segment.data() + *table_offset);
  std::fill_n(table, entries, MOECACHED_ABSENT);
  if (options.spoil_model) options.spoil_model(view);
  return segment;
}

}  // namespace moecached::client::test
