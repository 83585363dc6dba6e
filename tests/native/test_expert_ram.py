"""Experts in a fixed amount of memory: what is kept and read there, and that nobody sees it in the results."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from colibri.native import ROW_LOGITS, Batch, Context, InvalidArgument, IOFailure, Model
from support.models import SPARSE, blocks_in_memory, drop

TOP_K = SPARSE.config["num_experts_per_tok"]
N_BLOCKS = SPARSE.n_layers * SPARSE.config["num_experts"]
RANDOM = np.random.default_rng(3)
TOKENS = RANDOM.integers(SPARSE.config["vocab_size"], size=90).tolist()


def open_context(model: Model, slots: int = 0, **options: int) -> Context:
    return Context(model, n_pages=3, max_context=96, expert_ram_bytes=slots * slot_bytes(model), **options)


def slot_bytes(model: Model) -> int:
    with Context(model, n_pages=1, max_rows=1, expert_ram_bytes=1 << 40) as context:
        return context.expert_stats().slot_bytes


def run(context: Context, tokens: list[int], begin: int = 0) -> bytes:
    """Logits of the last of the tokens, which stand from `begin` on."""
    n, positions = len(tokens), list(range(begin, begin + len(tokens)))
    flags = [0] * (n - 1) + [ROW_LOGITS]
    context.forward(Batch(tokens, positions, [0] * n, flags, [list(range(-(-(begin + n) // 32)))]))
    return context.logits(0).tobytes()


def one_by_one(context: Context) -> list[bytes]:
    return [run(context, [token], position) for position, token in enumerate(TOKENS)]


@pytest.mark.parametrize("slots", [TOP_K, 9, 40, N_BLOCKS])
def test_the_budget_does_not_change_a_bit(sparse_model_path: Path, slots: int) -> None:
    with Model(sparse_model_path) as model, open_context(model) as mapped, open_context(model, slots) as limited:
        assert run(limited, TOKENS[:70]) == run(mapped, TOKENS[:70])
        assert one_by_one(limited) == one_by_one(mapped)
        assert limited.expert_stats().slots_used <= limited.expert_stats().slots == slots


def test_residency_stays_within_the_budget(sparse_model_path: Path) -> None:
    with Model(sparse_model_path) as model, open_context(model) as mapped:
        before = anonymous_bytes()
        one_by_one(mapped)
        without = anonymous_bytes() - before
    drop(sparse_model_path)
    with Model(sparse_model_path) as model, open_context(model, 20) as context:
        before = anonymous_bytes()
        one_by_one(context)
        budget = 20 * slot_bytes(model)
        stats = context.expert_stats()
        assert stats.slots_used == 20
        assert stats.bytes_read > 2 * budget
        # The budget is 8 MiB, all experts are 27; huge pages make what is touched besides vary by some.
        assert anonymous_bytes() - before < without + budget + (4 << 20)
        assert blocks_in_memory(sparse_model_path, model) == {}, "the page cache holds experts as well"


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")))


def test_what_fits_is_read_once(sparse_model_path: Path) -> None:
    with Model(sparse_model_path) as model, open_context(model, N_BLOCKS) as context:
        one_by_one(context)
        first = context.expert_stats()
        one_by_one(context)
        again = context.expert_stats()
        assert again.bytes_read <= N_BLOCKS * first.slot_bytes
        assert again.misses == first.misses
        assert again.hits - first.hits == len(TOKENS) * SPARSE.n_layers * TOP_K


def test_what_is_used_often_stays(sparse_model_path: Path) -> None:
    """One token again and again, between others: its experts stay, though they are not the latest used."""
    with Model(sparse_model_path) as model, open_context(model, 24) as context:
        misses = 0
        for position in range(90):
            before = context.expert_stats().misses
            run(context, [TOKENS[position] if position % 6 == 5 else 7], position)
            misses += (context.expert_stats().misses - before) * (position % 6 != 5 and position > 30)
        stats = context.expert_stats()
        assert misses < stats.misses / 2


def test_experts_are_read_before_they_are_routed_to(sparse_model_path: Path) -> None:
    with Model(sparse_model_path) as model, open_context(model, N_BLOCKS // 2) as context:
        for _ in range(4):
            run(context, TOKENS)  # every expert of a layer is needed, so the next layer's are foreseen
        stats = context.expert_stats()
        assert 0 < stats.read_ahead_used <= stats.read_ahead


def test_the_next_layers_router_is_asked_early(sparse_model_path: Path) -> None:
    with Model(sparse_model_path) as model, open_context(model, 16) as context:
        for token in TOKENS:
            run(context, [token])  # each alone, so that nothing is known of the last one
        stats = context.expert_stats()
        assert stats.read_ahead_used > 0
        assert stats.hits + stats.misses == len(TOKENS) * SPARSE.n_layers * TOP_K


def test_less_than_a_token_needs_is_refused_with_what_would_do(sparse_model_path: Path) -> None:
    with Model(sparse_model_path) as model:
        least = TOP_K * slot_bytes(model)
        with pytest.raises(InvalidArgument, match=f"give at least {least}"):
            Context(model, n_pages=1, expert_ram_bytes=least - 1)


def test_memory_for_experts_counts_as_the_contexts(sparse_model_path: Path) -> None:
    with Model(sparse_model_path) as model, open_context(model) as mapped, open_context(model, 8) as limited:
        assert 0 <= limited.memory_bytes - mapped.memory_bytes - 8 * slot_bytes(model) < 1 << 16
        assert mapped.expert_stats().slots == 0


def test_a_file_that_is_cut_ends_in_an_error(sparse_model_path: Path, tmp_path: Path) -> None:
    copies = [tmp_path / file.name for file in sparse_model_path.parent.glob("m.colibri*")]
    for copy in copies:
        copy.write_bytes((sparse_model_path.parent / copy.name).read_bytes())
    with (
        Model(tmp_path / sparse_model_path.name, weights="read-trunk") as model,
        open_context(model, TOP_K, max_rows=8) as context,
    ):
        for copy in copies:
            os.truncate(copy, 65536)
        with pytest.raises(IOFailure, match="was cut"):
            run(context, TOKENS[:8])


def test_a_context_may_be_closed_while_it_reads_ahead(sparse_model_path: Path) -> None:
    for _ in range(20):
        with Model(sparse_model_path) as model, open_context(model, 24) as context:
            run(context, TOKENS[:3])
