"""A real llama.cpp run recorded with moecachectl and replayed with moecache-sim; and moecache-sim's command line."""
import json
import signal
import subprocess
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import harness
from harness import CTL, Daemon, Host, wait_for

SIM = harness.BUILD / "bench/replay/moecache-sim"
TRACE = harness.DATA / "gpt-oss-20b_k4_24seq.csv.zst"
COUNTERS = ("lookups", "hits", "misses", "insertions", "evictions")


def sim(*args, expect=0):
    done = subprocess.run([SIM, *map(str, args)], capture_output=True, text=True)
    assert done.returncode == expect, f"moecache-sim {args}: exit {done.returncode}: {done.stdout[-500:]}{done.stderr}"
    return done


class Recorder:
    def __init__(self, daemon, path, *args):
        self.process = subprocess.Popen([CTL, "--socket", daemon.directory / "control.sock", "--output", "json", "trace", "record",
                                         *args, "-o", path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        wait_for("the recording to run", lambda: self.process.poll() is not None or self.has_begun())

    def has_begun(self):
        for link in Path(f"/proc/{self.process.pid}/fd").iterdir():
            try:
                if "(deleted)" in str(link.readlink()):
                    return True
            except FileNotFoundError:  # closed in between
                pass
        return False

    def stop(self, with_signal=signal.SIGINT):
        if with_signal:
            self.process.send_signal(with_signal)
        out, err = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, f"exit {self.process.returncode}: {err}"
        return json.loads(out)


class RecordAndReplay(harness.HostTestCase):
    def test_a_replay_counts_what_the_daemon_counted(self):
        for slots, policy in (("8", "slru"), ("16", "lru")):
            with self.subTest(slots=slots, policy=policy), Daemon("--slots", slots, "--policy", policy, "--pool-prefetch", "off") as daemon:
                path = daemon.directory / "trace.csv.zst"
                daemon.ctl("register", str(harness.Q4_K))
                recorder = Recorder(daemon, path)
                for prompt in (harness.PROMPT, "int main(int argc"):
                    self.assert_served(Host(harness.Q4_K, daemon=daemon, prompt=prompt).finish())
                wait_for("the last session to close", lambda: not daemon.sessions())
                summary = recorder.stop()
                self.assertEqual(summary["dropped"], 0)
                self.assertEqual(summary["sequences"], 2)
                self.assertGreater(summary["rows"], 60)
                run = json.loads(sim(path, "--policy", "recorded", "--slots", "recorded", "--layers", "-o", "json").stdout)["runs"][0]
                self.assertEqual(run["policy"], policy)
                layers = daemon.models()[0]["layers"]
                self.assertEqual(len(layers), len(run["layers"]))
                for counted, replayed in zip(layers, run["layers"]):
                    self.assertEqual({name: counted.get(name, 0) for name in COUNTERS}, {name: replayed[name] for name in COUNTERS})
                    self.assertGreater(counted["evictions"], 0)

    def test_tokens_and_seconds_end_a_recording(self):
        with Daemon("--slots", "16") as daemon:
            daemon.ctl("register", str(harness.Q4_K))
            path = daemon.directory / "trace.csv"
            self.assertEqual(Recorder(daemon, path, "--seconds", "0.2").stop(None)["rows"], 0)
            recorder = Recorder(daemon, path, "--tokens", "20", "--single-tokens")
            Host(harness.Q4_K, daemon=daemon).finish()
            self.assertEqual(recorder.stop(None)["rows"], 20)
            lines = path.read_text().splitlines()
            self.assertEqual(len(lines), 22)
            header = json.loads(lines[0].removeprefix("# moetrace-csv v1 "))
            self.assertEqual((header["layers"], header["experts"], header["k"]), (8, 32, 4))

    def test_there_is_nothing_to_record_without_a_model(self):
        with Daemon() as daemon:
            done = subprocess.run([CTL, "--socket", daemon.directory / "control.sock", "trace", "record", "-o", daemon.directory / "x"],
                                  capture_output=True, text=True)
            self.assertEqual(done.returncode, 4)
            self.assertIn("no model", done.stderr)
            self.assertFalse((daemon.directory / "x").exists())


class Simulator(unittest.TestCase):
    def test_curves_are_drawn(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "curves.svg"
            sim(TRACE, "--policy", "lru", "--policy", "ewma", "--svg", path)
            lines = [e for e in ElementTree.parse(path).iter() if e.tag.endswith("polyline")]
            self.assertEqual(len(lines), 4)  # two policies, two yardsticks
            self.assertTrue(all(len(line.get("points").split()) == 12 for line in lines))

    def test_a_shared_pool_beats_private_ones_of_the_same_total(self):
        runs = json.loads(sim(TRACE, "--policy", "slru", "--slots", "50%", "--interleave", 2, "-o", "json").stdout)["runs"]
        shared, private = (next(r for r in runs if r["private"] == p) for p in (False, True))
        self.assertGreater(shared["total"]["hit_rate"], private["total"]["hit_rate"] + 0.1)

    def test_layers_say_how_uneven_they_are_and_what_to_change(self):
        report = json.loads(sim(TRACE, "--policy", "lru", "--slots", "12.5%,50%,90%,100%", "--layers", "-o", "json").stdout)
        self.assertEqual(len(report["layers"]), 24)
        self.assertTrue(all(0 < layer["gini"] < 1 and 0 < layer["entropy_bits"] <= 5 for layer in report["layers"]))
        self.assertIn("fewer than twice the 4 experts", report["advice"][0])
        self.assertIn("past the knee", report["advice"][-1])

    def test_bad_input_is_named(self):
        for args, code, text in (([TRACE, "--policy", "oracle"], 1, "there are"), ([TRACE, "--slots", "200%"], 2, "more than 100"),
                                 (["/nowhere.csv"], 1, "/nowhere.csv"), ([TRACE, "--slots", "recorded"], 2, "recorded"),
                                 ([harness.Q4_K], 1, "moetrace-csv"), ([TRACE, "--mode", "magic"], 2, "magic"),
                                 ([TRACE, "--interleave", "99"], 2, "24 sequence"), ([TRACE, "--memory", "1"], 1, "--memory")):
            with self.subTest(args=args):
                self.assertIn(text, sim(*args, expect=code).stderr)


if __name__ == "__main__":
    harness.main()
