#!/usr/bin/env python3
"""make bench: one row a figure (name, value, goal, met or not), the same as JSON in BUILD/bench.json, ratios of two things measured in one run.

Runs pairs alternately and takes the median of the ratios, since a shared machine drifts. Figures that cannot be taken on this
machine are rows too, with the reason.
"""
import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/integration"))
PROMPT = "The system call returns a file descriptor. On error,"


class Bench:
    def __init__(self, options):
        self.build = Path(options.build).resolve()
        self.quick = options.quick
        self.rows = []

    def row(self, name, value, goal, met, note=""):
        self.rows.append({"name": name, "value": value, "goal": goal, "met": met, "note": note})
        text = value if isinstance(value, str) else f"{value:.4g}"
        verdict = "" if met is None else "met" if met else "NOT met"
        print(f"{name:<62} {text:>12}  {goal:<8} {verdict:<8} {note}", flush=True)

    def run_json(self, *command, **environment):
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env={**os.environ, **environment})
        if done.returncode != 0:
            raise RuntimeError(f"{Path(str(command[0])).name}: exit {done.returncode}: {done.stderr[-800:]}")
        return json.loads(done.stdout)


def resolve(bench):
    result = bench.run_json(bench.build / "bench/micro/resolve_bench", "--json")
    ns = result["value"]
    bench.row("resolve of 8 resident experts of a layer, ns", ns, "<= 200", ns <= 200)


def decode_rate(harness, model, daemon, n_predict):
    run = harness.Host(model, daemon=daemon, n_predict=n_predict, threads=1, prompt=PROMPT)
    run.finish()
    if daemon and run.stats["fallback_reads"]:
        raise RuntimeError("fallback reads in a measured run")
    return run.figures["decode_tokens_per_s"]


def all_resident(bench, harness):
    for kind, model in (("Q4_K", harness.Q4_K), ("MXFP4", harness.requantized("mxfp4")), ("Q8_0", harness.requantized("q8_0"))):
        n, pairs = (200, 3) if bench.quick else (700, 9)
        with harness.Daemon("--slots", "32") as daemon:
            decode_rate(harness, model, daemon, n)  # fills the slots
            ratios = []
            for i in range(pairs):
                first, second = (daemon, None) if i % 2 == 0 else (None, daemon)
                rates = {bool(d): decode_rate(harness, model, d, n) for d in (first, second)}
                ratios.append(rates[True] / rates[False])
        value = statistics.median(ratios)
        bench.row(f"decode, all resident / stock --no-repack, {kind}", value, ">= 0.97", value >= 0.97,
                  f"1 thread, {pairs} alternating pairs, {min(ratios):.3f}..{max(ratios):.3f}")


def ssd(bench):
    path = bench.build / "bench-ssd.bin"
    bytes_wanted = (1 if bench.quick else 4) << 30
    if not path.exists() or path.stat().st_size != bytes_wanted:
        with path.open("wb") as file:
            for _ in range(bytes_wanted >> 24):
                file.write(os.urandom(1 << 20) * 16)
            file.flush()
            os.fsync(file.fileno())
    seconds = 2 if bench.quick else 4

    # fio's memory is what its malloc gives; --thread makes it the heap of the process that the tunable speaks to.
    def fio(depth, huge_pages):
        done = subprocess.run(["fio", "--name=r", "--thread", f"--filename={path}", "--readonly", "--rw=randread", "--bs=1m", f"--iodepth={depth}",
                               "--ioengine=io_uring", "--direct=1", "--fixedbufs=1", "--registerfiles=1", "--time_based",
                               f"--runtime={seconds}", "--output-format=json"], capture_output=True, text=True, check=True,
                              env={**os.environ, "GLIBC_TUNABLES": f"glibc.malloc.hugetlb={int(huge_pages)}"})
        return json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"] / 1e9

    def ours(depth):
        return bench.run_json(bench.build / "bench/micro/ssd_bench", path, "--block", "1MiB", "--depth", depth, "--seconds", seconds,
                              "--json")

    try:
        rates, fio_rates = [], {True: [], False: []}
        for i in range(3 if bench.quick else 7):
            for who in ("ours", True, False) if i % 2 == 0 else (False, True, "ours"):
                if who == "ours":
                    result = ours(32)
                    rates.append(result["gb_per_s"])
                else:
                    fio_rates[who].append(fio(32, who))
        for huge_pages, goal in ((True, ">= 0.97"), (False, "-")):
            ratios = [a / b for a, b in zip(rates, fio_rates[huge_pages])]
            value = statistics.median(ratios)
            bench.row(f"SSD read / fio on {'huge' if huge_pages else '4 KiB'} pages, 1 MiB, depth 32, same file", value, goal,
                      value >= 0.97 if huge_pages else None,
                      f"{statistics.median(rates):.2f} / {statistics.median(fio_rates[huge_pages]):.2f} GB/s, {min(ratios):.3f}..{max(ratios):.3f}"
                      f"; ours on {'huge' if result['huge_pages'] else '4 KiB'} pages")
        value = statistics.median(rates) / ours(1)["gb_per_s"]
        bench.row("SSD read, depth 32 / depth 1", value, "-", None)
    finally:
        path.unlink(missing_ok=True)


