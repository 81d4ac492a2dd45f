"""On a GPU: logits and tokens are those of the stock run with everything in VRAM, while experts are swapped as fast as possible.

Batches of up to eight tokens take kernels whose sums do not depend on how many slots a tensor has, so bytes are compared. Larger
ones add up in another order while a layer is partly resident; what may differ then is bounded by what stock itself
differs between two batch sizes (ARCHITECTURE.md).
"""
import array
import math
import unittest

import harness
from harness import Daemon, Host, LONG_PROMPT

EXPERTS = 32
CHURN = {"MOECACHED_TEST_CHURN": "1"}
SMALL = ("--batch", "4", "--ubatch", "4")


def divergence(left, right, n_vocab):
    """Mean Kullback-Leibler divergence of the rows' next-token distributions."""
    total, rows = 0.0, len(left) // n_vocab
    for row in range(rows):
        a, b = left[row * n_vocab:(row + 1) * n_vocab], right[row * n_vocab:(row + 1) * n_vocab]
        top_a, top_b = max(a), max(b)
        log_a = math.log(sum(math.exp(x - top_a) for x in a)) + top_a
        log_b = math.log(sum(math.exp(x - top_b) for x in b)) + top_b
        total += sum(math.exp(x - log_a) * ((x - log_a) - (y - log_b)) for x, y in zip(a, b))
    return total / rows


