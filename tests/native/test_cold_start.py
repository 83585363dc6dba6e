"""What is read of a model file, counted in pages that are in the page cache. No time is judged."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from colibri.bench.cold_start import cold_start
from colibri.bench.models import RandomWeights, full_config, write_checkpoint
from colibri.bench.page_cache import PAGE_BYTES, evict, resident_pages
from colibri.convert import convert
from colibri.convert.inspection import ModelFile
from colibri.native import ROW_LOGITS, Batch, Context, InvalidArgument, Model
from support.models import SPARSE


@pytest.fixture(scope="module", params=[1, 3], ids=["one file", "shards"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cold")
    write_checkpoint(folder / "source", full_config(SPARSE))
    convert(folder / "source", folder / "m.colibri", expert_shards=request.param, open_weights=RandomWeights)
    return folder / "m.colibri"


def drop(path: Path) -> None:
    if not all(evict(file) for file in path.parent.glob(f"{path.name}*")):
        pytest.skip("this file system keeps the file in memory")


def one_token(model: Model) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    """Logits of a token, and where it was routed to: [n_layers, top_k]."""
    with Context(model, n_pages=1, max_rows=1, max_logits=1, max_context=32) as context:
        result = context.forward(Batch([7], [0], [0], [ROW_LOGITS], [[0]], want_routing=True))
        assert result.routing is not None
        return result.routing[0]


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


def test_the_first_token_reads_the_experts_it_is_routed_to_whole_and_no_others(path: Path) -> None:
    drop(path)
    with Model(path) as model:
        routing = one_token(model)
        routed = {(layer, int(expert)) for layer, row in enumerate(routing) for expert in row}
        assert blocks_in_memory(path, model) == dict.fromkeys(routed, 1.0)


def test_opening_touches_header_and_tables_only(path: Path) -> None:
    drop(path)
    with ModelFile(path) as file:
        first_tensor = min(int(entry["offset"]) for entry in file.tensors)
    drop(path)
    with Model(path) as model:
        pages = resident_pages(path)
        assert pages.any()
        assert not pages[-(-first_tensor // PAGE_BYTES) :].any()
        assert blocks_in_memory(path, model) == {}


def test_what_is_read_until_the_first_token_is_what_it_needs(path: Path) -> None:
    if len(list(path.parent.glob("m.colibri*"))) > 1:
        pytest.skip("counts one file")
    drop(path)
    run = cold_start(path, token=7, threads=1)
    assert 1 <= run.bytes_ratio <= 1.05
    assert run.resident_after_open < 0.01


@pytest.mark.parametrize("weights", ["read", "read-trunk"])
def test_weights_that_are_read_give_the_same_bits(path: Path, weights: str) -> None:
    logits = []
    for how in ("map", weights):
        with Model(path, weights=how) as model, Context(model, n_pages=2, max_context=64) as context:
            tokens = list(range(40))
            context.forward(Batch(tokens, tokens, [0] * 40, [0] * 39 + [ROW_LOGITS], [[0, 1]]))
            logits.append(context.logits(0).tobytes())
            model.verify()
    assert logits[0] == logits[1]


def test_weights_that_are_read_stay_in_memory_when_the_file_is_cut(path: Path, tmp_path: Path) -> None:
    copies = {file: tmp_path / file.name for file in path.parent.glob("m.colibri*")}
    for file, copy in copies.items():
        copy.write_bytes(file.read_bytes())
    with Model(tmp_path / path.name, weights="read") as model:
        for copy in copies.values():
            os.truncate(copy, 4096)
        one_token(model)
        model.verify()


def test_an_unknown_way_to_have_weights_is_refused(path: Path) -> None:
    with pytest.raises(InvalidArgument, match="'fetch' is none of map, read"):
        Model(path, weights="fetch")
