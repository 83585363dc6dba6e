"""An engine and a page store in pure Python that cannot be fooled.

A lane of a page holds, beside its token, a digest of everything that the engine found before it through the page
table, as a real lane's K and V depend on all tokens before. A row's "logits" are a digest of all lanes 0 … position
that are really there. So a wrong page, a stale lane, a bad copy or a wrong position gives other tokens than
`reference` does.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

PAGE_TOKENS = 32
LANE = struct.Struct("<i12s")  # token, digest of it and all before it
ZERO_LANE = bytes(LANE.size)
ROW_LOGITS, ROW_SCORE = 1, 2
E_CANCELED, E_NUMERIC, E_CHECKSUM = -6, -7, -8


class FakeNativeError(Exception):
    code = 0


class Canceled(FakeNativeError):
    code = E_CANCELED


class NumericFailure(FakeNativeError):
    code = E_NUMERIC


class ChecksumMismatch(FakeNativeError):
    code = E_CHECKSUM


@dataclass(frozen=True)
class Sampling:
    """The fields of colibri.native.Sampling."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    position: int = 0
    history: Sequence[int] = ()
    n_prompt: int = 0
    bias: dict[int, float] = field(default_factory=dict)
    n_top_logprobs: int = 0
    allowed: Any = None

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True)
class Sampled:
    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class BatchResult:
    row_status: list[int]
    logprobs: list[float] | None
    routing: None = None


def checksum(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _number(*parts: bytes | int) -> int:
    text = b"|".join(part if isinstance(part, bytes) else b"%d" % part for part in parts)
    return int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "little")


def _logprob(logits: bytes, token: int) -> float:
    return -1.0 - _number(logits, token) % 1000 / 100


def _draw(logits: bytes, sampling: Any, vocabulary: int) -> int:
    drawn = (sampling.seed, sampling.position) if sampling.temperature else ()
    penalized = (sampling.n_prompt, *sampling.history) if sampling.has_penalties else ()
    return _number(logits, *drawn, b"history", *penalized) % vocabulary


