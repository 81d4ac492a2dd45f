#!/usr/bin/env python3
"""The benchmark on a GPU: one table (name, value, goal, met or not), the same as JSON, all ratios of figures taken in this run.

Drives unmodified llama-server processes over a model that walks a recorded routing trace (README.md). A step that fails or for
which no time is left costs its rows, not the table.
"""
import argparse
import ctypes
import json
import os
import platform
import re
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TRACE = ROOT.parent / "shared/data/traces/synth_qwen3-30b-a3b_k8.csv.zst"

# Where in the walk each figure is taken. The measured part is new to the cache: the circle is not closed within one daemon.
WARM_TOKENS, DECODE_TOKENS = 400, 800
POLICY_PERCENTS = (12.5, 25)  # of slots, where policies are compared
PAIR_WARM_TOKENS, PAIR_TOKENS = 300, 400
IDENTITY_PROMPT, IDENTITY_TOKENS = 8, 96  # batches of more than 8 tokens take kernels whose sums depend on the number of slots
START_S, STOP_S = 120, 60


# -- the daemon's counters
@dataclass
class Counters:
    """What this program needs of `moecachectl -o json stats`. None: this daemon does not say."""
    lookups: int
    hits: int  # found in VRAM
    bytes_read: int
    records_dropped: int
    upload_bytes: int | None
    upload_s: float | None  # time in which copies to the GPU were under way
    gpu_bytes: int | None  # VRAM behind expert slots


def parse_stats(stats):
    total = stats["total"]
    upload_ns = total.get("upload_ns")
    device_bytes = stats.get("device_bytes")
    return Counters(lookups=total["lookups"], hits=total["hits"], bytes_read=total["bytes_read"], records_dropped=stats["records_dropped"],
                    upload_bytes=total.get("bytes_uploaded"), upload_s=None if upload_ns is None else upload_ns / 1e9,
                    gpu_bytes=device_bytes)


def grown(before, after):
    """The counters of `after` less those of `before`."""
    pairs = {name: (getattr(before, name), getattr(after, name)) for name in Counters.__dataclass_fields__}
    return Counters(**{name: None if a is None or b is None else b - a for name, (a, b) in pairs.items()})


def hit_rate(counters):
    return counters.hits / counters.lookups if counters.lookups > 0 else None


# -- processes
class Failed(Exception):
    pass


def tail(path, n_bytes=1500):
    text = Path(path).read_text(errors="replace") if Path(path).exists() else ""
    return text[-n_bytes:]


class Process:
    def __init__(self, name, command, folder, environment=None):
        self.name, self.log = name, folder / f"{re.sub('[^a-z0-9]+', '-', name)}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen([str(part) for part in command], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                            env={**os.environ, **(environment or {})})

    def wait_until(self, condition, seconds):
        end = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None:
                raise Failed(f"{self.name} ended with {self.process.returncode}: {tail(self.log)}")
            if time.monotonic() > end:
                raise Failed(f"{self.name} was not ready within {seconds:.0f} s: {tail(self.log)}")
            time.sleep(0.02)

    def stop(self):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.stop()


class Daemon(Process):
    def __init__(self, bench, percent, name, extra=()):
        options = bench.options
        # A folder of its own, short enough for the path of a socket.
        self.directory = tempfile.TemporaryDirectory(prefix="moecached-e2e-")
        self.ctl = [str(bench.build / "client/ctl/moecachectl"), "--socket", f"{self.directory.name}/control.sock", "-o", "json"]
        self.bench = bench
        super().__init__(name, [bench.build / "daemon/app/moecached", "--directory", self.directory.name, options.slots_flag, f"{percent}%",
                                *shlex.split(options.daemon_args), *extra], bench.logs)
        try:
            self.wait_until(lambda: subprocess.run([*self.ctl, "status"], capture_output=True).returncode == 0, 60)
        except BaseException:
            self.stop()
            raise

    def stop(self):
        super().stop()
        self.directory.cleanup()

    @property
    def socket(self):
        return f"{self.directory.name}/handle.sock"

    @property
    def environment(self):
        return {"GGML_BACKEND_PATH": str(self.bench.build / "shim/ggml/libggml-moecache.so"), "MOECACHED_SOCKET": self.socket}

    def stats(self):
        done = subprocess.run([*self.ctl, "stats"], capture_output=True, text=True, timeout=30)
        if done.returncode != 0:
            raise Failed(f"moecachectl stats: {done.stdout}{done.stderr}")
        return json.loads(done.stdout)

    def set_policy(self, policy):
        done = subprocess.run([*self.ctl, "policy", "set", "gpu" if self.bench.options.slots_flag.startswith("--gpu") else "ram", policy],
                              capture_output=True, text=True, timeout=30)
        if done.returncode != 0:
            raise Failed(f"moecachectl policy set {policy}: {done.stdout}{done.stderr}")

    def status(self):
        done = subprocess.run([*self.ctl, "status"], capture_output=True, text=True, timeout=30)
        return json.loads(done.stdout) if done.returncode == 0 else {}

    def counters(self):
        """Records come a little after the tokens they are of: waits until the count stands still."""
        now = parse_stats(self.stats())
        for _ in range(20):
            before, now = now, None
            time.sleep(0.1)
            now = parse_stats(self.stats())
            if now.lookups == before.lookups:
                break
        return now


