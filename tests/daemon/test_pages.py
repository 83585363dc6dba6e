"""The page table: conservation, sharing, what is found again, what is evicted, what is written behind."""

from __future__ import annotations

import ast
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from colibri.daemon import page_writer, pages, scheduler
from colibri.daemon.kv_types import PAGE_TOKENS, Batch
from colibri.daemon.pages import PageTable, SequencePages, common_length, numerics_key, page_id
from support.fake_engine import FakeEngine, MemoryPageStore
from support.scheduler_rig import KEY, tokens_of


def table_of(n_pages: int = 8, store: MemoryPageStore | None = None, **options: Any) -> PageTable:
    engine = FakeEngine(n_pages=n_pages)
    table = PageTable(engine, n_pages=n_pages, key=KEY, store=store, **options)
    engine.is_immutable = table.is_immutable
    return table


def acquire(table: PageTable, tokens: list[int]) -> SequencePages:
    sequence = table.acquire(array("i", tokens), len(tokens) - 1)
    while not table.restore(sequence, 1):
        pass
    return sequence


def compute(table: PageTable, sequence: SequencePages, n_tokens: int) -> None:
    """Lets the engine write positions up to n_tokens, as the scheduler would."""
    assert table.reserve(sequence, n_tokens)
    if n_tokens == sequence.n_tokens:
        return
    new = range(sequence.n_tokens, n_tokens)
    batch = Batch(page_tables=[sequence.pages])
    batch.tokens.extend(sequence.tokens[new.start : new.stop])
    batch.positions.extend(new)
    batch.sequences.extend(0 for _ in new)
    batch.flags.extend(0 for _ in new)
    table._pool.forward(batch)  # type: ignore[attr-defined]
    table.commit(sequence, n_tokens)


def keep(table: PageTable, tokens: list[int]) -> None:
    """Computes a sequence and leaves it in the cache."""
    sequence = acquire(table, tokens)
    compute(table, sequence, len(tokens))
    table.release(sequence)
    table.check_integrity()


def found(table: PageTable, tokens: list[int]) -> int:
    """How many leading tokens the cache has."""
    sequence = acquire(table, tokens)
    n = sequence.n_tokens
    table.release(sequence)
    table.check_integrity()
    return n


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change", [{"fingerprint": b"b"}, {"kv_format": "f32"}, {"version": 2}, {"window": 512}, {"routing": "static"}]
)
def test_everything_that_decides_the_bits_is_in_the_key(change: dict[str, Any]) -> None:
    base: dict[str, Any] = {"fingerprint": b"a", "kv_format": "f16", "version": 1}
    assert numerics_key(**base) == numerics_key(**base)
    assert numerics_key(**base) != numerics_key(**(base | change))


def test_an_id_depends_on_key_parent_and_every_token() -> None:
    tokens = list(range(32))
    ids = {page_id(KEY, b"p" * 16, tokens), page_id(b"k" * 16, b"p" * 16, tokens), page_id(KEY, b"q" * 16, tokens)}
    ids |= {page_id(KEY, b"p" * 16, [*tokens[:i], 99, *tokens[i + 1 :]]) for i in range(32)}
    assert len(ids) == 35
    assert all(len(id) == 16 for id in ids)


def test_an_id_is_the_same_on_every_machine() -> None:
    """Ids are on disks: a change here makes every stored page useless."""
    assert page_id(b"k" * 16, b"p" * 16, [1, 2, 70000]).hex() == "ef63c4ec6bde669d34c10477ad3271a3"


def test_the_common_length_counts_from_the_beginning() -> None:
    assert common_length([1, 2, 3], (1, 2, 4)) == 2
    assert common_length([1], [1, 2]) == 1
    assert common_length([], [1]) == 0


