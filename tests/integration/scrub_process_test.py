"""A stray write into the pool of a running daemon, from outside of it: found within one period, mended, and told to people."""
import subprocess
import time
import unittest
from pathlib import Path

import harness
from harness import CTL, Daemon, wait_for

PERIOD_S = 2


class Scrub(unittest.TestCase):
    def pool_bytes(self, daemon):
        base, end = next(line.split()[0].split("-") for line in Path(f"/proc/{daemon.process.pid}/maps").read_text().splitlines()
                         if "memfd:moecached-pool" in line)
        with open(f"/proc/{daemon.process.pid}/mem", "rb", buffering=0) as memory:
            memory.seek(int(base, 16))
            return memory.read(int(end, 16) - int(base, 16))

    def test_stray_write_is_found_mended_and_told(self):
        with Daemon("--slots", "100%", "--pool-scope", "layer", "--scrub-period", f"{PERIOD_S}s") as daemon:
            model = daemon.ctl("register", str(harness.Q4_K))["model"]
            layers = daemon.models()[0]["layers"]
            counts = daemon.directory / "counts.csv"
            rows = [f"all,{layer['block']},{','.join('1' for _ in range(layer['n_experts']))}" for layer in layers]
            header = "workload,layer," + ",".join(f"c{i}" for i in range(layers[0]["n_experts"]))
            counts.write_text("# moecounts-csv v1 {}\n" + header + "\n" + "\n".join(rows) + "\n")
            n_loading = daemon.ctl("prewarm", "--model", str(model), "--from", str(counts))["experts"]
            resident = lambda: sum(layer["resident"] for layer in daemon.models()[0]["layers"])
            wait_for("every expert to be loaded", lambda: resident() == n_loading)
            self.assertEqual(n_loading, sum(layer["n_experts"] for layer in layers))
            good = self.pool_bytes(daemon)
            checked = lambda: daemon.ctl("stats")["total"].get("slots_checked", 0)
            wait_for("a whole round", lambda: checked() >= 2 * n_loading)
            self.assertEqual(daemon.ctl("stats")["total"]["slots_corrupt"], 0)
            self.assertIn(f"each slot every {PERIOD_S} s", daemon.ctl("status")["scrub"])

            daemon.flip_byte(4096 + 1)
            written = time.monotonic()
            self.assertNotEqual(self.pool_bytes(daemon), good)
            wait_for("the scrubber", lambda: daemon.ctl("stats")["total"]["slots_corrupt"] == 1)
            took = time.monotonic() - written
            print(f"found after {took:.2f} s of {PERIOD_S}")
            self.assertLess(took, PERIOD_S + 1, "a busy machine gets some more")
            wait_for("the file's bytes to be back", lambda: resident() == n_loading and self.pool_bytes(daemon) == good)

            done = subprocess.run([CTL, "--socket", daemon.directory / "control.sock", "doctor"], capture_output=True, text=True)
            self.assertIn("something wrote into the pool", done.stdout)
            self.assertEqual(done.returncode, 1, "doctor has an error")
            lines = [line for line in daemon.log.read_text().splitlines() if "stray write" in line]
            self.assertEqual(len(lines), 1, lines)
            # Once a round, and it was found once.
            again = checked()
            wait_for("another round", lambda: checked() >= again + 2 * n_loading)
            self.assertEqual(daemon.ctl("stats")["total"]["slots_corrupt"], 1)


if __name__ == "__main__":
    harness.main()
