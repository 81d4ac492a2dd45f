// What the C functions have in common. Thread: any.
#pragma once

#include <exception>
#include <memory>

#include "client/include/moecached/moecached.h"
#include "client/src/error.h"
#include "client/src/session.h"

// The object behind the opaque type.
struct moecached_session {
  std::unique_ptr<moecached::client::Session> session;
};

struct moecached_model {
  moecached::client::Session& session;
  moecached::client::Model& model;
};

namespace moecached::client {

// Exceptions (std::bad_alloc, std::system_error) end here.
template <typename Body>
moecached_status guarded(Body body) noexcept {
  try {
    return body();
  } catch (const std::exception& error) {
    return fail(MOECACHED_E_SYSTEM, "%s", error.what());
  }
}

inline moecached_status null_argument(const char* name) noexcept {
  return fail(MOECACHED_E_ARGUMENT, "%s is NULL", name);
}

}  // namespace moecached::client
