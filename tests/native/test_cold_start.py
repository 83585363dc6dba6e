"""What is read of a model file, counted in pages that are in the page cache. No time is judged."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from colibri.bench.cold_start import cold_start
from colibri.bench.page_cache import PAGE_BYTES, resident_pages
from colibri.convert.inspection import ModelFile
from colibri.native import ROW_LOGITS, Batch, Context, InvalidArgument, Model
from support.models import blocks_in_memory, drop


def one_token(model: Model) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    """Logits of a token, and where it was routed to: [n_layers, top_k]."""
    with Context(model, n_pages=1, max_rows=1, max_logits=1, max_context=32) as context:
        result = context.forward(Batch([7], [0], [0], [ROW_LOGITS], [[0]], want_routing=True))
        assert result.routing is not None
        return result.routing[0]


def test_the_first_token_reads_the_experts_it_is_routed_to_whole_and_no_others(sparse_model_path: Path) -> None:
    drop(sparse_model_path)
    with Model(sparse_model_path) as model:
        routing = one_token(model)
        routed = {(layer, int(expert)) for layer, row in enumerate(routing) for expert in row}
        assert blocks_in_memory(sparse_model_path, model) == dict.fromkeys(routed, 1.0)


def test_opening_touches_header_and_tables_only(sparse_model_path: Path) -> None:
    drop(sparse_model_path)
    with ModelFile(sparse_model_path) as file:
        first_tensor = min(int(entry["offset"]) for entry in file.tensors)
    drop(sparse_model_path)
    with Model(sparse_model_path) as model:
        pages = resident_pages(sparse_model_path)
        assert pages.any()
        assert not pages[-(-first_tensor // PAGE_BYTES) :].any()
        assert blocks_in_memory(sparse_model_path, model) == {}


@pytest.mark.parametrize("sparse_model_path", [1], ids=["one file"], indirect=True)  # it counts one
def test_what_is_read_until_the_first_token_is_what_it_needs(sparse_model_path: Path) -> None:
    drop(sparse_model_path)
    run = cold_start(sparse_model_path, token=7, threads=1)
    assert 1 <= run.bytes_ratio <= 1.05
    assert run.resident_after_open < 0.01


@pytest.mark.parametrize("weights", ["read", "read-trunk"])
def test_weights_that_are_read_give_the_same_bits(sparse_model_path: Path, weights: str) -> None:
    logits = []
    for how in ("map", weights):
        with Model(sparse_model_path, weights=how) as model, Context(model, n_pages=2, max_context=64) as context:
            tokens = list(range(40))
            context.forward(Batch(tokens, tokens, [0] * 40, [0] * 39 + [ROW_LOGITS], [[0, 1]]))
            logits.append(context.logits(0).tobytes())
            model.verify()
    assert logits[0] == logits[1]


def test_weights_that_are_read_stay_in_memory_when_the_file_is_cut(sparse_model_path: Path, tmp_path: Path) -> None:
    copies = {file: tmp_path / file.name for file in sparse_model_path.parent.glob("m.colibri*")}
    for file, copy in copies.items():
        copy.write_bytes(file.read_bytes())
    with Model(tmp_path / sparse_model_path.name, weights="read") as model:
        for copy in copies.values():
            os.truncate(copy, 4096)
        one_token(model)
        model.verify()


def test_an_unknown_way_to_have_weights_is_refused(sparse_model_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="'fetch' is none of map, read"):
        Model(sparse_model_path, weights="fetch")
