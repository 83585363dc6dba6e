"""The page table: which KV page holds what, who uses it, where it can be found again.

Owns every page number of the engine's pool. A page is in exactly one of three states:

    free      nothing worth keeping
    cached    its content can be found again; nobody uses it; first in, first evicted (least recently used)
    active    one or more sequences use it

    law of conservation (check_integrity): free + cached + active = all

A page of 32 tokens that is full and computed is *published*: it becomes a node under the page before it, is immutable
from then on, and is shared by every sequence that has the same beginning. What remains at the end of a sequence,
fewer than 32 tokens, becomes a *tail* when the sequence is released; a tail is never appended to, its lanes are
copied.

Nodes form a tree in RAM. A node is found by its tokens under its parent *node*, not by a hash, so two beginnings can
never be taken for each other. Towards the store a page has an id, a hash chained over (numerics key, parent id,
tokens); there, too, the token ids are compared. Should two nodes ever have the same id, the later one and all below
it stay in RAM only.

The least recently used page never has children in the tree: a sequence that holds a page holds all pages before it, and
releases them last to first.

Everything here is a cache of what can be computed again: every failure to read or write it is counted and costs time
only.
"""

from __future__ import annotations

import hashlib
import logging
import struct
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from colibri.daemon.kv_types import PAGE_TOKENS, KVPool, PageMeta, PageStore, PageWrite
from colibri.daemon.page_writer import PageWriter

log = logging.getLogger(__name__)

ID_BYTES = 16
# What may wait for the writer thread. At 1 MiB a page this is a prompt of 8192 tokens.
WRITE_QUEUE_BYTES = 256 << 20


def numerics_key(fingerprint: bytes, *, kv_format: str, version: int, window: int = 0, routing: str = "exact") -> bytes:
    """All that decides the bits in a page besides the tokens (docs/numerics.md), hashed to ID_BYTES."""
    text = f"{fingerprint.hex()}/{kv_format}/{window}/{routing}/{version}"
    return hashlib.blake2b(text.encode(), digest_size=ID_BYTES).digest()


def page_id(key: bytes, parent_id: bytes, tokens: Sequence[int]) -> bytes:
    """The name of a page in the store: a hash chained over everything that its content depends on."""
    ids = struct.pack(f"<{len(tokens)}i", *tokens)
    return hashlib.blake2b(key + parent_id + ids, digest_size=ID_BYTES).digest()


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences share from their beginning."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


@dataclass(eq=False, slots=True)
class Node:
    """A page that can be found again. A full page has 32 tokens; a tail has fewer, and no children."""

    id: bytes
    parent: Node | None
    tokens: tuple[int, ...]
    page: int
    saved: bool  # in the store, or on its way
    storable: bool  # its id is its own, and so are those of all pages before it
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)

    @property
    def is_tail(self) -> bool:
        return len(self.tokens) < PAGE_TOKENS


@dataclass(eq=False, slots=True)
class SequencePages:
    """The pages of one sequence, from PageTable.acquire until PageTable.release."""

    tokens: array[int]  # the owner's own array, read here and grown there
    limit: int  # so many leading tokens may come from the cache
    tip: Node  # the last full page
    pages: array[int] = field(default_factory=lambda: array("i"))  # of positions 0-31, 32-63, …
    n_tokens: int = 0  # positions whose K and V are valid
    storable: bool = True
    settled: bool = False  # the search is over: what comes next it computes


@dataclass(slots=True)
class Counters:
    """What happened since the start, in pages."""

    ram_hits: int = 0
    disk_hits: int = 0
    copied: int = 0  # beginnings of pages copied to be appended to
    evicted: int = 0
    bad: int = 0  # stored pages that failed their proof
    collisions: int = 0
    store_errors: int = 0
    dropped: int = 0  # evicted before they could be written


Findable = TypeVar("Findable", Node, PageMeta)


