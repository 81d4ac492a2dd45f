#!/usr/bin/env python3
"""make demo: an unmodified llama.cpp generates text with its experts in moecached, next to the stock run.

Fails when the text differs from the stock run, when the daemon served no lookup, or when any read bypassed it.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "The system call returns a file descriptor. On error,"


def mib(value):
    return f"{value / 2**20:.1f} MiB"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", default="build")
    parser.add_argument("--llama-libs", required=True)
    parser.add_argument("--model", default=str(ROOT / "tests/data/tinymoe-53m-a8m-q4_k_m.gguf"))
    parser.add_argument("--slots", default="25%", help="slots of each layer")
    parser.add_argument("--n-predict", default="96")
    options = parser.parse_args()
    build = Path(options.build).resolve()
    host = build / "tests/support/moecached_llama_host"
    ctl = build / "client/ctl/moecachectl"
    # llama.cpp's threads spin at barriers, also while one of them waits for a miss: one core is left to the daemon.
    threads = str(max(1, (os.cpu_count() or 2) - 1))

    with tempfile.TemporaryDirectory(prefix="moecached-demo-") as folder:
        def generate(name, *arguments, **environment):
            figures = f"{folder}/{name}.json"
            command = [host, "--libs", options.llama_libs, "--model", options.model, "--prompt", PROMPT, "--n-predict",
                       options.n_predict, "--threads", threads, "--temp", "0.6", "--seed", "7", "--json", figures, *arguments]
            done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
            if done.returncode != 0:
                sys.exit(f"the llama.cpp host ended with {done.returncode}:\n{done.stderr[-3000:]}")
            return json.loads(Path(figures).read_text())

        def moecachectl(what):
            done = subprocess.run([ctl, "--socket", f"{folder}/control.sock", "-o", "json", what], capture_output=True, text=True)
            if done.returncode not in (0, 1):
                sys.exit(f"moecachectl {what}: {done.stdout}{done.stderr}")
            return json.loads(done.stdout)

        log = open(f"{folder}/daemon.log", "w+")
        daemon = subprocess.Popen([build / "daemon/app/moecached", "--directory", folder, "--slots", options.slots],
                                  stdout=log, stderr=log)
        try:
            for _ in range(1000):
                if Path(f"{folder}/control.sock").exists() or daemon.poll() is not None:
                    break
                time.sleep(0.01)
            if daemon.poll() is not None:
                log.seek(0)
                sys.exit(f"moecached did not start:\n{log.read()}")
            print(f"moecached runs with {options.slots} of the experts; llama.cpp generates through it, then stock ...\n")
            stats = f"{folder}/stats.json"
            cached = generate("moecached", "--no-repack", "--plugin", str(build / "shim/ggml/libggml-moecache.so"),
                              MOECACHED_SOCKET=f"{folder}/handle.sock", MOECACHED_STATS_FILE=stats)
            client = json.loads(Path(stats).read_text())
            model = moecachectl("models")["models"][0]
            ssd = moecachectl("status")["ssd"]
        finally:
            daemon.terminate()
            daemon.wait()
            log.close()
        stock = generate("stock", "--no-repack")
        default = generate("default")

    print(PROMPT + cached["text"].removeprefix(PROMPT))
    identical = cached["tokens"] == stock["tokens"] and cached["text"] == stock["text"]
    print(f"\nidentical: {'yes' if identical else 'no'}   (against stock with the same kernels, --no-repack)\n")

    layers = model["layers"]
    lookups = sum(layer["lookups"] for layer in layers)
    hits = sum(layer["hits"] for layer in layers)
    slots = sum(layer["n_slots"] for layer in layers)
    rows = [
        ("experts in the file", mib(model["expert_bytes_total"])),
        ("pool (RAM tier)", f"{mib(model['pool_bytes'])}, {slots} of {sum(layer['n_experts'] for layer in layers)} experts"),
        ("lookups", f"{client['lookups']}"),
        ("  served by the RAM tier", f"{hits} of {lookups} ({100 * hits / max(1, lookups):.1f} %)"),
        ("  read from SSD into slots", f"{lookups - hits} misses, {mib(model['bytes_read'])}"),
        ("  streamed for the prompt", f"{model['streamed_parts']} parts, {mib(model['streamed_bytes'])}"),
        ("  SSD engine", ssd["engine"] + (", O_DIRECT" if ssd["direct"] else ", page cache") +
         (f" ({ssd['fallback_reason']})" if ssd["fallback_reason"] else "")),
        ("fallback reads", f"{client['fallback_reads']}"),
    ]
    for name, value in rows:
        print(f"{name:<28} {value}")
    print(f"\n{'':<28} {'moecached':>14} {'stock':>14} {'stock default':>14}")
    print(f"{'peak RSS of the process':<28} " + " ".join(f"{mib(run['rss_peak_bytes']):>14}" for run in (cached, stock, default)))
    print(f"{'decode tokens/s':<28} " + " ".join(f"{run['decode_tokens_per_s']:>14.1f}" for run in (cached, stock, default)))
    print(f"{'prompt tokens/s':<28} " + " ".join(f"{run['prompt_tokens_per_s']:>14.1f}" for run in (cached, stock, default)))

    problems = []
    if not identical:
        problems.append("the text differs from the stock run")
    if lookups == 0 or client["lookups"] == 0:
        problems.append("the daemon served no lookup")
    if client["fallback_reads"] > 0:
        problems.append(f"{client['fallback_reads']} reads bypassed the daemon")
    if problems:
        sys.exit("demo failed: " + "; ".join(problems))
    print("\nYour own model, with an unmodified llama.cpp v0.5.0 build:\n"
          f"  {os.path.relpath(ctl)} run -- llama-server -m your-moe-model.gguf")


if __name__ == "__main__":
    main()
