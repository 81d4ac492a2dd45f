#!/usr/bin/env python3
"""The benchmark of models that VRAM and RAM cannot hold: half of the experts have a slot in either, the others are on disk.

One table (name, value, goal, met or not), all ratios of figures taken in this run; the same model, walk and servers as run.py. Everything
that is compared runs under the same cap on RAM: a cgroup where one can be made, else memory that this program takes out of use.
"""
import contextlib
import ctypes
import json
import mmap
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import run as e2e

VRAM_PERCENT, RAM_PERCENT = 12.5, 37.5
BOTH_RAM_PERCENT = 62.5  # beside 50 % in VRAM: nothing is on disk alone
# Of everything that is not a RAM slot: what llama.cpp keeps on the host, the programs, streams.
OTHER_RAM = 4 << 30
WARM_TOKENS, DECODE_TOKENS = 150, 250
STOCK_WARM_TOKENS, STOCK_TOKENS = 6, 10  # seconds each
CGROUP = Path("/sys/fs/cgroup/moecached-e2e")


def memory_available():
    facts = dict(line.split(":") for line in open("/proc/meminfo", encoding="utf-8"))
    available = int(facts["MemAvailable"].split()[0]) << 10
    for limit, used in (("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),):
        try:
            text = Path(limit).read_text().strip()
            if text != "max":
                available = min(available, int(text) - int(Path(used).read_text()))
        except OSError:
            pass
    return available


class Cap:
    """At most so many bytes of RAM, page cache included, for the processes that are started within."""

    def __init__(self, bench, n_bytes):
        self.bench, self.n_bytes, self.balloon, self.how = bench, n_bytes, None, None

    def __enter__(self):
        self.bench.forget_file()
        try:
            CGROUP.mkdir(exist_ok=True)
            (CGROUP / "memory.max").write_text(str(self.n_bytes))
            self.before = next(line for line in open("/proc/self/cgroup", encoding="utf-8") if line.startswith("0::")).strip()[3:]
            (CGROUP / "cgroup.procs").write_text(str(os.getpid()))
            self.how = "cgroup"
        except (OSError, StopIteration):
            self.inflate()
            self.how = "memory taken out of use"
        return self

    def inflate(self):
        taken = memory_available() - self.n_bytes
        if taken <= 0:
            return
        self.balloon = mmap.mmap(-1, taken)
        self.balloon.madvise(mmap.MADV_HUGEPAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.balloon))
        libc = ctypes.CDLL(None, use_errno=True)
        pieces, step = [], 1 << 30
        for at in range(0, taken, step):
            pieces.append((address + at, min(step, taken - at)))
        failed = []

        def lock(mine):
            for at, size in mine:
                if libc.mlock(ctypes.c_void_p(at), ctypes.c_size_t(size)) != 0:
                    failed.append(ctypes.get_errno())

        threads = [threading.Thread(target=lock, args=(pieces[i::8],)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise e2e.Failed(f"no cap on RAM: mlock: {os.strerror(failed[0])}")

    def __exit__(self, *unused):
        if self.balloon is not None:
            libc = ctypes.CDLL(None)
            libc.munlock(ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(self.balloon))), ctypes.c_size_t(len(self.balloon)))
            self.balloon = None  # the object that was made from its buffer goes with it
        if self.how == "cgroup":
            Path(f"/sys/fs/cgroup{self.before}/cgroup.procs").write_text(str(os.getpid()))
            for _ in range(50):
                try:
                    CGROUP.rmdir()
                    break
                except OSError:
                    time.sleep(0.1)


class Spill(e2e.Bench):
    def __init__(self, options):
        super().__init__(options)
        scale = 4 if options.quick else 1
        self.warm, self.tokens = WARM_TOKENS // scale, DECODE_TOKENS // scale

    def forget_file(self):
        with open(self.model, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    @property
    def ram_bytes(self):
        return int(self.about["expert_bytes_total"] * RAM_PERCENT / 100)

    def cap(self):
        return Cap(self, self.ram_bytes + OTHER_RAM)

    def reading_rate(self, path):
        """Bytes a second of 32 reads of 1 MiB at once, past the page cache where the file system can; and whether it could."""
        size, block, depth = os.path.getsize(path), 1 << 20, 32
        total = min(size // block, 4096)
        for flags in (os.O_DIRECT, 0):
            try:
                fd = os.open(path, os.O_RDONLY | flags)
                os.preadv(fd, [mmap.mmap(-1, block)], 0)
                break
            except OSError:
                continue

        def read(first):
            buffer = mmap.mmap(-1, block)
            for i in range(first, total, depth):
                os.preadv(fd, [buffer], (i * 7919 % (size // block)) * block)

        threads = [threading.Thread(target=read, args=(i,)) for i in range(depth)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rate = total * block / (time.perf_counter() - start)
        os.close(fd)
        return rate, bool(flags)

    def disk(self):
        self.forget_file()
        rate, direct = self.reading_rate(self.model)
        self.keep("disk_bytes_per_s", rate)
        self.keep("disk.direct", "yes" if direct else "no")

    def fast(self):
        """The same from a file in memory, without a cap: a disk nearly as fast as the link, so that there is something to overlap."""
        folder = Path(self.options.fast_dir)
        usage = os.statvfs(folder)
        free = min(usage.f_bavail * usage.f_frsize, memory_available() - self.ram_bytes - OTHER_RAM)
        if free < os.path.getsize(self.model):
            raise e2e.Failed(f"{folder} has room for {free / 1e9:.1f} GB, the model has {os.path.getsize(self.model) / 1e9:.1f}")
        on_disk, self.model = self.model, folder / "moecached-e2e.gguf"
        try:
            shutil.copyfile(on_disk, self.model)
            self.keep("fast_bytes_per_s", self.reading_rate(self.model)[0])
            ram = int(self.about["experts"] * RAM_PERCENT / 100)
            # Reads of such a file are copies by whoever reads: threads, as one thread of io_uring would make them one by one.
            args = ["--gpu-mode", "spill", "--pool-slots", str(ram), "--ssd-engine", "pread", "--ssd-queue-depth", "16"]
            with e2e.Daemon(self, f"{VRAM_PERCENT}", "daemon fast", args) as daemon, e2e.Server(self, "server fast", daemon=daemon) as server:
                server.decode(0, self.warm)
                self.keep("fast.decode", server.decode(self.warm, self.tokens))
                self.measured_prompt(daemon, server, "fast")
        finally:
            self.model.unlink(missing_ok=True)
            self.model = on_disk

    def measured_prompt(self, daemon, server, key):
        server.prompt_rate(512, 1)  # the first one allocates
        start = self.totals(daemon)
        began = time.monotonic()
        self.keep(f"{key}.prompt512", server.prompt_rate(512, 1))
        self.keep(f"{key}.prompt512_s", time.monotonic() - began)
        end = self.totals(daemon)
        self.keep(f"{key}.prompt512_read", end["streamed_bytes"] - start["streamed_bytes"] + end["bytes_read"] - start["bytes_read"])

    def stock(self):
        with e2e.Server(self, "stock") as server:
            self.keep("stock.identity", server.identity())
            server.decode(0, 100)
            self.keep("stock.decode", server.decode(self.warm, self.tokens))
            self.keep("stock.prompt512", server.prompt_rate(512, 3))

    def cpu_moe(self):
        with self.cap() as cap, e2e.Server(self, "cpu-moe", "--cpu-moe") as server:
            self.keep("cap", f"{cap.n_bytes / 1e9:.1f} GB, {cap.how}")
            server.decode(0, STOCK_WARM_TOKENS)
            self.keep("cpu-moe.decode", server.decode(self.warm, STOCK_TOKENS))
            self.keep("cpu-moe.prompt512", server.prompt_rate(512, 1))

    def totals(self, daemon):
        """Counters of all layers, when they stand still."""
        daemon.counters()
        done = subprocess.run([*daemon.ctl, "models", "--layers"], capture_output=True, text=True, timeout=30)
        model = json.loads(done.stdout)["models"][0]
        names = ("lookups", "hits", "misses", "device_hits", "insertions", "evictions", "resident", "device_resident", "rises", "swaps")
        out = {name: sum(int(layer.get(name, 0)) for layer in model["layers"]) for name in names}
        out["experts_read_bytes"] = sum(int(layer.get("insertions", 0)) * n for layer, n in zip(model["layers"], self.about["expert_bytes_of_layer"]))
        for name in ("bytes_read", "streamed_bytes", "bytes_uploaded", "bytes_demoted"):
            out[name] = int(model.get(name, 0))
        return out

    def spill(self, key, vram, ram_slots, identity=True, prompts=True, extra=(), environment=None, again=False, capped=True):
        """ram_slots: of each layer. again: what is measured has been decoded before, so that it is where it belongs."""
        args = ["--gpu-mode", "spill", "--pool-slots", str(ram_slots), "--pool-bytes", str(self.ram_bytes + OTHER_RAM // 2), *extra]
        if not capped:
            args = ["--gpu-mode", "spill", "--pool-slots", str(ram_slots), "--pool-bytes", str(self.about["expert_bytes_total"]), *extra]
        with (self.cap() if capped else contextlib.nullcontext()), e2e.Daemon(self, vram, f"daemon {key}", args) as daemon, \
                e2e.Server(self, f"server {key}", daemon=daemon, environment=environment) as server:
            server.decode(0, self.warm + (self.tokens if again else 0))
            before = self.totals(daemon)
            self.keep(f"{key}.decode", server.decode(self.warm, self.tokens))
            after = self.totals(daemon)
            delta = {name: after[name] - before[name] for name in after}
            self.keep(f"{key}.counters", {"decode": delta, "all": after})
            self.keep(f"{key}.summary", f"VRAM {delta['device_hits'] / delta['lookups']:.3f} RAM "
                      f"{(delta['hits'] - delta['device_hits']) / delta['lookups']:.3f} disk {delta['misses'] / delta['lookups']:.3f}, "
                      f"{delta['bytes_read'] / 1e9:.2f} GB read, {delta['rises']} rises")
            if prompts:
                self.measured_prompt(daemon, server, key)
            if identity:
                self.keep(f"{key}.identity", server.identity())
            done = subprocess.run([*daemon.ctl, "doctor"], capture_output=True, text=True, timeout=30)
            self.keep(f"{key}.doctor", "; ".join(f["text"] for f in json.loads(done.stdout or "{}").get("findings", []) if "spill" in f["text"]))

    def covered(self):
        """RAM holds everything, VRAM the half."""
        with e2e.Daemon(self, "50", "daemon covered", ["--gpu-mode", "covered"]) as daemon, e2e.Server(self, "server covered", daemon=daemon) as server:
            server.decode(0, self.warm + self.tokens)
            self.keep("covered.decode", server.decode(self.warm, self.tokens))

    def run(self):
        n_experts = self.about["experts"]
        vram, ram = int(n_experts * VRAM_PERCENT / 100), int(n_experts * RAM_PERCENT / 100)
        self.step("dma", 5, self.dma)
        self.step("disk", 10, self.disk)
        self.step("stock", 25, self.stock)
        self.step("spill", 60, lambda: self.spill("spill", f"{VRAM_PERCENT}", ram))
        self.step("cpu-moe", 90, self.cpu_moe)
        # What inclusive tiers would hold: RAM has what VRAM has, so of other experts there are as many less.
        self.step("inclusive", 50, lambda: self.spill("inclusive", f"{VRAM_PERCENT}", ram - vram, identity=False, prompts=False))
        self.step("no-read-ahead", 50, lambda: self.spill("no-read-ahead", f"{VRAM_PERCENT}", ram, identity=False, prompts=False,
                                                         extra=["--pool-prefetch", "off"]))
        self.step("resident", 40, lambda: self.spill("resident", "100", 16, prompts=False, again=True))
        self.step("cut", 40, lambda: self.spill("cut", "100", 16, prompts=False, again=True,
                                                          environment={"MOECACHED_GPU_WAIT": "0"}))
        self.step("both", 40, lambda: self.spill("both", "50", int(n_experts * BOTH_RAM_PERCENT / 100), prompts=False, again=True, capped=False))
        self.step("covered", 45, self.covered)
        self.step("fast", 60, self.fast)

    # -- the table
    def table(self):
        m = self.measured
        self.rows = []
        counters = m.get("spill.counters")
        if counters:
            d, a = counters["decode"], counters["all"]
            shares = [d["device_hits"] / d["lookups"], (d["hits"] - d["device_hits"]) / d["lookups"], d["misses"] / d["lookups"]]
            self.row("all three tiers hit: least share of lookups", min(shares), "> 0", min(shares) > 0,
                     "VRAM {:.1f}, RAM {:.1f}, disk {:.1f} %".format(*(100 * share for share in shares)))
            balance = (a["hits"] + a["misses"] - a["lookups"], a["insertions"] - a["evictions"] - a["resident"] - a["device_resident"],
                       a["rises"] - a["swaps"] - a["device_resident"], a["bytes_read"] - a["experts_read_bytes"])
            self.row("lookups, experts and bytes that do not add up", sum(abs(x) for x in balance), "0", not any(balance),
                     f"hits + misses - lookups {balance[0]}; read - evicted - resident {balance[1]}; risen - fallen - in VRAM {balance[2]}; "
                     f"bytes read - experts read {balance[3]}")
        self.ratio("decode: spill / --cpu-moe, mmap, same RAM", "spill.decode", "cpu-moe.decode", 2, ("spill", "cpu-moe"))
        self.ratio("prompt 512: spill / --cpu-moe, mmap, same RAM", "spill.prompt512", "cpu-moe.prompt512", 1, ("spill", "cpu-moe"))
        self.ratio("decode: exclusive / inclusive at equal VRAM and RAM", "spill.decode", "inclusive.decode", 1, ("spill", "inclusive"))
        self.overlap_row("spill", "disk_bytes_per_s", "")
        self.overlap_row("fast", "fast_bytes_per_s", ", file in memory")
        self.ratio("decode: with read-ahead / without", "spill.decode", "no-read-ahead.decode", 1, ("spill", "no-read-ahead"))
        self.ratio("decode, half in VRAM: exclusive, RAM for the other half / covered, RAM for all", "both.decode", "covered.decode", 1, ("both", "covered"))
        self.ratio("decode, all in VRAM / stock", "resident.decode", "stock.decode", 0.8, ("resident", "stock"))
        self.ratio("decode, all in VRAM: waits on the GPU / graphs cut", "resident.decode", "cut.decode", 1, ("resident", "cut"))
        for key in ("spill", "both", "resident", "cut"):
            self.same_as_stock(f"greedy text equal to stock: {key}", f"{key}.identity", "stock.identity", key)
        walked = not self.left_the_walk
        self.row("decoding followed the trace", "yes" if walked else "no", "yes", walked, "; ".join(self.left_the_walk)[:200])
        return self.rows

    def overlap_row(self, key, source, where):
        m = self.measured
        needed = [m.get(name) for name in (f"{key}.prompt512_s", f"{key}.prompt512_read", source, "dma_bytes_per_s", "stock.prompt512")]
        name = f"prompt 512: read + upload + compute, one after the other / measured{where}"
        if None in needed:
            self.row(name, None, ">= 1.5", None, self.why(key, "disk"))
            return
        seconds, read, disk, dma, stock = needed
        parts = (read / disk, self.about["expert_bytes_total"] * (1 - VRAM_PERCENT / 100) / dma, 512 / stock)
        self.row(name, sum(parts) / seconds, ">= 1.5", sum(parts) / seconds >= 1.5,
                 "{:.2f} + {:.2f} + {:.2f} s, measured {:.2f} s".format(*parts, seconds))


def main():
    parser = e2e.make_parser(__doc__)
    parser.set_defaults(daemon_args="")  # the page cache is no tier here
    parser.add_argument("--fast-dir", default="/dev/shm", help="a file system in memory with room for the model, for the rows of a fast disk (/dev/shm)")
    options = parser.parse_args()
    options.json = options.json or str(Path(options.model_dir) / "spill.json")
    bench = Spill(options)
    about = e2e.run_all(bench)
    print(f"{about['machine']}; GPU {about['gpu']}; commit {about['commit']}; load {os.getloadavg()[0]:.2f}")
    print(f"RAM capped at {bench.measured.get('cap')}; disk {bench.measured.get('disk_bytes_per_s', 0) / 1e9:.2f} GB/s, O_DIRECT: "
          f"{bench.measured.get('disk.direct')}\n")
    return e2e.finish(bench)


if __name__ == "__main__":
    sys.exit(main())
