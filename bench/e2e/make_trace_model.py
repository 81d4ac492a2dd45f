#!/usr/bin/env python3
"""Writes a Qwen3-30B-A3B-shaped GGUF with random weights whose router follows a recorded trace (README.md says how and why).

Needs numpy alone. The weights are random quantised blocks made by as many threads as there are cores, so that writing the file
is what takes the time. Beside OUT it writes OUT.routes (the rows that each token should take, for check_routing) and OUT.json.
"""
import argparse
import concurrent.futures
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import time

import numpy as np

F32, F16, Q4_K, Q6_K = 0, 1, 12, 14
BLOCK = {F32: (1, 4), F16: (1, 2), Q4_K: (256, 144), Q6_K: (256, 210)}  # weights, bytes
ALIGNMENT = 32
CHUNK_BYTES = 16 << 20

# Standard deviations of the random weights. The input of every projection has a root mean square of 1, so with n_embd inputs
# of std 0.02 activations are about 1. What attention and the experts add to the residual stream is kept to a few per cent of it
# over all layers: enough to show in the logits when an expert is wrong, too little to change what the router picks.
STD_QK, STD_V, STD_O = 0.02, 0.002, 0.0005
STD_GATE, STD_UP, STD_DOWN = 0.02, 0.002, 0.006

# Targets of the router's logits: the wanted experts by rank, every other expert 0.
LOGIT_FIRST, LOGIT_STEP = 4.0, 0.1
LOGIT_NEXT_TOKEN = 10.0


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("--trace", required=True, help="moetrace-csv v1, plain or .zst (read by the zstd program or the zstandard module)")
    parser.add_argument("--tokens", type=int, default=1800, help="rows of the trace to take, at most --n-embd (1800)")
    parser.add_argument("--phases", choices=("decode", "all"), default="decode", help="which rows of the trace count (decode)")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--n-embd", type=int, default=2048)
    parser.add_argument("--n-ff", type=int, default=768, help="of one expert")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    if options.n_embd % 256 or options.n_ff % 256 or options.heads * options.head_dim % 256:
        parser.error("--n-embd, --n-ff and heads times --head-dim must be multiples of 256, the block of Q4_K and Q6_K")
    if not 1 < options.tokens <= options.n_embd:
        parser.error("--tokens must be between 2 and --n-embd: the router's equations have an exact solution only up to there")
    if options.top_k > options.experts:
        parser.error("--top-k is larger than --experts")
    return options


# -- the trace
def open_trace(path):
    if not path.endswith(".zst"):
        return open(path, encoding="ascii")
    if shutil.which("zstd"):
        return io.StringIO(subprocess.run(["zstd", "-dc", path], check=True, capture_output=True).stdout.decode("ascii"))
    try:
        import zstandard
    except ImportError:
        sys.exit(f"{path}: neither the zstd program nor python's zstandard is here: decompress it elsewhere and give the .csv")
    with open(path, "rb") as file:
        return io.StringIO(zstandard.ZstdDecompressor().stream_reader(file).read().decode("ascii"))


def fold(ids, n_experts, k):
    """The first k distinct ids modulo the expert count, filled up with the next ones; a full-size trace passes unchanged."""
    chosen = list(dict.fromkeys(int(i) % n_experts for i in ids if i >= 0))[:k]
    candidate = chosen[-1] if chosen else 0
    while len(chosen) < k:
        candidate = (candidate + 1) % n_experts
        if candidate not in chosen:
            chosen.append(candidate)
    return chosen


