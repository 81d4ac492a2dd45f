"""Two processes on one pool, and one of them killed."""
import harness
from harness import Daemon, Host, stock, wait_for


class Sharing(harness.HostTestCase):
    def test_two_hosts_at_once_share_one_pool_and_both_equal_stock(self):
        with Daemon("--slots", "8") as daemon:
            runs = [Host(harness.Q4_K, daemon=daemon, threads=1, n_predict=48) for _ in range(2)]
            wait_for("both sessions", lambda: len(daemon.sessions()) == 2)
            self.assertEqual(len(daemon.models()), 1)
            for run in runs:
                run.finish()
                self.assert_served(run)
                self.assert_same(run, stock(harness.Q4_K, n_predict=48))

    def test_different_prompts_on_a_small_shared_pool_do_not_disturb_each_other(self):
        other = "int main(int argc, char **argv)"
        with Daemon("--slots", "4") as daemon:
            first = Host(harness.Q4_K, daemon=daemon, threads=1, n_predict=40)
            second = Host(harness.Q4_K, daemon=daemon, threads=1, n_predict=40, prompt=other)
            for run, prompt in ((first, harness.PROMPT), (second, other)):
                run.finish()
                self.assert_served(run)
                self.assert_same(run, stock(harness.Q4_K, prompt, 40))

    def test_second_process_reads_nothing_when_everything_is_resident(self):
        with Daemon("--slots", "32") as daemon:
            Host(harness.Q4_K, daemon=daemon).finish()
            before = daemon.models()[0]["bytes_read"]
            run = Host(harness.Q4_K, daemon=daemon).finish()
            self.assert_same(run, stock(harness.Q4_K))
            model = daemon.models()[0]
            self.assertEqual(model["bytes_read"], before)
            self.assertGreater(before, 0)

    def test_killed_client_is_reclaimed_and_the_other_goes_on(self):
        with Daemon("--slots", "8") as daemon:
            victim = Host(harness.Q4_K, daemon=daemon, threads=1, n_predict=900)
            survivor = Host(harness.Q4_K, daemon=daemon, threads=1, n_predict=200)
            wait_for("both to decode", lambda: len(daemon.sessions()) == 2 and
                     all(session["lookups"] > 1000 for session in daemon.sessions()))
            victim.kill()
            wait_for("the session to be reclaimed", lambda: len(daemon.sessions()) <= 1)
            survivor.finish()
            self.assert_served(survivor)
            self.assert_same(survivor, stock(harness.Q4_K, n_predict=200))
            wait_for("the last session to close", lambda: not daemon.sessions())
            self.assertEqual(daemon.models()[0]["sessions"], 0)

    def test_flipped_byte_shows_in_both_processes(self):
        with Daemon("--slots", "32", "--scrub-period", "none") as daemon:  # which would mend it
            Host(harness.Q4_K, daemon=daemon).finish()
            daemon.flip_byte(4096 + 1)
            runs = [Host(harness.Q4_K, daemon=daemon, threads=1) for _ in range(2)]
            for run in runs:
                self.assertFalse(run.finish().logits == stock(harness.Q4_K).logits, "a flipped byte went unnoticed")


if __name__ == "__main__":
    harness.main()