class PageTable:
    """Hands out pages, finds computed ones again, evicts, and writes behind. One thread uses it."""

    def __init__(
        self,
        pool: KVPool,
        *,
        n_pages: int,
        key: bytes,
        store: PageStore | None = None,
        write_queue_bytes: int = WRITE_QUEUE_BYTES,
    ) -> None:
        self._pool = pool
        self._key = key
        self._store = store
        self._writer: PageWriter[Node] | None = (
            PageWriter(store, max_queue_bytes=write_queue_bytes) if store is not None else None
        )
        self.page_bytes = pool.page_bytes
        self._root = Node(page_id(key, b"", ()), None, (), -1, saved=True, storable=True)
        self._ids: dict[bytes, Node] = {self._root.id: self._root}
        self._node_of: list[Node | None] = [None] * n_pages
        self._references = array("i", bytes(4 * n_pages))
        self._free = list(range(n_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._live: set[SequencePages] = set()
        # In the order in which they were made, so that a page is written before those that follow it.
        self._unsaved: dict[Node, None] = {}
        self._unsaved_tails: dict[Node, None] = {}
        self.counters = Counters()

    # -- what a sequence does ---------------------------------------------------------------------------------------

    @property
    def n_pages(self) -> int:
        return len(self._node_of)

    @property
    def n_available(self) -> int:
        """Pages that can be had without taking any from a sequence."""
        return len(self._free) + len(self._cached)

    def acquire(self, tokens: array[int], limit: int) -> SequencePages:
        """Begins a sequence with what RAM holds of its first `limit` tokens; `restore` goes on in the store."""
        sequence = SequencePages(tokens, limit, self._root)
        self._live.add(sequence)
        self._match(sequence)
        return sequence

    def restore(self, sequence: SequencePages, max_pages: int) -> bool:
        """Takes up to `max_pages` further pages from RAM or the store; whether there is nothing more to find.

        Where another sequence is about to compute the very next page, that is waited for: ask again after a step.
        """
        for _ in range(max_pages):
            self._match(sequence)
            stored = self._stored_children(sequence)
            if self._restore_full(sequence, stored):
                continue
            if not self._is_coming(sequence):
                self._copy_beginning(sequence, stored)
                sequence.settled = True
            break
        return sequence.settled

    def reserve(self, sequence: SequencePages, n_positions: int) -> bool:
        """Gives the sequence pages for its first `n_positions`; False if none is left (what it got it keeps)."""
        while len(sequence.pages) * PAGE_TOKENS < n_positions:
            page = self._allocate()
            if page is None:
                return False
            sequence.pages.append(page)
        return True

    def commit(self, sequence: SequencePages, n_tokens: int) -> None:
        """Says that the first `n_tokens` positions are computed; pages that became full are published."""
        first_open = sequence.n_tokens // PAGE_TOKENS
        sequence.n_tokens = n_tokens
        for index in range(first_open, n_tokens // PAGE_TOKENS):
            self._publish(sequence, index)

    def release(self, sequence: SequencePages) -> None:
        """Ends the sequence. What it computed stays cached."""
        self._live.remove(sequence)
        self._publish_tail(sequence)
        for page in reversed(sequence.pages):
            self._unreference(page)
        del sequence.pages[:]

    # -- finding --------------------------------------------------------------------------------------------------

    def _match(self, sequence: SequencePages) -> None:
        """Takes full pages from RAM as far as they go."""
        while (chunk := self._next_full(sequence)) and (child := sequence.tip.children.get(chunk)):
            self._reference(child.page)
            self._advance(sequence, child)
            self.counters.ram_hits += 1

    @staticmethod
    def _next_full(sequence: SequencePages) -> tuple[int, ...] | None:
        """The next 32 tokens, if the limit allows them all."""
        end = sequence.n_tokens + PAGE_TOKENS
        return tuple(sequence.tokens[sequence.n_tokens : end]) if end <= sequence.limit else None

    def _is_coming(self, sequence: SequencePages) -> bool:
        """Whether a sequence that is being computed will publish the next full page. No waiting in circles: those that
        wait are not settled."""
        chunk = self._next_full(sequence)
        if chunk is None:
            return False
        start, end = sequence.n_tokens, sequence.n_tokens + PAGE_TOKENS
        return any(
            other.settled and other.tip is sequence.tip and tuple(other.tokens[start:end]) == chunk
            for other in self._live
        )

    @staticmethod
    def _advance(sequence: SequencePages, node: Node) -> None:
        sequence.pages.append(node.page)
        sequence.tip = node
        sequence.n_tokens += PAGE_TOKENS

    def _stored_children(self, sequence: SequencePages) -> list[PageMeta]:
        wanted = sequence.n_tokens < sequence.limit
        if self._store is None or not wanted or not sequence.storable or not sequence.tip.storable:
            return []
        try:
            return list(self._store.children(sequence.tip.id))
        except Exception as error:  # a cache that cannot be read is an empty one
            log.warning("page store cannot be searched: %s", error)
            self.counters.store_errors += 1
            return []

    def _restore_full(self, sequence: SequencePages, stored: list[PageMeta]) -> bool:
        """Loads the next whole page from the store, if it is there and proves itself; else takes it out of `stored`."""
        chunk = self._next_full(sequence)
        if chunk is None or not stored:
            return False
        wanted_id = page_id(self._key, sequence.tip.id, chunk)
        meta = next((meta for meta in stored if meta.id == wanted_id), None)
        if meta is None:
            return False
        if tuple(meta.tokens) != chunk:  # the same hash for other tokens: keep away from the store from here on
            stored.clear()
            self.counters.collisions += 1
            sequence.storable = False
            return False
        page = self._load(meta, PAGE_TOKENS)
        if page is None:
            stored.remove(meta)
            return False
        self._advance(sequence, self._attach(sequence, chunk, page, saved=True))
        return True

    def _copy_beginning(self, sequence: SequencePages, stored: Sequence[PageMeta]) -> None:
        """Copies the longest beginning of the next page that a tail or page in RAM or store has, into an own page."""
        start = sequence.n_tokens
        wanted = sequence.tokens[start : min(start + PAGE_TOKENS, sequence.limit)]
        node, n_resident = _longest_beginning(wanted, sequence.tip.children.values())
        meta, n_stored = _longest_beginning(wanted, stored)
        page = None
        if meta is not None and n_stored > n_resident:
            page, n = self._load(meta, n_stored), n_stored
        if page is None and node is not None and self._node_of[node.page] is node:  # not evicted for the stored one
            page, n = self._copy(node, n_resident), n_resident
        if page is not None:
            sequence.pages.append(page)
            sequence.n_tokens += n

    def _load(self, meta: PageMeta, n_tokens: int) -> int | None:
        """A fresh page with the first `n_tokens` of a stored one. One that fails its proof is dropped and counted."""
        assert self._store is not None
        page = self._allocate()
        if page is None:
            return None
        try:
            self._pool.kv_load(page, n_tokens, self._store.read(meta), meta.checksum)
        except Exception as error:  # missing, short, damaged, refused by the engine: all mean "compute it again"
            log.warning("stored page %s is not usable: %s", meta.id.hex(), error)
            self.counters.bad += 1
            self._unreference(page)
            self._drop_stored(meta)
            return None
        self.counters.disk_hits += 1
        return page

    def _copy(self, node: Node, n_tokens: int) -> int | None:
        """A fresh page with the first `n_tokens` of a resident one."""
        self._touch(node.page)
        page = self._allocate(keep=node.page)
        if page is not None:
            self._pool.kv_copy(page, node.page, n_tokens)
            self.counters.copied += 1
        return page

    def _drop_stored(self, meta: PageMeta) -> None:
        assert self._store is not None
        try:
            self._store.drop(meta)
        except Exception as error:  # it will fail its proof again, and be counted again
            log.warning("bad page %s cannot be dropped: %s", meta.id.hex(), error)
            self.counters.store_errors += 1

    # -- publishing -----------------------------------------------------------------------------------------------

    def _publish(self, sequence: SequencePages, index: int) -> None:
        """Makes a full page findable; if another sequence has published the same, that one is used from now on."""
        start = index * PAGE_TOKENS
        chunk = tuple(sequence.tokens[start : start + PAGE_TOKENS])
        node = sequence.tip.children.get(chunk)
        if node is None:
            self._forget_beginnings(sequence.tip, chunk)
            node = self._attach(sequence, chunk, sequence.pages[index], saved=False)
        else:  # equal bits, by law 1
            self._reference(node.page)
            self._unreference(sequence.pages[index])
            sequence.pages[index] = node.page
        sequence.tip = node

    def _publish_tail(self, sequence: SequencePages) -> None:
        """Makes what is left behind the last full page findable, unless something findable begins with it."""
        start = sequence.n_tokens - sequence.n_tokens % PAGE_TOKENS
        tokens = tuple(sequence.tokens[start : sequence.n_tokens])
        if not tokens:
            return
        for sibling in sequence.tip.children.values():
            if sibling.tokens[: len(tokens)] == tokens:
                self._touch(sibling.page)
                return
        self._forget_beginnings(sequence.tip, tokens)
        self._attach(sequence, tokens, sequence.pages[start // PAGE_TOKENS], saved=False)

    def _attach(self, sequence: SequencePages, tokens: tuple[int, ...], page: int, *, saved: bool) -> Node:
        """A new node under the sequence's last page."""
        parent = sequence.tip
        own_id = page_id(self._key, parent.id, tokens)
        collides = own_id in self._ids
        self.counters.collisions += collides
        storable = parent.storable and sequence.storable and not collides
        node = Node(own_id, parent, tokens, page, saved, storable)
        parent.children[tokens] = node
        self._node_of[page] = node
        self._ids.setdefault(own_id, node)
        if storable and not saved and self._writer is not None:
            (self._unsaved_tails if node.is_tail else self._unsaved)[node] = None
        return node

    def _detach(self, node: Node) -> None:
        assert node.parent is not None
        assert not node.children
        del node.parent.children[node.tokens]
        self._node_of[node.page] = None
        if self._ids.get(node.id) is node:
            del self._ids[node.id]
        self._unsaved.pop(node, None)
        self._unsaved_tails.pop(node, None)

    def _forget_beginnings(self, parent: Node, tokens: tuple[int, ...]) -> None:
        """Frees tails that a longer page is about to replace."""
        stale = [child for child in parent.children.values() if tokens[: len(child.tokens)] == child.tokens]
        for tail in stale:
            del self._cached[tail.page]
            self._detach(tail)
            self._free.append(tail.page)

    # -- page numbers ---------------------------------------------------------------------------------------------

    def _allocate(self, keep: int = -1) -> int | None:
        """A page with one reference, taken from the cache if need be; never page `keep`. None if all are in use."""
        if not self._free and not self._evict(keep):
            return None
        page = self._free.pop()
        self._references[page] = 1
        return page

    def _evict(self, keep: int) -> bool:
        page = next(iter(self._cached), keep)
        if page == keep:
            return False
        node = self._node_of[page]
        assert node is not None
        if node.storable and not node.saved and self._writer is not None and not self._save(node):
            self.counters.dropped += 1
        del self._cached[page]
        self._detach(node)
        self._free.append(page)
        self.counters.evicted += 1
        return True

    def _reference(self, page: int) -> None:
        if self._references[page] == 0:
            del self._cached[page]
        self._references[page] += 1

    def _unreference(self, page: int) -> None:
        self._references[page] -= 1
        if self._references[page] == 0:
            if self._node_of[page] is None:
                self._free.append(page)
            else:
                self._cached[page] = None

    def _touch(self, page: int) -> None:
        if page in self._cached:
            self._cached.move_to_end(page)

    # -- writing behind ---------------------------------------------------------------------------------------------

    @property
    def is_writing(self) -> bool:
        """Whether the outcome of a write is still unknown."""
        return self._writer is not None and self._writer.is_busy

    @property
    def has_unsaved(self) -> bool:
        """Whether pages or tails wait to be written."""
        return bool(self._unsaved or self._unsaved_tails)

    def write_behind(self, *, tails: bool = False) -> None:
        """Hands the writer as many pages as it takes, never waiting; tails only when asked (idle, shutdown)."""
        if self._writer is None:
            return
        self._collect_outcomes(self._writer)
        while self._unsaved and self._save(next(iter(self._unsaved))):
            pass
        while tails and self._unsaved_tails and self._save(next(iter(self._unsaved_tails))):
            pass

    def flush(self, timeout_s: float) -> bool:
        """Waits until what the writer took is written or has failed; whether that was in time."""
        return self._writer is None or self._writer.flush(time.monotonic() + timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Writes everything that is not yet written and ends the writer; whether all was written in time."""
        if self._writer is None:
            return True
        deadline = time.monotonic() + timeout_s
        while self.has_unsaved and self._writer.wait_for_room(self.page_bytes, deadline):
            self.write_behind(tails=True)
        self._writer.flush(deadline)
        self._writer.close(deadline)
        self._collect_outcomes(self._writer)
        return not self.has_unsaved

    def _save(self, node: Node) -> bool:
        """Copies a page out and hands it to the writer, if that has room."""
        assert self._writer is not None
        assert node.parent is not None
        if not self._writer.has_room(self.page_bytes):
            return False
        payload, checksum = self._pool.kv_save(node.page)
        write = PageWrite(node.id, node.parent.id, node.tokens, checksum, payload)
        node.saved = self._writer.offer(node, write)
        if node.saved:
            self._unsaved.pop(node, None)
            self._unsaved_tails.pop(node, None)
        return node.saved

    def _collect_outcomes(self, writer: PageWriter[Node]) -> None:
        for node, written in writer.outcomes():
            if not written and self._node_of[node.page] is node:  # still here: it may try again later
                node.saved = False
                (self._unsaved_tails if node.is_tail else self._unsaved)[node] = None

    # -- inspection -------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """Figures for `status`; all in pages but those named bytes."""
        counters = self.counters
        writer = self._writer
        return {
            "total": self.n_pages,
            "free": len(self._free),
            "cached": len(self._cached),
            "active": self.n_pages - self.n_available,
            "page_bytes": self.page_bytes,
            "unsaved": len(self._unsaved) + len(self._unsaved_tails),
            "write_queue": writer.n_queued if writer else 0,
            "write_queue_bytes": writer.queued_bytes if writer else 0,
            "written": writer.n_written if writer else 0,
            "write_failures": writer.n_failed if writer else 0,
        } | {name: getattr(counters, name) for name in Counters.__slots__}

    def is_immutable(self, page: int) -> bool:
        """Whether the page is published or shared, so that nothing may be written into it."""
        return self._node_of[page] is not None or self._references[page] != 1

    def check_integrity(self) -> None:
        """Raises AssertionError if the law of conservation, or what follows from it, does not hold."""
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & cached, "a page is both free and cached"
        held = array("i", bytes(4 * self.n_pages))
        for sequence in self._live:
            for page in sequence.pages:
                held[page] += 1
            assert sequence.n_tokens <= len(sequence.pages) * PAGE_TOKENS, "more tokens than pages"
        assert held == self._references, "references differ from what sequences hold"
        for page, node in enumerate(self._node_of):
            assert (page in free or page in cached) == (held[page] == 0), f"page {page} is lost"
            assert page not in cached or node is not None, f"page {page} is cached and cannot be found"
            assert page not in free or node is None, f"page {page} is free and can be found"
            if node is not None:
                self._check_node(node)
        self._check_eviction_order()

    def _check_node(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        assert self._node_of[node.page] is node
        assert parent.children[node.tokens] is node
        assert parent is self._root or self._node_of[parent.page] is parent, "a page whose parent is gone"
        assert not (node.is_tail and node.children), "a tail with children"
        users = sum(self._references[child.page] for child in node.children.values())
        assert users <= self._references[node.page], "a page is used without the one before it"

    def _check_eviction_order(self) -> None:
        place = {page: i for i, page in enumerate(self._cached)}
        for page, i in place.items():
            node = self._node_of[page]
            assert node is not None
            for child in node.children.values():
                assert place[child.page] < i, "a page would be evicted before one that follows it"


def _longest_beginning(wanted: Sequence[int], pages: Iterable[Findable]) -> tuple[Findable | None, int]:
    """The page that shares the longest beginning with `wanted`, and how long that is."""
    best: Findable | None = None
    longest = 0
    for page in pages:
        n = common_length(wanted, page.tokens)
        if n > longest:
            best, longest = page, n
    return best, longest