def read_routes(options):
    """uint16 [tokens][layers][k], and the trace's own description. Sequences follow each other as they do in the file."""
    with open_trace(options.trace) as file:
        first = file.readline()
        if not first.startswith("# moetrace-csv v1"):
            sys.exit(f"{options.trace}: not a moetrace-csv v1 file")
        about = json.loads(first[first.index("{"):])
        file.readline()
        n_layers, k = about["layers"], about["k"]
        if options.layers > n_layers:
            sys.exit(f"{options.trace}: has {n_layers} layers, --layers wants {options.layers}")
        rows = []
        for line in file:
            cells = np.fromstring(line, dtype=np.int32, sep=",")
            if options.phases == "decode" and cells[2] != 1:
                continue
            ids = cells[3:].reshape(n_layers, k)[:options.layers]
            if options.experts >= about["experts"] and options.top_k == k and (ids >= 0).all():
                rows.append(ids)
            else:
                rows.append([fold(layer, options.experts, options.top_k) for layer in ids])
            if len(rows) == options.tokens:
                return np.array(rows, dtype=np.uint16), about
    sys.exit(f"{options.trace}: has {len(rows)} such rows, --tokens wants {options.tokens}")


# -- the steered tensors
def embeddings(options, n_extra):
    """One row a token, of root mean square 1, which RMSNorm leaves as it is. Those of the trace are orthogonal to each other."""
    rng = np.random.default_rng([options.seed, 1])
    q, _ = np.linalg.qr(rng.standard_normal((options.n_embd, options.tokens)))
    trace = q.T * np.sqrt(options.n_embd)
    extra = rng.standard_normal((n_extra, options.n_embd))
    extra /= np.sqrt((extra ** 2).mean(axis=1, keepdims=True))
    return trace, extra


def router(trace, routes, n_experts):
    """W with W x_t = wanted logits of token t. For orthogonal rows of length sqrt(n) least squares is a product: Y^T X / n."""
    wanted = np.zeros((len(trace), n_experts))
    targets = LOGIT_FIRST - LOGIT_STEP * np.arange(routes.shape[1])
    np.put_along_axis(wanted, routes.astype(np.int64), np.broadcast_to(targets, routes.shape), axis=1)
    return (wanted.T @ trace) / trace.shape[1]


def output_rows(trace, n_extra):
    """Token t + 1 has the largest logit behind token t, and token 0 behind the last: greedy decoding walks the trace in a circle."""
    rows = np.roll(trace, 1, axis=0) * (LOGIT_NEXT_TOKEN / trace.shape[1])
    return np.concatenate([rows, np.zeros((n_extra, trace.shape[1]))])


