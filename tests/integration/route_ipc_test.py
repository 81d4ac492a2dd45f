"""A client in plain CUDA runtime calls, which takes no descriptor: it routes over gRPC and reads device memory by a 64-byte handle.

On a machine with a GPU `python3 tests/integration/route_ipc_test.py` runs it there ($MOECACHED_ROUTE_MODEL: a model of yours); elsewhere, and
there as well, over a driver of host memory.
"""
import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import harness

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))
import moe_files  # noqa: E402  beside the other makers of models

GPU_PROGRAM = harness.BUILD / "tests/stress/route_ipc/route_ipc_check"
SOFT_PROGRAM = harness.BUILD / "tests/stress/route_ipc/route_ipc_check_soft"
SOFT_CUDA = harness.BUILD / "tests/support/soft_cuda/libcuda.so.1"
EQUAL, DIFFERENT, ERROR = 0, 1, 2


class RouteIpc(unittest.TestCase):
    program, environment, n_decisions = SOFT_PROGRAM, {"MOECACHED_LIBCUDA": str(SOFT_CUDA)}, 3000

    @classmethod
    def setUpClass(cls):
        if not SOFT_PROGRAM.exists():
            raise unittest.SkipTest("built without CUDA's headers")

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="moecached-route-ipc-")
        self.addCleanup(folder.cleanup)
        given = os.environ.get("MOECACHED_ROUTE_MODEL")
        self.model = Path(given) if given else Path(folder.name) / "model.gguf"
        if not given:
            moe_files.write_gguf(self.model, moe_files.Model(n_layers=3, n_experts=32, top_k=4))

    def daemon(self, *flags, **environment):
        return harness.Daemon("--control-route", "--gpu-slots", "25%", "--gpu-keep-free", "0", *flags,
                              environment={**self.environment, **environment})

    def check(self, daemon, *flags):
        done = subprocess.run([self.program, daemon.directory, self.model, "--decisions", str(self.n_decisions), *flags], capture_output=True, text=True,
                              env={**os.environ, **self.environment}, timeout=300)
        return done.returncode, done.stdout + done.stderr

    def assert_equal(self, daemon, *flags):
        code, text = self.check(daemon, *flags)
        self.assertEqual(code, EQUAL, text)
        found = re.search(r"from slots (\d+), from RAM (\d+); (\d+) bytes compared, wrong 0", text)
        self.assertIsNotNone(found, text)
        return [int(number) for number in found.groups()]

    def test_bytes_are_the_files_and_what_is_used_most_moves_into_slots(self):
        with self.daemon() as daemon:
            from_slots, from_ram, _ = self.assert_equal(daemon)
            self.assertGreater(from_slots, 0)
            self.assertGreater(from_ram, 0)
            model = daemon.models()[0]
            self.assertTrue(model["device"].startswith("GPU-"))
            hits = sum(layer["hits"] for layer in model["layers"])
            self.assertGreater(hits, 0, "the daemon learns from streams as from other lanes")
            harness.wait_for("the streams to be gone", lambda: not daemon.sessions())
            # A second client finds everything loaded.
            self.assert_equal(daemon, "--streams", "1")
            self.assertEqual(len(daemon.models()), 1)

    def test_bytes_are_right_while_slots_are_swapped_under_four_streams(self):
        with self.daemon(MOECACHED_TEST_CHURN="1") as daemon:
            from_slots, _, _ = self.assert_equal(daemon, "--streams", "4")
            self.assertGreater(from_slots, 0)
            self.assertGreater(sum(layer["evictions"] for layer in daemon.models()[0]["layers"]), 10)

    def test_one_wrong_byte_shows(self):
        with self.daemon(MOECACHED_TEST_SPOIL="1") as daemon:
            code, text = self.check(daemon)
            self.assertEqual(code, DIFFERENT, text)

    def test_device_memory_that_is_to_stay_free_does(self):
        with self.daemon("--gpu-keep-free", "1000GiB") as daemon:
            code, text = self.check(daemon)
            self.assertEqual(code, ERROR, text)
            self.assertIn("gpu.keep_free", text)
            self.assertEqual(daemon.sessions(), [])

    def test_a_gpu_that_is_not_served_is_named(self):
        with harness.Daemon("--control-route", "--gpu-devices", "none", environment=self.environment) as daemon:
            code, text = self.check(daemon)
            self.assertEqual(code, ERROR, text)
            self.assertIn("it serves no GPU", text)


class RouteIpcOnAGpu(RouteIpc):
    # Slots come half a second after the first decision; a model of one's own has more to compare.
    program, environment, n_decisions = GPU_PROGRAM, {}, 2000 if "MOECACHED_ROUTE_MODEL" in os.environ else 20000

    @classmethod
    def setUpClass(cls):
        if not GPU_PROGRAM.exists() or not Path("/dev/nvidiactl").exists():
            raise unittest.SkipTest("no GPU, or no nvcc to build the client with")


if __name__ == "__main__":
    unittest.main(verbosity=2)
