"""The page store: KV pages on disk, a cache.

    meta   PARENT:16 ID:16  → token ids, checksum, size, number      level compaction, small
    data   NUMBER:u64       → the page's bytes                       FIFO: whole files, oldest first, are unlinked

Numbers only rise, so each table file of `data` is a run of consecutive pages and the budget is kept by dropping the
oldest file: no page is ever rewritten by a compaction. To make that nearly least-recently-used, a page that is read
in the oldest part of a filling store is written again at the young end. A page is dropped by dropping its meta; its
bytes leave with their file.

Pages and their metas are written in one atomic batch: a page is visible when it is whole. Nothing here is the truth,
so a database that cannot be opened is thrown away and counted.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rocksdict import DBCompactionStyle, FifoCompactOptions, Options

from colibri.kvstore.errors import PageCorrupt, StoreDamaged, StoreError, StoreFull, StoreVersionError
from colibri.kvstore.records import BadRecord, pack_tokens, seal, unpack_tokens, unseal
from colibri.kvstore.rocks import Batch, Database, base_options, skipping_damaged_log

DEFAULT_BUDGET_BYTES = 20 << 30
MIN_BUDGET_BYTES = 32 << 20

# Another length than that of the keys of `meta`, which tells their files apart.
_DATA_KEY_BYTES = 8

# Writes stop while the volume has less than this free, so that a cache never takes the last space from the truth.
LOW_WATER_BYTES = 256 << 20


@dataclass(frozen=True)
class PageMeta:
    id: bytes  # 16 bytes
    parent: bytes  # 16 bytes
    tokens: tuple[int, ...]  # fewer than a full page's: a tail
    checksum: int  # of the payload, computed and verified by the engine
    n_bytes: int
    number: int  # rises with every write


@dataclass(frozen=True)
class PageWrite:
    id: bytes
    parent: bytes
    tokens: tuple[int, ...]
    checksum: int
    payload: bytes


class PageStore:
    """Threads may share it."""

    def __init__(
        self, path: str | Path, *, budget_bytes: int | None = None, low_water_bytes: int = LOW_WATER_BYTES
    ) -> None:
        self._path = Path(path)
        self._budget = max(DEFAULT_BUDGET_BYTES if budget_bytes is None else budget_bytes, MIN_BUDGET_BYTES)
        self._low_water = low_water_bytes
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(
            ("written", "written_bytes", "read", "renewed", "evicted", "corrupt", "rebuilt"), 0
        )
        self._failure: str | None = None  # of the last write, if RocksDB refused it
        self._unchecked_bytes = 0  # written since the last look at what was evicted
        if not self._opens():
            shutil.rmtree(self._path)
            self._counts["rebuilt"] += 1
            self._open()

    def _opens(self) -> bool:
        try:
            self._open()
        except (StoreDamaged, StoreVersionError):
            return False
        return True

    def _open(self) -> None:
        self._db = Database(self._path, skipping_damaged_log(_meta_options()), {"data": _data_options(self._budget)})
        try:
            self._index = _Index()
            metas, damaged = self._scan(b"")
            for meta in sorted(metas, key=lambda meta: meta.number):
                self._index.add(meta)
            self._forget(damaged)
            self._counts["corrupt"] += len(damaged)
            self._drop_evicted()
        except BaseException:
            self._db.close()
            raise

    def children(self, parent: bytes) -> list[PageMeta]:
        """Every stored page and tail whose parent this is."""
        try:
            metas, damaged = self._scan(parent)
        except StoreDamaged:
            # The block cannot be repaired in place; the next open starts over.
            metas, damaged = [], [b""]
        if damaged:
            with self._lock:
                self._counts["corrupt"] += len(damaged)
                self._forget([key for key in damaged if key])
        return metas

    def _scan(self, parent: bytes) -> tuple[list[PageMeta], list[bytes]]:
        """The metas below a parent, and the keys of those that are damaged."""
        metas: list[PageMeta] = []
        damaged: list[bytes] = []
        for key, value in self._db.scan(parent):
            try:
                metas.append(_parse(key, value))
            except BadRecord:
                damaged.append(key)
        return metas, damaged

    def read(self, meta: PageMeta) -> bytes:
        """The page's bytes; the caller verifies their checksum. Raises PageCorrupt (and drops the page) if they are
        missing, short, or fail RocksDB's own checksum."""
        try:
            payload = self._db.get(_data_key(meta.number), "data") or b""
            problem = None if len(payload) == meta.n_bytes else f"{len(payload)} of {meta.n_bytes} bytes are there"
        except StoreDamaged as error:
            payload, problem = b"", str(error)
        with self._lock:
            if problem:
                self._drop_unreadable(meta)
                raise PageCorrupt(f"page {meta.id.hex()}: {problem}")
            self._counts["read"] += 1
            if self._is_evicted_soon(meta):
                self._renew(meta, payload)
        return payload

    def _drop_unreadable(self, meta: PageMeta) -> None:
        self._drop_evicted()
        key = meta.parent + meta.id
        if self._index.number(key) == meta.number:
            self._counts["corrupt"] += 1
            self._forget([key])

    def write(self, pages: Sequence[PageWrite]) -> None:
        """Stores all of them or none; those already there are left alone. A page takes the place of shorter tails
        that it continues. Raises StoreFull, StoreError."""
        with self._lock:
            self._check_space()
            try:
                self._write(pages)
            except StoreError as error:
                self._failure = str(error)
                raise
            self._failure = None

    def _write(self, pages: Sequence[PageWrite]) -> None:
        batch = Batch()
        fresh: dict[bytes, PageMeta] = {}
        obsolete: list[bytes] = []
        for page in pages:
            key = page.parent + page.id
            if key in fresh or key in self._index:
                continue
            number = self._index.next_number + len(fresh)
            meta = PageMeta(page.id, page.parent, tuple(page.tokens), page.checksum, len(page.payload), number)
            fresh[key] = meta
            batch.put(_data_key(number), page.payload, "data")
            batch.put(key, _sealed(key, meta))
            obsolete += self._shorter_tails(meta)
        for key in obsolete:
            batch.delete(key)
        self._db.write(batch, sync=False)
        for meta in fresh.values():
            self._index.add(meta)
            self._counts["written"] += 1
            self._counts["written_bytes"] += meta.n_bytes
        for key in obsolete:
            self._index.remove(key)
        self._unchecked_bytes += sum(meta.n_bytes for meta in fresh.values())
        if self._unchecked_bytes >= _table_bytes(self._budget):
            self._unchecked_bytes = 0
            self._drop_evicted()

    def drop(self, meta: PageMeta) -> None:
        """Forgets a bad or obsolete page; one that is not there is fine."""
        with self._lock:
            self._forget([meta.parent + meta.id])

    def stats(self) -> dict[str, int | str | None]:
        with self._lock:
            return {
                "pages": len(self._index),
                "bytes": self._index.n_bytes,
                "budget_bytes": self._budget,
                "refusing": self.problem(),
                **self._counts,
            }

    def flush(self) -> None:
        """Moves what is in memory, and safe in the log, to table files."""
        self._db.flush()

    def close(self) -> None:
        # A cache that cannot be closed well is checked, or made anew, when it is opened.
        with self._lock, contextlib.suppress(StoreError):
            self._db.close()

    def problem(self) -> str | None:
        """Why no pages are written now; None if they are. Never waits for a writer."""
        return self._lack_of_space() or self._failure

    def _check_space(self) -> None:
        if lack := self._lack_of_space():
            raise StoreFull(lack)

    def _lack_of_space(self) -> str | None:
        try:
            free = shutil.disk_usage(self._path).free
        except OSError as error:
            return f"{self._path}: {error.strerror}"
        if free >= self._low_water:
            return None
        return f"{self._path}: {free >> 20} MiB free, {self._low_water >> 20} MiB are kept"

    def _shorter_tails(self, page: PageMeta) -> list[bytes]:
        return [
            meta.parent + meta.id
            for meta in self._scan(page.parent)[0]
            if len(meta.tokens) < len(page.tokens) and meta.tokens == page.tokens[: len(meta.tokens)]
        ]

    def _is_evicted_soon(self, meta: PageMeta) -> bool:
        """In the oldest quarter of a store that is at least half full."""
        if self._index.n_bytes < self._budget // 2 or self._index.number(meta.parent + meta.id) != meta.number:
            return False
        oldest, end = self._index.oldest_number, self._index.next_number
        return meta.number < oldest + (end - oldest) // 4

    def _renew(self, meta: PageMeta, payload: bytes) -> None:
        """Writes a page that is in use again, away from the end that is dropped next."""
        key = meta.parent + meta.id
        renewed = replace(meta, number=self._index.next_number)
        batch = Batch()
        batch.put(_data_key(renewed.number), payload, "data")
        batch.put(key, _sealed(key, renewed))
        with contextlib.suppress(StoreError):  # the page was read; that is what was asked for
            self._check_space()
            self._db.write(batch, sync=False)
            self._index.add(renewed)
            self._counts["renewed"] += 1

    def _forget(self, keys: Sequence[bytes]) -> None:
        if not keys:
            return
        batch = Batch()
        for key in keys:
            batch.delete(key)
        self._db.write(batch, sync=False)
        for key in keys:
            self._index.remove(key)

    def _drop_evicted(self) -> None:
        """Forgets the metas of pages whose files RocksDB has dropped to keep the budget."""
        starts = [file["start_key"] for file in self._db.files() if len(file["start_key"]) == _DATA_KEY_BYTES]
        if not starts:
            return
        evicted = self._index.keys_below(int.from_bytes(min(starts), "big"))
        self._forget(evicted)
        self._counts["evicted"] += len(evicted)


