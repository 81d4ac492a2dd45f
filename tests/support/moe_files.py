"""Small MoE models with weights that mean something, as a GGUF or as safetensors with their config.json. Standard library alone.

Weights are multiples of 1/64 below 1, the same in every file of the same seed, so that results are finite and bytes differ.
"""
import json
import struct
from pathlib import Path

F32, F16, Q8_0, BF16 = 0, 1, 8, 30  # ggml's numbers
NAMES = {F32: "F32", F16: "F16", BF16: "BF16"}  # of safetensors
PARTS = ("gate", "up", "down")


class Model:
    def __init__(self, n_layers=2, n_experts=8, top_k=2, hidden=64, inner=32, dtype=F32):
        self.n_layers, self.n_experts, self.top_k = n_layers, n_experts, top_k
        self.hidden, self.inner, self.dtype = hidden, inner, dtype

    def shape(self, part):
        """(rows, columns) of one expert's matrix."""
        return (self.hidden, self.inner) if part == "down" else (self.inner, self.hidden)

    def matrix(self, layer, part, expert):
        """One expert's matrix as bytes."""
        rows, columns = self.shape(part)
        seed = (layer * 3 + PARTS.index(part)) * self.n_experts + expert
        return encode([((i * 37 + seed * 101 + i // 64 * 11) % 127 - 63) / 64 for i in range(rows * columns)], self.dtype)


def encode(values, dtype):
    if dtype == F32:
        return struct.pack(f"<{len(values)}f", *values)
    if dtype == F16:
        return struct.pack(f"<{len(values)}e", *values)
    if dtype == BF16:  # these values have few enough bits to be cut
        return b"".join(struct.pack("<f", value)[2:] for value in values)
    assert dtype == Q8_0
    out = b""
    for i in range(0, len(values), 32):
        out += struct.pack("<e32b", 1 / 64, *[round(value * 64) for value in values[i:i + 32]])
    return out


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def write_gguf(path, model):
    """Returns where the data of each tensor begin."""
    keys = [("general.architecture", 8, text("qwen3moe")), ("qwen3moe.expert_count", 4, struct.pack("<I", model.n_experts)),
            ("qwen3moe.expert_used_count", 4, struct.pack("<I", model.top_k))]
    tensors = [(f"blk.{layer}.ffn_{part}_exps.weight", model.shape(part),
                b"".join(model.matrix(layer, part, expert) for expert in range(model.n_experts)))
               for layer in range(model.n_layers) for part in PARTS]
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(keys))
    header += b"".join(text(key) + struct.pack("<I", kind) + value for key, kind, value in keys)
    places, data = {}, b""
    for name, (rows, columns), content in tensors:
        header += text(name) + struct.pack("<IQQQIQ", 3, columns, rows, model.n_experts, model.dtype, len(data))
        places[name] = len(data)
        data += content + bytes(-len(content) % 32)
    header += bytes(-len(header) % 32)
    Path(path).write_bytes(header + data)
    return {name: len(header) + offset for name, offset in places.items()}


def hf_tensors(model, names):
    """(name, dtype, shape, bytes) as Qwen ("projections"), Mixtral ("mixtral") or newer models ("fused") call them."""
    for layer in range(model.n_layers):
        block = f"model.layers.{layer}." + ("block_sparse_moe" if names == "mixtral" else "mlp")
        dtype = NAMES[model.dtype]
        yield f"{block}.gate.weight", "F32", (model.n_experts, model.hidden), bytes(model.n_experts * model.hidden * 4)
        experts = range(model.n_experts)
        if names == "fused":
            rows, columns = model.shape("gate")
            yield (f"{block}.experts.gate_up_proj", dtype, (model.n_experts, 2 * rows, columns),
                   b"".join(model.matrix(layer, "gate", e) + model.matrix(layer, "up", e) for e in experts))
            yield (f"{block}.experts.down_proj", dtype, (model.n_experts, *model.shape("down")),
                   b"".join(model.matrix(layer, "down", e) for e in experts))
            continue
        called = {"gate": "w1", "down": "w2", "up": "w3"} if names == "mixtral" else {part: f"{part}_proj" for part in PARTS}
        for expert in experts:
            for part in PARTS:
                yield (f"{block}.experts.{expert}.{called[part]}.weight", dtype, model.shape(part),
                       model.matrix(layer, part, expert))


def write_safetensors(folder, model, names="projections", n_shards=1):
    """Returns the files that a client passes: shards, config.json and, with more than one shard, the index."""
    folder = Path(folder)
    shards = [[] for _ in range(n_shards)]
    for i, tensor in enumerate(hf_tensors(model, names)):
        shards[i % n_shards].append(tensor)
    files, weight_map = [], {}
    for number, tensors in enumerate(shards, 1):
        header, data = {"__metadata__": {"format": "pt"}}, b""
        for name, dtype, shape, content in tensors:
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(content)]}
            data += content
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        files.append(folder / f"model-{number:05}-of-{n_shards:05}.safetensors")
        files[-1].write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
        weight_map |= {name: files[-1].name for name, *_ in tensors}
    files.append(folder / "config.json")
    files[-1].write_text(json.dumps({"model_type": "qwen3_moe", "num_experts": model.n_experts,
                                     "num_experts_per_tok": model.top_k}))
    if n_shards > 1:
        files.append(folder / "model.safetensors.index.json")
        files[-1].write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return files
