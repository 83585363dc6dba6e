"""A second reader and a second forward pass, in numpy float64, written from docs/format.md and docs/numerics.md alone.

It shares no code with convert/ or native/: what it computes from a .colibri file proves that the file says what the
checkpoint said, and what the engine computes can be held against it. Slow and simple on purpose; for tiny models.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

FORMATS = ["vector", "f32", "bf16", "f16", "q8", "q4"]
INTEGERS = frozenset({"q8", "q4"})
Q4_LEVELS = np.array([-127, -95, -74, -58, -44, -32, -21, -10, 0, 11, 22, 34, 47, 62, 79, 101], np.float64)
TIED, QK_NORM_HEAD, QK_NORM_WHOLE, QKV_BIAS, O_BIAS, NORM_TOPK = (1 << bit for bit in range(6))
SHARED_EXPERT, SHARED_GATED, QKV_CLIP, QKV_FUSED = 1 << 6, 1 << 7, 1 << 10, 1 << 11
NO_LAYER = 0xFFFFFFFF
ROLES = {
    **{1: "embedding", 2: "head", 3: "final_norm", 4: "inv_freq"},
    **{16: "attn_norm", 17: "q", 18: "k", 19: "v", 20: "o", 21: "q_norm", 22: "k_norm"},
    **{23: "q_bias", 24: "k_bias", 25: "v_bias", 26: "o_bias", 27: "qkv", 28: "qkv_bias"},
    **{32: "ffn_norm", 33: "router", 40: "dense_gate", 41: "dense_up", 42: "dense_down"},
    **{35: "shared_gate", 36: "shared_up", 37: "shared_down", 38: "shared_expert_gate"},
}
# The header's fields in their order, by type; what is between and behind is not needed here.
HEADER = struct.Struct("<8sIIQQ32s10Q19I5f2II16i32I")
FIELDS = """
    magic version header_bytes file_bytes header_checksum fingerprint
    tensor_table n_tensors expert_table n_blocks json json_bytes json_checksum experts expert_stride expert_bytes
    n_shards shard_index experts_per_shard expert_format arch_flags n_layers mask_words hidden vocabulary n_heads
    n_kv_heads head_dim rotary_dim n_experts top_k expert_width shared_width dense_width max_positions
    rms_eps attention_scale rope_factor router_scale qkv_clip n_groups top_k_groups n_end_tokens
"""
TENSOR_ENTRY = struct.Struct("<4I6Q")


@dataclass
class Matrix:
    """Decoded weights [rows, cols], and whether activations are quantised before they meet them."""

    weights: Array
    integers: bool = False


@dataclass
class ReferenceModel:
    """A decoded file. `tensors` is keyed by (layer, role name), layer -1 for the model's own."""

    header: dict[str, Any]
    json: dict[str, Any]
    tensors: dict[tuple[int, str], Matrix]
    experts: dict[tuple[int, int], tuple[Matrix, Matrix, Matrix]] = field(repr=False)


