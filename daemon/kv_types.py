"""What page table and scheduler need of an engine and a page store, as shapes.

`colibri.native.Context` and `colibri.kvstore.PageStore` have them, and so have the fakes of the tests. Neither is
imported here: the scheduler and the page table run and are tested without C and without RocksDB.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

# These are COLIBRI_PAGE_TOKENS, COLIBRI_ROW_* and COLIBRI_E_* of colibri.h; a test with the real engine compares them.
PAGE_TOKENS = 32
ROW_NONE = 0
ROW_LOGITS = 1
ROW_SCORE = 2
ROW_OK = 0
E_IO = -3
E_CANCELED = -6
E_NUMERIC = -7


@dataclass(slots=True)
class Batch:
    """One forward: rows of any number of sequences, those of a sequence together and at consecutive positions."""

    tokens: array[int] = field(default_factory=lambda: array("i"))  # [n_rows]
    positions: array[int] = field(default_factory=lambda: array("i"))  # [n_rows]
    sequences: array[int] = field(default_factory=lambda: array("i"))  # [n_rows], ascending from 0
    flags: array[int] = field(default_factory=lambda: array("B"))  # [n_rows], ROW_*
    targets: array[int] | None = None  # [n_rows], read where ROW_SCORE is set
    page_tables: list[array[int]] = field(default_factory=list)  # [n_sequences], page numbers from position 0 on
    want_routing: bool = False


class BatchResult(Protocol):
    """What a forward gives back, row by row."""

    @property
    def row_status(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[float] | None: ...


class Sampled(Protocol):
    """A token drawn, and its log-probability by the model's own distribution."""

    @property
    def token(self) -> int: ...
    @property
    def logprob(self) -> float: ...
    @property
    def top(self) -> Sequence[tuple[int, float]]: ...


class KVPool(Protocol):
    """The engine's pool of KV pages, addressed by number."""

    @property
    def page_bytes(self) -> int: ...
    def kv_save(self, page: int) -> tuple[bytes, int]: ...
    def kv_load(self, page: int, n_tokens: int, buffer: bytes, checksum: int) -> None: ...
    def kv_copy(self, to_page: int, from_page: int, n_tokens: int) -> None: ...


class Engine(KVPool, Protocol):
    """The part of the engine that computes. `Batch` and sampling parameters are read by field name."""

    def forward(self, batch: Any) -> BatchResult: ...
    def sample(self, i: int, sampling: Any) -> Sampled: ...
    def cancel(self) -> None: ...


class PageMeta(Protocol):
    """What the store knows of a page without reading it."""

    @property
    def id(self) -> bytes: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def checksum(self) -> int: ...


@dataclass(frozen=True, slots=True)
class PageWrite:
    """A page on its way to the store."""

    id: bytes
    parent: bytes
    tokens: tuple[int, ...]
    checksum: int
    payload: bytes


class PageStore(Protocol):
    """The store of pages. Any exception is a cache miss or a page not written, never more."""

    def children(self, parent: bytes) -> Sequence[Any]: ...
    def read(self, meta: Any) -> bytes: ...
    def write(self, pages: Any) -> None: ...
    def drop(self, meta: Any) -> None: ...