class FakeEngine:
    """colibri.native.Context's methods. `is_immutable`, if set, is asked before every write into a page."""

    def __init__(self, *, n_pages: int, vocabulary: int = 1000, max_rows: int = 512, max_logits: int = 8) -> None:
        self.n_pages = n_pages
        self.vocabulary = vocabulary
        self.max_rows = max_rows
        self.max_logits = max_logits
        self.page_bytes = PAGE_TOKENS * LANE.size
        self.is_immutable: Callable[[int], bool] = lambda page: False
        self.before_forward: Callable[[Any], None] = lambda batch: None
        self.poison: set[int] = set()  # tokens whose row is not finite
        self.n_rows = 0
        self.n_forwards = 0
        self.n_cancels = 0
        self.n_copies = 0
        # Lanes start with rubbish: nobody may rely on zeros in a page that was handed out.
        self._pages = [[LANE.pack(-1 - page, b"rubbish")] * PAGE_TOKENS for page in range(n_pages)]
        self._filled = [0] * n_pages
        self._logits: list[tuple[bytes, int, bool]] = []

    # -- forward and sample -----------------------------------------------------------------------------------------

    def forward(self, batch: Any) -> BatchResult:
        self.n_forwards += 1
        self.before_forward(batch)
        self._check(batch)
        self.n_rows += len(batch.tokens)
        self._logits = []
        status, logprobs = [], []
        for first, last in _runs(batch.sequences):
            table = batch.page_tables[batch.sequences[first]]
            seen = self._read(table, batch.positions[first])
            for row in range(first, last):
                ok = batch.tokens[row] not in self.poison
                seen.update(self._write(table, batch.positions[row], batch.tokens[row], seen))
                logits = seen.digest()
                status.append(0 if ok else E_NUMERIC)
                scored = batch.flags[row] & ROW_SCORE
                logprobs.append(_logprob(logits, batch.targets[row]) if scored else 0.0)
                if batch.flags[row] & ROW_LOGITS:
                    self._logits.append((logits, batch.positions[row], ok))
        return BatchResult(status, logprobs if batch.targets is not None else None)

    def sample(self, i: int, sampling: Any) -> Sampled:
        logits, position, ok = self._logits[i]
        assert sampling.position == position + 1, "the token is drawn for another position"
        if not ok:
            raise NumericFailure("the logits are not finite")
        token = _draw(logits, sampling, self.vocabulary)
        top = [((token + n) % self.vocabulary, -1.0 - n) for n in range(sampling.n_top_logprobs)]
        return Sampled(token, _logprob(logits, token), top)

    def cancel(self) -> None:
        self.n_cancels += 1

    def _check(self, batch: Any) -> None:
        n = len(batch.tokens)
        assert 0 < n <= self.max_rows
        assert len(batch.positions) == len(batch.sequences) == len(batch.flags) == n
        assert sum(bool(flag & ROW_LOGITS) for flag in batch.flags) <= self.max_logits
        written: list[int] = []
        used: set[int] = set()
        for index, (first, last) in enumerate(_runs(batch.sequences)):
            positions = list(batch.positions[first:last])
            assert batch.sequences[first] == index, "sequences do not ascend from 0"
            assert positions == list(range(positions[0], positions[0] + len(positions))), "positions are not in order"
            table = batch.page_tables[index]
            assert len(set(table)) == len(table), "a page stands twice in one page table"
            written += table[positions[0] // PAGE_TOKENS : positions[-1] // PAGE_TOKENS + 1]
            used.update(table)
        assert len(batch.page_tables) == batch.sequences[-1] + 1
        assert len(set(written)) == len(written), "two sequences write into one page"
        for index, table in enumerate(batch.page_tables):
            own = {table[batch.positions[row] // PAGE_TOKENS] for row in range(n) if batch.sequences[row] == index}
            assert not (set(table) - own) & set(written), "a sequence reads a page that another one writes"
        for page in written:
            assert not self.is_immutable(page), f"page {page} is shared or published, and written"

    def _read(self, table: Sequence[int], n_tokens: int) -> Any:
        """Digest over the lanes of positions 0 … n_tokens - 1 as the page table leads to them."""
        seen = hashlib.blake2b(digest_size=12)
        for position in range(n_tokens):
            seen.update(self._pages[table[position // PAGE_TOKENS]][position % PAGE_TOKENS])
        return seen

    def _write(self, table: Sequence[int], position: int, token: int, seen: Any) -> bytes:
        page, lane = table[position // PAGE_TOKENS], position % PAGE_TOKENS
        before = seen.copy()
        before.update(struct.pack("<ii", token, position))
        content = LANE.pack(token, before.digest())
        assert lane <= self._filled[page] or lane == 0, f"lane {lane} of page {page} is written before those before it"
        if 0 < lane < self._filled[page]:
            assert self._pages[page][lane] == content, f"lane {lane} of page {page} is overwritten with something else"
        else:
            self._pages[page][lane] = content
            self._filled[page] = lane + 1
        return content

    # -- pages ----------------------------------------------------------------------------------------------------

    def kv_save(self, page: int) -> tuple[bytes, int]:
        data = b"".join(self._pages[page])
        return data, checksum(data)

    def kv_load(self, page: int, n_tokens: int, buffer: bytes, expected: int) -> None:
        assert 1 <= n_tokens <= PAGE_TOKENS
        assert not self.is_immutable(page)
        self._put(page, [], 0)
        if len(buffer) != self.page_bytes or checksum(buffer) != expected:
            raise ChecksumMismatch(f"page {page}: the bytes do not match their checksum")
        self._put(page, [buffer[i : i + LANE.size] for i in range(0, len(buffer), LANE.size)], n_tokens)

    def kv_copy(self, to_page: int, from_page: int, n_tokens: int) -> None:
        assert to_page != from_page
        assert not self.is_immutable(to_page)
        assert n_tokens <= self._filled[from_page], "lanes are copied that were never written"
        self.n_copies += 1
        self._put(to_page, self._pages[from_page], n_tokens)

    def lane(self, page: int, lane: int) -> bytes:
        """What a lane holds."""
        return self._pages[page][lane]

    def _put(self, page: int, lanes: Sequence[bytes], n_tokens: int) -> None:
        self._pages[page] = [*lanes[:n_tokens], *[ZERO_LANE] * (PAGE_TOKENS - n_tokens)]
        self._filled[page] = n_tokens


def _runs(sequences: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first row, last row + 1) of each sequence."""
    first = 0
    for row in range(1, len(sequences) + 1):
        if row == len(sequences) or sequences[row] != sequences[first]:
            yield first, row
            first = row


class Reference:
    """What the engine must say, computed without pages: the trivially simple model."""

    def __init__(self, vocabulary: int = 1000) -> None:
        self._vocabulary = vocabulary

    def logits(self, tokens: Sequence[int]) -> list[bytes]:
        """One digest a position."""
        seen, out = hashlib.blake2b(digest_size=12), []
        for position, token in enumerate(tokens):
            before = seen.copy()
            before.update(struct.pack("<ii", token, position))
            seen.update(LANE.pack(token, before.digest()))
            out.append(seen.digest())
        return out

    def generate(self, prompt: Sequence[int], n: int, sampling: Sampling | None = None) -> list[int]:
        tokens = list(prompt)
        for _ in range(n):
            here = replace(sampling or Sampling(), position=len(tokens), history=tuple(tokens), n_prompt=len(prompt))
            tokens.append(_draw(self.logits(tokens)[-1], here, self._vocabulary))
        return tokens[len(prompt) :]

    def score(self, tokens: Sequence[int]) -> list[float]:
        return [_logprob(logits, target) for logits, target in zip(self.logits(tokens), tokens[1:], strict=False)]


# -- store ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FakeMeta:
    id: bytes
    parent: bytes
    tokens: tuple[int, ...]
    checksum: int
    n_bytes: int
    number: int


class MemoryPageStore:
    """colibri.kvstore.PageStore in memory, with faults on demand."""

    def __init__(self) -> None:
        self.pages: dict[tuple[bytes, bytes], tuple[FakeMeta, bytes]] = {}
        self.fail_writes = False
        self.fail_reads = False
        self.dropped: list[bytes] = []
        self.n_writes = 0
        self.n_reads = 0

    def children(self, parent: bytes) -> list[FakeMeta]:
        if self.fail_reads:
            raise OSError("the disk does not answer")
        return [meta for (above, _), (meta, _) in list(self.pages.items()) if above == parent]

    def read(self, meta: FakeMeta) -> bytes:
        self.n_reads += 1
        if self.fail_reads:
            raise OSError("the disk does not answer")
        return self.pages[meta.parent, meta.id][1]

    def write(self, pages: Sequence[Any]) -> None:
        if self.fail_writes:
            raise OSError("no space left on device")
        for page in pages:
            self.n_writes += 1
            meta = FakeMeta(page.id, page.parent, tuple(page.tokens), page.checksum, len(page.payload), self.n_writes)
            self.pages[page.parent, page.id] = meta, page.payload

    def drop(self, meta: FakeMeta) -> None:
        self.dropped.append(meta.id)
        self.pages.pop((meta.parent, meta.id), None)

    def corrupt(self, index: int) -> FakeMeta:
        """Flips a byte in the middle of the index-th page written; returns its meta."""
        key = list(self.pages)[index]
        meta, data = self.pages[key]
        middle = len(data) // 2
        self.pages[key] = meta, data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :]
        return meta
