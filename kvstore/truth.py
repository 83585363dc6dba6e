"""The truth: named logs of small records, and one head for each.

A name's keys stand together: head first, then its records by (turn, part).

    NAME 0x00 0x00                        head: where the log ends, and whatever its owner wants to list cheaply
    NAME 0x00 0x01 TURN:u32 PART:u32      record: the position of the one before it, and fields

Turns are numbered without gaps, every record names the one before it and the head names the last, so that a record
that is gone is noticed as surely as one that is damaged. What the fields mean is the owner's business
(colibri.daemon.sessions).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from rocksdict import BlockBasedOptions, Options

from colibri.kvstore.errors import NotFound, RecordCorrupt, StoreDamaged, StoreError, StoreFull
from colibri.kvstore.records import BadRecord, seal, unseal
from colibri.kvstore.reserve import Reserve
from colibri.kvstore.rocks import Batch, Database, base_options, skipping_all_damage, skipping_damaged_log

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

Position = tuple[int, int]  # (turn, part)

# Kept on disk to be given back when the volume is full: enough for the ends of many turns.
RESERVE_BYTES = 8 << 20

# Files that came from memory and were not merged with the others; compacted when there are more. Every one costs a
# reader a look, and space that removed records still take.
_MAX_FILES = 8

# Of records in memory; then they become a file.
_MEMORY_BYTES = 8 << 20

# How long a write waits for RocksDB after the reserve was released: it looks for free space every 5 s.
_RECOVERY_S = 7.0

# Longer than any key: a search that gets there has found no end.
_MAX_KEY_BYTES = 255

# One flipped byte makes a block unreadable; small blocks keep the neighbours out of it.
_BLOCK_BYTES = 1024


@dataclass(frozen=True)
class Record:
    turn: int
    part: int
    fields: Mapping[str, Any]

    @property
    def position(self) -> Position:
        return (self.turn, self.part)


class _Gate:
    """Any number may use the database at once; who opens it again is alone with it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._n_inside = 0

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """May be nested."""
        with self._changed:
            self._n_inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._n_inside -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody gets in from when the last one has left."""
        with self._changed:
            self._changed.wait_for(lambda: self._n_inside == 0)
            yield


def _shared(method: Callable[Concatenate[TruthStore, P], T]) -> Callable[Concatenate[TruthStore, P], T]:
    """A method that reads."""

    @functools.wraps(method)
    def inside(self: TruthStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._gate.shared():
            return method(self, *args, **kwargs)

    return inside


class TruthStore:
    """Logs of records by name. Threads may share it; writers to one name must take turns."""

    def __init__(self, path: str | Path, *, reserve_bytes: int = RESERVE_BYTES) -> None:
        self._path = Path(path)
        self._reserve = Reserve(self._path.with_suffix(".reserve"), reserve_bytes)
        self._write_lock = threading.Lock()
        self._gate = _Gate()
        self._compactable = True
        self._compactor: threading.Thread | None = None
        self._unchecked_bytes = 0  # written since the last look at the files
        self._failure: StoreError | None = None  # of the last write, if it failed
        self.log_was_damaged = False
        self._db = self._open()
        self._identity = _identity(self._path)
        if self._has_many_files():
            self._compact()
        self._reserve.take()

    def _open(self) -> Database:
        """On a full volume opening takes some of the reserve as well."""
        try:
            return self._open_whole_or_damaged()
        except StoreFull:
            if not self._reserve.release():
                raise
        return self._open_whole_or_damaged()

    def _open_whole_or_damaged(self) -> Database:
        """Notes whether parts of the last run's log had to be given up; the chains then say which turns."""
        try:
            return Database(self._path, _options())
        except StoreDamaged:
            self.log_was_damaged = True
        try:
            return Database(self._path, skipping_damaged_log(_options()))
        except StoreDamaged:
            return Database(self._path, skipping_all_damage(_options()))

    def _has_many_files(self) -> bool:
        return len([file for file in self._db.files() if file["level"] == 0]) > _MAX_FILES

    def _compact(self) -> None:
        try:
            self._db.compact()
        except StoreError as error:
            # After a compaction that met damage RocksDB takes no writes until it is opened again.
            log.warning("the sessions' database cannot be compacted: %s", error)
            self._compactable = False
            with self._gate.alone():
                with contextlib.suppress(StoreError):  # it cannot move to table files what the log has
                    self._db.close()
                self._db = self._open()

    def _compact_if_due(self, batch: Batch) -> None:
        """On a thread of its own, so that whoever writes or reads goes on."""
        self._unchecked_bytes += sum(len(key) + len(value) for key, value, _ in batch.puts)
        if self._unchecked_bytes < _MEMORY_BYTES or (self._compactor is not None and self._compactor.is_alive()):
            return
        self._unchecked_bytes = 0
        if self._compactable and self._has_many_files():
            self._compactor = threading.Thread(target=self._compact, name="colibri-truth-compaction", daemon=True)
            self._compactor.start()

    @_shared
    def head(self, name: str) -> dict[str, Any] | None:
        """None if there is no such name. Raises RecordCorrupt."""
        key = _head_key(name)
        try:
            value = self._db.get(key)
            return None if value is None else unseal(key, value)[1]
        except (StoreDamaged, BadRecord):
            raise RecordCorrupt(name, [0]) from None

    @_shared
    def records(self, name: str) -> list[Record]:
        """The whole log, in order. Raises NotFound, or RecordCorrupt naming every turn that is damaged or gone."""
        key = _head_key(name)
        try:
            value = self._db.get(key)
            if value is None:
                raise NotFound(f"no records under {name!r}")
            last = tuple(unseal(key, value)[0])
        except (StoreDamaged, BadRecord):
            raise RecordCorrupt(name, [0]) from None
        try:
            found = list(self._db.scan(_record_prefix(name)))
        except StoreDamaged:
            return self._records_by_chain(name, last)
        return _checked(name, found, last)

    def _records_by_chain(self, name: str, last: Position) -> list[Record]:
        """For a log that cannot be scanned: from the last record back along the chain, one key at a time. (What
        stands in the way may be the remains of a session of that name that was deleted.)"""
        records: list[Record] = []
        position: Position | None = last
        while position is not None:
            link = self._read(name, position)
            if link is None:
                earlier = [turn for turn in range(position[0]) if self._read(name, (turn, 0)) is None]
                raise RecordCorrupt(name, [*earlier, position[0]])
            record, position = link
            records.append(record)
        return records[::-1]

    def _read(self, name: str, position: Position) -> tuple[Record, Position | None] | None:
        """A record and the position of the one before it; None if it is damaged or gone."""
        key = _record_key(name, position)
        try:
            value = self._db.get(key)
            if value is None:
                return None
            previous, fields = unseal(key, value)
        except (StoreDamaged, BadRecord):
            return None
        return Record(*position, fields), None if previous is None else tuple(previous)

    def commit(
        self,
        name: str,
        records: Sequence[Record],
        *,
        previous: Position | None,
        head: Mapping[str, Any],
        remove: Sequence[Position] = (),
        sync: bool,
    ) -> None:
        """Appends `records` after the one at `previous`, takes those at `remove` away, and replaces the head: all or
        nothing. With `sync` it is on disk when this returns; without, it survives the process but not the machine.
        """
        batch = Batch()
        for record in records:
            key = _record_key(name, record.position)
            batch.put(key, seal(key, previous, dict(record.fields)))
            previous = record.position
        for position in remove:
            batch.delete(_record_key(name, position))
        key = _head_key(name)
        batch.put(key, seal(key, previous, dict(head)))
        self._write(batch, sync=sync)

    def delete(self, name: str) -> None:
        """Forgets the name, damaged or not. Raises NotFound."""
        first, end = name.encode() + b"\0", _behind(name)
        with self._gate.shared(), contextlib.suppress(StoreDamaged):
            if not any(True for _ in self._db.scan(first)):
                raise NotFound(f"no records under {name!r}")
        batch = Batch()
        # A range, because keys in a damaged block cannot be listed.
        batch.delete_range(first, end)
        self._write(batch, sync=True)

    def _write(self, batch: Batch, *, sync: bool) -> None:
        with self._write_lock:
            try:
                self._refuse_if_removed()
                self._write_around_damage(batch, sync=sync)
            except StoreError as error:
                self._failure = error
                raise
            self._failure = None
            self._compact_if_due(batch)

    def problem(self) -> str | None:
        """Why sessions cannot be saved, as far as is known without trying. Never waits for a writer."""
        if _identity(self._path) != self._identity:
            return f"{self._path} was removed or replaced"
        failure = self._failure
        if isinstance(failure, StoreFull) and self._reserve.has_room():
            return None  # the next write will do
        return None if failure is None else str(failure)

    def _write_around_damage(self, batch: Batch, *, sync: bool) -> None:
        try:
            self._write_with_reserve(batch, sync=sync)
        except StoreDamaged:
            if self._compactor is None:
                raise
            # A compaction has just met damage, and is about to open the database again.
            self._compactor.join()
            self._write_with_reserve(batch, sync=sync)

    def _write_with_reserve(self, batch: Batch, *, sync: bool) -> None:
        with self._gate.shared():
            try:
                self._db.write(batch, sync=sync)
            except StoreFull:
                # Space that came free counts too: RocksDB goes on refusing for a while.
                if not self._reserve.release() and not self._reserve.has_room():
                    raise
                self._write_after_recovery(batch, sync=sync)
            else:
                self._reserve.take()

    def _refuse_if_removed(self) -> None:
        """RocksDB would go on writing into files that nobody can find again."""
        if _identity(self._path) != self._identity:
            raise StoreError(f"{self._path}: was removed or replaced while it was open")

    def _write_after_recovery(self, batch: Batch, *, sync: bool) -> None:
        """RocksDB takes writes again once it has moved a log with a failed write out of use."""
        deadline = time.monotonic() + _RECOVERY_S
        while True:
            try:
                return self._db.write(batch, sync=sync)
            except StoreFull:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    @_shared
    def heads(self, after: str | None, limit: int) -> list[tuple[str, dict[str, Any] | None]]:
        """Up to `limit` names behind `after`, in the order of their bytes, each with its head (None: damaged)."""
        result: list[tuple[str, dict[str, Any] | None]] = []
        position = b"" if after is None else _behind(after)
        while len(result) < limit:
            key = self._first_readable_key(position)
            if key is None:
                break
            name = key.split(b"\0", 1)[0].decode()
            try:
                result.append((name, self.head(name)))
            except RecordCorrupt:
                result.append((name, None))
            position = _behind(name)
        return result

    def _first_readable_key(self, start: bytes) -> bytes | None:
        with contextlib.suppress(StoreDamaged):
            return self._first_key(start)
        with contextlib.suppress(StoreDamaged):
            return self._first_key(self._end_of_damage(start))
        return None

    def _first_key(self, start: bytes) -> bytes | None:
        return next((key for key, _ in self._db.scan(b"", start=start)), None)

    def _end_of_damage(self, start: bytes) -> bytes:
        """The least key from which can be read again, found byte by byte: nothing in an unreadable block says where
        the next one begins."""
        edge = b""  # a beginning of the last key that falls into the damage
        while len(edge) < _MAX_KEY_BYTES:
            byte = start[len(edge)] if start.startswith(edge) and start != edge else -1
            while byte < 255 and self._is_damaged_at(edge + bytes([byte + 1])):
                byte += 1
            if byte < 0:
                break
            edge += bytes([byte])
        return edge + b"\0"

    def _is_damaged_at(self, start: bytes) -> bool:
        try:
            self._first_key(start)
        except StoreDamaged:
            return True
        return False

    def close(self) -> None:
        if self._compactor is not None:
            self._compactor.join()
        with self._write_lock:
            # Damage to a table file costs one block, damage to a log may cost more. On a full disk the log has to do.
            with contextlib.suppress(StoreError):
                self._db.flush()
            # What was committed is in the log already, and what closing would add cannot be had any more.
            with contextlib.suppress(StoreError):
                self._db.close()


