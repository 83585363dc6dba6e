"""Random models of real shapes, as .colibri and as GGUF: what speed is measured on without gigabytes of downloads.

Speed depends on shapes and on how tokens spread over the experts, not on what the weights say. So every weight is
drawn from a normal distribution (0.02, norms 1, biases 0) by a generator that is seeded with its tensor's name: any
tensor can be made again, alone, and both files hold the same values. Weights go through the converter as if they came
from a checkpoint.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import click
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from colibri.convert import convert
from colibri.convert.architecture import Architecture, tensor_specs
from colibri.convert.checkpoint import SourceTensor, read_json
from colibri.convert.config import Config
from colibri.convert.families import Family, find
from colibri.convert.format import Format, Role
from colibri.convert.tiles import Floats

SPREAD = 0.02  # of the weights; with 2048 inputs of size one a router's logits differ by about one
SEED = 1
# Above the longest context that is measured, with room to decode.
MAX_POSITIONS = 65536


@dataclass(frozen=True)
class Shape:
    """A model to be made: its Hugging Face configuration, depth apart, and the depth that fits a small machine."""

    name: str
    n_layers: int
    config: Mapping[str, Any]


_COMMON = {"max_position_embeddings": MAX_POSITIONS, "rope_theta": 1e6, "hidden_act": "silu"}
SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            "qwen",  # Qwen1.5-MoE-A2.7B
            8,
            {
                "model_type": "qwen2_moe",
                "hidden_size": 2048,
                "vocab_size": 32000,
                "num_attention_heads": 16,
                "num_key_value_heads": 16,
                "num_experts": 60,
                "num_experts_per_tok": 4,
                "moe_intermediate_size": 1408,
                "shared_expert_intermediate_size": 5632,
                "norm_topk_prob": False,
            },
        ),
        Shape(
            "olmoe",  # OLMoE-1B-7B
            8,
            {
                "model_type": "olmoe",
                "hidden_size": 2048,
                "vocab_size": 50304,
                "num_attention_heads": 16,
                "num_key_value_heads": 16,
                "num_experts": 64,
                "num_experts_per_tok": 8,
                "intermediate_size": 1024,
                "norm_topk_prob": False,
            },
        ),
        Shape(
            "mixtral",  # Mixtral-8x7B
            2,
            {
                "model_type": "mixtral",
                "hidden_size": 4096,
                "vocab_size": 32000,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
                "intermediate_size": 14336,
            },
        ),
        Shape(
            "sparse32",  # 2 of 32 experts: little of a file is needed for a first token
            8,
            {
                "model_type": "mixtral",
                "hidden_size": 2048,
                "vocab_size": 32000,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "num_local_experts": 32,
                "num_experts_per_tok": 2,
                "intermediate_size": 4096,
            },
        ),
        Shape(
            "tiny",  # for tests: seconds on any machine
            2,
            {
                "model_type": "qwen2_moe",
                "hidden_size": 64,
                "vocab_size": 320,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "shared_expert_intermediate_size": 64,
                "norm_topk_prob": False,
            },
        ),
    )
}


def full_config(shape: Shape, n_layers: int | None = None) -> dict[str, Any]:
    """config.json of a shape, at its own depth or another."""
    return {**_COMMON, **shape.config, "num_hidden_layers": n_layers or shape.n_layers, "eos_token_id": None}


class RandomWeights:
    """The weights that a folder's config.json asks for, drawn when they are read. Stands in for a Checkpoint."""

    def __init__(self, folder: Path) -> None:
        config = Config(read_json(folder / "config.json"))
        self.family: Family = find(config)
        self.architecture: Architecture = self.family.architecture(config)
        self.theta = config.number("rope_theta")
        self.tensors: dict[str, SourceTensor] = {name: tensor for name, tensor in self._tensors()}
        self.files: list[str] = []

    def _tensors(self) -> Iterator[tuple[str, SourceTensor]]:
        for spec in tensor_specs(self.architecture, Format.F32):
            if spec.role is not Role.INV_FREQ:
                name = self.name(spec.role, spec.layer)
                shape = (spec.cols,) if spec.format is Format.VECTOR else (spec.rows, spec.cols)
                yield name, SourceTensor(name, "", "F32", shape)
        for layer in self.architecture.moe_layers:
            for expert in range(self.architecture.n_experts):
                names = self.expert_names(layer, expert)
                for name, shape in zip(names, self.architecture.expert_shapes(), strict=True):
                    yield name, SourceTensor(name, "", "F32", shape)

    def name(self, role: Role, layer: int) -> str:
        """What the family's checkpoints call a tensor."""
        return self.family.names[role][0].format(layer=layer)

    def expert_names(self, layer: int, expert: int) -> tuple[str, str, str]:
        """What they call gate, up and down of an expert."""
        names = next(names for names in self.family.experts if not names.fused)
        gate, up, down = (text.format(layer=layer, expert=expert) for text in (names.gate, names.up, names.down))
        return gate, up, down

    def check_dtype(self, name: str) -> None:
        """All are float32."""

    def draw(self, name: str) -> Floats:
        """The whole tensor: norms are 1, biases 0, the rest is normal."""
        shape = self.tensors[name].shape
        if len(shape) == 1:
            return np.full(shape, 0 if name.endswith("bias") else 1, np.float32)
        generator = np.random.Generator(np.random.SFC64([SEED, zlib.crc32(name.encode())]))
        values: Floats = generator.standard_normal(shape, np.float32)
        values *= np.float32(SPREAD)
        return values

    def read(self, name: str, index: tuple[slice | int, ...] = (slice(None),)) -> Floats:
        return self.draw(name)[index]

    def bands(self, name: str, rows: slice, band_rows: int, prefix: tuple[int, ...] = ()) -> Iterator[Floats]:
        """As Checkpoint.bands; the tensor is drawn once."""
        matrix = self.draw(name)[prefix]
        for start in range(rows.start, rows.stop, band_rows):
            yield matrix[start : min(start + band_rows, rows.stop)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


def _tokenizer() -> Tokenizer:
    """A token a byte: enough for the daemon to take text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def write_checkpoint(folder: Path, config: Mapping[str, Any]) -> None:
    """A checkpoint folder without weights: RandomWeights draws them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")
    (folder / "tokenizer.json").write_text(_tokenizer().to_str())
    (folder / "tokenizer_config.json").write_text("{}\n")


def default_folder() -> Path:
    """$COLIBRI_BENCH_DIR, else a folder in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("COLIBRI_BENCH_DIR") or f"{cache}/colibri-bench").expanduser()


def model_stem(shape: Shape, n_layers: int | None) -> str:
    return f"{shape.name}-{n_layers or shape.n_layers}"


def make_model(
    name: str,
    quantize: str = "q8",
    *,
    n_layers: int | None = None,
    fused: bool = True,
    folder: Path | None = None,
) -> Path:
    """The .colibri of a shape, made if it is not in the folder yet. Its name has shape, depth and format.
    `fused`: q, k and v as one matrix, as convert() makes them.
    """
    shape, folder = SHAPES[name], folder or default_folder()
    out = folder / f"{model_stem(shape, n_layers)}-{quantize}{'' if fused else '-apart'}.colibri"
    if not out.exists():
        checkpoint = folder / model_stem(shape, n_layers)
        write_checkpoint(checkpoint, full_config(shape, n_layers))
        convert(checkpoint, out, quantize=quantize, flash_attn_compatible=fused, open_weights=RandomWeights)
    return out


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(SHAPES)))
@click.option("--quantize", default="q8", show_default=True, help="A format of colibrictl convert.")
@click.option("--gguf", "gguf_type", help="Make a GGUF instead: q8_0, q4_0 or f16.")
@click.option("--as", "arch", help="Architecture that the GGUF is said to be, qwen3moe for a reader without OLMoE.")
@click.option("--layers", type=click.IntRange(min=1), help="Depth. [default: the shape's own]")
@click.option("--folder", type=click.Path(path_type=Path), help="[default: $COLIBRI_BENCH_DIR]")
def main(
    names: tuple[str, ...],
    quantize: str,
    gguf_type: str | None,
    arch: str | None,
    layers: int | None,
    folder: Path | None,
) -> None:
    """Make models of the given shapes, and print their paths."""
    for name in names:
        if gguf_type is None:
            click.echo(str(make_model(name, quantize, n_layers=layers, folder=folder)))
        else:
            from .gguf_model import make_gguf  # needs the extra `bench`

            click.echo(str(make_gguf(name, gguf_type, n_layers=layers, folder=folder, arch=arch)))


if __name__ == "__main__":
    main()
