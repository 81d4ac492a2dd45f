#!/usr/bin/env python3
"""Share of (token, layer) pairs whose chosen experts are those of the trace, in a prompt of all tokens (or N) and in greedy decoding.

usage: check_routing.py --host BUILD/tests/support/moecached_llama_host --libs LLAMA_BIN MODEL [--prompt N] [--decode N]
Exit 0 if both shares are above 0.99 and decoding followed the trace's order.
"""
import argparse
import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--host", required=True)
    parser.add_argument("--libs", required=True)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--start", type=int, default=0, help="first token of the prompt (0)")
    parser.add_argument("--prompt", type=int, help="tokens of the prompt (all of them, once around)")
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    data = Path(options.model + ".routes").read_bytes()
    n_tokens, n_layers, k = struct.unpack_from("<III", data)
    wanted = np.frombuffer(data, "<u2", offset=12).reshape(n_tokens, n_layers, k)
    n_prompt = options.prompt or n_tokens
    order = [(options.start + i) % n_tokens for i in range(n_prompt)]
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "prompt").write_text("".join(f"t{t:04d} " for t in order), encoding="ascii")
        subprocess.run([options.host, "--libs", options.libs, "--model", options.model, "--prompt-file", folder / "prompt", "--ignore-eog",
                        "--n-predict", str(options.decode + 1), "--ctx", str(n_prompt + options.decode + 8), "--threads", str(options.threads),
                        "--routing-out", folder / "routing", "--json", folder / "json"], check=True, stdout=subprocess.DEVNULL)
        run = json.loads((folder / "json").read_text())
        chosen = np.fromfile(folder / "routing", "<i4").reshape(-1, n_layers, k)
    decoded = run["tokens"][:options.decode]  # the last one was sampled, not evaluated
    follows = decoded == [(options.start + n_prompt + i) % n_tokens for i in range(options.decode)]
    equal = (np.sort(chosen, axis=2) == np.sort(wanted[order + decoded], axis=2)).all(axis=2)
    same_order = (chosen == wanted[order + decoded]).all(axis=2)
    shares = equal[:n_prompt].mean(), equal[n_prompt:].mean()
    print(f"sets equal to the trace: prompt {shares[0]:.5f} of {equal[:n_prompt].size}, decode {shares[1]:.5f} of {equal[n_prompt:].size}; "
          f"in the same order: {same_order.mean():.5f}; decoding followed the trace: {follows}")
    return 0 if min(shares) > 0.99 and follows else 1


if __name__ == "__main__":
    sys.exit(main())
