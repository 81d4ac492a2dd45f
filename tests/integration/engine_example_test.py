"""examples/engine/moe_layer.c as an engine's author runs it: another program than llama.cpp, on slots of a real daemon."""
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import harness

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))
import moe_files  # noqa: E402  beside the other makers of models

PROGRAM = harness.BUILD / "examples/engine/moe_layer"
READ_EXPERT = harness.BUILD / "client/examples/read_expert"
GPU_PROGRAM = harness.BUILD / "examples/engine/moe_layer_gpu"
SOFT_PROGRAM = harness.BUILD / "tests/support/soft_cuda/moe_layer_soft"
SOFT_CUDA = harness.BUILD / "tests/support/soft_cuda/libcuda.so.1"
EQUAL, DIFFERENT, ERROR = 0, 1, 2


class EngineExample(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="moecached-engine-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def run_example(self, daemon, *files, program=PROGRAM):
        done = subprocess.run([program, *files], capture_output=True, text=True,
                              env={**os.environ, **(daemon.environment if daemon else {}),
                                   "MOECACHED_SOCKET": daemon.socket if daemon else "/nonexistent/socket"})
        return done.returncode, done.stdout + done.stderr

    def assert_served(self, daemon, *files):
        code, text = self.run_example(daemon, *files)
        self.assertEqual(code, EQUAL, text)
        last = text.splitlines()[-1]
        self.assertRegex(last, r"equal: lookups \d+, hits [1-9]\d*, leases [1-9]\d*, read from the file by the client library 0")
        self.assertNotIn("nan", text)

    def gguf(self, **shape):
        path = self.folder / "model.gguf"
        places = moe_files.write_gguf(path, moe_files.Model(**shape))
        return path, places

    def test_every_type_gives_the_numbers_of_the_file(self):
        with harness.Daemon("--slots", "5", "--policy", "slru") as daemon:
            for dtype in (moe_files.F32, moe_files.F16, moe_files.BF16, moe_files.Q8_0):
                path, _ = self.gguf(dtype=dtype)
                self.assert_served(daemon, path)
                path.unlink()

    def test_safetensors_give_the_numbers_of_the_files(self):
        with harness.Daemon("--slots", "5", "--policy", "slru") as daemon:
            for names, dtype, n_shards in (("projections", moe_files.F32, 1), ("projections", moe_files.BF16, 3),
                                           ("mixtral", moe_files.F16, 2), ("fused", moe_files.F32, 2)):
                with self.subTest(names=names, dtype=dtype, n_shards=n_shards):
                    folder = Path(tempfile.mkdtemp(dir=self.folder))
                    files = moe_files.write_safetensors(folder, moe_files.Model(dtype=dtype), names, n_shards)
                    self.assert_served(daemon, *files)
                    code, text = self.run_example(daemon, *files, program=READ_EXPERT)
                    self.assertEqual(code, EQUAL, text)

    def test_gguf_and_safetensors_of_the_same_weights_give_the_same_numbers(self):
        path, _ = self.gguf()
        files = moe_files.write_safetensors(self.folder, moe_files.Model())
        with harness.Daemon() as daemon:
            lines = [[line for line in self.run_example(daemon, *given)[1].splitlines() if "y[0]" in line]
                     for given in ((path,), files)]
        self.assertGreater(len(lines[0]), 0)
        self.assertEqual(*lines)

    def test_one_wrong_byte_in_a_slot_shows(self):
        path, places = self.gguf()
        with harness.Daemon("--scrub-period", "none") as daemon:  # which would mend it
            self.assert_served(daemon, path)
            # Slot 0 of the first layer begins with gate, in phase with the file; its exponent's byte.
            daemon.flip_byte(places["blk.0.ffn_gate_exps.weight"] % 4096 + 3)
            code, text = self.run_example(daemon, path)
            self.assertEqual(code, DIFFERENT, text)
            self.assertIn("blk.0: 4 experts", text)

    def test_says_when_there_is_no_daemon(self):
        path, _ = self.gguf()
        code, text = self.run_example(None, path)
        self.assertEqual(code, ERROR)
        self.assertIn("no session: ", text)

    def test_a_gpu_gives_the_numbers_of_the_file(self):
        if not GPU_PROGRAM.exists() or not Path("/dev/nvidiactl").exists():
            self.skipTest("no GPU, or no nvcc to build the example with")
        self.assert_both_places_serve(GPU_PROGRAM, {})

    def test_the_gpu_example_with_a_driver_of_host_memory(self):
        if not SOFT_PROGRAM.exists():
            self.skipTest("built without CUDA's headers")
        self.assert_both_places_serve(SOFT_PROGRAM, {"MOECACHED_LIBCUDA": str(SOFT_CUDA)})

    def assert_both_places_serve(self, program, environment):
        path, _ = self.gguf(n_experts=32)
        files = moe_files.write_safetensors(self.folder, moe_files.Model(n_experts=32, dtype=moe_files.BF16), n_shards=2)
        with harness.Daemon("--gpu-slots", "25%", "--gpu-keep-free", "0", environment=environment) as daemon:
            for given in ((path,), files):
                code, text = self.run_example(daemon, *given, program=program)
                self.assertEqual(code, EQUAL, text)
                self.assertRegex(text, r"in VRAM [1-9]\d*, in RAM [1-9]\d*; layers that differ 0")
        with harness.Daemon("--gpu-slots", "25%", "--gpu-keep-free", "0",
                            environment={**environment, "MOECACHED_TEST_SPOIL": "1"}) as daemon:
            code, text = self.run_example(daemon, path, program=program)
            self.assertEqual(code, DIFFERENT, "a spoiled byte must show: " + text)


harness.main()
