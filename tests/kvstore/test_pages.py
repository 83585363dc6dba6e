"""The page store: whole or not at all, and never more than a cache."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from colibri.kvstore import PageCorrupt, PageStore, PageWrite, StoreFull
from colibri.kvstore.rocks import Database

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


def folder_bytes(path: Path) -> int:
    total = 0
    for file in path.iterdir():
        with contextlib.suppress(FileNotFoundError):  # unlinked meanwhile
            total += file.stat().st_size
    return total


def flip_byte(path: Path, of: bytes) -> None:
    """Flips a bit of the first place in the folder's files where these bytes stand."""
    for file in sorted(path.iterdir()):
        data = bytearray(file.read_bytes())
        if (at := data.find(of)) >= 0:
            data[at + len(of) // 2] ^= 1
            file.write_bytes(data)
            return
    raise AssertionError(f"{of[:20]!r} is not in {path}")


def filled(path: Path, pages: list[PageWrite]) -> None:
    """Writes and closes, so that all is in table files."""
    store = PageStore(path, low_water_bytes=0)
    store.write(pages)
    store.flush()
    store.close()


def test_a_flipped_byte_of_a_page_costs_that_page_only(tmp_path: Path) -> None:
    pages = [page(number) for number in range(5)]
    filled(tmp_path / "pages", pages)
    flip_byte(tmp_path / "pages", pages[3].payload)
    store = PageStore(tmp_path / "pages", low_water_bytes=0)
    metas = {meta.id: meta for meta in store.children(ROOT)}
    with pytest.raises(PageCorrupt, match=pages[3].id.hex()):
        store.read(metas[pages[3].id])
    assert pages[3].id not in {meta.id for meta in store.children(ROOT)}
    assert store.stats()["corrupt"] == 1
    for good in (pages[0], pages[1], pages[2], pages[4]):
        assert store.read(metas[good.id]) == good.payload
    store.write([pages[3]])
    assert store.read(next(m for m in store.children(ROOT) if m.id == pages[3].id)) == pages[3].payload
    store.close()


def test_a_flipped_byte_of_a_meta_is_counted_and_the_store_goes_on(tmp_path: Path) -> None:
    filled(tmp_path / "pages", [page(1)])
    flip_byte(tmp_path / "pages", page(1).parent + page(1).id)
    store = PageStore(tmp_path / "pages", low_water_bytes=0)
    assert store.children(ROOT) == []
    assert store.stats()["rebuilt"] == 1
    store.write([page(1)])
    assert len(store.children(ROOT)) == 1
    store.close()


@pytest.mark.parametrize("name", ["CURRENT", "MANIFEST-*", "*.sst"])
def test_a_database_that_cannot_be_opened_is_started_over(tmp_path: Path, name: str) -> None:
    filled(tmp_path / "pages", [page(1)])
    for file in (tmp_path / "pages").glob(name):
        file.write_bytes(b"")
    store = PageStore(tmp_path / "pages", low_water_bytes=0)
    assert (store.stats()["rebuilt"], store.stats()["pages"]) == (1, 0)
    store.close()


def test_the_budget_is_kept_by_dropping_the_oldest_pages(tmp_path: Path) -> None:
    budget = 32 << 20
    store = PageStore(tmp_path / "pages", budget_bytes=budget, low_water_bytes=0)
    for number in range(160):
        store.write([page(number, n_bytes=400_000)])
        assert folder_bytes(tmp_path / "pages") <= budget + (2 << 20)  # files are unlinked a moment later
    present = []
    for meta in store.children(ROOT):
        with contextlib.suppress(PageCorrupt):  # dropped since the last look
            assert store.read(meta) == page(meta.tokens[0], n_bytes=400_000).payload
            present.append(meta.tokens[0])
    stats = store.stats()
    assert 20 < len(present) < 80
    assert min(present) > 70
    assert present[-20:] == list(range(140, 160))
    assert stats["evicted"] > 50
    assert stats["evicted"] + stats["pages"] == 160
    assert stats["corrupt"] == 0
    store.close()


def test_a_page_in_use_outlives_the_budget(tmp_path: Path) -> None:
    store = PageStore(tmp_path / "pages", budget_bytes=32 << 20, low_water_bytes=0)
    for number in range(160):
        store.write([page(number, n_bytes=400_000)])
        first = [meta for meta in store.children(ROOT) if meta.id == page(0).id]
        assert store.read(first[0]) == page(0, n_bytes=400_000).payload
    assert store.stats()["renewed"] > 0
    store.close()


def test_below_the_low_water_mark_writes_are_refused_and_reads_go_on(tmp_path: Path) -> None:
    filled(tmp_path / "pages", [page(1)])
    store = PageStore(tmp_path / "pages", low_water_bytes=1 << 60)
    with pytest.raises(StoreFull, match="MiB free"):
        store.write([page(2)])
    assert "MiB free" in str(store.stats()["refusing"])
    (meta,) = store.children(ROOT)
    assert store.read(meta) == page(1).payload
    store.close()


def test_a_failed_write_leaves_nothing(store: PageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise StoreFull("no space")

    with monkeypatch.context() as patch:
        patch.setattr(Database, "write", fail)
        with pytest.raises(StoreFull):
            store.write([page(1), page(2)])
    assert store.children(ROOT) == []
    assert store.stats()["pages"] == 0
    assert store.problem() == "no space"
    store.write([page(1), page(2)])
    assert store.problem() is None
    assert len(store.children(ROOT)) == 2


def test_a_read_while_pages_are_written_sees_whole_batches_and_whole_pages(store: PageStore) -> None:
    """S5: LMCache#4385, openvino.genai#3722."""
    n_batches, n_pages = 60, 4
    started, done = threading.Event(), threading.Event()

    def write() -> None:
        started.wait(60)
        for batch in range(n_batches):
            parent = batch.to_bytes(16, "big")
            store.write([page(batch * n_pages + i, parent=parent) for i in range(n_pages)])
        done.set()

    with ThreadPoolExecutor(1) as executor:
        writing = executor.submit(write)
        seen = set()
        started.set()
        while not done.is_set() or len(seen) < n_batches:
            for batch in range(n_batches):
                metas = store.children(batch.to_bytes(16, "big"))
                assert len(metas) in (0, n_pages)
                for meta in metas:
                    number = int.from_bytes(meta.id[:15], "big")
                    assert store.read(meta) == page(number).payload
                if metas:
                    seen.add(batch)
            assert not writing.done() or writing.result() is None
    assert store.stats()["corrupt"] == 0
