// Command lines of the stress programs: what they do not know they do not run on.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdio>
#include <optional>

namespace moecached::test {

// The exit code of a program that ends here, since it was asked for help or for what it does not know.
inline std::optional<int> parse_or_end(CLI::App& app, int argc, char** argv) {
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& done) {
    return app.exit(done);
  } catch (const CLI::ParseError& error) {
    std::fprintf(stderr, "%s: %s (see --help)\n", app.get_name().c_str(), error.what());
    return 2;
  }
  return std::nullopt;
}

}  // namespace moecached::test
