// A model that a session moves from one daemon to the next besides its own: the seam between session.h and
// models on GPUs, so that the session knows nothing of CUDA. A move is prepared as a whole, for all models of
// the session, and only then committed. Thread: under the session's lock; between prepare() and commit() or
// forget() no lane comes or goes. Memory: the session owns the models.
#pragma once

#include "client/include/moecached/moecached.h"
#include "client/src/connection.h"

namespace moecached::client {

class MovableModel {
 public:
  virtual ~MovableModel() = default;
  // Opens the model and a block for each of its lanes at `next`, beside what it has.
  [[nodiscard]] virtual moecached_status prepare(Connection& next) = 0;
  // Whether lanes could go on at once. MOECACHED_E_UNAVAILABLE: not yet, ask again. REQUIRES: prepared.
  [[nodiscard]] virtual moecached_status ready() = 0;
  // Leaves `last`, which gets its lane blocks back. REQUIRES: prepared with this `next`.
  virtual void commit(Connection& last, Connection& next) = 0;
  // Drops what prepare() has made, while its connection still exists.
  virtual void forget(Connection& next) = 0;
};

}  // namespace moecached::client
