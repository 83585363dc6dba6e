"""The page store: whole or not at all, and never more than a cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from colibri.kvstore import PageCorrupt, PageStore, PageWrite

ROOT = b"r" * 16


def page(number: int, parent: bytes = ROOT, n_tokens: int = 32, n_bytes: int = 5000) -> PageWrite:
    tokens = tuple(range(number, number + n_tokens))
    return PageWrite(
        number.to_bytes(15, "big") + bytes([n_tokens]),
        parent,
        tokens,
        2**64 - 1 - number,
        bytes([number % 256]) * n_bytes,
    )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PageStore]:
    store = PageStore(tmp_path / "pages", low_water_bytes=0)
    yield store
    store.close()


def test_a_page_round_trips_through_a_restart(tmp_path: Path) -> None:
    store = PageStore(tmp_path / "pages", low_water_bytes=0)
    written = page(1)
    store.write([written])
    store.close()
    store = PageStore(tmp_path / "pages", low_water_bytes=0)
    (meta,) = store.children(ROOT)
    assert (meta.id, meta.parent, meta.tokens, meta.checksum) == (written.id, ROOT, written.tokens, written.checksum)
    assert store.read(meta) == written.payload
    store.close()


def test_children_are_found_by_their_parent(store: PageStore) -> None:
    first, second, grandchild = page(1), page(2), page(3, parent=page(1).id)
    store.write([first, second, grandchild])
    assert {meta.id for meta in store.children(ROOT)} == {first.id, second.id}
    assert [meta.id for meta in store.children(first.id)] == [grandchild.id]
    assert store.children(grandchild.id) == []


def test_writing_twice_is_harmless(store: PageStore) -> None:
    store.write([page(1), page(1)])
    before = store.stats()
    store.write([page(1)])
    assert store.stats() == before
    assert len(store.children(ROOT)) == 1


def test_a_full_page_takes_the_place_of_its_tails(store: PageStore) -> None:
    other_tail = page(9, n_tokens=5)
    store.write([page(1, n_tokens=5), other_tail])
    store.write([page(1, n_tokens=20)])
    store.write([page(1)])
    assert {meta.id for meta in store.children(ROOT)} == {page(1).id, other_tail.id}
    assert store.stats()["pages"] == 2


def test_a_dropped_page_is_gone(store: PageStore) -> None:
    store.write([page(1)])
    (meta,) = store.children(ROOT)
    store.drop(meta)
    store.drop(meta)
    assert store.children(ROOT) == []
    assert (store.stats()["pages"], store.stats()["bytes"]) == (0, 0)
    with pytest.raises(PageCorrupt):
        store.read(meta.__class__(meta.id, ROOT, meta.tokens, 0, meta.n_bytes, meta.number + 1))