class MemoryCap:
    """A memory cgroup (v1 or v2) that processes are started in; everything they touch counts: heap, shared memory, page cache."""

    def __init__(self, limit_bytes):
        name = f"moecached-bench-{os.getpid()}"
        v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
        if (v2 / "cgroup.controllers").exists():
            (v2 / "cgroup.subtree_control").write_text("+memory")
            self.path, limit, swap = v2 / name, "memory.max", "memory.swap.max"
        else:
            self.path, limit, swap = v1 / name, "memory.limit_in_bytes", None
        self.path.mkdir()
        (self.path / limit).write_text(str(limit_bytes))
        if swap and (self.path / swap).exists():
            (self.path / swap).write_text("0")

    def __enter__(self):
        self.previous = [line for line in Path("/proc/self/cgroup").read_text().splitlines()]
        (self.path / "cgroup.procs").write_text(str(os.getpid()))  # children inherit it
        return self

    def __exit__(self, *unused):
        (self.path.parent / "cgroup.procs").write_text(str(os.getpid()))
        for _ in range(100):
            try:
                self.path.rmdir()
                return
            except OSError:
                time.sleep(0.05)


def capped(bench, harness):
    name = "decode, 25 % of the experts under a memory cap / stock mmap, same cap"
    model = harness.requantized("f32")
    # The file is about 215 MB. The cap leaves room for the pool, the tensors that are not experts, two processes and this script.
    cap_bytes = 150 << 20
    n = 60 if bench.quick else 200
    ratios, rates = [], {True: [], False: []}
    try:
        for i in range(2 if bench.quick else 3):
            pair = {}
            for cached in (True, False) if i % 2 == 0 else (False, True):
                subprocess.run(["sync"], check=True)
                os.posix_fadvise(fd := os.open(model, os.O_RDONLY), 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)
                with MemoryCap(cap_bytes):
                    if cached:
                        with harness.Daemon("--slots", "25%", "--pool-bytes", "100MiB") as daemon:
                            pair[True] = decode_rate(harness, model, daemon, n)
                    else:
                        pair[False] = decode_rate(harness, model, None, n)
            ratios.append(pair[True] / pair[False])
            for key in rates:
                rates[key].append(pair[key])
    except (OSError, PermissionError) as error:
        bench.row(name, "-", ">= 2", None, f"not measured: no memory cgroup can be made here ({error})")
        return
    value = statistics.median(ratios)
    bench.row(name, value, ">= 2", value >= 2,
              f"F32, file {model.stat().st_size >> 20} MiB, cap {cap_bytes >> 20} MiB, "
              f"{statistics.median(rates[True]):.1f} vs {statistics.median(rates[False]):.1f} t/s")


def attach(bench, harness):
    with harness.Daemon("--slots", "32") as daemon:
        harness.Host(harness.Q4_K, daemon=daemon, prompt=harness.LONG_PROMPT).finish()
        # One resolve of everything is not needed: what the first process used is there.
        before = daemon.models()[0]["bytes_read"]
        results = [bench.run_json(bench.build / "bench/micro/attach_bench", daemon.socket, harness.Q4_K) for _ in range(9)]
        read = daemon.models()[0]["bytes_read"] - before
    seconds = statistics.median(result["attach_s"] for result in results)
    bench.row("second process attaching, seconds", seconds, "<= 1", seconds <= 1)
    bench.row("second process attaching, bytes read", read, "0", read == 0)


def route(bench, harness):
    with harness.Daemon("--slots", "32", "--control-route") as daemon:
        result = bench.run_json(bench.build / "bench/micro/route_bench", daemon.directory, harness.Q4_K, "--json", "--batches", 20 if bench.quick else 60)
    bench.row("routing decision of a layer, ring, us", result["ring_us"], "-", None, f"{result['experts']} resident experts")
    bench.row("routing decision of a layer, gRPC stream, us", result["stream_us"], "-", None,
              f"batches {result['stream_us_min']:.0f}..{result['stream_us_max']:.0f}")
    bench.row("routing decision, gRPC stream / ring", result["ratio"], "-", None, "same daemon, in turns")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", default="build")
    parser.add_argument("--llama-libs", default="")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter runs, for trying the bench itself")
    parser.add_argument("--only", help="comma-separated: resolve,resident,ssd,capped,attach,route")
    options = parser.parse_args()
    os.environ["MOECACHED_BUILD"] = options.build
    os.environ["MOECACHED_LLAMA_LIBS"] = options.llama_libs
    import harness
    bench = Bench(options)
    commit = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), platform.machine())
    machine = f"{os.cpu_count()} x {cpu}, Linux {platform.release()}"
    print(f"{machine}; commit {commit}; load {os.getloadavg()[0]:.2f}\n")
    parts = {"resolve": lambda: resolve(bench), "resident": lambda: all_resident(bench, harness), "ssd": lambda: ssd(bench),
             "capped": lambda: capped(bench, harness), "attach": lambda: attach(bench, harness),
             "route": lambda: route(bench, harness)}
    for name in options.only.split(",") if options.only else parts:
        parts[name]()
    out = bench.build / "bench.json"
    out.write_text(json.dumps({"machine": machine, "commit": commit, "rows": bench.rows}, indent=1) + "\n")
    print(f"\n{out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