def _identity(path: Path) -> tuple[int, int] | None:
    """Which folder stands at a path."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _options() -> Options:
    options = base_options()
    blocks = BlockBasedOptions()
    blocks.set_block_size(_BLOCK_BYTES)
    options.set_block_based_table_factory(blocks)
    options.set_write_buffer_size(_MEMORY_BYTES)
    # A compaction that meets a damaged block stops all writes until the next open, so it is done by us.
    options.set_disable_auto_compactions(True)
    options.set_level_zero_slowdown_writes_trigger(1 << 20)
    options.set_level_zero_stop_writes_trigger(1 << 20)
    return options


def _head_key(name: str) -> bytes:
    return name.encode() + b"\0\0"


def _record_prefix(name: str) -> bytes:
    return name.encode() + b"\0\1"


def _record_key(name: str, position: Position) -> bytes:
    turn, part = position
    return _record_prefix(name) + turn.to_bytes(4, "big") + part.to_bytes(4, "big")


def _behind(name: str) -> bytes:
    """Before any other name, behind all keys of this one: names hold no control characters."""
    return name.encode() + b"\1"


def _checked(name: str, found: Sequence[tuple[bytes, bytes]], last: Position) -> list[Record]:
    """Parses the log and proves that nothing is missing from it."""
    records: list[Record] = []
    damaged: list[int] = []
    before: Position | None = None
    for key, value in found:
        position = (int.from_bytes(key[-8:-4], "big"), int.from_bytes(key[-4:], "big"))
        try:
            previous, fields = unseal(key, value)
        except BadRecord:
            damaged.append(position[0])
        else:
            expected = None if previous is None else tuple(previous)
            if expected != before and expected is not None and expected[0] not in damaged:
                damaged.append(expected[0])
            records.append(Record(*position, fields))
        before = position
    if before != last:
        damaged.append(last[0])
    damaged += set(range(last[0] + 1)) - {int.from_bytes(key[-8:-4], "big") for key, _ in found}
    if damaged:
        raise RecordCorrupt(name, damaged)
    return records
