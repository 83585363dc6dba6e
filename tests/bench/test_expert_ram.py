"""The program that measures experts in a budget: what it counts. How long that takes is not judged."""

from __future__ import annotations

from pathlib import Path

import pytest

from colibri.bench.expert_ram import STREAMS, line, measure
from support.models import SPARSE, make_sparse_model

SLOT_BYTES = 417792


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sparse_model(tmp_path_factory.mktemp("sparse"))


@pytest.mark.parametrize("stream", STREAMS)
def test_what_is_missed_was_read_and_what_fits_is_not_missed(path: Path, stream: str) -> None:
    n_blocks = SPARSE.n_layers * SPARSE.config["num_experts"]
    runs = measure(path, 20 * SLOT_BYTES, stream=stream, steps=20, warm_steps=4, repeats=2)
    assert all(0 < run.hit_rate < 1 and run.missed_bytes <= run.read_bytes + 2 * SLOT_BYTES for run in runs)
    assert all(0 < run.bound_s <= run.serial_s and run.disk > 0 for run in runs)
    everything = measure(path, n_blocks * SLOT_BYTES, stream=stream, steps=20, warm_steps=300, repeats=1)
    assert everything[0].hit_rate > 0.95
    assert f"{stream}, 0.01 GiB" in line("sparse", runs)
