// Text out of a hostile file, made fit for messages, logs, terminals and gRPC strings (which must be UTF-8).
#pragma once

#include <string>
#include <string_view>

namespace moecached {

// Every byte that is not printable ASCII becomes '?'.
[[nodiscard]] std::string printable(std::string_view text);

// Printable and in single quotes, shortened to 90 bytes. (Not "quoted": std::quoted is found for a
// std::string.)
[[nodiscard]] std::string in_quotes(std::string_view text);

// As it is if it is UTF-8, control characters replaced by '?'; otherwise as printable().
[[nodiscard]] std::string for_people(std::string_view text);

}  // namespace moecached
