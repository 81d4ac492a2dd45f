"""Real processes for the integration tests: a daemon in a folder of its own, llama.cpp hosts, and ways to break them.

Nothing here sleeps to order things: tests wait for what they can observe (a socket, a counter, an exit), bounded by a deadline.
"""
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

BUILD = Path(os.environ.get("MOECACHED_BUILD", "build")).resolve()
LIBS = os.environ.get("MOECACHED_LLAMA_LIBS", "")
DATA = Path(__file__).resolve().parent.parent / "data"
DAEMON = BUILD / "daemon/app/moecached"
CTL = BUILD / "client/ctl/moecachectl"
PLUGIN = BUILD / "shim/ggml/libggml-moecache.so"
HOST = BUILD / "tests/support/moecached_llama_host"
REQUANTIZE = BUILD / "tests/support/moecached_requantize"
Q4_K = DATA / "tinymoe-53m-a8m-q4_k_m.gguf"
PROMPT = "And it came to pass in those days, that"
LONG_PROMPT = (
    "The system call returns a file descriptor. On error, it returns -1 and sets errno to indicate the error. "
    "int main(int argc, char **argv) { int fd = open(argv[1], O_RDONLY); if (fd < 0) { perror(argv[1]); return 1; } } "
    "CREATE TABLE t1 (id INTEGER PRIMARY KEY, name TEXT); Die Option wird beim Start gelesen. And it came to pass in those days, that "
) * 3
DEADLINE_S = 60
OVERRIDE = r"\.ffn_(gate|up|down|gate_up)_exps=MOECACHE"  # as `moecachectl run` gives


def has_cuda():
    return os.path.exists("/dev/nvidiactl") and any(Path(LIBS).glob("libggml-cuda*"))


def wait_for(what, condition, deadline_s=DEADLINE_S):
    """Polls until the condition holds; returns its value."""
    end = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"gave up after {deadline_s} s waiting for {what}")
        time.sleep(0.005)


class Daemon:
    """A moecached of its own. Use as a context manager."""

    def __init__(self, *args, directory=None, environment=None):
        self._own = None if directory else tempfile.TemporaryDirectory(prefix="moecached-test-")
        self.directory = Path(directory or self._own.name)
        self.args = args
        self.environment = environment or {}
        self.process = None
        self.log = self.directory / "log"

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *unused):
        if self.process and self.process.poll() is None:
            self.process.terminate()
            code = self.process.wait(DEADLINE_S)
            assert code == 0, f"the daemon ended with {code}: {self.log.read_text()}"
        if self._own:
            self._own.cleanup()

    @property
    def socket(self):
        return str(self.directory / "handle.sock")

    def start(self):
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [DAEMON, "--directory", str(self.directory), *self.args], stdout=subprocess.DEVNULL, stderr=log,
                env={**os.environ, **self.environment})
        wait_for("the daemon to listen", lambda: self.process.poll() is not None or self.answers())
        if self.process.poll() is not None:
            raise AssertionError(f"the daemon ended with {self.process.returncode}: {self.log.read_text()}")

    def answers(self):
        return subprocess.run([CTL, "--socket", self.directory / "control.sock", "status"], capture_output=True).returncode == 0

    def ctl(self, *args):
        done = subprocess.run([CTL, "--socket", self.directory / "control.sock", "-o", "json", *args],
                              capture_output=True, text=True)
        assert done.returncode in (0, 1), f"moecachectl {args}: exit {done.returncode}: {done.stdout}{done.stderr}"
        return json.loads(done.stdout)

    def models(self):
        return self.ctl("models")["models"]

    def sessions(self):
        return self.ctl("sessions")["sessions"]

    def lookups(self):
        return sum(session.get("lookups", 0) for session in self.sessions())

    @contextlib.contextmanager
    def held(self):
        """No thread of it runs inside."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            wait_for("the daemon to stop", lambda: "State:\tT" in Path(f"/proc/{self.process.pid}/status").read_text())
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def flip_byte(self, offset):
        """Flips one bit pattern in the pool of the first model, behind everybody's back."""
        base = None
        for line in Path(f"/proc/{self.process.pid}/maps").read_text().splitlines():
            if "memfd:moecached-pool" in line:
                base = int(line.split("-")[0], 16)
                break
        assert base is not None, "no pool is mapped"
        with open(f"/proc/{self.process.pid}/mem", "r+b", buffering=0) as memory:
            memory.seek(base + offset)
            byte = memory.read(1)[0]
            memory.seek(base + offset)
            memory.write(bytes([byte ^ 0x14]))


