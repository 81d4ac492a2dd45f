// client/examples/read_expert.c as a newcomer runs it: a program of its own, against a daemon, with a model
// file.
#include <spawn.h>
#include <sys/wait.h>

#include "tests/unit/client/client_fixture.h"

extern char** environ;

namespace moecached::client::test {
namespace {

class ReadExpert : public ClientTest {
 protected:
  // Returns the exit status.
  int run() {
    ::setenv("MOECACHED_SOCKET", socket_.c_str(), 1);
    std::vector<std::string> words{READ_EXPERT};
    words.insert(words.end(), model_file_.paths().begin(), model_file_.paths().end());
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    pid_t child = 0;
    int status = -1;
    if (::posix_spawn(&child, READ_EXPERT, nullptr, nullptr, arguments.data(), environ) == 0)
      ::waitpid(child, &status, 0);
    ::unsetenv("MOECACHED_SOCKET");
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
};

TEST_F(ReadExpert, FindsEveryByteRight) {
  start_daemon();
  EXPECT_EQ(run(), 0);
  EXPECT_EQ(daemon_->label(), "read_expert");
  EXPECT_EQ(daemon_->wait_for(MOECACHED_RECORD_LEASE, 1)[0].ids, (std::vector<std::uint16_t>{0, 4, 8, 12}));
}

TEST_F(ReadExpert, NoticesOneFlippedByte) {
  start_daemon();
  daemon_->make_resident(0, {0, 4, 8, 12});
  daemon_->flip_byte(0, 3, 17);
  EXPECT_EQ(run(), 1);
}

TEST_F(ReadExpert, SaysWhenThereIsNoDaemon) { EXPECT_EQ(run(), 2); }

}  // namespace
}  // namespace moecached::client::test
