#!/usr/bin/env python3
"""The benchmark on two GPUs: one daemon whose GPUs read each other's slots, against two daemons of the same total VRAM.

One table (name, value, goal, met or not), all ratios of figures taken in this run; the same model, walk and servers as run.py.
"""
import json
import os
import subprocess
import sys
from pathlib import Path

import run as e2e

PERCENT = 25  # slots of each GPU
WARM_TOKENS = 500  # of each server; slots that hold other experts on every GPU take longer to settle than those of one


class Peers(e2e.Bench):
    def __init__(self, options):
        super().__init__(options)
        self.pair_warm = WARM_TOKENS // (8 if options.quick else 1)
        self.doctor = {}

    def server(self, name, gpu, daemon=None, environment=None):
        """On one GPU, as -ngl 99 puts it there; the process sees both unless told otherwise."""
        if self.options.one_gpu_twice:
            environment = {"ONE_GPU_TWICE_AS": str(gpu)}
        device = "CUDA0" if environment else f"CUDA{gpu}"
        return e2e.Server(self, name, "--device", device, daemon=daemon, environment=environment)

    def stock(self):
        with self.server("stock", 0) as server:
            self.keep("stock.identity", server.identity())
            server.decode(0, self.warm_tokens)
            self.keep("stock.decode", server.decode(self.warm_tokens, self.decode_tokens))

    def gpu_uuids(self):
        done = subprocess.run(["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"], capture_output=True, text=True, timeout=20)
        uuids = done.stdout.split()
        if self.options.one_gpu_twice:
            uuids = [uuids[0], f"{uuids[0][:-2]}{int(uuids[0][-2:], 16) ^ 1:02x}"]
        return uuids

    @staticmethod
    def memory_kib():
        facts = dict(line.split(":") for line in open("/proc/meminfo", encoding="utf-8"))
        return int(facts["MemAvailable"].split()[0])

    @staticmethod
    def models(daemon):
        done = subprocess.run([*daemon.ctl, "models"], capture_output=True, text=True, timeout=30)
        return json.loads(done.stdout)["models"]

    def measure(self, key, daemons, servers):
        before = [daemon.stats()["total"] for daemon in daemons]
        start = e2e.time.monotonic()
        self.pair(key, daemons, *servers)
        seconds = e2e.time.monotonic() - start
        after = [daemon.stats()["total"] for daemon in daemons]

        def total(name):
            return sum(b.get(name, 0) - a.get(name, 0) for a, b in zip(before, after))

        self.keep(f"{key}.peer_hits", total("peer_hits") / max(1, total("lookups")))
        self.keep(f"{key}.peer_bytes_per_s", total("bytes_from_peers") / seconds)
        self.keep(f"{key}.ram_bytes", sum(model["pool_bytes"] for daemon in daemons for model in self.models(daemon)))
        for gpu, server in enumerate(servers):
            self.keep(f"{key}.gpu{gpu}.identity", server.identity())
            self.keep(f"{key}.gpu{gpu}.prompt512", server.prompt_rate(512, 2))

    def two_daemons(self):
        free = self.memory_kib()
        uuids = self.gpu_uuids()
        with e2e.Daemon(self, PERCENT, "daemon gpu 0", [f"--gpu-devices={uuids[0]}"]) as first, \
                e2e.Daemon(self, PERCENT, "daemon gpu 1", [f"--gpu-devices={uuids[1]}"]) as second, \
                self.server("private 0", 0, first) as a, self.server("private 1", 1, second) as b:
            self.keep("two.taken_kib", free - self.memory_kib())
            self.measure("two", [first, second], [a, b])

    def one_daemon(self, key, extra=(), environments=(None, None)):
        free = self.memory_kib()
        with e2e.Daemon(self, PERCENT, f"daemon {key}", extra) as daemon, \
                self.server(f"{key} 0", 0, daemon, environments[0]) as a, self.server(f"{key} 1", 1, daemon, environments[1]) as b:
            self.keep(f"{key}.taken_kib", free - self.memory_kib())
            self.measure(key, [daemon], [a, b])
            done = subprocess.run([*daemon.ctl, "doctor"], capture_output=True, text=True, timeout=30)
            self.doctor[key] = [finding["text"] for finding in json.loads(done.stdout or "{}").get("findings", [])]
            self.keep(f"{key}.doctor", "; ".join(text for text in self.doctor[key] if "other GPUs" in text or "but RAM" in text))

    def hidden(self):
        """Each process sees one GPU, as in a container: memory of the other is imported all the same, or not."""
        self.one_daemon("hidden", (), tuple({"CUDA_VISIBLE_DEVICES": uuid} for uuid in self.gpu_uuids()[:2]))

    def split(self):
        """One server whose layers lie on both GPUs, against the bound for that."""
        with e2e.Server(self, "stock split", "-sm", "layer") as server:
            server.decode(0, self.warm_tokens)
            self.keep("stock split.decode", server.decode(self.warm_tokens, self.decode_tokens))
            self.keep("stock split.identity", server.identity())
        for percent in (25, 50):
            key = f"split {percent}%"
            with e2e.Daemon(self, percent, f"daemon {key}") as daemon, \
                    e2e.Server(self, f"server {key}", "-sm", "layer", daemon=daemon) as server:
                server.decode(0, self.warm_tokens)
                self.measured_decode(daemon, server, key)
                self.keep(f"{key}.identity", server.identity())

    def run(self):
        self.step("dma", 5, self.dma)
        self.step("stock", 30, self.stock)
        self.step("two", 60, self.two_daemons)
        self.step("peers", 60, lambda: self.one_daemon("peers"))
        self.step("off", 60, lambda: self.one_daemon("off", ["--gpu-peers=false"]))
        if not self.options.one_gpu_twice:
            self.step("hidden", 60, self.hidden)
            self.step("split", 90, self.split)

    # -- the table
    def table(self):
        m = self.measured
        self.rows = []
        if "peers.ram_bytes" in m and m.get("two.ram_bytes"):
            value = m["peers.ram_bytes"] / m["two.ram_bytes"]
            self.row("RAM: one daemon / two", value, "<= 0.5", value <= 0.5,
                     f"{m['peers.ram_bytes'] / 1e9:.1f} of {m['two.ram_bytes'] / 1e9:.1f} GB pinned; "
                     f"{m['peers.taken_kib'] / 1e6:.1f} of {m['two.taken_kib'] / 1e6:.1f} GB of MemAvailable")
        if "peers.hit" in m and "two.hit" in m:
            points = 100 * (m["peers.hit"] - m["two.hit"])
            self.row("hits in VRAM anywhere, peers - two daemons, points", points, "> 0", points > 0,
                     f"{100 * m['peers.hit']:.1f} vs {100 * m['two.hit']:.1f} %, {PERCENT} % slots on each GPU")
        self.ratio("decode, two servers: peers / two daemons", "peers.total", "two.total", 1.3, ("peers", "two"))
        self.ratio("decode, two servers: peers / one daemon without", "peers.total", "off.total", 1.3, ("peers", "off"))
        self.ratio("prompt 512: peers / two daemons", "peers.gpu0.prompt512", "two.gpu0.prompt512", 1, ("peers", "two"))
        if "peers.peer_hits" in m:
            self.row("lookups served by the other GPU", m["peers.peer_hits"], "> 0", m["peers.peer_hits"] > 0,
                     f"{m['peers.peer_bytes_per_s'] / 1e9:.1f} GB/s over the whole pair")
        for key in ("two", "peers", "off", "hidden"):
            for gpu in (0, 1):
                self.same_as_stock(f"greedy text equal to stock: {key}, GPU {gpu}", f"{key}.gpu{gpu}.identity", "stock.identity", key)
        if "off.peer_hits" in m:
            self.row("peers switched off: served by the other GPU", m["off.peer_hits"], "0", m["off.peer_hits"] == 0, "")
        if "hidden.peer_hits" in m:
            says = m.get("hidden.doctor") or "nothing"
            works = m["hidden.peer_hits"] > 0 or says != "nothing"
            self.row("processes that see one GPU: served by the other, or said", m["hidden.peer_hits"], "either", works,
                     f"{m['hidden.total']:.1f} t/s; doctor: {says}"[:160])
        for percent in (25, 50):
            self.split_row(percent)
            self.same_as_stock(f"greedy text equal to stock: -sm layer, {percent} % slots", f"split {percent}%.identity", "stock split.identity", "split")
        walked = not self.left_the_walk
        self.row("decoding followed the trace", "yes" if walked else "no", "yes", walked, "; ".join(self.left_the_walk)[:200])
        return self.rows

    def split_row(self, percent):
        m, key = self.measured, f"split {percent}%"
        needed = (m.get("stock split.decode"), m.get("dma_bytes_per_s"), m.get(f"{key}.decode"), m.get(f"{key}.hit"))
        name = f"-sm layer: decode / bound, {percent} % slots"
        if None in needed:
            self.row(name, None, ">= 0.9", None, self.why("dma", "split"))
            return
        stock, dma, rate, hit = needed
        bound = 1 / (1 / stock + (1 - hit) * self.about["expert_bytes_per_token"] / dma)
        self.row(name, rate / bound, ">= 0.9", rate / bound >= 0.9, f"{rate:.1f} t/s, hit {100 * hit:.1f} %, bound {bound:.1f}, stock {stock:.1f}")


def main():
    parser = e2e.make_parser(__doc__)
    parser.add_argument("--one-gpu-twice", metavar="LIBRARY",
                        help="tests/support/one_gpu_twice: to try all but the way between GPUs where there is one; its speeds say nothing")
    options = parser.parse_args()
    if options.one_gpu_twice:
        os.environ["MOECACHED_LIBCUDA"] = str(Path(options.one_gpu_twice).resolve())
    options.json = options.json or str(Path(options.model_dir) / "peers.json")
    bench = Peers(options)
    about = e2e.run_all(bench)
    print(f"{about['machine']}; GPUs {len(bench.gpu_uuids())} x {about['gpu']}; commit {about['commit']}; load {os.getloadavg()[0]:.2f}\n")
    return e2e.finish(bench)


if __name__ == "__main__":
    sys.exit(main())
