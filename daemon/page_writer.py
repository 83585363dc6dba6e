"""The writer thread behind the page table: pages leave for the store through a bounded queue.

Writing is a favour to the future and never a duty to the present: `offer` refuses when the queue is full or the store
failed a moment ago, and whoever offers goes on at once. The queue is bounded in bytes, and what the thread is writing
counts until it is written. Outcomes come back through `outcomes`, on the thread that asks.

Law: every page offered and accepted has exactly one outcome.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from colibri.daemon.kv_types import PageStore, PageWrite

log = logging.getLogger(__name__)

Owner = TypeVar("Owner")

# A batch is one atomic write: large enough that the store is not asked for every page, small enough to be soon durable.
BATCH_BYTES = 16 << 20
# After a failed write the store (a full disk, most likely) is left alone for so long; then the next page tries it
# again.
RETRY_AFTER_S = 1.0


class PageWriter(Generic[Owner]):
    """Writes pages on its own thread. Everything public belongs to one other thread."""

    def __init__(self, store: PageStore, *, max_queue_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._max_queue_bytes = max_queue_bytes
        self._clock = clock
        self._changed = threading.Condition()
        self._queue: deque[tuple[Owner, PageWrite]] = deque()
        self._outcomes: deque[tuple[Owner, bool]] = deque()
        self._queued_bytes = 0  # waiting or being written
        self._n_queued = 0
        self._suspended_until = float("-inf")
        self._closing = False
        self.n_written = 0
        self.n_failed = 0
        self._thread = threading.Thread(target=self._run, name="colibri-page-writer", daemon=True)
        self._thread.start()

    @property
    def n_queued(self) -> int:
        """Pages accepted and not yet written."""
        return self._n_queued

    @property
    def queued_bytes(self) -> int:
        return self._queued_bytes

    @property
    def is_busy(self) -> bool:
        """Whether an outcome is outstanding or not yet taken."""
        return self._n_queued > 0 or bool(self._outcomes)

    def has_room(self, n_bytes: int) -> bool:
        """Whether a page of `n_bytes` would be accepted now. One page is always allowed into an empty queue."""
        fits = self._queued_bytes + n_bytes <= self._max_queue_bytes or self._n_queued == 0
        return fits and not self.is_suspended

    @property
    def is_suspended(self) -> bool:
        """Whether the store failed a moment ago, or no more is wanted."""
        return self._closing or self._clock() < self._suspended_until

    def offer(self, owner: Owner, write: PageWrite) -> bool:
        """Accepts a page if there is room; never waits. `owner` comes back with the outcome."""
        n_bytes = len(write.payload)
        if not self.has_room(n_bytes):
            return False
        with self._changed:
            self._queue.append((owner, write))
            self._queued_bytes += n_bytes
            self._n_queued += 1
            self._changed.notify_all()
        return True

    def outcomes(self) -> list[tuple[Owner, bool]]:
        """(owner, written) of every page that is done since the last call."""
        done = []
        while self._outcomes:
            done.append(self._outcomes.popleft())
        return done

    def wait_for_room(self, n_bytes: int, deadline: float) -> bool:
        """Waits until a page of `n_bytes` fits; False at `deadline`, and at once when the store fails. For shutdown."""
        self._wait(lambda: self.has_room(n_bytes) or self.is_suspended, deadline)
        return self.has_room(n_bytes)

    def flush(self, deadline: float) -> bool:
        """Waits until everything accepted has its outcome, at most until `deadline`; whether that was reached."""
        return self._wait(lambda: self._n_queued == 0, deadline)

    def close(self, deadline: float) -> None:
        """Ends the thread after what is queued is written, or leaves it behind at `deadline`."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(max(0.0, deadline - self._clock()))

    def _wait(self, condition: Callable[[], bool], deadline: float) -> bool:
        with self._changed:
            return self._changed.wait_for(condition, max(0.0, deadline - self._clock()))

    def _run(self) -> None:
        while batch := self._next_batch():
            written = self._write([write for _, write in batch])
            with self._changed:
                self._queued_bytes -= sum(len(write.payload) for _, write in batch)
                self._n_queued -= len(batch)
                self._outcomes.extend((owner, written) for owner, _ in batch)
                self._changed.notify_all()

    def _next_batch(self) -> list[tuple[Owner, PageWrite]]:
        """Waits for pages and takes as many as one write should hold; empty when closing and nothing is left."""
        batch: list[tuple[Owner, PageWrite]] = []
        n_bytes = 0
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            while self._queue and n_bytes < BATCH_BYTES:
                batch.append(self._queue.popleft())
                n_bytes += len(batch[-1][1].payload)
        return batch

    def _write(self, writes: list[PageWrite]) -> bool:
        try:
            self._store.write(writes)
        except Exception as error:  # whatever a store may raise: the pages are a cache, and losing them costs time only
            log.warning("pages not written (%d): %s", len(writes), error)
            self.n_failed += len(writes)
            self._suspended_until = self._clock() + RETRY_AFTER_S
            return False
        self.n_written += len(writes)
        return True
