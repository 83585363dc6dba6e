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

import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from colibri.kvstore.errors import PageCorrupt, StoreDamaged, StoreFull, StoreVersionError
from colibri.kvstore.records import BadRecord, pack_tokens, seal, unpack_tokens, unseal
from colibri.kvstore.rocks import Batch, Database, base_options
from rocksdict import DBCompactionStyle, FifoCompactOptions, Options

DEFAULT_BUDGET_BYTES = 20 << 30
MIN_BUDGET_BYTES = 32 << 20

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
        self._refusal: str | None = None
        try:
            self._open()
        except (StoreDamaged, StoreVersionError):
            shutil.rmtree(self._path)
            self._counts["rebuilt"] += 1
            self._open()

    def _open(self) -> None:
        self._db = Database(self._path, _meta_options(), {"data": _data_options(self._budget)})
        try:
            self._index = _Index()
            damaged = []
            for key, value in self._db.scan(b""):
                try:
                    self._index.add(_parse(key, value))
                except BadRecord:
                    damaged.append(key)
            self._forget(damaged)
            self._counts["corrupt"] += len(damaged)
            self._drop_evicted()
        except BaseException:
            self._db.close()
            raise

    def children(self, parent: bytes) -> list[PageMeta]:
        """Every stored page and tail whose parent this is."""
        metas: list[PageMeta] = []
        damaged: list[bytes] = []
        try:
            for key, value in self._db.scan(parent):
                try:
                    metas.append(_parse(key, value))
                except BadRecord:
                    damaged.append(key)
        except StoreDamaged:
            self._counts["corrupt"] += 1
        if damaged:
            with self._lock:
                self._counts["corrupt"] += len(damaged)
                self._forget(damaged)
        return metas

    def read(self, meta: PageMeta) -> bytes:
        """The page's bytes; the caller verifies their checksum. Raises PageCorrupt (and drops the page) if they are
        missing, short, or fail RocksDB's own checksum."""
        try:
            payload = self._db.get(_data_key(meta.number), "data")
            problem = None if payload is not None and len(payload) == meta.n_bytes else "missing or short"
        except StoreDamaged as error:
            payload, problem = None, str(error)
        if payload is None or problem:
            self._counts["corrupt"] += 1
            self.drop(meta)
            raise PageCorrupt(f"page {meta.id.hex()}: {problem}")
        self._counts["read"] += 1
        self._renew_if_old(meta, payload)
        return payload

    def write(self, pages: Sequence[PageWrite]) -> None:
        """Stores all of them or none; those already there are left alone. A page takes the place of shorter tails
        that it continues. Raises StoreFull, StoreError."""
        with self._lock:
            self._write(pages)

    def _write(self, pages: Sequence[PageWrite]) -> None:
        self._check_space()
        batch = Batch(self._db)
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
                "refusing": self._refusal,
                **self._counts,
            }

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def _check_space(self) -> None:
        free = shutil.disk_usage(self._path).free
        self._refusal = None if free >= self._low_water else f"{free} bytes free, {self._low_water} are kept"
        if self._refusal:
            raise StoreFull(f"{self._path}: {self._refusal}")

    def _shorter_tails(self, page: PageMeta) -> list[bytes]:
        return [
            meta.parent + meta.id
            for meta in map(_parse_scanned, self._db.scan(page.parent))
            if meta and len(meta.tokens) < len(page.tokens) and meta.tokens == page.tokens[: len(meta.tokens)]
        ]

    def _renew_if_old(self, meta: PageMeta, payload: bytes) -> None:
        """Moves a page that is in use away from the end that is dropped next."""

    def _forget(self, keys: Sequence[bytes]) -> None:
        if not keys:
            return
        batch = Batch(self._db)
        for key in keys:
            batch.delete(key)
        self._db.write(batch, sync=False)
        for key in keys:
            self._index.remove(key)

    def _drop_evicted(self) -> None:
        """Forgets the metas of pages whose files RocksDB has dropped to keep the budget."""


class _Index:
    """Which pages are stored, by key and in the order of their numbers. About 300 bytes a page."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, tuple[int, int]] = {}  # → number, n_bytes
        self._by_number: dict[int, bytes] = {}
        self.n_bytes = 0
        self.next_number = 1

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: bytes) -> bool:
        return key in self._by_key

    def add(self, meta: PageMeta) -> None:
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


def _parse_scanned(item: tuple[bytes, bytes]) -> PageMeta | None:
    try:
        return _parse(*item)
    except BadRecord:
        return None


def _data_key(number: int) -> bytes:
    return number.to_bytes(8, "big")


def _meta_options() -> Options:
    options = base_options()
    options.set_write_buffer_size(8 << 20)
    # Both families flush together, so that neither keeps old logs alive.
    options.set_atomic_flush(True)
    return options


def _data_options(budget_bytes: int) -> Options:
    options = base_options()
    # A table file is the unit of eviction; an eighth of the budget is left for the log and the buffers.
    options.set_write_buffer_size(min(max(budget_bytes // 64, 1 << 20), 64 << 20))
    options.set_max_write_buffer_number(3)
    options.set_compaction_style(DBCompactionStyle.fifo())
    fifo = FifoCompactOptions()
    fifo.max_table_files_size = budget_bytes // 8 * 7
    options.set_fifo_compaction_options(fifo)
    return options
