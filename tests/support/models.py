"""Random models for tests, larger than tests/data's: enough pages that bytes read say something."""

from __future__ import annotations

from pathlib import Path

import pytest

from colibri.bench.models import SHAPES, RandomWeights, Shape, full_config, write_checkpoint
from colibri.bench.page_cache import PAGE_BYTES, evict, resident_pages
from colibri.convert import convert
from colibri.convert.inspection import ModelFile
from colibri.native import Model

# 64 experts of 432 KB, of which 2 of 16 are used in a layer.
SPARSE = Shape(
    "sparse",
    4,
    {
        **SHAPES["olmoe"].config,
        "hidden_size": 256,
        "vocab_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "intermediate_size": 512,
    },
)


def make_sparse_model(folder: Path, *, shards: int = 1) -> Path:
    """The model file of SPARSE."""
    write_checkpoint(folder / "source", full_config(SPARSE))
    convert(folder / "source", folder / "m.colibri", expert_shards=shards, open_weights=RandomWeights)
    return folder / "m.colibri"


def drop(path: Path) -> None:
    if not all(evict(file) for file in path.parent.glob(f"{path.name}*")):
        pytest.skip("this file system keeps the file in memory")


def blocks_in_memory(path: Path, model: Model) -> dict[tuple[int, int], float]:
    """(layer, expert) → which share of its pages is in memory, for those of which any is."""
    with ModelFile(path) as file:
        stride, n_bytes, offset = (file[name] for name in ("expert_stride", "expert_bytes", "expert_offset"))
    n_experts, n_shards, found = model.info.n_experts, model.info.n_shards, {}
    for number, file_path in enumerate(model.shards or [path]):
        pages = resident_pages(file_path)
        first, end = (n * n_experts // n_shards for n in (number, number + 1))
        for block in range(model.info.n_layers * (end - first)):
            begin = (offset if n_shards == 1 else 65536) + block * stride
            share = pages[begin // PAGE_BYTES : -(-(begin + n_bytes) // PAGE_BYTES)].mean()
            if share:
                found[block // (end - first), first + block % (end - first)] = float(share)
    return found
