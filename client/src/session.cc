#include "client/src/session.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <utility>

#include "client/src/error.h"

namespace moecached::client {
namespace {

constexpr const char* kDefaultSocket = "/run/moecached/handle.sock";
constexpr long kDefaultPatienceMs = 10'000;
constexpr long kPatienceMsMax = 300'000;

// $MOECACHED_WAIT_MS; anything that is not a sensible number of milliseconds counts as unset.
std::chrono::milliseconds patience() {
  const char* text = std::getenv("MOECACHED_WAIT_MS");
  if (text == nullptr) return std::chrono::milliseconds(kDefaultPatienceMs);
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  const bool sensible = end != text && *end == '\0' && value > 0 && value <= kPatienceMsMax;
  return std::chrono::milliseconds(sensible ? value : kDefaultPatienceMs);
}

const char* socket_path(const char* given) {
  if (given != nullptr) return given;
  const char* from_environment = std::getenv("MOECACHED_SOCKET");
  return from_environment != nullptr && *from_environment != '\0' ? from_environment : kDefaultSocket;
}

}  // namespace

// A move is prepared as a whole and only then committed, so that a daemon which refuses the second model
// leaves this process as it was: on the frozen table of the last daemon and the files.
struct Session::Move {
  std::unique_ptr<Connection> connection;
  std::vector<std::unique_ptr<ModelMapping>> mappings;  // one for each of models_
  std::vector<LaneBlock*> blocks;                       // one for each lane of each model, in that order
};

Session::Session() = default;

Session::~Session() { drop_prepared_move(); }

moecached_status Session::open(const char* socket, const char* label, std::unique_ptr<Session>* out) {
  auto session = std::make_unique<Session>();
  session->options_.socket_path = socket_path(socket);
  session->options_.label = label != nullptr ? label : program_invocation_short_name;
  session->options_.patience = patience();
  if (const auto status = Connection::open(session->options_, &session->connection_)) return status;
  *out = std::move(session);
  return MOECACHED_OK;
}

bool Session::connected() {
  const std::lock_guard lock(mutex_);
  return connection_->check_alive();
}

moecached_status Session::open_model(std::span<const char* const> paths, const GpuUuid* gpu, Model** out) {
  const std::lock_guard lock(mutex_);
  if (!connection_->check_alive()) {
    return fail(MOECACHED_E_UNAVAILABLE, "the daemon of this session is gone: reconnect first");
  }
  ModelFiles files;
  if (const auto status = ModelFiles::open(paths, &files)) return status;
  std::unique_ptr<ModelMapping> mapping;
  if (const auto status = ModelMapping::open(*connection_, files, gpu, &mapping)) return status;
  models_.push_back(std::make_unique<Model>(std::move(files), gpu, std::move(mapping)));
  *out = models_.back().get();
  return MOECACHED_OK;
}

void Session::close_model(Model* model) {
  const std::lock_guard lock(mutex_);
  drop_prepared_move();
  std::erase_if(models_, [model](const auto& owned) { return owned.get() == model; });
}

moecached_status Session::open_lane(Model& model, Lane** out) {
  const std::lock_guard lock(mutex_);
  drop_prepared_move();
  lanes_.reserve(lanes_.size() + 1);
  model.lanes.reserve(model.lanes.size() + 1);
  LaneBlock* block = nullptr;
  if (const auto status = connection_->take_lane(model.mapping->model_id, &block)) return status;
  std::unique_ptr<Lane> lane;
  try {
    lane = std::make_unique<Lane>(model, *model.mapping, *connection_, block);
  } catch (...) {
    connection_->give_back_lane(block);
    throw;
  }
  *out = lane.get();
  model.lanes.push_back(lane.get());
  lanes_.push_back(std::move(lane));
  return MOECACHED_OK;
}

void Session::close_lane(Model& model, Lane* lane) {
  lane->settle_streams();  // may wait: not under the lock
  const std::lock_guard lock(mutex_);
  drop_prepared_move();
  lane->end();
  connection_->give_back_lane(lane->block());
  lane->counters().add_to(&model.retired);
  std::erase(model.lanes, lane);
  std::erase_if(lanes_, [lane](const auto& owned) { return owned.get() == lane; });
}

moecached_counters Session::counters(const Model& model) {
  const std::lock_guard lock(mutex_);
  moecached_counters sum = model.retired;
  for (const Lane* lane : model.lanes) lane->counters().add_to(&sum);
  sum.reconnects = reconnects_;
  return sum;
}

moecached_status Session::reconnect() {
  const std::lock_guard lock(mutex_);
  if (connection_->check_alive()) return MOECACHED_OK;
  if (!gate_.pass(std::chrono::steady_clock::now())) {
    return fail(MOECACHED_E_UNAVAILABLE, "the daemon is gone, and was looked for less than 2 s ago");
  }
  if (prepared_ != nullptr && !prepared_->connection->check_alive()) drop_prepared_move();
  if (prepared_ == nullptr) {
    prepared_ = std::make_unique<Move>();
    auto status = MOECACHED_E_SYSTEM;
    try {
      status = prepare(prepared_.get());
    } catch (...) {
      drop_prepared_move();  // half of a move is none
      throw;
    }
    if (status != MOECACHED_OK) {
      drop_prepared_move();
      return status;
    }
  }
  if (const auto status = ready()) {
    // A daemon that still loads is asked again; opening the models anew would not make it faster.
    if (status != MOECACHED_E_UNAVAILABLE) drop_prepared_move();
    return status;
  }
  commit(*prepared_);
  prepared_.reset();
  return MOECACHED_OK;
}

moecached_status Session::ready() {
  for (const auto& model : movables_) {
    if (const auto status = model->ready()) return status;
  }
  return MOECACHED_OK;
}

void Session::drop_prepared_move() {
  if (prepared_ == nullptr) return;
  if (prepared_->connection != nullptr) {
    for (const auto& model : movables_) model->forget(*prepared_->connection);
  }
  prepared_.reset();
}

void Session::Locked::remove(MovableModel* model) {
  session_.drop_prepared_move();
  std::erase_if(session_.movables_, [model](const auto& owned) { return owned.get() == model; });
}

void Session::Locked::drop_prepared_move() { session_.drop_prepared_move(); }

moecached_status Session::prepare(Move* move) {
  if (const auto status = Connection::open(options_, &move->connection)) return status;
  for (const auto& model : models_) {
    std::unique_ptr<ModelMapping> mapping;
    const GpuUuid* const gpu = model->gpu ? &*model->gpu : nullptr;
    if (const auto status = ModelMapping::open(*move->connection, model->files, gpu, &mapping)) return status;
    if (!mapping->layout.same_experts(model->mapping->layout)) {
      return fail(MOECACHED_E_VERSION,
                  "the new daemon describes %s in another way than the last one: restart",
                  model->files.first_path());
    }
    for (std::size_t i = 0; i < model->lanes.size(); ++i) {
      LaneBlock* block = nullptr;
      if (const auto status = move->connection->take_lane(mapping->model_id, &block)) return status;
      move->blocks.push_back(block);
    }
    move->mappings.push_back(std::move(mapping));
  }
  for (const auto& model : movables_) {
    if (const auto status = model->prepare(*move->connection)) return status;
  }
  return MOECACHED_OK;
}

void Session::commit(Move& move) {
  auto block = move.blocks.begin();
  for (std::size_t i = 0; i < models_.size(); ++i) {
    Model& model = *models_[i];
    for (Lane* lane : model.lanes) {
      lane->end();
      // The last daemon may live on without this session; its lanes must not hold its slots.
      connection_->give_back_lane(lane->block());
      lane->attach(*move.mappings[i], *move.connection, *block++);
    }
    model.mapping = std::move(move.mappings[i]);
    ++model.generation;
  }
  for (const auto& model : movables_) model->commit(*connection_, *move.connection);
  connection_ = std::move(move.connection);
  ++reconnects_;
}

}  // namespace moecached::client