# -- random blocks
def random_blocks(kind, n_blocks, std, rng):
    """Blocks whose weights have mean 0 and about this standard deviation."""
    size = BLOCK[kind][1]
    blocks = rng.integers(0, 1 << 32, (n_blocks * size + 3) // 4, dtype=np.uint32).view(np.uint8)[:n_blocks * size]
    blocks = blocks.reshape(n_blocks, size)
    if kind == Q4_K:
        # w = d * scale * q - dmin * min with 4-bit q: scale = min in 0..15 and dmin = 7.5 d make the mean 0.
        d = np.float16(std / 40.6)
        blocks[:, 0:2] = np.frombuffer(d.tobytes(), np.uint8)
        blocks[:, 2:4] = np.frombuffer(np.float16(7.5 * d).tobytes(), np.uint8)
        blocks[:, 4:8] &= 0x0F
        blocks[:, 8:12] = blocks[:, 4:8]
        blocks[:, 12:16] &= 0x0F
        blocks[:, 12:16] *= 17
    else:
        # w = d * scale * (q - 32) with signed scales, here in -8..7.
        blocks[:, 192:208] &= 0x0F
        blocks[:, 192:208] -= 8
        blocks[:, 208:210] = np.frombuffer(np.float16(std / 85.7).tobytes(), np.uint8)
    return blocks


# -- GGUF
def gguf_string(text):
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def gguf_value(value):
    """Type number and bytes of a metadata value: bool, int (uint32), float (float32), str, or a list of str or int (int32)."""
    if isinstance(value, bool):
        return 7, struct.pack("<B", value)
    if isinstance(value, int):
        return 4, struct.pack("<I", value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, str):
        return 8, gguf_string(value)
    if value and isinstance(value[0], int):
        return 9, struct.pack("<IQ", 5, len(value)) + np.array(value, "<i4").tobytes()
    return 9, struct.pack("<IQ", 8, len(value)) + b"".join(gguf_string(item) for item in value)


class Writer:
    """Lays the tensors out first, then writes them from many threads, each at its own offset."""

    def __init__(self, path, seed, threads):
        self.path, self.seed, self.threads = path, seed, threads
        self.metadata, self.tensors, self.offset = {}, [], 0

    def add(self, name, kind, shape, content):
        """shape: innermost dimension first, as in the file. content: an array, or the standard deviation of random blocks."""
        n, size = BLOCK[kind]
        n_bytes = int(np.prod(shape)) // n * size
        self.tensors.append((name, kind, shape, self.offset, n_bytes, content))
        self.offset += -(-n_bytes // ALIGNMENT) * ALIGNMENT

    def header(self):
        parts = [b"GGUF", struct.pack("<IQQ", 3, len(self.tensors), len(self.metadata))]
        for key, value in self.metadata.items():
            kind, data = gguf_value(value)
            parts += [gguf_string(key), struct.pack("<I", kind), data]
        for name, kind, shape, offset, _, _ in self.tensors:
            parts += [gguf_string(name), struct.pack("<I", len(shape)), struct.pack(f"<{len(shape)}Q", *shape),
                      struct.pack("<IQ", kind, offset)]
        data = b"".join(parts)
        return data + bytes(-len(data) % ALIGNMENT)

    def write(self):
        header = self.header()
        jobs = []
        for index, (_, kind, _, offset, n_bytes, content) in enumerate(self.tensors):
            if isinstance(content, np.ndarray):
                jobs.append((content.astype({F32: "<f4", F16: "<f2"}[kind]).tobytes(), kind, offset, n_bytes, None))
                continue
            step = CHUNK_BYTES // BLOCK[kind][1] * BLOCK[kind][1]
            jobs += [(content, kind, offset + at, min(step, n_bytes - at), [self.seed, 2, index, at]) for at in range(0, n_bytes, step)]
        with open(self.path, "wb") as file:
            fd = file.fileno()
            os.ftruncate(fd, len(header) + self.offset)
            write_all(fd, header, 0)

            def run(job):
                content, kind, offset, n_bytes, seed = job
                if seed is not None:
                    rng = np.random.Generator(np.random.SFC64(seed))
                    content = random_blocks(kind, n_bytes // BLOCK[kind][1], content, rng).data.cast("B")
                write_all(fd, content, len(header) + offset)

            with concurrent.futures.ThreadPoolExecutor(self.threads) as pool:
                for _ in pool.map(run, jobs):
                    pass
        return len(header) + self.offset


def write_all(fd, data, offset):
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


# -- the model
def gpt2_bytes():
    """The characters that GPT-2's byte-level vocabulary writes the 256 bytes with."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def vocabulary(n_tokens):
    """Token t of the trace is the text "t<t> " and has id t; behind them the 256 bytes, so that any text can be tokenised."""
    normal, control, user_defined = 1, 3, 4
    texts = [f"t{t:04d} " for t in range(n_tokens)] + gpt2_bytes() + ["ĠĠ", "<|endoftext|>"]
    kinds = [user_defined] * n_tokens + [normal] * 257 + [control]
    return texts, kinds


def main():
    options = parse_arguments()
    start = time.monotonic()
    routes, about = read_routes(options)
    texts, kinds = vocabulary(options.tokens)
    n_extra = len(texts) - options.tokens
    end_of_text = len(texts) - 1
    trace, extra = embeddings(options, n_extra)

    writer = Writer(options.out, options.seed, options.threads)
    arch = "qwen3moe"
    writer.metadata = {
        "general.architecture": arch,
        "general.name": "trace-model",
        "general.file_type": 15,
        f"{arch}.vocab_size": len(texts),
        f"{arch}.context_length": 32768,
        f"{arch}.embedding_length": options.n_embd,
        f"{arch}.block_count": options.layers,
        f"{arch}.feed_forward_length": options.n_ff * options.top_k,
        f"{arch}.attention.head_count": options.heads,
        f"{arch}.attention.head_count_kv": options.kv_heads,
        f"{arch}.attention.key_length": options.head_dim,
        f"{arch}.attention.value_length": options.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{arch}.rope.freq_base": 1e6,
        f"{arch}.expert_count": options.experts,
        f"{arch}.expert_used_count": options.top_k,
        f"{arch}.expert_feed_forward_length": options.n_ff,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": ["Ġ Ġ"],
        "tokenizer.ggml.bos_token_id": end_of_text,
        "tokenizer.ggml.eos_token_id": end_of_text,
        "tokenizer.ggml.add_bos_token": False,
    }
    n, ff, experts, head = options.n_embd, options.n_ff, options.experts, options.head_dim
    q_rows, kv_rows = options.heads * head, options.kv_heads * head
    ones, head_ones = np.ones(n), np.ones(head)
    writer.add("token_embd.weight", F32, (n, len(texts)), np.concatenate([trace, extra]))
    writer.add("output_norm.weight", F32, (n,), ones)
    writer.add("output.weight", F16, (n, len(texts)), output_rows(trace, n_extra))
    for layer in range(options.layers):
        block = f"blk.{layer}."
        writer.add(block + "attn_norm.weight", F32, (n,), ones)
        writer.add(block + "attn_q.weight", Q4_K, (n, q_rows), STD_QK)
        writer.add(block + "attn_k.weight", Q4_K, (n, kv_rows), STD_QK)
        writer.add(block + "attn_v.weight", Q6_K, (n, kv_rows), STD_V)
        writer.add(block + "attn_q_norm.weight", F32, (head,), head_ones)
        writer.add(block + "attn_k_norm.weight", F32, (head,), head_ones)
        writer.add(block + "attn_output.weight", Q4_K, (q_rows, n), STD_O)
        writer.add(block + "ffn_norm.weight", F32, (n,), ones)
        writer.add(block + "ffn_gate_inp.weight", F32, (n, experts), router(trace, routes[:, layer], experts))
        writer.add(block + "ffn_gate_exps.weight", Q4_K, (n, ff, experts), STD_GATE)
        writer.add(block + "ffn_up_exps.weight", Q4_K, (n, ff, experts), STD_UP)
        writer.add(block + "ffn_down_exps.weight", Q6_K if layer % 2 == 0 else Q4_K, (ff, n, experts), STD_DOWN)
    solved_s = time.monotonic() - start
    n_bytes = writer.write()
    experts_of = [entry for entry in writer.tensors if "_exps." in entry[0]]
    expert_bytes = sum(entry[4] for entry in experts_of)
    by_layer = [sum(entry[4] for entry in experts_of if entry[0].startswith(f"blk.{layer}.")) // experts for layer in range(options.layers)]
    # Header of .routes: tokens, layers, k, each uint32; then the ids.
    with open(options.out + ".routes", "wb") as file:
        file.write(struct.pack("<III", *routes.shape) + routes.astype("<u2").tobytes())
    figures = {"tokens": options.tokens, "layers": options.layers, "experts": experts, "top_k": options.top_k, "n_embd": n, "n_ff": ff,
               "n_vocab": len(texts), "file_bytes": n_bytes, "expert_bytes_total": expert_bytes, "expert_bytes_of_layer": by_layer,
               "expert_bytes_per_token": expert_bytes * options.top_k // experts, "trace": os.path.basename(options.trace),
               "trace_about": about, "seed": options.seed}
    with open(options.out + ".json", "w", encoding="utf-8") as file:
        json.dump(figures, file, indent=1)
    print(f"{options.out}: {n_bytes / 1e9:.2f} GB, {options.tokens} tokens, {figures['expert_bytes_per_token'] / 1e6:.1f} MB of experts a token; "
          f"trace and router {solved_s:.1f} s, all {time.monotonic() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
