#!/usr/bin/env python3
"""Writes a GGUF of the gpt-oss architecture with random weights: MXFP4 experts with a bias for each of their parts.

What it says is noise; that two programs say the same noise is what it is for. Needs numpy.
"""
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench/e2e"))
import make_trace_model as gguf  # noqa: E402

MXFP4 = 39
LAYERS, EXPERTS, TOP_K = 8, 32, 4
N, FF, HEADS, KV_HEADS, HEAD = 1440, 1440, 32, 8, 64  # half of gpt-oss-20b's width


def blocks(kind, n_blocks, std, rng, of_others=gguf.random_blocks):
    """MXFP4: a byte of exponent, then 32 values of 4 bits, of standard deviation 3.5 before scaling."""
    if kind != MXFP4:
        return of_others(kind, n_blocks, std, rng)
    data = rng.integers(0, 256, (n_blocks, 17), dtype=np.uint8)
    data[:, 0] = int(np.round(np.log2(std / 3.5))) + 128
    return data


def main(path, seed=7):
    gguf.BLOCK[MXFP4] = (32, 17)
    gguf.random_blocks = blocks
    rng = np.random.Generator(np.random.SFC64(seed))
    texts, kinds = gguf.vocabulary(64)
    writer = gguf.Writer(path, seed, 8)
    arch = "gpt-oss"
    writer.metadata = {
        "general.architecture": arch,
        "general.name": "random-gpt-oss",
        f"{arch}.vocab_size": len(texts),
        f"{arch}.context_length": 32768,
        f"{arch}.embedding_length": N,
        f"{arch}.block_count": LAYERS,
        f"{arch}.feed_forward_length": FF,
        f"{arch}.expert_feed_forward_length": FF,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.key_length": HEAD,
        f"{arch}.attention.value_length": HEAD,
        f"{arch}.attention.sliding_window": 128,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 150000.0,
        f"{arch}.expert_count": EXPERTS,
        f"{arch}.expert_used_count": TOP_K,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": ["Ġ Ġ"],
        "tokenizer.ggml.bos_token_id": len(texts) - 1,
        "tokenizer.ggml.eos_token_id": len(texts) - 1,
        "tokenizer.ggml.add_bos_token": False,
    }

    def random(name, *shape, std):
        writer.add(name, gguf.F32, shape, std * rng.standard_normal(shape[::-1], dtype=np.float32))

    def ones(name, n):
        writer.add(name, gguf.F32, (n,), np.ones(n))

    random("token_embd.weight", N, len(texts), std=1)
    ones("output_norm.weight", N)
    random("output.weight", N, len(texts), std=0.05)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        ones(block + "attn_norm.weight", N)
        ones(block + "post_attention_norm.weight", N)
        for part, rows in (("q", HEADS * HEAD), ("k", KV_HEADS * HEAD), ("v", KV_HEADS * HEAD)):
            random(f"{block}attn_{part}.weight", N, rows, std=0.03)
            random(f"{block}attn_{part}.bias", rows, std=0.1)
        random(block + "attn_output.weight", HEADS * HEAD, N, std=0.03)
        random(block + "attn_output.bias", N, std=0.1)
        random(block + "attn_sinks.weight", HEADS, std=1)
        random(block + "ffn_gate_inp.weight", N, EXPERTS, std=0.05)
        random(block + "ffn_gate_inp.bias", EXPERTS, std=0.1)
        for part, inner, rows in (("gate", N, FF), ("up", N, FF), ("down", FF, N)):
            writer.add(f"{block}ffn_{part}_exps.weight", MXFP4, (inner, rows, EXPERTS), 0.03)
            random(f"{block}ffn_{part}_exps.bias", rows, EXPERTS, std=0.3)
    n_bytes = writer.write()
    print(f"{path}: {n_bytes / 1e6:.0f} MB")


if __name__ == "__main__":
    main(*sys.argv[1:2])
