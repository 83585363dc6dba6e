"""The truth store: whole logs, or the names of the turns that are not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from colibri.kvstore import NotFound, Record, RecordCorrupt, StoreError, StoreFull, StoreVersionError, TruthStore, truth
from colibri.kvstore.reserve import Reserve
from colibri.kvstore.rocks import Batch, Database


def marker(name: str, turn: int) -> bytes:
    """Long enough that every record has a block of its own."""
    return f"<{name} {turn}>".encode() * 200


def add(store: TruthStore, name: str, turn: int) -> None:
    record = Record(turn, 0, {"text": marker(name, turn)})
    store.commit(name, [record], previous=(turn - 1, 0) if turn else None, head={"turns": turn}, sync=True)


def written(path: Path) -> None:
    store = TruthStore(path, reserve_bytes=0)
    for name in ("alice", "bob"):
        for turn in range(4):
            add(store, name, turn)
    store.close()


def rewrite(path: Path, old: bytes, new: bytes, *, pattern: str = "*") -> None:
    for file in sorted(path.glob(pattern)):
        data = file.read_bytes()
        if old in data:
            file.write_bytes(data.replace(old, new, 1))
            return
    raise AssertionError(f"{old[:20]!r} is not in {path}")


def test_records_round_trip_in_order(tmp_path: Path) -> None:
    written(tmp_path / "truth")
    store = TruthStore(tmp_path / "truth", reserve_bytes=0)
    records = store.records("alice")
    assert [record.position for record in records] == [(turn, 0) for turn in range(4)]
    assert [record.fields["text"] for record in records] == [marker("alice", turn) for turn in range(4)]
    assert store.heads(None, 10) == [("alice", {"turns": 3}), ("bob", {"turns": 3})]
    assert not store.log_was_damaged
    with pytest.raises(NotFound):
        store.records("carol")
    with pytest.raises(NotFound):
        store.delete("carol")
    store.close()


def test_a_name_that_begins_another_is_kept_apart(tmp_path: Path) -> None:
    store = TruthStore(tmp_path / "truth", reserve_bytes=0)
    for name in ("a", "a b", "ab"):
        add(store, name, 0)
    assert [len(store.records(name)) for name in ("a", "a b", "ab")] == [1, 1, 1]
    store.delete("a")
    assert [name for name, _ in store.heads(None, 10)] == ["a b", "ab"]
    store.close()


@pytest.mark.parametrize("turn", range(4))
def test_a_flipped_byte_names_its_turn_and_nothing_else_suffers(tmp_path: Path, turn: int) -> None:
    path = tmp_path / "truth"
    written(path)
    damaged = bytearray(marker("alice", turn))
    damaged[1000] ^= 1
    rewrite(path, marker("alice", turn), bytes(damaged), pattern="*.sst")
    store = TruthStore(path, reserve_bytes=0)
    with pytest.raises(RecordCorrupt, match=f"turn {turn}$") as caught:
        store.records("alice")
    assert (caught.value.name, caught.value.turns) == ("alice", [turn])
    assert len(store.records("bob")) == 4
    add(store, "carol", 0)
    assert [name for name, _ in store.heads(None, 10)] == ["alice", "bob", "carol"]
    store.delete("alice")
    add(store, "alice", 0)
    assert len(store.records("alice")) == 1
    store.close()
    store = TruthStore(path, reserve_bytes=0)
    assert [len(store.records(name)) for name in ("alice", "bob", "carol")] == [1, 4, 1]
    store.close()


def test_damage_survives_a_compaction_as_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "truth"
    written(path)
    damaged = bytearray(marker("alice", 1))
    damaged[1000] ^= 1
    rewrite(path, marker("alice", 1), bytes(damaged), pattern="*.sst")
    monkeypatch.setattr("colibri.kvstore.truth._MAX_FILES", 0)
    store = TruthStore(path, reserve_bytes=0)
    add(store, "carol", 0)
    assert len(store.records("bob")) == 4
    with pytest.raises(RecordCorrupt, match=r"turn 1$"):
        store.records("alice")
    store.close()


def test_a_damaged_log_is_noticed_and_costs_named_turns_only(tmp_path: Path) -> None:
    path = tmp_path / "truth"
    store = TruthStore(path, reserve_bytes=0)
    for turn in range(30):
        add(store, "alice", turn)
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in path.iterdir():  # as a crash leaves it: nothing is in table files yet
        (copy / file.name).write_bytes(file.read_bytes())
    store.close()
    damaged = bytearray(marker("alice", 3))
    damaged[1000] ^= 1
    rewrite(copy, marker("alice", 3), bytes(damaged), pattern="*.log")
    store = TruthStore(copy, reserve_bytes=0)
    assert store.log_was_damaged
    with pytest.raises(RecordCorrupt) as caught:
        store.records("alice")
    assert caught.value.turns[0] <= 3
    add(store, "bob", 0)
    assert len(store.records("bob")) == 1
    store.close()


def add_in_two_parts(store: TruthStore, name: str, turn: int) -> None:
    records = [Record(turn, part, {"part": part}) for part in range(2)]
    store.commit(name, records, previous=(turn - 1, 1) if turn else None, head={}, sync=True)


@pytest.mark.parametrize("missing", [(turn, part) for turn in range(4) for part in range(2)])
def test_a_record_that_is_gone_is_noticed_by_its_neighbours(tmp_path: Path, missing: tuple[int, int]) -> None:
    """Between others, and at the end, where only the head knows of it."""
    store = TruthStore(tmp_path / "truth", reserve_bytes=0)
    for turn in range(4):
        add_in_two_parts(store, "alice", turn)
    store.commit("alice", [], previous=(3, 1), head={}, remove=[missing], sync=True)
    with pytest.raises(RecordCorrupt) as caught:
        store.records("alice")
    assert caught.value.turns == [missing[0]]
    store.close()


@pytest.mark.parametrize("change", ["a bit", "another's place"])
def test_a_record_that_rocksdb_gives_back_changed_is_noticed(tmp_path: Path, change: str) -> None:
    """Its checksums are of blocks on disk; ours go with the record, and with its place."""
    written(tmp_path / "truth")
    other = Database(tmp_path / "truth", truth._options())
    values = dict(other.scan(b"alice\0\1"))
    second, third = sorted(values)[1:3]
    batch = Batch()
    batch.put(third, values[second] if change == "another's place" else values[third][:-1] + b"!")
    other.write(batch, sync=False)
    other.close()
    store = TruthStore(tmp_path / "truth", reserve_bytes=0)
    with pytest.raises(RecordCorrupt) as caught:
        store.records("alice")
    assert caught.value.turns == [2]
    assert len(store.records("bob")) == 4
    store.close()


def test_a_record_of_a_later_version_is_refused_by_both_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TruthStore(tmp_path / "truth", reserve_bytes=0)
    with monkeypatch.context() as patch:
        patch.setattr("colibri.kvstore.records.VERSION", 2)
        add(store, "alice", 0)
    with pytest.raises(StoreVersionError, match=r"version 2.* version 1"):
        store.records("alice")
    store.close()


def failing(times: int, text: str, write: Callable[..., None]) -> Callable[..., None]:
    """`Database.write`, but the first calls fail as RocksDB does."""
    left = [times]

    def attempt(self: Database, *args: object, **kwargs: object) -> None:
        if left[0]:
            left[0] -= 1
            raise StoreFull(text)
        write(self, *args, **kwargs)

    return attempt


def test_the_reserve_is_given_back_when_the_disk_is_full_and_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TruthStore(tmp_path / "truth", reserve_bytes=1 << 20)
    reserve = tmp_path / "truth.reserve"
    assert reserve.stat().st_size == 1 << 20
    with monkeypatch.context() as patch:
        patch.setattr(Database, "write", failing(3, "No space left on device", Database.write))
        add(store, "alice", 0)
    assert not reserve.exists()
    add(store, "alice", 1)
    assert reserve.stat().st_size == 1 << 20
    assert len(store.records("alice")) == 2
    store.close()


def test_a_full_disk_is_opened_with_the_reserve_that_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = TruthStore(tmp_path / "truth", reserve_bytes=1 << 20)
    add(store, "alice", 0)
    store.close()
    reserve = tmp_path / "truth.reserve"
    original = Database.__init__

    def needs_room(self: Database, *args: Any, **kwargs: Any) -> None:
        if reserve.exists():
            raise StoreFull("No space left on device")
        original(self, *args, **kwargs)

    monkeypatch.setattr(Database, "__init__", needs_room)
    store = TruthStore(tmp_path / "truth", reserve_bytes=1 << 20)
    assert len(store.records("alice")) == 1
    store.close()


@pytest.mark.parametrize("replaced", [False, True])
def test_nothing_is_acknowledged_once_the_folder_is_gone(tmp_path: Path, replaced: bool) -> None:
    store = TruthStore(tmp_path / "truth", reserve_bytes=0)
    add(store, "alice", 0)
    (tmp_path / "truth").rename(tmp_path / "elsewhere")
    if replaced:
        (tmp_path / "truth").mkdir()
    with pytest.raises(StoreError, match="removed or replaced"):
        add(store, "alice", 1)
    store.close()


def test_without_a_reserve_a_full_disk_is_an_error_that_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TruthStore(tmp_path / "truth", reserve_bytes=1 << 60)
    add(store, "alice", 0)
    with monkeypatch.context() as patch:
        patch.setattr(Database, "write", failing(1, "No space left on device", Database.write))
        with pytest.raises(StoreFull):
            add(store, "alice", 1)
    assert len(store.records("alice")) == 1
    store.close()


def test_a_store_that_cannot_be_written_says_why_until_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = TruthStore(tmp_path / "truth", reserve_bytes=0)
    add(store, "alice", 0)
    assert store.problem() is None
    with monkeypatch.context() as patch:
        patch.setattr(Database, "write", failing(2, "truth: Input/output error", Database.write))
        patch.setattr(Reserve, "has_room", lambda self: False)
        with pytest.raises(StoreFull):
            add(store, "alice", 1)
        assert store.problem() == "truth: Input/output error"
        patch.setattr(Reserve, "has_room", lambda self: True)  # space came free: no need to wait for a write
        assert store.problem() is None
    add(store, "alice", 1)
    assert store.problem() is None
    (tmp_path / "truth").rename(tmp_path / "elsewhere")
    assert "removed or replaced" in str(store.problem())
    store.close()


def test_what_rocksdb_says_becomes_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        TruthStore(tmp_path / "file" / "truth", reserve_bytes=0)


# Compaction while the store is open


def replaced_head(store: TruthStore, name: str, n_bytes: int) -> None:
    """Writes that leave nothing but their last one to be kept."""
    store.commit(name, [], previous=(0, 0), head={"text": b"x" * n_bytes}, sync=False)


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> int:
    """Records become a file after so many bytes; the least that RocksDB takes."""
    monkeypatch.setattr("colibri.kvstore.truth._MEMORY_BYTES", 64 << 10)
    return 64 << 10


def wait_for_compaction(store: TruthStore) -> None:
    if store._compactor is not None:
        store._compactor.join()


def test_files_stay_few_and_small_while_the_store_is_written_to(tmp_path: Path, small_memory: int) -> None:
    store = TruthStore(tmp_path / "truth", reserve_bytes=0)
    add(store, "alice", 0)
    for _ in range(400):  # 100 times what is kept
        replaced_head(store, "bob", small_memory // 4)
        wait_for_compaction(store)
    files = store._db.files()
    assert len(files) < 20
    assert sum(file["size"] for file in files) < 40 * small_memory
    assert len(store.records("alice")) == 1
    store.close()


def test_damage_that_a_compaction_meets_stops_no_writer_and_no_reader(tmp_path: Path, small_memory: int) -> None:
    path = tmp_path / "truth"
    written(path)
    damaged = bytearray(marker("alice", 1))
    damaged[1000] ^= 1
    rewrite(path, marker("alice", 1), bytes(damaged), pattern="*.sst")
    store = TruthStore(path, reserve_bytes=0)
    before = store._db
    for _ in range(60):
        for name in ("aaron", "carol"):  # on both sides, so that every new file has to be merged with the damaged one
            replaced_head(store, name, small_memory // 4)
        wait_for_compaction(store)
        assert len(store.records("bob")) == 4
    assert store._db is not before  # it did meet the damage
    with pytest.raises(RecordCorrupt, match=r"turn 1$"):
        store.records("alice")
    store.close()


def test_readers_on_other_threads_never_meet_a_closed_database(tmp_path: Path) -> None:
    written(tmp_path / "truth")
    store = TruthStore(tmp_path / "truth", reserve_bytes=0)

    def fail() -> None:
        raise StoreError("damage")

    reading = threading.Event()

    def read() -> int:
        n = 0
        while not reading.is_set():
            n += len(store.records("alice")) + len(store.heads(None, 10))
        return n

    with ThreadPoolExecutor(2) as executor:
        readers = [executor.submit(read) for _ in range(2)]
        for _ in range(5):
            store._db.compact = fail  # type: ignore[method-assign]
            store._compact()
        reading.set()
        assert all(reader.result() for reader in readers)
    store.close()
