"""The writer thread: bounded, never waited for, one outcome for every page it took."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from colibri.daemon.kv_types import PageWrite
from colibri.daemon.page_writer import RETRY_AFTER_S, PageWriter
from support.fake_engine import MemoryPageStore

PATIENCE_S = 60


def page(number: int, n_bytes: int = 100) -> PageWrite:
    return PageWrite(number.to_bytes(16, "big"), bytes(16), (number,), 0, bytes(n_bytes))


class GatedStore(MemoryPageStore):
    """Writes only while the gate is open, and remembers what came together."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.writing = threading.Event()
        self.batches: list[int] = []

    def write(self, pages: Any) -> None:
        self.writing.set()
        assert self.gate.wait(PATIENCE_S)
        self.batches.append(len(pages))
        super().write(pages)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store() -> GatedStore:
    return GatedStore()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def writer(store: GatedStore, clock: Clock) -> Iterator[PageWriter[str]]:
    writer: PageWriter[str] = PageWriter(store, max_queue_bytes=300, clock=clock)
    yield writer
    store.gate.set()
    writer.close(deadline=PATIENCE_S)


def flush(writer: PageWriter[str]) -> None:
    assert writer.flush(deadline=PATIENCE_S)


def test_what_is_being_written_counts_until_it_is_written(writer: PageWriter[str], store: GatedStore) -> None:
    assert writer.offer("a", page(1))
    assert store.writing.wait(PATIENCE_S)
    assert writer.offer("b", page(2))
    assert writer.offer("c", page(3))
    assert not writer.offer("d", page(4))
    assert (writer.n_queued, writer.queued_bytes) == (3, 300)
    store.gate.set()
    flush(writer)
    assert (writer.n_queued, writer.queued_bytes) == (0, 0)
    assert writer.offer("d", page(4))


def test_what_waits_is_written_together(writer: PageWriter[str], store: GatedStore) -> None:
    writer.offer("a", page(1))
    assert store.writing.wait(PATIENCE_S)
    writer.offer("b", page(2))
    writer.offer("c", page(3))
    store.gate.set()
    flush(writer)
    assert store.batches == [1, 2]


def test_a_page_larger_than_the_queue_is_taken_when_that_is_empty(writer: PageWriter[str], store: GatedStore) -> None:
    assert writer.offer("a", page(1, 1000))
    assert not writer.offer("b", page(2, 1))


def test_every_page_taken_has_one_outcome(writer: PageWriter[str], store: GatedStore, clock: Clock) -> None:
    store.gate.set()
    store.fail_writes = True
    assert writer.offer("a", page(1))
    flush(writer)
    store.fail_writes = False
    clock.now = RETRY_AFTER_S
    assert writer.offer("b", page(2))
    flush(writer)
    assert writer.is_busy
    assert writer.outcomes() == [("a", False), ("b", True)]
    assert not writer.is_busy
    assert (writer.n_written, writer.n_failed) == (1, 1)


def test_after_a_failure_nothing_is_taken_for_a_while(writer: PageWriter[str], store: GatedStore, clock: Clock) -> None:
    store.gate.set()
    store.fail_writes = True
    writer.offer("a", page(1))
    flush(writer)
    assert not writer.offer("b", page(2))
    assert not writer.wait_for_room(1, deadline=PATIENCE_S)  # at once
    clock.now = RETRY_AFTER_S
    assert writer.has_room(1)


def test_closing_writes_what_was_taken(store: GatedStore) -> None:
    writer: PageWriter[str] = PageWriter(store, max_queue_bytes=300)
    for number in range(3):
        assert writer.offer("x", page(number))
    store.gate.set()
    writer.close(deadline=time.monotonic() + PATIENCE_S)
    assert len(store.pages) == 3
    assert not writer.offer("late", page(9))
