"""DeepSeek-MoE in numpy float64, straight from a checkpoint: the oracle of a family that transformers does not have.

Written from the paper (Dai et al. 2024, DeepSeekMoE) and the published configuration; it shares no code with convert/,
native/ or the reader of .colibri files. An oracle test holds it against transformers all the same, on a Qwen2-MoE that
computes the same function.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - safetensors finds the dtype bfloat16 by name once this is imported
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

Array = npt.NDArray[np.float64]


class DeepSeekMoE:
    """One sequence at a time, every position at once. x: [n, hidden]."""

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.weights = {name: w.astype(np.float64) for name, w in load_file(folder / "model.safetensors").items()}

    def linear(self, name: str, x: Array) -> Array:
        y = x @ self.weights[f"{name}.weight"].T
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def norm(self, name: str, x: Array) -> Array:
        mean_square = (x * x).mean(axis=-1, keepdims=True)
        return x / np.sqrt(mean_square + self.config["rms_norm_eps"]) * self.weights[f"{name}.weight"]

    def mlp(self, name: str, x: Array) -> Array:
        gate = self.linear(f"{name}.gate_proj", x)
        return self.linear(f"{name}.down_proj", gate / (1 + np.exp(-gate)) * self.linear(f"{name}.up_proj", x))

    def rotate(self, heads: Array) -> Array:
        """[n, heads, head_dim]: the pairs (i, i + head_dim / 2) as complex numbers, turned by their position."""
        n, _, head_dim = heads.shape
        exponents = np.arange(0, head_dim, 2) / head_dim
        turns = np.exp(1j * np.outer(np.arange(n), self.config["rope_theta"] ** -exponents))[:, None, :]
        numbers = (heads[..., : head_dim // 2] + 1j * heads[..., head_dim // 2 :]) * turns
        return np.concatenate([numbers.real, numbers.imag], axis=-1)

    def attention(self, name: str, x: Array) -> Array:
        n, n_heads, n_kv = len(x), self.config["num_attention_heads"], self.config["num_key_value_heads"]
        q = self.rotate(self.linear(f"{name}.q_proj", x).reshape(n, n_heads, -1))
        k = self.rotate(self.linear(f"{name}.k_proj", x).reshape(n, n_kv, -1))
        v = self.linear(f"{name}.v_proj", x).reshape(n, n_kv, -1)
        outputs = []
        for head in range(n_heads):
            kv_head = head * n_kv // n_heads
            scores = q[:, head] @ k[:, kv_head].T / np.sqrt(q.shape[-1])
            scores[np.triu_indices(n, 1)] = -np.inf
            outputs.append(softmax(scores) @ v[:, kv_head])
        return self.linear(f"{name}.o_proj", np.concatenate(outputs, axis=-1))

    def experts(self, name: str, x: Array) -> tuple[Array, npt.NDArray[np.int32]]:
        """Routed experts weighed by their affinity, shared ones added as they are; and the choice, ascending."""
        top_k = self.config["num_experts_per_tok"]
        affinities = softmax(x @ self.weights[f"{name}.gate.weight"].T)
        chosen = np.sort(np.argsort(-affinities, axis=-1, kind="stable")[:, :top_k], axis=-1)
        y = np.zeros_like(x)
        for row, experts in enumerate(chosen):
            weights = affinities[row, experts]
            if self.config.get("norm_topk_prob") and top_k > 1:
                weights = weights / weights.sum()
            for expert, weight in zip(experts, weights, strict=True):
                y[row] += weight * self.mlp(f"{name}.experts.{expert}", x[row])
        if self.config.get("n_shared_experts"):
            y += self.mlp(f"{name}.shared_experts", x)
        return y, chosen.astype(np.int32)

    def is_dense(self, layer: int) -> bool:
        return layer < self.config["first_k_dense_replace"] or layer % self.config.get("moe_layer_freq", 1) != 0

    def forward(self, tokens: npt.NDArray[np.int32]) -> tuple[Array, npt.NDArray[np.int32]]:
        """Logits [n, vocabulary]; chosen experts [n, n_layers, top_k], -1 in dense layers."""
        n_layers = self.config["num_hidden_layers"]
        routing = np.full((len(tokens), n_layers, self.config["num_experts_per_tok"]), -1, np.int32)
        x = self.weights["model.embed_tokens.weight"][tokens]
        for layer in range(n_layers):
            prefix = f"model.layers.{layer}"
            x = x + self.attention(f"{prefix}.self_attn", self.norm(f"{prefix}.input_layernorm", x))
            normed = self.norm(f"{prefix}.post_attention_layernorm", x)
            if self.is_dense(layer):
                x = x + self.mlp(f"{prefix}.mlp", normed)
            else:
                y, routing[:, layer] = self.experts(f"{prefix}.mlp", normed)
                x = x + y
        return self.linear("lm_head", self.norm("model.norm", x)), routing


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def run(folder: Path, tokens: npt.NDArray[np.int32]) -> tuple[Array, npt.NDArray[np.int32]]:
    """What transformers_oracle.run() gives for the other families."""
    return DeepSeekMoE(folder).forward(tokens)