def _header(raw: bytes) -> dict[str, Any]:
    """The fields by name, and which layers are dense."""
    values = HEADER.unpack_from(raw)
    header = dict(zip(FIELDS.split(), values, strict=False))
    mask = values[-32:]
    header["dense_layers"] = [layer for layer in range(header["n_layers"]) if mask[layer // 32] >> layer % 32 & 1]
    return header


def decode_matrix(raw: bytes, fmt: str, rows: int, cols: int) -> Array:
    """Tiles of 16 rows back to [rows, cols], element by element as numerics.md lays them out."""
    n_tiles = -(-rows // 16)
    tile = len(raw) // n_tiles
    out = np.zeros((n_tiles * 16, cols))
    for t in range(n_tiles):
        data = raw[t * tile : (t + 1) * tile]
        decode = _decode_integers if fmt in INTEGERS else _decode_float
        out[16 * t : 16 * t + 16] = decode(data, fmt, cols)
    return out[:rows]


def _bf16(raw: bytes) -> npt.NDArray[np.float32]:
    return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)


def _decode_float(data: bytes, fmt: str, cols: int) -> Array:
    if fmt == "f32":
        values = np.frombuffer(data[: cols * 64], "<f4")
    else:
        half = data[: cols * 32]
        values = _bf16(half) if fmt == "bf16" else np.frombuffer(half, "<f2")
    return values.reshape(cols, 16).T.astype(np.float64)


def _decode_integers(data: bytes, fmt: str, cols: int) -> Array:
    padded = -(-cols // 32) * 32
    if fmt == "q8":
        end = padded * 16
        integers = np.frombuffer(data[:end], np.uint8).reshape(padded // 4, 16, 4).astype(np.float64) - 128
    else:
        end = padded * 8
        pairs = np.frombuffer(data[:end], np.uint8).reshape(padded // 32, 1, 4, 16, 4)
        integers = Q4_LEVELS[np.concatenate([pairs & 15, pairs >> 4], axis=1)].reshape(padded // 4, 16, 4)
    scales = _bf16(data[end : end + padded]).reshape(padded // 32, 16)
    weights = integers.transpose(1, 0, 2).reshape(16, padded) * np.repeat(scales.T.astype(np.float64), 32, axis=1)
    assert not weights[:, cols:].any(), "padding is not zero"
    return weights[:, :cols]


def matrix_bytes(fmt: str, rows: int, cols: int) -> int:
    padded = -(-cols // 32) * 32
    tile = {"f32": cols * 64, "bf16": cols * 32, "f16": cols * 32, "q8": padded * 17, "q4": padded * 9}[fmt]
    return -(-rows // 16) * (-(-tile // 64) * 64)


def load(path: Path) -> ReferenceModel:
    """Decodes a whole file."""
    raw = path.read_bytes()
    header = _header(raw)
    assert header["magic"] == b"COLIBRI\x1a"
    experts = {}
    moe_layers = [layer for layer in range(header["n_layers"]) if layer not in header["dense_layers"]]
    for block, (layer, expert) in enumerate((layer, e) for layer in moe_layers for e in range(header["n_experts"])):
        start = header["experts"] + block * header["expert_stride"]
        experts[layer, expert] = _expert(raw[start : start + header["expert_bytes"]], header)
    document = json.loads(raw[header["json"] : header["json"] + header["json_bytes"]])
    return ReferenceModel(header, document, dict(_tensors(raw, header)), experts)


def _tensors(raw: bytes, header: dict[str, Any]) -> Iterator[tuple[tuple[int, str], Matrix]]:
    for i in range(header["n_tensors"]):
        entry = TENSOR_ENTRY.unpack_from(raw, header["tensor_table"] + 64 * i)
        role, layer, fmt, _, rows, cols, offset, n_bytes, *_ = entry
        key = (-1 if layer == NO_LAYER else layer, ROLES[role])
        data = raw[offset : offset + n_bytes]
        if FORMATS[fmt] == "vector":
            yield key, Matrix(np.frombuffer(data, "<f4").reshape(rows, cols).astype(np.float64))
        else:
            yield key, Matrix(decode_matrix(data, FORMATS[fmt], rows, cols), FORMATS[fmt] in INTEGERS)


def _expert(data: bytes, header: dict[str, Any]) -> tuple[Matrix, Matrix, Matrix]:
    fmt, width, hidden = FORMATS[header["expert_format"]], header["expert_width"], header["hidden"]
    matrices, position = [], 0
    for rows, cols in ((width, hidden), (width, hidden), (hidden, width)):
        n_bytes = matrix_bytes(fmt, rows, cols)
        matrices.append(Matrix(decode_matrix(data[position : position + n_bytes], fmt, rows, cols), fmt in INTEGERS))
        position += n_bytes
    assert position == len(data)
    return matrices[0], matrices[1], matrices[2]


def quantize_activations(x: Array) -> Array:
    """The rule of q8 and q4, in float32 where numerics.md says so; the values that the integers stand for."""
    n_rows, cols = x.shape
    padded = np.zeros((n_rows, -(-cols // 32) * 32), np.float32)
    padded[:, :cols] = x
    groups = padded.reshape(n_rows, -1, 32)
    amax = np.abs(groups).max(axis=2, keepdims=True)
    usable = amax >= np.float32(2.0**-100)
    divisor = np.where(usable, amax, np.float32(1))
    integers = np.where(usable, np.rint(groups * (np.float32(127) / divisor)), np.float32(0))
    scale = np.where(usable, amax / np.float32(127), np.float32(0))
    return (integers.astype(np.float64) * scale).reshape(n_rows, -1)[:, :cols]


def apply(matrix: Matrix, x: Array) -> Array:
    """[n, cols] → [n, rows]"""
    return (quantize_activations(x) if matrix.integers else x) @ matrix.weights.T


def rmsnorm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rope(x: Array, inv_freq: Array, factor: float) -> Array:
    """x: [n, heads, head_dim], row i at position i; angles in float32 as in the engine and in transformers."""
    positions = np.arange(len(x), dtype=np.float32)
    angles = (positions[:, None] * inv_freq.astype(np.float32)).astype(np.float64)[:, None, :]
    half = inv_freq.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = np.cos(angles) * factor, np.sin(angles) * factor
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def projections(model: ReferenceModel, layer: int, x: Array) -> dict[str, Array]:
    """q, k and v of rows x with their biases, from three matrices or from one that has their rows in this order."""
    h, tensors = model.header, model.tensors
    names = ["qkv"] if h["arch_flags"] & QKV_FUSED else ["q", "k", "v"]
    parts = [apply(tensors[layer, name], x) for name in names]
    if h["arch_flags"] & QKV_BIAS:
        parts = [part + tensors[layer, f"{name}_bias"].weights for part, name in zip(parts, names, strict=True)]
    q_width, kv_width = h["n_heads"] * h["head_dim"], h["n_kv_heads"] * h["head_dim"]
    split = np.split(np.concatenate(parts, axis=1), [q_width, q_width + kv_width], axis=1)
    return dict(zip("qkv", split, strict=True))


def attention(model: ReferenceModel, layer: int, x: Array) -> Array:
    h = model.header
    n = len(x)
    projected = projections(model, layer, x)

    def finish(name: str, heads: int) -> Array:
        y = projected[name]
        if h["arch_flags"] & QK_NORM_WHOLE and name != "v":
            y = rmsnorm(y, model.tensors[layer, f"{name}_norm"].weights[0], h["rms_eps"])
        if h["arch_flags"] & QKV_CLIP:
            y = np.clip(y, -h["qkv_clip"], h["qkv_clip"])
        return y.reshape(n, heads, h["head_dim"])

    q, k, v = finish("q", h["n_heads"]), finish("k", h["n_kv_heads"]), finish("v", h["n_kv_heads"])
    if h["arch_flags"] & QK_NORM_HEAD:
        q = rmsnorm(q, model.tensors[layer, "q_norm"].weights[0], h["rms_eps"])
        k = rmsnorm(k, model.tensors[layer, "k_norm"].weights[0], h["rms_eps"])
    inv_freq = model.tensors[-1, "inv_freq"].weights[0]
    q, k = rope(q, inv_freq, h["rope_factor"]), rope(k, inv_freq, h["rope_factor"])
    k, v = (np.repeat(t, h["n_heads"] // h["n_kv_heads"], axis=1) for t in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) * h["attention_scale"]
    scores = np.where(np.tril(np.ones((n, n), bool)), scores, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed = np.einsum("hqk,khd->qhd", p / p.sum(axis=-1, keepdims=True), v).reshape(n, -1)
    out = apply(model.tensors[layer, "o"], mixed)
    return out + model.tensors[layer, "o_bias"].weights if h["arch_flags"] & O_BIAS else out


def swiglu(gate: Matrix, up: Matrix, down: Matrix, x: Array) -> Array:
    g = apply(gate, x)
    return apply(down, g / (1 + np.exp(-g)) * apply(up, x))


def experts(model: ReferenceModel, layer: int, x: Array) -> tuple[Array, npt.NDArray[np.int32]]:
    """Output [n, hidden] and the chosen experts [n, top_k], ascending."""
    h = model.header
    logits = apply(model.tensors[layer, "router"], x)
    chosen = np.sort(np.argsort(-logits, axis=1, kind="stable")[:, : h["top_k"]], axis=1)
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    weights = np.take_along_axis(e, chosen, axis=1)
    total = weights if h["arch_flags"] & NORM_TOPK else e
    weights = weights / total.sum(axis=1, keepdims=True) * h["router_scale"]
    out = np.zeros_like(x)
    for expert in range(h["n_experts"]):
        rows, slots = np.nonzero(chosen == expert)
        if len(rows):
            out[rows] += weights[rows, slots, None] * swiglu(*model.experts[layer, expert], x[rows])
    return out + shared_expert(model, layer, x), chosen.astype(np.int32)


def shared_expert(model: ReferenceModel, layer: int, x: Array) -> Array | float:
    flags = model.header["arch_flags"]
    if not flags & SHARED_EXPERT:
        return 0.0
    y = swiglu(*(model.tensors[layer, f"shared_{part}"] for part in ("gate", "up", "down")), x)
    return y / (1 + np.exp(-apply(model.tensors[layer, "shared_expert_gate"], x))) if flags & SHARED_GATED else y


def forward(model: ReferenceModel, tokens: list[int]) -> tuple[Array, npt.NDArray[np.int32]]:
    """Logits [n, vocabulary] at every position, and chosen experts [n, n_layers, top_k] with -1 in dense layers."""
    h = model.header
    x = model.tensors[-1, "embedding"].weights[np.asarray(tokens)]
    routing = np.full((len(tokens), h["n_layers"], h["top_k"]), -1, np.int32)
    for layer in range(h["n_layers"]):
        norm = model.tensors[layer, "attn_norm"].weights[0]
        x = x + attention(model, layer, rmsnorm(x, norm, h["rms_eps"]))
        y = rmsnorm(x, model.tensors[layer, "ffn_norm"].weights[0], h["rms_eps"])
        if layer in h["dense_layers"]:
            dense = [model.tensors[layer, f"dense_{part}"] for part in ("gate", "up", "down")]
            x = x + swiglu(dense[0], dense[1], dense[2], y)
        else:
            mixed, routing[:, layer] = experts(model, layer, y)
            x = x + mixed
    x = rmsnorm(x, model.tensors[-1, "final_norm"].weights[0], h["rms_eps"])
    head = "embedding" if h["arch_flags"] & TIED else "head"
    return apply(model.tensors[-1, head], x), routing
