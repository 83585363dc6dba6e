"""The random models as GGUF, for engines that read it: the same tensors, in Q8_0, Q4_0 or F16.

Names come from the gguf package's own table, by the names that the family's checkpoints use. Routers stay in f32, as in
our files. Mixtral's q and k are not reordered for the reader's rotary layout: that changes the text, not the speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from colibri.convert.architecture import GATES, Architecture

from .models import SHAPES, RandomWeights, default_folder, full_config, model_stem, write_checkpoint

TYPES = {
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
    "f16": gguf.GGMLQuantizationType.F16,
}
# By the family's name. A reader that has no OLMoE takes its tensors as a Qwen3-MoE: the same sizes, but q and k normed
# by head.
ARCHITECTURES = {"qwen2_moe": "qwen2moe", "olmoe": "olmoe", "mixtral": "llama"}
AS_QWEN3 = "qwen3moe"

_EXPERTS = (gguf.MODEL_TENSOR.FFN_GATE_EXP, gguf.MODEL_TENSOR.FFN_UP_EXP, gguf.MODEL_TENSOR.FFN_DOWN_EXP)
_FILE_TYPES = {"q8_0": gguf.LlamaFileType.MOSTLY_Q8_0, "q4_0": gguf.LlamaFileType.MOSTLY_Q4_0}


@dataclass(frozen=True)
class Tensor:
    """One tensor of the file: `parts` are the checkpoint's names, more than one where experts are stacked."""

    name: str
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    type: gguf.GGMLQuantizationType


def _tensors(weights: RandomWeights, arch: str, quantized: gguf.GGMLQuantizationType) -> Iterator[Tensor]:
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, weights.architecture.n_layers)
    gates = {
        weights.name(role, layer)
        for role in GATES & weights.family.names.keys()
        for layer in range(weights.architecture.n_layers)
    }
    experts = {
        name
        for layer in weights.architecture.moe_layers
        for expert in range(weights.architecture.n_experts)
        for name in weights.expert_names(layer, expert)
    }
    for name, source in weights.tensors.items():
        if name in experts:
            continue
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise ValueError(f"{name} has no name in a GGUF of {arch}")
        shape = source.shape
        if arch == AS_QWEN3 and len(shape) == 1 and name.endswith(("q_norm.weight", "k_norm.weight")):
            shape = (weights.architecture.head_dim,)
        plain = len(shape) == 1 or name in gates
        yield Tensor(target, (name,), shape, gguf.GGMLQuantizationType.F32 if plain else quantized)
    for layer in weights.architecture.moe_layers:
        each = [weights.expert_names(layer, expert) for expert in range(weights.architecture.n_experts)]
        for i, shape in enumerate(weights.architecture.expert_shapes()):
            target = gguf.TENSOR_NAMES[_EXPERTS[i]].format(bid=layer) + ".weight"
            yield Tensor(target, tuple(names[i] for names in each), (len(each), *shape), quantized)


def _data(weights: RandomWeights, tensor: Tensor) -> npt.NDArray[Any]:
    """The tensor's values in its type."""
    drawn = (
        weights.draw(name)[tuple(slice(n) for n in tensor.shape[-len(weights.tensors[name].shape) :])]
        for name in tensor.parts
    )
    parts = [gguf.quants.quantize(values, tensor.type) for values in drawn]
    return parts[0] if len(parts) == 1 else np.stack(parts)


def _describe(writer: gguf.GGUFWriter, shape: Architecture, theta: float) -> None:
    """The keys that readers want."""
    writer.add_context_length(shape.max_positions)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.n_layers)
    writer.add_feed_forward_length(shape.shared_width or shape.expert_width)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(theta)
    writer.add_layer_norm_rms_eps(shape.rms_eps)
    writer.add_expert_count(shape.n_experts)
    writer.add_expert_used_count(shape.top_k)
    writer.add_expert_feed_forward_length(shape.expert_width)
    if shape.shared_width:
        writer.add_expert_shared_feed_forward_length(shape.shared_width)


def _name_tokens(writer: gguf.GGUFWriter, vocabulary: int) -> None:
    """A vocabulary that no text needs: speed is measured on token ids."""
    special = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = special + [f"token{i}" for i in range(vocabulary - len(special))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * vocabulary)
    writer.add_token_types(
        [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
        + [gguf.TokenType.BYTE] * 256
        + [gguf.TokenType.NORMAL] * (vocabulary - len(special))
    )
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def write_gguf(out: Path, weights: RandomWeights, arch: str, quantize: str) -> None:
    """Writes a tensor at a time under a temporary name, then renames."""
    quantized = TYPES[quantize]
    partial = out.with_name(out.name + ".partial")
    writer = gguf.GGUFWriter(partial, arch)
    _describe(writer, weights.architecture, weights.theta)
    writer.add_vocab_size(weights.architecture.vocabulary)
    _name_tokens(writer, weights.architecture.vocabulary)
    if quantize in _FILE_TYPES:
        writer.add_file_type(_FILE_TYPES[quantize])
    tensors = list(_tensors(weights, arch, quantized))
    for tensor in tensors:
        block, block_bytes = gguf.GGML_QUANT_SIZES[tensor.type]
        n_bytes = int(np.prod(tensor.shape)) // block * block_bytes
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), n_bytes, raw_dtype=tensor.type)
    writer.write_header_to_file(partial)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(_data(weights, tensor))
    writer.close()
    partial.rename(out)


def make_gguf(
    name: str,
    quantize: str = "q8_0",
    *,
    n_layers: int | None = None,
    folder: Path | None = None,
    arch: str | None = None,
) -> Path:
    """The GGUF of a shape, made if it is not in the folder yet. `arch`: another architecture to call it."""
    shape, folder = SHAPES[name], folder or default_folder()
    checkpoint = folder / model_stem(shape, n_layers)
    write_checkpoint(checkpoint, full_config(shape, n_layers))
    weights = RandomWeights(checkpoint)
    arch = arch or ARCHITECTURES[weights.family.name]
    suffix = f"-{arch}" if arch == AS_QWEN3 else ""
    out = folder / f"{model_stem(shape, n_layers)}{suffix}-{quantize}.gguf"
    if not out.exists():
        write_gguf(out, weights, arch, quantize)
    return out