class Host:
    """One run of the llama.cpp host program."""

    def __init__(self, model, *args, daemon=None, environment=None, prompt=PROMPT, n_predict=32, threads=1):
        self._directory = tempfile.TemporaryDirectory(prefix="moecached-host-")
        path = Path(self._directory.name)
        self.logits_path, self.json_path, self.stats_path = path / "logits", path / "json", path / "stats"
        command = [HOST, "--libs", LIBS, "--model", str(model), "--prompt", prompt, "--n-predict", str(n_predict), "--threads",
                   str(threads), "--no-repack", "--ignore-eog", "--logits-out", self.logits_path, "--json", self.json_path]
        env = {**os.environ, "MOECACHED_STATS_FILE": str(self.stats_path), **(environment or {})}
        if daemon:
            command += ["--plugin", PLUGIN]
            if has_cuda():  # a CPU host places experts by what the device supports
                command += ["--override", OVERRIDE]
            env["MOECACHED_SOCKET"] = daemon.socket
        self.process = subprocess.Popen([*command, *args], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE)

    def finish(self, expect=0):
        out, err = self.process.communicate(timeout=300)
        self.stderr = err.decode(errors="replace")
        if expect is not None:
            assert self.process.returncode == expect, f"the host ended with {self.process.returncode}: {self.stderr[-3000:]}"
        self.text = out
        if self.process.returncode == 0:
            self.logits = self.logits_path.read_bytes()
            self.figures = json.loads(self.json_path.read_text(errors="replace"))  # random models write random bytes
            self.tokens = self.figures["tokens"]
            self.stats = json.loads(self.stats_path.read_text()) if self.stats_path.exists() else None
        self._directory.cleanup()
        return self

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.stderr.close()
        self._directory.cleanup()


_stock = {}


def stock(model, prompt=PROMPT, n_predict=32):
    """The unmodified run with the same kernels, once per question."""
    key = (str(model), prompt, n_predict)
    if key not in _stock:
        _stock[key] = Host(model, prompt=prompt, n_predict=n_predict).finish()
    return _stock[key]


def requantized(kind):
    """The trained model in another type, made once in the build tree."""
    path = BUILD / "tests" / f"tinymoe-{kind}.gguf"
    if not path.exists():
        partial = path.with_suffix(f".{os.getpid()}")
        subprocess.run([REQUANTIZE, "--libs", LIBS, str(Q4_K), str(partial), kind], check=True, capture_output=True)
        partial.rename(path)
    return path


def gpt_oss():
    """A random model with MXFP4 experts and biases, made once in the build tree."""
    path = BUILD / "tests/random-gpt-oss.gguf"
    if not path.exists():
        partial = path.with_suffix(f".{os.getpid()}")
        made = subprocess.run([sys.executable, Path(__file__).resolve().parent.parent / "support/make_gpt_oss_model.py", partial],
                              capture_output=True, text=True)
        if "No module named 'numpy'" in made.stderr:
            raise unittest.SkipTest("no numpy to make a model with")
        assert made.returncode == 0, made.stderr
        partial.rename(path)
    return path


class HostTestCase(unittest.TestCase):
    """Skips, with the reason, when there is no llama.cpp to run."""

    @classmethod
    def setUpClass(cls):
        if not LIBS or not HOST.exists():
            raise unittest.SkipTest("no llama.cpp libraries (MOECACHED_LLAMA_LIBS)")

    def assert_same(self, run, reference):
        self.assertEqual(run.tokens, reference.tokens)
        self.assertEqual(len(run.logits), len(reference.logits))
        self.assertTrue(run.logits == reference.logits, "tokens are equal, logits are not")

    def assert_served(self, run):
        self.assertIsNotNone(run.stats, "the plugin wrote no counters: it was not in use")
        self.assertGreater(run.stats["lookups"], 0)
        self.assertEqual(run.stats["fallback_reads"], 0, "a fallback read served the run, not the daemon")


def main():
    unittest.main(verbosity=2)