@pytest.mark.parametrize("module", [pages, page_writer, scheduler])
def test_page_table_and_scheduler_need_neither_asyncio_nor_the_engine(module: Any) -> None:
    tree = ast.parse(Path(module.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not names & {"asyncio", "cffi", "colibri.native"}


# -- finding ---------------------------------------------------------------------------------------------------------


def test_an_empty_table_finds_nothing() -> None:
    assert found(table_of(), tokens_of(1, 100)) == 0


def test_at_least_one_token_is_left_to_compute() -> None:
    table = table_of()
    keep(table, tokens_of(1, 64))
    for n in (1, 31, 32, 33, 63, 64):
        assert found(table, tokens_of(1, n)) == n - 1


def test_a_full_page_is_shared_and_a_tail_is_copied() -> None:
    table = table_of()
    keep(table, tokens_of(1, 40))
    first, second = acquire(table, tokens_of(1, 50)), acquire(table, tokens_of(1, 60))
    assert first.n_tokens == second.n_tokens == 40
    assert first.pages[0] == second.pages[0]
    assert first.pages[1] != second.pages[1]
    assert table.is_immutable(first.pages[0])
    assert not table.is_immutable(first.pages[1])


def test_a_page_computed_twice_is_kept_once() -> None:
    table = table_of()
    first, second = (table.acquire(array("i", tokens_of(1, 70)), 0) for _ in range(2))
    for sequence in (first, second):
        compute(table, sequence, 70)
    table.check_integrity()
    assert first.pages[:2] == second.pages[:2]
    assert first.pages[2] != second.pages[2]
    assert table.stats()["active"] == 4


def test_a_page_that_another_is_about_to_compute_is_waited_for() -> None:
    table = table_of()
    first = acquire(table, tokens_of(1, 100))
    second = table.acquire(array("i", tokens_of(1, 70)), 69)
    for n_computed, n_found in ((0, 0), (20, 0), (40, 32), (64, 64)):
        compute(table, first, n_computed)
        assert table.restore(second, 9) == (n_found == 64)
        assert second.n_tokens == n_found


def test_nobody_waits_for_a_sequence_that_left() -> None:
    table = table_of()
    first = acquire(table, tokens_of(1, 100))
    compute(table, first, 20)
    second = table.acquire(array("i", tokens_of(1, 70)), 69)
    assert not table.restore(second, 9)
    table.release(first)
    assert table.restore(second, 9)
    assert second.n_tokens == 20


def test_a_longer_tail_takes_the_place_of_a_shorter_one() -> None:
    table = table_of()
    for n in (33, 40, 50):
        keep(table, tokens_of(1, n))
    assert table.stats()["cached"] == 2
    keep(table, tokens_of(1, 45))
    assert table.stats()["cached"] == 2
    keep(table, tokens_of(1, 64))
    assert table.stats()["cached"] == 2
    assert found(table, tokens_of(1, 64)) == 63


def test_tails_that_differ_live_side_by_side() -> None:
    table = table_of()
    trunk = tokens_of(1, 32)
    keep(table, [*trunk, 1, 2, 3])
    keep(table, [*trunk, 1, 5])
    assert found(table, [*trunk, 1, 2, 3, 9]) == 35
    assert found(table, [*trunk, 1, 5, 9]) == 34


def test_of_several_beginnings_the_longest_is_copied() -> None:
    table = table_of()
    trunk = tokens_of(1, 32)
    for tail in ([1, 2, 8], [1, 2, 3, 4, 8], [1, 2, 3, 8]):
        keep(table, [*trunk, *tail])
    assert found(table, [*trunk, 1, 2, 3, 4, 5, 6]) == 36


def test_the_store_is_asked_for_a_longer_beginning_than_ram_has() -> None:
    store = MemoryPageStore()
    table = table_of(store=store)
    keep(table, tokens_of(1, 60))
    assert table.close(timeout_s=10)
    table = table_of(store=store)
    keep(table, [*tokens_of(1, 40), 5])
    assert table.counters.disk_hits == 2  # the full page, and the first 40 - 32 of the tail
    assert found(table, tokens_of(1, 70)) == 60


def test_a_score_takes_nothing_from_the_cache() -> None:
    table = table_of()
    keep(table, tokens_of(1, 64))
    sequence = table.acquire(array("i", tokens_of(1, 64)), 0)
    assert table.restore(sequence, 1)
    assert sequence.n_tokens == 0
    assert len(sequence.pages) == 0


# -- eviction --------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_goes_first_and_its_end_before_its_beginning() -> None:
    table = table_of(8)
    for seed in (1, 2):
        keep(table, tokens_of(seed, 128))
    assert found(table, tokens_of(1, 128)) == 127  # used again
    keep(table, tokens_of(3, 64))
    assert found(table, tokens_of(2, 128)) == 64
    assert found(table, tokens_of(1, 128)) >= 96


def test_pages_in_use_are_never_taken() -> None:
    table = table_of(4)
    sequence = acquire(table, tokens_of(1, 96))
    compute(table, sequence, 96)
    other = acquire(table, tokens_of(2, 64))
    assert not table.reserve(other, 64)
    assert len(other.pages) == 1
    table.check_integrity()
    table.release(other)
    table.release(sequence)
    assert table.n_available == 4


def test_a_tail_is_not_evicted_to_be_copied_into_its_own_page() -> None:
    table = table_of(2)
    keep(table, tokens_of(1, 40))
    assert found(table, tokens_of(1, 50)) == 32
    table = table_of(3)
    keep(table, tokens_of(1, 40))
    assert found(table, tokens_of(1, 50)) == 40


def test_a_beginning_that_was_evicted_for_a_damaged_page_is_not_copied() -> None:
    store = MemoryPageStore()
    table = table_of(1, store)
    keep(table, [1, 2, 3, 4, 5])
    assert table.close(timeout_s=10)
    table = table_of(1, store)
    store.fail_reads = True
    keep(table, [1, 2, 3, 9])
    store.fail_reads = False
    store.corrupt(0)
    assert found(table, [1, 2, 3, 4, 5, 6]) == 0
    assert table.counters.bad == 1


# -- writing behind --------------------------------------------------------------------------------------------------


def test_full_pages_are_written_behind_and_tails_when_asked() -> None:
    store = MemoryPageStore()
    table = table_of(store=store)
    keep(table, tokens_of(1, 70))
    table.write_behind()
    assert table.flush(timeout_s=10)
    assert sorted(len(meta.tokens) for meta, _ in store.pages.values()) == [32, 32]
    table.write_behind(tails=True)
    assert table.flush(timeout_s=10)
    assert sorted(len(meta.tokens) for meta, _ in store.pages.values()) == [6, 32, 32]
    assert not table.has_unsaved


def test_a_full_page_is_written_once() -> None:
    store = MemoryPageStore()
    for _ in range(2):
        table = table_of(store=store)
        for _ in range(2):
            keep(table, tokens_of(1, 70))
        assert table.close(timeout_s=10)
    full = [meta.number for meta, _ in store.pages.values() if len(meta.tokens) == PAGE_TOKENS]
    assert sorted(full) == [1, 2]  # the numbers of their first writing


def test_the_queue_is_bounded_in_bytes_and_a_full_one_drops_on_eviction() -> None:
    store = MemoryPageStore()
    table = table_of(8, store, write_queue_bytes=3 * table_of().page_bytes)
    with table._writer._changed:  # type: ignore[union-attr]  # the writer sleeps
        keep(table, tokens_of(1, 256))
        table.write_behind()
        assert table.stats()["write_queue"] == 3
        assert table.stats()["write_queue_bytes"] == 3 * table.page_bytes
        keep(table, tokens_of(2, 256))
        assert table.counters.evicted == 8
        assert table.counters.dropped == 5
    assert table.close(timeout_s=10)
    assert len(store.pages) == 3 + 8


def test_a_failed_write_is_tried_again_after_a_while() -> None:
    store = MemoryPageStore()
    store.fail_writes = True
    table = table_of(store=store)
    now = 0.0
    table._writer._clock = lambda: now  # type: ignore[union-attr]
    keep(table, tokens_of(1, 64))
    table.write_behind()
    assert table.flush(timeout_s=10)
    store.fail_writes = False
    table.write_behind()
    assert table.flush(timeout_s=10)
    assert store.pages == {}
    assert table.stats()["write_failures"] == 2
    now = page_writer.RETRY_AFTER_S
    table.write_behind()
    assert table.flush(timeout_s=10)
    assert len(store.pages) == 2


def test_closing_does_not_wait_for_a_store_that_fails() -> None:
    store = MemoryPageStore()
    store.fail_writes = True
    table = table_of(store=store)
    keep(table, tokens_of(1, 64))
    assert not table.close(timeout_s=1e6)


# -- the law ---------------------------------------------------------------------------------------------------------


class PageTableMachine(RuleBasedStateMachine):
    """Any order of events keeps the law of conservation, and every page holds what its tokens say."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryPageStore()
        self.live: list[SequencePages] = []
        self.restart()

    def restart(self) -> None:
        self.engine = FakeEngine(n_pages=10)
        self.table = PageTable(
            self.engine, n_pages=10, key=KEY, store=self.store, write_queue_bytes=4 * self.engine.page_bytes
        )
        self.engine.is_immutable = self.table.is_immutable
        self.live = []

    @rule(seed=st.integers(1, 2), n=st.integers(1, 150), turn=st.integers(0, 149), limited=st.booleans())
    def arrive(self, seed: int, n: int, turn: int, limited: bool) -> None:
        tokens = tokens_of(seed, n)
        if turn < n:
            tokens[turn] = 999
        self.live.append(self.table.acquire(array("i", tokens), 0 if limited else n - 1))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), n=st.integers(1, 100))
    def go_on(self, data: st.DataObject, n: int) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        self.table.restore(sequence, 1 + n % 3)
        end = min(len(sequence.tokens), sequence.n_tokens + n)
        if self.table.reserve(sequence, end):
            compute(self.table, sequence, end)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 3))
    def grow(self, data: st.DataObject, token: int) -> None:
        data.draw(st.sampled_from(self.live)).tokens.append(token)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        self.live.remove(sequence)
        self.table.release(sequence)

    @rule(tails=st.booleans())
    def write(self, tails: bool) -> None:
        self.table.write_behind(tails=tails)
        assert self.table.flush(timeout_s=10)

    @rule(reads=st.booleans(), writes=st.booleans())
    def break_or_mend_the_store(self, reads: bool, writes: bool) -> None:
        self.store.fail_reads, self.store.fail_writes = reads, writes

    @precondition(lambda self: self.store.pages)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        self.store.corrupt(data.draw(st.integers(0, len(self.store.pages) - 1)))

    @rule()
    def die_and_come_back(self) -> None:
        self.restart()

    @invariant()
    def the_law_holds(self) -> None:
        self.table.check_integrity()

    @invariant()
    def every_sequence_finds_its_own_tokens(self) -> None:
        for sequence in self.live:
            truth = FakeEngine(n_pages=len(sequence.pages) + 1)
            batch = Batch(page_tables=[array("i", range(truth.n_pages))])
            n = sequence.n_tokens
            batch.tokens.extend(sequence.tokens[:n])
            batch.positions.extend(range(n))
            batch.sequences.extend([0] * n)
            batch.flags.extend([0] * n)
            if n:
                truth.forward(batch)
            own = [self.engine.lane(sequence.pages[p // PAGE_TOKENS], p % PAGE_TOKENS) for p in range(n)]
            assert own == [truth.lane(p // PAGE_TOKENS, p % PAGE_TOKENS) for p in range(n)]

    def teardown(self) -> None:
        self.table.close(timeout_s=10)


PageTableMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_any_order_of_events_keeps_the_law = PageTableMachine.TestCase
