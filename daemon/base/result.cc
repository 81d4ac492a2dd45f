#include "daemon/base/result.h"

#include <system_error>

namespace moecached {

Fault system_fault(std::string_view what, int error_number) {
  std::string text(what);
  text += ": " + std::generic_category().message(error_number) + " (errno " + std::to_string(error_number) + ")";
  return Fault{FaultCode::kSystem, std::move(text)};
}

}  // namespace moecached
