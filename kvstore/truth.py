"""The truth: named logs of small records, and one head for each.

A name's keys stand together: head first, then its records by (turn, part).

    NAME 0x00 0x00                        head: where the log ends, and whatever its owner wants to list cheaply
    NAME 0x00 0x01 TURN:u32 PART:u32      record: the position of the one before it, and fields

Every record names the one before it and the head names the last, so that a record that is gone is noticed as surely
as one that is damaged. What the fields mean is the owner's business (colibri.daemon.sessions).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colibri.kvstore.errors import NotFound, RecordCorrupt, StoreDamaged
from colibri.kvstore.records import BadRecord, seal, unseal
from colibri.kvstore.rocks import Batch, Database, base_options, strict
from rocksdict import BlockBasedOptions, Options

Position = tuple[int, int]  # (turn, part)

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


class TruthStore:
    """Logs of records by name. Threads may share it; writers to one name must take turns."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self.log_was_damaged = self._replay_strictly()
        self._db = Database(self._path, _options())

    def _replay_strictly(self) -> bool:
        """Replays the log of the last run, and says whether parts of it had to be given up."""
        try:
            Database(self._path, strict(_options())).close()
        except StoreDamaged:
            return True
        return False

    def head(self, name: str) -> dict[str, Any] | None:
        """None if there is no such name. Raises RecordCorrupt."""
        key = _head_key(name)
        try:
            value = self._db.get(key)
            return None if value is None else unseal(key, value)[1]
        except (StoreDamaged, BadRecord):
            raise RecordCorrupt(name, [0]) from None

    def records(self, name: str) -> list[Record]:
        """The whole log, in order. Raises NotFound, or RecordCorrupt naming every turn that is damaged or gone."""
        key = _head_key(name)
        try:
            value = self._db.get(key)
            if value is None:
                raise NotFound(f"no records under {name!r}")
            last = tuple(unseal(key, value)[0])
            found = list(self._db.scan(_record_prefix(name)))
        except (StoreDamaged, BadRecord):
            raise RecordCorrupt(name, self._damaged_turns(name) or [0]) from None
        return _checked(name, found, last)

    def _damaged_turns(self, name: str) -> list[int]:
        """For a log that cannot be read through: looks at each turn on its own."""
        damaged: list[int] = []
        turn = 0
        while True:
            try:
                if not self._turn_exists(name, turn):
                    return damaged
            except StoreDamaged:
                damaged.append(turn)
            turn += 1

    def _turn_exists(self, name: str, turn: int) -> bool:
        prefix = _record_prefix(name) + turn.to_bytes(4, "big")
        return bool(list(self._db.scan(prefix)))

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
        batch = Batch(self._db)
        for record in records:
            key = _record_key(name, record.position)
            batch.put(key, seal(key, previous, dict(record.fields)))
            previous = record.position
        for position in remove:
            batch.delete(_record_key(name, position))
        key = _head_key(name)
        batch.put(key, seal(key, previous, dict(head)))
        self._db.write(batch, sync=sync)

    def delete(self, name: str) -> None:
        """Forgets the name, damaged or not. Raises NotFound."""
        first, end = name.encode() + b"\0", _behind(name)
        with contextlib.suppress(StoreDamaged):
            if not any(True for _ in self._db.scan(first)):
                raise NotFound(f"no records under {name!r}")
        batch = Batch(self._db)
        # A range, because keys in a damaged block cannot be listed.
        batch.delete_range(first, end)
        self._db.write(batch, sync=True)

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

    def _first_readable_key(self, position: bytes) -> bytes | None:
        for start in itertools.chain([position], _steps_behind(position)):
            with contextlib.suppress(StoreDamaged):
                return next((key for key, _ in self._db.scan(b"", start=start)), None)
        return None

    def close(self) -> None:
        # Table files have a checksum per block; the log would be read as a whole.
        self._db.flush()
        self._db.close()


def _options() -> Options:
    options = base_options()
    blocks = BlockBasedOptions()
    blocks.set_block_size(_BLOCK_BYTES)
    options.set_block_based_table_factory(blocks)
    options.set_write_buffer_size(8 << 20)
    # Damage can stop compactions; that must not stop writes.
    options.set_level_zero_slowdown_writes_trigger(10_000)
    options.set_level_zero_stop_writes_trigger(10_000)
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


def _steps_behind(position: bytes) -> Iterator[bytes]:
    """Ever larger steps: over a block that cannot be read nothing says where the next one starts."""
    for length in range(len(position), 0, -1):
        for byte in range(position[length - 1] + 1, 256):
            yield position[: length - 1] + bytes([byte])


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
    if before != last and last[0] not in damaged:
        damaged.append(last[0])
    if damaged:
        raise RecordCorrupt(name, damaged)
    return records