class Server(Process):
    """A llama-server. With a daemon its experts lie in the daemon's slots."""

    def __init__(self, bench, name, *args, daemon=None, environment=None):
        self.bench = bench
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        placement = ["-ot", "exps=MOECACHE"] if daemon else []
        start = time.monotonic()
        super().__init__(name, [bench.llama_bin / "llama-server", "-m", bench.model, "--host", "127.0.0.1", "--port", self.port, "-c", 4096, "-np", 1,
                                "-ngl", 99, "-t", bench.options.threads, "--cache-ram", 0, "--no-ui", *placement, *args,
                                *shlex.split(bench.options.server_args)], bench.logs,
                         {**(daemon.environment if daemon else {}), **(environment or {})})
        try:
            self.wait_until(self.healthy, START_S)
        except BaseException:
            self.stop()
            raise
        self.start_s = time.monotonic() - start

    def healthy(self):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as reply:
                return reply.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def splits(self):
        """Of the graphs for prompts and for single tokens, as llama.cpp logs them (-lv 4) when it makes a context; the last one's."""
        found = re.findall(r"nodes = [\d /]+, splits = (\d[\d /]*)", Path(self.log).read_text(errors="replace"))
        return found[-1].strip() if found else None

    def complete(self, prompt, n_predict, n_probs=0):
        body = {"prompt": prompt, "n_predict": n_predict, "temperature": 0, "ignore_eos": True, "cache_prompt": False, "return_tokens": True,
                "n_probs": n_probs}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self.bench.options.step_seconds) as reply:
                result = json.load(reply)
        except (urllib.error.URLError, OSError) as error:
            raise Failed(f"{self.name}: no completion ({error}): {tail(self.log)}") from error
        expected = [(prompt[-1] + 1 + i) % self.bench.n_tokens for i in range(n_predict)]
        if result["tokens"] != expected:
            at = next((i for i, pair in enumerate(zip(result["tokens"], expected)) if pair[0] != pair[1]), len(result["tokens"]))
            self.bench.left_the_walk.append(f"{self.name} at token {at}")
        return result

    def decode(self, first, n):
        return self.complete([first % self.bench.n_tokens], n)["timings"]["predicted_per_second"]

    def prompt_rate(self, length, repeats):
        """Median over prompts of different tokens."""
        n = self.bench.n_tokens
        return statistics.median(self.complete([(i * length + j) % n for j in range(length)], 1)["timings"]["prompt_per_second"]
                                 for i in range(repeats))

    def identity(self):
        result = self.complete(list(range(IDENTITY_PROMPT)), IDENTITY_TOKENS, n_probs=3)
        return {"content": result["content"],
                "logprobs": [[top["logprob"] for top in token["top_logprobs"]] for token in result["completion_probabilities"]]}


