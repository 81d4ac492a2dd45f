"""Logits and tokens are those of the stock run, for three types of experts at four pool sizes, and a wrong byte would show."""
import harness
from harness import Daemon, Host, LONG_PROMPT, stock

LAYERS, EXPERTS, TOP_K = 8, 32, 4


class Identity(harness.HostTestCase):
    def check(self, model):
        for slots in (4, 8, 16, 32):
            with self.subTest(model=model.name, slots=slots), Daemon("--slots", str(slots)) as daemon:
                run = Host(model, daemon=daemon).finish()
                self.assert_served(run)
                self.assert_same(run, stock(model))
                layers = daemon.models()[0]["layers"]
                self.assertEqual([layer["n_slots"] for layer in layers], [slots] * LAYERS)

    def test_q4_k_equals_stock_at_four_pool_sizes(self):
        self.check(harness.Q4_K)

    def test_q8_0_equals_stock_at_four_pool_sizes(self):
        self.check(harness.requantized("q8_0"))

    def test_mxfp4_equals_stock_at_four_pool_sizes(self):
        self.check(harness.requantized("mxfp4"))

    def test_prompt_that_needs_more_experts_than_the_pool_holds_runs_in_waves(self):
        with Daemon("--slots", "8") as daemon:
            run = Host(harness.Q4_K, daemon=daemon, prompt=LONG_PROMPT).finish()
            self.assert_served(run)
            self.assertGreater(run.stats["waves"], 0, "the prompt did not need waves: the test shows nothing")
            self.assert_same(run, stock(harness.Q4_K, LONG_PROMPT))

    def test_pread_engine_without_direct_io_gives_the_same_bytes(self):
        with Daemon("--slots", "8", "--ssd-engine", "pread", "--ssd-direct", "false") as daemon:
            run = Host(harness.Q4_K, daemon=daemon, prompt=LONG_PROMPT).finish()
            self.assert_served(run)
            self.assert_same(run, stock(harness.Q4_K, LONG_PROMPT))
            self.assertEqual(daemon.ctl("status")["ssd"]["engine"], "pread")

    def test_load_without_mmap_finds_the_same_file(self):
        with Daemon("--slots", "8") as daemon:
            run = Host(harness.Q4_K, "--load", "none", daemon=daemon).finish()
            self.assert_served(run)
            self.assert_same(run, stock(harness.Q4_K))

    def test_one_flipped_byte_in_a_slot_is_caught(self):
        with Daemon("--slots", "32", "--scrub-period", "none") as daemon:  # which would mend it
            # One expert of layer 0 was filled first, so slot 0 holds an expert that this prompt uses.
            self.assert_same(Host(harness.Q4_K, daemon=daemon).finish(), stock(harness.Q4_K))
            daemon.flip_byte(4096 + 1)
            run = Host(harness.Q4_K, daemon=daemon).finish()
            self.assert_served(run)
            self.assertFalse(run.logits == stock(harness.Q4_K).logits, "a flipped byte went unnoticed")


if __name__ == "__main__":
    harness.main()