class _Index:
    """Which pages are stored, by key and in the order of their numbers. About 300 bytes a page."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, tuple[int, int]] = {}  # → number, n_bytes
        self._by_number: dict[int, bytes] = {}
        self.n_bytes = 0
        self.next_number = 1

    @property
    def oldest_number(self) -> int:
        return next(iter(self._by_number), self.next_number)

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: bytes) -> bool:
        return key in self._by_key

    def number(self, key: bytes) -> int | None:
        entry = self._by_key.get(key)
        return None if entry is None else entry[0]

    def keys_below(self, number: int) -> list[bytes]:
        return [self._by_number[n] for n in itertools.takewhile(lambda n: n < number, self._by_number)]

    def add(self, meta: PageMeta) -> None:
        """Numbers must rise from call to call."""
        key = meta.parent + meta.id
        self.remove(key)
        self._by_key[key] = (meta.number, meta.n_bytes)
        self._by_number[meta.number] = key
        self.n_bytes += meta.n_bytes
        self.next_number = max(self.next_number, meta.number + 1)

    def remove(self, key: bytes) -> None:
        number, n_bytes = self._by_key.pop(key, (0, 0))
        self._by_number.pop(number, None)
        self.n_bytes -= n_bytes


def _sealed(key: bytes, meta: PageMeta) -> bytes:
    return seal(key, pack_tokens(meta.tokens), meta.checksum, meta.n_bytes, meta.number)


def _parse(key: bytes, value: bytes) -> PageMeta:
    tokens, checksum, n_bytes, number = unseal(key, value)
    return PageMeta(key[16:], key[:16], tuple(unpack_tokens(tokens)), checksum, n_bytes, number)


def _data_key(number: int) -> bytes:
    return number.to_bytes(_DATA_KEY_BYTES, "big")


def _table_bytes(budget_bytes: int) -> int:
    """Of a file of `data`, the unit of eviction."""
    return min(budget_bytes // 64, 64 << 20)


def _meta_options() -> Options:
    options = base_options()
    options.set_write_buffer_size(8 << 20)
    # Both families flush together, so that neither keeps old logs alive.
    options.set_atomic_flush(True)
    return options


def _data_options(budget_bytes: int) -> Options:
    options = base_options()
    options.set_write_buffer_size(_table_bytes(budget_bytes))
    options.set_max_write_buffer_number(3)
    options.set_compaction_style(DBCompactionStyle.fifo())
    fifo = FifoCompactOptions()
    # An eighth is left for the log and the metas.
    fifo.max_table_files_size = budget_bytes // 8 * 7
    options.set_fifo_compaction_options(fifo)
    return options