# -- the GPU
def smi(query):
    try:
        done = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "-i", "0"], capture_output=True, text=True,
                              timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def pinned_copy_rate(n_bytes=512 << 20, copies=16):
    """Bytes a second from page-locked memory to the GPU: one copy engine, large pieces, nothing else running."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise Failed(f"no CUDA driver: {error}") from error

    def call(name, *args):
        code = getattr(cuda, name)(*args)
        if code != 0:
            raise Failed(f"{name} returned {code}")

    device, context, on_device, on_host = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuMemAlloc_v2", ctypes.byref(on_device), ctypes.c_size_t(n_bytes))
    call("cuMemAllocHost_v2", ctypes.byref(on_host), ctypes.c_size_t(n_bytes))
    best = 0.0
    for _ in range(3):
        call("cuCtxSynchronize")
        start = time.perf_counter()
        for _ in range(copies):
            call("cuMemcpyHtoDAsync_v2", on_device, on_host, ctypes.c_size_t(n_bytes), None)
        call("cuCtxSynchronize")
        best = max(best, copies * n_bytes / (time.perf_counter() - start))
    call("cuMemFreeHost", on_host)
    call("cuMemFree_v2", on_device)
    call("cuDevicePrimaryCtxRelease_v2", device)
    return best


# -- the steps
class Bench:
    def __init__(self, options):
        self.options = options
        self.start = time.monotonic()
        self.build, self.llama_bin = Path(options.build).resolve(), Path(options.llama_bin).resolve()
        self.folder = Path(options.model_dir).resolve()
        self.logs = self.folder / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.only = options.only.split(",") if options.only else None
        scale, self.repeats, self.pairs = (8, 1, 1) if options.quick else (1, 3, 5)
        self.warm_tokens, self.decode_tokens = WARM_TOKENS // scale, DECODE_TOKENS // scale
        self.pair_warm, self.pair_tokens = PAIR_WARM_TOKENS // scale, PAIR_TOKENS // scale
        self.measured, self.failures, self.left_the_walk, self.rows = {}, {}, [], []

    def left_s(self):
        return self.options.seconds - (time.monotonic() - self.start)

    def wants(self, *names):
        return self.only is None or any(name in self.only for name in names)

    def note(self, text):
        print(f"[{time.monotonic() - self.start:5.1f} s] {text}", file=sys.stderr, flush=True)

    def keep(self, key, value):
        self.measured[key] = value
        self.note(f"{key} = {value:.5g}" if isinstance(value, (int, float)) else f"{key} = {value}" if isinstance(value, str) else key)

    def step(self, name, needed_s, action, *also):
        """Runs a step that takes about so many seconds. `also`: other names of --only that need it."""
        if not self.wants(name, *also):
            return
        if self.left_s() < needed_s:
            self.failures[name] = f"no time left for step {name}"
        else:
            self.note(f"step {name}")
            try:
                action()
            except Exception as error:  # whatever it is, the other steps still have their figures
                self.failures[name] = f"step {name}: {error}"
        if name in self.failures:
            self.note(self.failures[name])
        self.write_json()

    def prepare_model(self):
        self.model = self.folder / "trace-model.gguf"
        wanted = shlex.split(self.options.model_args)
        about_path, args_path = Path(f"{self.model}.json"), Path(f"{self.model}.args")
        key = json.dumps([Path(self.options.trace).name, wanted])
        if not (about_path.exists() and args_path.exists() and args_path.read_text() == key):
            args_path.unlink(missing_ok=True)
            self.note("making the model")
            done = subprocess.run([sys.executable, HERE / "make_trace_model.py", self.model, "--trace", self.options.trace, *wanted], timeout=240)
            if done.returncode != 0:
                sys.exit("make_trace_model.py failed")
            args_path.write_text(key)
        self.about = json.loads(about_path.read_text())
        self.n_tokens = self.about["tokens"]

    def dma(self):
        self.keep("dma_bytes_per_s", self.options.dma_gbps * 1e9 if self.options.dma_gbps else pinned_copy_rate())

    def figures(self, server, key, prompts):
        self.keep(f"{key}.decode", server.decode(self.warm_tokens, self.decode_tokens))
        for length in prompts:
            self.keep(f"{key}.prompt{length}", server.prompt_rate(length, self.repeats))

    def stock(self):
        with Server(self, "stock") as server:
            server.decode(0, self.warm_tokens)
            self.figures(server, "stock", (512, 2048))
            self.keep("stock.identity", server.identity())
        with Server(self, "stock splits", "-lv", 4) as server:
            self.keep("stock.splits", server.splits())

    def cpu_moe(self):
        with Server(self, "cpu-moe", "--cpu-moe") as server:
            server.decode(0, 16)
            self.keep("cpu-moe.decode", server.decode(self.warm_tokens, max(32, self.decode_tokens // 3)))
            self.keep("cpu-moe.prompt512", server.prompt_rate(512, 2))
            self.keep("cpu-moe.prompt2048", server.prompt_rate(2048, 1))

    def ncmoe(self):
        with Server(self, "ncmoe", "-ncmoe", self.about["layers"] // 2) as server:
            server.decode(0, 16)
            self.keep("ncmoe.decode", server.decode(self.warm_tokens, max(32, self.decode_tokens // 3)))

    def measured_decode(self, daemon, server, key):
        before = daemon.counters()
        rate = server.decode(self.warm_tokens, self.decode_tokens)
        delta = grown(before, daemon.counters())
        self.keep(f"{key}.decode", rate)
        self.keep(f"{key}.lookups_share", delta.lookups / (self.decode_tokens * self.about["layers"] * self.about["top_k"]))
        self.keep(f"{key}.records_dropped", delta.records_dropped)
        if hit_rate(delta) is not None:
            self.keep(f"{key}.hit", hit_rate(delta))
        if delta.upload_bytes is not None and delta.upload_s:
            self.keep(f"{key}.upload_bytes_per_s", delta.upload_bytes / delta.upload_s)

    def fill(self, daemon, server):
        """The rate at which slots are filled with nothing else on the link: one token makes the daemon begin, then nobody computes. Between two looks
        in the midst of it, since the token itself reads a gigabyte over the link."""
        server.decode(0, 1)
        looks = [parse_stats(daemon.stats())]
        while len(looks) < 3 or looks[-1].upload_bytes != looks[-2].upload_bytes:
            time.sleep(0.02)
            looks.append(parse_stats(daemon.stats()))
        total = looks[-1].upload_bytes or 0
        midst = [look for look in looks if 0.2 * total < (look.upload_bytes or 0) < 0.95 * total]
        if len(midst) > 1 and midst[-1].upload_s > midst[0].upload_s:
            self.keep("fill.upload_bytes_per_s", (midst[-1].upload_bytes - midst[0].upload_bytes) / (midst[-1].upload_s - midst[0].upload_s))

    def beside_stock(self, server):
        """All resident and stock in turns: the two differ by less than a server does from itself a minute later."""
        with Server(self, "stock beside") as stock:
            rates = {"all": ([], []), "stock beside": ([], [])}
            for i in range(self.pairs):
                for name, who in (("all", server), ("stock beside", stock)):
                    rates[name][0].append(who.decode(self.warm_tokens, self.decode_tokens // 2))
                    rates[name][1].append(who.prompt_rate(512, 3))
            for name, (decode, prompt) in rates.items():
                self.keep(f"{name}.decode", statistics.median(decode))
                self.keep(f"{name}.prompt512", statistics.median(prompt))

    def slots(self, percent):
        key = f"{percent}%"
        with Daemon(self, percent, f"daemon {key}") as daemon, Server(self, f"server {key}", daemon=daemon) as server:
            if self.wants(str(percent)):
                if percent == 100:
                    self.fill(daemon, server)
                server.decode(0, self.warm_tokens)
                self.measured_decode(daemon, server, key)
                self.keep(f"{key}.identity", server.identity())
                for length in {25: (512, 2048)}.get(percent, ()):
                    self.keep(f"{key}.prompt{length}", server.prompt_rate(length, self.repeats))
                if percent == 100:
                    self.beside_stock(server)
                if smi("memory.used"):
                    self.keep(f"{key}.gpu_mib_used", int(smi("memory.used")))
            if percent == 25 and self.wants("25"):
                with Server(self, "server 25% splits", "-lv", 4, daemon=daemon) as talkative:
                    self.keep("25%.splits", talkative.splits())
            if percent == 50 and self.wants("attach", "two"):
                self.shared(daemon, server)
            if percent == 25 and self.wants("two"):
                self.private(daemon, server)

    def shared(self, daemon, server):
        before = daemon.counters()
        second = Server(self, "server 50% second", daemon=daemon)
        with second:
            after = daemon.counters()
            self.keep("attach.bytes_read", after.bytes_read - before.bytes_read)
            if after.gpu_bytes is not None:
                self.keep("attach.gpu_bytes", after.gpu_bytes - before.gpu_bytes)
            self.keep("attach.server_start_s", second.start_s)
            tool = self.build / "bench/micro/attach_bench"
            if tool.exists():
                gpus = [name for name in daemon.status().get("devices", []) if name.startswith("GPU-")][:1]
                runs = [subprocess.run([tool, daemon.socket, self.model, *gpus], capture_output=True, text=True, timeout=60) for _ in range(3)]
                if all(run.returncode == 0 for run in runs):
                    self.keep("attach.seconds", statistics.median(json.loads(run.stdout)["attach_s"] for run in runs))
                else:
                    self.failures["attach"] = f"attach_bench: {runs[0].stderr.strip()}"
            if self.wants("two"):
                self.pair("shared", [daemon], server, second)

    def private(self, daemon, server):
        with Daemon(self, 25, "daemon 25% second") as other, Server(self, "server 25% second", daemon=other) as second:
            self.pair("private", [daemon, other], server, second)

    def pair(self, key, daemons, *servers):
        """Both decode at once, in different parts of the walk. Tokens of both over the time until the slower one is done."""
        def both(first, n):
            errors = []

            def run(server, at):
                try:
                    server.decode(at, n)
                except Exception as error:
                    errors.append(error)

            threads = [threading.Thread(target=run, args=(server, first + i * self.n_tokens // 2)) for i, server in enumerate(servers)]
            start = time.monotonic()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if errors:
                raise errors[0]
            return len(servers) * n / (time.monotonic() - start)

        both(0, self.pair_warm)
        before = [daemon.counters() for daemon in daemons]
        rate = both(self.pair_warm, self.pair_tokens)
        deltas = [grown(b, daemon.counters()) for b, daemon in zip(before, daemons)]
        self.keep(f"{key}.total", rate)
        lookups = sum(delta.lookups for delta in deltas)
        if lookups:
            self.keep(f"{key}.hit", sum(delta.hits for delta in deltas) / lookups)

    def policies(self, percent):
        """The default policy and LRU over the same walk, and what of the default's hits a long prompt leaves. The default goes first: what LRU
        finds when it takes over it has replaced after the warm-up, the default would remember more."""
        key = f"policy {percent}%"
        tail = self.decode_tokens // 4
        end = self.warm_tokens + self.decode_tokens

        def decode_hits(first, n):
            before = daemon.counters()
            server.decode(first, n)
            return hit_rate(grown(before, daemon.counters()))

        with Daemon(self, percent, f"daemon {key}") as daemon, Server(self, f"server {key}", daemon=daemon) as server:
            server.decode(0, self.warm_tokens)
            self.measured_decode(daemon, server, f"{key}.default")
            self.keep(f"{key}.no_prompt_hit", decode_hits(end, tail))
            server.decode(self.warm_tokens, self.decode_tokens)
            server.prompt_rate(2048, 1)
            self.keep(f"{key}.prompt_hit", decode_hits(end, tail))
            for policy in ("lru", *self.options.policies):
                daemon.set_policy(policy)
                server.decode(0, self.warm_tokens)
                self.measured_decode(daemon, server, f"{key}.{policy}")

    def no_upload(self):
        with Daemon(self, 10, "daemon no upload", shlex.split(self.options.no_upload_args)) as daemon, \
                Server(self, "server no upload", daemon=daemon) as server:
            server.decode(0, 16)
            self.measured_decode(daemon, server, "no_upload")

    def run(self):
        self.step("dma", 5, self.dma)
        # What most rows need comes first.
        self.step("stock", 30, self.stock)
        self.step("25", 60, lambda: self.slots(25), "two")
        self.step("cpu-moe", 45, self.cpu_moe)
        self.step("50", 60, lambda: self.slots(50), "two", "attach")
        self.step("100", 70, lambda: self.slots(100))
        self.step("10", 50, lambda: self.slots(10))
        self.step("ncmoe", 30, self.ncmoe)
        self.step("75", 35, lambda: self.slots(75))
        if self.options.no_upload_args:
            self.step("no-upload", 50, self.no_upload)
        for percent in POLICY_PERCENTS:
            self.step(f"policy-{percent}", 70, lambda percent=percent: self.policies(percent), "policy")

    # -- the table
    def why(self, *steps):
        reasons = [self.failures[step].splitlines()[0][:160] for step in steps if step in self.failures]
        return "not measured" + (f": {reasons[0]}" if reasons else "")

    def same_as_stock(self, name, ours, stock, step):
        ours, stock = self.measured.get(ours), self.measured.get(stock)
        if ours is None or stock is None:
            self.row(name, None, "equal", None, self.why("stock", step))
            return
        pairs = [(a, b) for x, y in zip(ours["logprobs"], stock["logprobs"]) for a, b in zip(x, y)]
        equal = ours["content"] == stock["content"]
        self.row(name, "equal" if equal else "differs", "equal", equal,
                 f"largest difference of log probabilities {max(abs(a - b) for a, b in pairs):.2g}")

    def row(self, name, value, goal, met, note):
        self.rows.append({"name": name, "value": value, "goal": goal, "met": met, "note": note})

    def ratio(self, name, above, below, goal, steps):
        goal_text = f">= {goal}"
        a, b = self.measured.get(above), self.measured.get(below)
        if a is None or not b:
            self.row(name, None, goal_text, None, self.why(*steps))
        else:
            self.row(name, a / b, goal_text, a / b >= goal, f"{a:.1f} vs {b:.1f} t/s")

    def bound_row(self, percent):
        m, key = self.measured, f"{percent}%"
        goal = 0.85 if percent == 10 else 0.90
        name = f"decode / bound, {percent} % slots"
        needed = (m.get("stock.decode"), m.get("dma_bytes_per_s"), m.get(f"{key}.decode"), m.get(f"{key}.hit"))
        if None in needed:
            why = self.why("dma", "stock", str(percent))
            self.row(name, None, f">= {goal}", None, why if m.get(f"{key}.decode") is None else f"{why}; {m[f'{key}.decode']:.1f} t/s")
            return
        stock, dma, rate, hit = needed
        bound = 1 / (1 / stock + (1 - hit) * self.about["expert_bytes_per_token"] / dma)
        note = f"{rate:.1f} t/s, hit {100 * hit:.1f} %, bound {bound:.1f}"
        if abs(m[f"{key}.lookups_share"] - 1) > 0.02:
            note += f"; the daemon saw {100 * m[f'{key}.lookups_share']:.1f} % of the lookups"
        self.row(name, rate / bound, f">= {goal}", rate / bound >= goal, note)

    def upload_rows(self):
        m = self.measured
        name = "upload / pinned DMA ceiling, filling all slots"
        rate, dma, shared = m.get("fill.upload_bytes_per_s"), m.get("dma_bytes_per_s"), m.get("10%.upload_bytes_per_s")
        if rate is None or not dma:
            self.row(name, None, ">= 0.95", None, self.why("dma", "100"))
        else:
            beside = "" if shared is None else f"; {shared / 1e9:.1f} beside decoding at 10 %"
            self.row(name, rate / dma, ">= 0.95", rate / dma >= 0.95, f"{rate / 1e9:.1f} of {dma / 1e9:.1f} GB/s while copying{beside}")
        name = "decode slowdown by uploads, 10 % slots"
        keys = ("stock.decode", "no_upload.decode", "no_upload.hit", "10%.decode", "10%.hit")
        if any(m.get(key) is None for key in keys):
            self.row(name, None, "<= 0.05", None, self.why("10", "no-upload") + ("" if self.options.no_upload_args else " (--no-upload-args)"))
            return
        # What a token costs that misses everywhere, from the run without uploads; the run with them should cost no more.
        stock, still, still_hit, busy, hit = (m[key] for key in keys)
        miss_s = (1 / still - 1 / stock) / (1 - still_hit)
        slowdown = (1 / busy) / (1 / stock + (1 - hit) * miss_s) - 1
        self.row(name, slowdown, "<= 0.05", slowdown <= 0.05, f"without: {still:.1f} t/s, hit {100 * still_hit:.1f} %; with: {busy:.1f}, {100 * hit:.1f} %")

    def two_rows(self):
        m = self.measured
        name = "two processes, one pool - two private pools of half: hit, points"
        if "shared.hit" in m and "private.hit" in m:
            points = 100 * (m["shared.hit"] - m["private.hit"])
            self.row(name, points, ">= 10", points >= 10, f"{100 * m['shared.hit']:.1f} vs {100 * m['private.hit']:.1f} %, 50 % slots in all")
        else:
            self.row(name, None, ">= 10", None, self.why("50", "25"))
        self.ratio("two processes, one pool / two private pools: total t/s", "shared.total", "private.total", 1.2, ("50", "25"))

    def splits_row(self):
        ours, stock = self.measured.get("25%.splits"), self.measured.get("stock.splits")
        if ours is None or stock is None:
            self.row("splits of llama.cpp's graphs, as stock's", None, "equal", None, self.why("stock", "25"))
        else:
            self.row("splits of llama.cpp's graphs, as stock's", ours, "equal", ours == stock, f"stock {stock}; prompt / token where they differ")

    def policy_rows(self):
        m = self.measured
        for percent in POLICY_PERCENTS:
            key, step = f"policy {percent}%", f"policy-{percent}"
            for policy in ("lru", *self.options.policies):
                self.ratio(f"decode, default policy / {policy}, {percent} % slots", f"{key}.default.decode", f"{key}.{policy}.decode", 1, (step,))
                hits = m.get(f"{key}.default.hit"), m.get(f"{key}.{policy}.hit")
                if None not in hits:
                    self.rows[-1]["note"] += f"; hits {100 * hits[0]:.1f} vs {100 * hits[1]:.1f} %"
            name = f"decode hits behind a prompt of 2048 / without it, {percent} % slots"
            still, behind = m.get(f"{key}.no_prompt_hit"), m.get(f"{key}.prompt_hit")
            if not still or behind is None:
                self.row(name, None, ">= 0.95", None, self.why(step))
            else:
                self.row(name, behind / still, ">= 0.95", behind / still >= 0.95, f"{100 * behind:.1f} vs {100 * still:.1f} % of the same tokens")

    def attach_rows(self):
        m = self.measured
        for name, key, goal in (("second process attaching: seconds", "attach.seconds", 1), ("second process attaching: bytes read", "attach.bytes_read", 0),
                                ("second process attaching: VRAM for experts, bytes", "attach.gpu_bytes", 0)):
            value = m.get(key)
            if value is None:
                self.row(name, None, f"<= {goal}", None, self.why("50", "attach"))
            else:
                note = f"llama-server as a whole: {m['attach.server_start_s']:.1f} s to its first answer" if key == "attach.seconds" else ""
                self.row(name, value, f"<= {goal}", value <= goal, note)

    def identity_rows(self):
        stock = self.measured.get("stock.identity")
        for percent in (10, 25, 50, 100):
            name = f"greedy text equal to stock, {percent} % slots"
            ours = self.measured.get(f"{percent}%.identity")
            if stock is None or ours is None:
                self.row(name, None, "equal", None, self.why("stock", str(percent)))
                continue
            pairs = [(a, b) for x, y in zip(ours["logprobs"], stock["logprobs"]) for a, b in zip(x, y)]
            same = sum(a == b for a, b in pairs) / len(pairs)
            worst = max(abs(a - b) for a, b in pairs)
            equal = ours["content"] == stock["content"]
            self.row(name, "equal" if equal else "differs", "equal", equal,
                     f"{IDENTITY_TOKENS} tokens; {100 * same:.1f} % of the log probabilities equal, largest difference {worst:.2g}")

    def table(self):
        self.rows = []
        for percent in (10, 25, 50, 75, 100):
            self.bound_row(percent)
        self.ratio("decode, 25 % slots / --cpu-moe", "25%.decode", "cpu-moe.decode", 3, ("25", "cpu-moe"))
        self.ratio("decode, 50 % slots / --cpu-moe", "50%.decode", "cpu-moe.decode", 4.5, ("50", "cpu-moe"))
        self.ratio("decode, 50 % slots / -ncmoe of half the layers", "50%.decode", "ncmoe.decode", 2.5, ("50", "ncmoe"))
        self.ratio("all resident / stock all in VRAM: decode", "all.decode", "stock beside.decode", 0.97, ("100",))
        self.ratio("all resident / stock all in VRAM: prompt 512", "all.prompt512", "stock beside.prompt512", 0.97, ("100",))
        self.ratio("prompt 512, 25 % slots / --cpu-moe", "25%.prompt512", "cpu-moe.prompt512", 4, ("25", "cpu-moe"))
        self.ratio("prompt 2048, 25 % slots / --cpu-moe", "25%.prompt2048", "cpu-moe.prompt2048", 4, ("25", "cpu-moe"))
        self.upload_rows()
        self.two_rows()
        self.policy_rows()
        self.attach_rows()
        self.identity_rows()
        self.splits_row()
        walked = not self.left_the_walk
        self.row("decoding followed the trace", "yes" if walked else "no", "yes", walked, "; ".join(self.left_the_walk)[:200])
        return self.rows

    def machine(self):
        cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo", encoding="utf-8") if line.startswith("model name")),
                   platform.machine())
        commit = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
        gpu = smi("name,driver_version,memory.total")
        return {"machine": f"{os.cpu_count()} x {cpu}, Linux {platform.release()}", "gpu": gpu or "none", "commit": self.options.commit or commit}

    def write_json(self):
        measured = {key: value for key, value in self.measured.items() if not key.endswith(".identity")}
        text = json.dumps({**self.machine(), "model": getattr(self, "about", None), "seconds": time.monotonic() - self.start, "rows": self.table(),
                           "measured": measured, "failures": self.failures}, indent=1)
        Path(self.options.json).write_text(text + "\n")


def print_rows(rows):
    for row in rows:
        value = row["value"]
        text = "-" if value is None else value if isinstance(value, str) else f"{value:.4g}"
        verdict = "" if row["met"] is None else "met" if row["met"] else "NOT met"
        print(f"{row['name']:<64} {text:>10}  {row['goal']:<8} {verdict:<8} {row['note']}")


def make_parser(text):
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument("--llama-bin", required=True, help="folder of llama.cpp's programs, built with CUDA")
    parser.add_argument("--build", required=True, help="this project's build folder")
    parser.add_argument("--model-dir", required=True, help="where the model is made (about 19 GB) or found again, and logs go")
    parser.add_argument("--trace", default=str(TRACE))
    parser.add_argument("--only", help="comma-separated steps, of run.py: dma,stock,25,cpu-moe,50,100,10,ncmoe,75,no-upload,two,attach,policy; of peers.py: dma,stock,two,peers,off,hidden,split; of spill.py: dma,disk,stock,spill,cpu-moe,inclusive,no-read-ahead,resident,cut,both,covered,fast")
    parser.add_argument("--quick", action="store_true", help="an eighth of the tokens, for trying the benchmark itself")
    parser.add_argument("--seconds", type=float, default=600, help="of the whole run: a step without enough time left is not begun (600)")
    parser.add_argument("--step-seconds", type=float, default=90, help="longest that one completion may take (90)")
    parser.add_argument("--threads", type=int, default=min(16, os.cpu_count() or 16), help="of llama.cpp (16, or the cores there are)")
    parser.add_argument("--json", help="where the results go (MODEL_DIR/e2e.json)")
    parser.add_argument("--commit", help="to print, where the sources are not a git checkout")
    parser.add_argument("--model-args", default="", help="more arguments of make_trace_model.py, to try this on a small model")
    parser.add_argument("--server-args", default="", help="more arguments of every llama-server")
    # The file has just been written and is in the page cache: from there the daemon starts sooner.
    parser.add_argument("--daemon-args", default="--ssd-direct=false", help="more arguments of every daemon (--ssd-direct=false)")
    parser.add_argument("--slots-flag", default="--gpu-slots", help="daemon flag that takes the share of slots; --slots on a machine without a GPU")
    parser.add_argument("--no-upload-args", default="--gpu-max-slowdown=0", help="daemon arguments that stop uploads: without them the slowdown is not measured (--gpu-max-slowdown=0)")
    parser.add_argument("--policies", type=lambda text: text.split(","), default=[], help="more policies than lru to compare the default with, after commas")
    parser.add_argument("--dma-gbps", type=float, help="instead of measuring the pinned copy rate")
    return parser


def run_all(bench):
    """Every step there is time for; returns what the machine is."""
    bench.prepare_model()
    about = bench.machine()
    try:
        bench.run()
    except KeyboardInterrupt:
        bench.failures["run"] = "interrupted"
    return about


def finish(bench):
    """Prints the table and what kept rows from being measured."""
    print_rows(bench.table())
    for step, reason in bench.failures.items():
        print(f"{step}: {reason.splitlines()[0][:300]}")
    bench.write_json()
    print(f"\n{time.monotonic() - bench.start:.0f} s; {bench.options.json}")
    return 0


def main():
    options = make_parser(__doc__).parse_args()
    options.json = options.json or str(Path(options.model_dir) / "e2e.json")
    bench = Bench(options)
    about = run_all(bench)
    print(f"{about['machine']}; GPU {about['gpu']}; commit {about['commit']}; load {os.getloadavg()[0]:.2f}")
    print(f"model {bench.about['file_bytes'] / 1e9:.2f} GB, {bench.about['layers']} x {bench.about['experts']} experts, top {bench.about['top_k']}, "
          f"{bench.about['expert_bytes_per_token'] / 1e6:.0f} MB of experts a token; trace {bench.about['trace']}; "
          f"DMA {bench.measured.get('dma_bytes_per_s', 0) / 1e9:.1f} GB/s; stock {bench.measured.get('stock.decode', 0):.1f} t/s\n")
    return finish(bench)


if __name__ == "__main__":
    sys.exit(main())
