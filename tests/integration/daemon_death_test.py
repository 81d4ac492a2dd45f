"""The daemon is killed during decode: the text does not change, fallback reads are counted, a restarted daemon takes over."""
import signal

import harness
from harness import Daemon, Host, stock, wait_for

N = 900


class DaemonDeath(harness.HostTestCase):
    def test_killed_daemon_changes_no_token_and_fallback_is_counted(self):
        with Daemon("--slots", "8") as daemon:
            run = Host(harness.Q4_K, daemon=daemon, n_predict=N)
            wait_for("decoding", lambda: daemon.lookups() > 2000)
            daemon.kill()
            run.finish()
            self.assert_same(run, stock(harness.Q4_K, n_predict=N))
            self.assertGreater(run.stats["fallback_reads"], 0, "the daemon was killed too late: the test shows nothing")

    def test_restarted_daemon_takes_over(self):
        with Daemon("--slots", "8") as daemon:
            run = Host(harness.Q4_K, daemon=daemon, n_predict=900)
            wait_for("decoding", lambda: daemon.lookups() > 1000)
            # Stopped meanwhile: a fast host would be done before the daemon is back.
            run.process.send_signal(signal.SIGSTOP)
            daemon.kill()
            daemon.start()
            run.process.send_signal(signal.SIGCONT)
            run.finish()
            self.assert_same(run, stock(harness.Q4_K, n_predict=900))
            self.assertGreater(run.stats["reconnects"], 0)

    def test_stopped_daemon_is_like_a_killed_one(self):
        with Daemon("--slots", "8") as daemon:
            run = Host(harness.Q4_K, daemon=daemon, n_predict=N)
            wait_for("decoding", lambda: daemon.lookups() > 1000)
            daemon.process.terminate()
            self.assertEqual(daemon.process.wait(harness.DEADLINE_S), 0)
            run.finish()
            self.assert_same(run, stock(harness.Q4_K, n_predict=N))

    def test_wrong_byte_left_in_the_pool_of_a_dead_daemon_shows(self):
        with Daemon("--slots", "32", "--scrub-period", "none") as daemon:  # which would mend it
            Host(harness.Q4_K, daemon=daemon).finish()
            daemon.flip_byte(4096 + 1)
            run = Host(harness.Q4_K, "--wait", daemon=daemon)
            wait_for("the session", lambda: daemon.sessions() and daemon.models()[0]["sessions"] == 1)
            daemon.kill()
            run.process.stdin.write(b"go\n")
            run.process.stdin.flush()
            run.finish()
            self.assertFalse(run.logits == stock(harness.Q4_K).logits, "a flipped byte went unnoticed")


if __name__ == "__main__":
    harness.main()