class GpuIdentity(harness.HostTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        if not harness.has_cuda():
            raise unittest.SkipTest("no GPU, or no llama.cpp libraries with CUDA in MOECACHED_LLAMA_LIBS")

    def assert_on_gpu(self, run, daemon):
        self.assertIsNotNone(run.stats, "the plugin wrote no counters: it was not in use")
        self.assertGreater(run.stats["gpu_computes"], 0)
        model = daemon.models()[0]
        self.assertTrue(model["device"].startswith("GPU-"))
        layers = model["layers"]
        self.assertGreater(sum(layer["lookups"] for layer in layers), 0)
        return layers

    def check(self, model, all_slots=(3, 8, 16, 32), n_predict=96):
        reference = Host(model, *SMALL, n_predict=n_predict).finish()
        for slots in all_slots:
            with self.subTest(model=model.name, slots=slots), \
                    Daemon("--gpu-slots", str(slots), "--gpu-keep-free", "0", environment=CHURN) as daemon:
                run = Host(model, *SMALL, daemon=daemon, n_predict=n_predict).finish()
                layers = self.assert_on_gpu(run, daemon)
                self.assertGreater(sum(layer["hits"] for layer in layers), 0, "no device slot was read")
                if slots < EXPERTS:
                    self.assertGreater(run.stats["gpu_fetches"], 0, "experts in RAM were read in place all the time")
                    self.assertGreater(sum(layer["evictions"] for layer in layers), 0, "nothing was swapped meanwhile")
                self.assert_same(run, reference)

    def test_q4_k(self):
        self.check(harness.Q4_K)

    def test_q6_k(self):
        self.check(harness.requantized("q6_k"))

    def test_q8_0(self):
        self.check(harness.requantized("q8_0"))

    def test_mxfp4(self):
        self.check(harness.requantized("mxfp4"))

    def test_every_other_type(self):
        for kind in ("f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q5_k", "iq4_nl", "iq4_xs", "iq3_s"):
            self.check(harness.requantized(kind), all_slots=(8,), n_predict=64)

    def test_gpt_oss_with_biases(self):
        self.check(harness.gpt_oss())

    def test_experts_read_in_place(self):
        reference = Host(harness.Q4_K, *SMALL, n_predict=96).finish()
        with Daemon("--gpu-slots", "8", "--gpu-keep-free", "0", environment=CHURN) as daemon:
            run = Host(harness.Q4_K, *SMALL, daemon=daemon, n_predict=96, environment={"MOECACHED_FETCH": "0"}).finish()
            self.assert_on_gpu(run, daemon)
            self.assertEqual(run.stats["gpu_fetches"], 0)
            self.assert_same(run, reference)

    def test_a_prompt_in_batches_of_2048(self):
        prompt = LONG_PROMPT * 8
        options = ("--batch", "2048", "--ubatch", "2048", "--ctx", "16384")
        for model in (harness.Q4_K, harness.gpt_oss()):
            reference = Host(model, *options, prompt=prompt, n_predict=32).finish()
            for slots in (8, 32):
                with self.subTest(model=model.name, slots=slots), Daemon("--gpu-slots", str(slots), "--gpu-keep-free", "0") as daemon:
                    run = Host(model, *options, daemon=daemon, prompt=prompt, n_predict=32).finish()
                    self.assert_on_gpu(run, daemon)
                    self.assert_same(run, reference)

    def test_a_prompt_batch_before_device_slots_exist_is_stocks(self):
        reference = Host(harness.Q4_K, prompt=LONG_PROMPT, n_predict=64).finish()
        for slots in (8, 32):
            with self.subTest(slots=slots), Daemon("--gpu-slots", str(slots), "--gpu-keep-free", "0") as daemon:
                run = Host(harness.Q4_K, daemon=daemon, prompt=LONG_PROMPT, n_predict=64).finish()
                self.assert_on_gpu(run, daemon)
                self.assert_same(run, reference)

    def test_a_prompt_batch_over_partly_resident_layers_differs_no_more_than_stock_itself(self):
        reference = Host(harness.Q4_K, prompt=LONG_PROMPT, n_predict=1).finish()
        other = Host(harness.Q4_K, "--ubatch", "32", prompt=LONG_PROMPT, n_predict=1).finish()
        with Daemon("--gpu-slots", "8", "--gpu-keep-free", "0") as daemon:
            Host(harness.Q4_K, daemon=daemon, n_predict=64).finish()  # adds and fills the device slots
            run = Host(harness.Q4_K, daemon=daemon, prompt=LONG_PROMPT, n_predict=1).finish()
            self.assert_on_gpu(run, daemon)
        logits = [array.array("f", r.logits) for r in (reference, other, run)]
        n_vocab = reference.figures["n_vocabulary"]
        own, ours = divergence(logits[0], logits[1], n_vocab), divergence(logits[0], logits[2], n_vocab)
        print(f"KL divergence: stock with another batch size {own:.2e}, partly resident {ours:.2e}")
        self.assertLessEqual(ours, max(2 * own, 1e-5))

    def test_one_wrong_byte_of_an_expert_is_noticed(self):
        reference = Host(harness.Q4_K, *SMALL).finish()
        with Daemon("--gpu-slots", "8", "--gpu-keep-free", "0", environment={"MOECACHED_TEST_SPOIL": "1"}) as daemon:
            run = Host(harness.Q4_K, *SMALL, daemon=daemon).finish()
            self.assert_on_gpu(run, daemon)
        self.assertFalse(run.logits == reference.logits, "a wrong byte went unnoticed")

    def test_daemon_killed_in_decode_and_restarted(self):
        reference = Host(harness.Q4_K, *SMALL, n_predict=600).finish()
        daemon = Daemon("--gpu-slots", "8", "--gpu-keep-free", "0", environment=CHURN)
        with daemon:
            host = Host(harness.Q4_K, *SMALL, daemon=daemon, n_predict=600)
            harness.wait_for("some graphs", lambda: daemon.models() and daemon.models()[0]["epochs"] > 50)
            daemon.kill()
            daemon.start()
            run = host.finish()
            self.assert_same(run, reference)

    def test_two_processes_on_one_pool(self):
        reference = Host(harness.Q4_K, *SMALL, n_predict=200).finish()
        with Daemon("--gpu-slots", "8", "--gpu-keep-free", "0", environment=CHURN) as daemon:
            hosts = [Host(harness.Q4_K, *SMALL, daemon=daemon, n_predict=200) for _ in range(2)]
            for run in [host.finish() for host in hosts]:
                self.assert_same(run, reference)
            self.assertEqual(len(daemon.models()), 1)


class GpuSpill(harness.HostTestCase):
    """VRAM and RAM hold a part of the experts, each in one place: what is missing is read from disk while the graph waits."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        if not harness.has_cuda():
            raise unittest.SkipTest("no GPU, or no llama.cpp libraries with CUDA in MOECACHED_LLAMA_LIBS")

    @staticmethod
    def daemon(vram, ram):
        return Daemon("--gpu-mode", "spill", "--gpu-slots", str(vram), "--pool-slots", str(ram), "--gpu-keep-free", "0")

    def counters(self, run, daemon, waits=True):
        self.assertIsNotNone(run.stats, "the plugin wrote no counters: it was not in use")
        self.assertGreater(run.stats["gpu_computes"], 0)
        self.assertEqual(run.stats["fallback_reads"], 0, "the daemon was bypassed")
        self.assertEqual(run.stats["gpu_waits"] > 0, waits, "graphs were cut, or were not")
        model = daemon.models()[0]
        self.assertTrue(model["spills"])
        total = {name: sum(layer[name] for layer in model["layers"]) for name in
                 ("lookups", "hits", "misses", "device_hits", "rises", "swaps", "evictions")}
        self.assertEqual(total["hits"] + total["misses"], total["lookups"])
        return total

    def check(self, model, *options, prompt=None, n_predict=700, tiers=((4, 10), (8, 16), (16, 16), (32, 8)), waits=True):
        options = options or SMALL
        given = {"prompt": prompt} if prompt else {}
        reference = Host(model, *options, n_predict=n_predict, **given).finish()
        for vram, ram in tiers:
            with self.subTest(model=model.name, vram=vram, ram=ram), self.daemon(vram, ram) as daemon:
                run = Host(model, *options, daemon=daemon, n_predict=n_predict, environment={"MOECACHED_GPU_WAIT": "1" if waits else "0"},
                           **given).finish()
                total = self.counters(run, daemon, waits)
                self.assertGreater(total["device_hits"], 0, "nothing was read from VRAM")
                if vram + ram < EXPERTS:
                    self.assertGreater(total["swaps"], 0, "nothing has changed places meanwhile")
                    self.assertGreater(total["evictions"], 0)
                self.assert_same(run, reference)

    def test_q4_k(self):  # long enough that there are slots in VRAM, which come after a second
        self.check(harness.Q4_K, *SMALL, "--ctx", "2048", n_predict=1900)

    def test_gpt_oss_with_biases(self):
        self.check(harness.gpt_oss(), *SMALL, "--ctx", "2048", n_predict=1900, tiers=((8, 16),))

    def test_graphs_that_are_cut(self):
        self.check(harness.Q4_K, tiers=((4, 10), (16, 16)), waits=False)

    def test_prompts_are_stocks_whatever_is_where(self):
        for model in (harness.Q4_K, harness.gpt_oss()):
            self.check(model, "--batch", "2048", "--ubatch", "512", "--ctx", "16384", prompt=LONG_PROMPT * 4, n_predict=1900,
                       tiers=((8, 16), (16, 8)))

    def test_daemon_killed_in_decode_and_restarted(self):
        reference = Host(harness.Q4_K, *SMALL, "--ctx", "2048", n_predict=1500).finish()
        daemon = self.daemon(8, 12)
        with daemon:
            host = Host(harness.Q4_K, *SMALL, "--ctx", "2048", daemon=daemon, n_predict=1500)
            harness.wait_for("experts in VRAM", lambda: daemon.models() and sum(layer["device_hits"] for layer in daemon.models()[0]["layers"]) > 0)
            daemon.kill()
            run = host.finish()
            self.assertGreater(run.stats["fallback_reads"], 0, "it had ended before the daemon did")
            self.assert_same(run, reference)
            daemon.start()
            again = Host(harness.Q4_K, *SMALL, "--ctx", "2048", daemon=daemon, n_predict=1500).finish()
            self.counters(again, daemon)
            self.assert_same(again, reference)

    def test_two_processes_on_one_pool(self):
        reference = Host(harness.Q4_K, *SMALL, n_predict=700).finish()
        with self.daemon(8, 16) as daemon:
            hosts = [Host(harness.Q4_K, *SMALL, daemon=daemon, n_predict=700) for _ in range(2)]
            for run in [host.finish() for host in hosts]:
                self.assert_same(run, reference)
            self.assertEqual(len(daemon.models()), 1)
            self.assertGreater(sum(layer["swaps"] for layer in daemon.models()[0]["layers"]), 0)


if __name__ == "__main__":
    harness.main()
