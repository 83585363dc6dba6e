"""The one place that knows rocksdict: raw databases of bytes, with errors that have types.

rocksdict raises bare `Exception`s with RocksDB's text, its mapping iterators end silently at a damaged block, and a
closed database stays locked while a handle to one of its column families lives. All three are dealt with here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rocksdict import ColumnFamily, DBCompressionType, DBRecoveryMode, Options, Rdict, WriteBatch, WriteOptions

from colibri.kvstore.errors import StoreDamaged, StoreError, StoreFull, StoreLocked

_CAUSES: tuple[tuple[str, type[StoreError]], ...] = (
    ("No space left on device", StoreFull),
    ("Disk quota exceeded", StoreFull),
    ("/LOCK: ", StoreLocked),
    ("Corruption", StoreDamaged),
    ("No such file or directory", StoreDamaged),
)


@contextmanager
def typed_errors(path: Path) -> Iterator[None]:
    """Turns what rocksdict raises into a StoreError that names the database."""
    try:
        yield
    except StoreError:
        raise
    except Exception as error:
        text = str(error)
        kind = next((kind for sign, kind in _CAUSES if sign in text), StoreError)
        raise kind(f"{path}: {text}") from error


def base_options() -> Options:
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    # Token ids are small and KV is noise: compressing either costs time and saves nothing.
    options.set_compression_type(DBCompressionType.none())
    # A torn end, which every crash leaves, is fine; damage before it refuses to open.
    options.set_wal_recovery_mode(DBRecoveryMode.tolerate_corrupted_tail_records())
    options.set_keep_log_file_num(3)
    # Reserved at once, and more than a small store needs.
    options.set_manifest_preallocation_size(64 << 10)
    return options


def skipping_damaged_log(options: Options) -> Options:
    """Reads what can be read of a damaged log."""
    options.set_wal_recovery_mode(DBRecoveryMode.skip_any_corrupted_record())
    return options


def skipping_all_damage(options: Options) -> Options:
    """Opens with damaged files too; reads still verify checksums, and fail where the damage is."""
    options.set_paranoid_checks(False)
    return skipping_damaged_log(options)


@dataclass
class Batch:
    """Writes that become visible, and durable, together or not at all. May be written again after a failure."""

    puts: list[tuple[bytes, bytes, str]] = field(default_factory=list)  # key, value, family
    deletes: list[bytes] = field(default_factory=list)
    deleted_ranges: list[tuple[bytes, bytes]] = field(default_factory=list)  # begin, end

    def put(self, key: bytes, value: bytes, family: str = "default") -> None:
        self.puts.append((key, value, family))

    def delete(self, key: bytes) -> None:
        self.deletes.append(key)

    def delete_range(self, begin: bytes, end: bytes) -> None:
        self.deleted_ranges.append((begin, end))


class Database:
    """An open RocksDB. Threads may share it."""

    def __init__(self, path: Path, options: Options, families: dict[str, Options] | None = None) -> None:
        self.path = path
        with typed_errors(path):
            self._db = Rdict(str(path), options, column_families=families or {})
            self._families: dict[str, Rdict] = {"default": self._db}
            self._handles: dict[str, ColumnFamily | None] = {"default": None}
            for name in families or {}:
                self._families[name] = self._db.get_column_family(name)
                self._handles[name] = self._db.get_column_family_handle(name)
        self._synced = WriteOptions()
        self._synced.sync = True
        self._unsynced = WriteOptions()

    def get(self, key: bytes, family: str = "default") -> bytes | None:
        with typed_errors(self.path):
            value: bytes | None = self._families[family].get(key)
            return value

    def write(self, batch: Batch, *, sync: bool) -> None:
        """Deletes first, then puts."""
        with typed_errors(self.path):
            raw = WriteBatch(raw_mode=True)
            for begin, end in batch.deleted_ranges:
                raw.delete_range(begin, end)
            for key in batch.deletes:
                raw.delete(key)
            for key, value, family in batch.puts:
                raw.put(key, value, self._handles[family])
            self._db.write(raw, self._synced if sync else self._unsynced)

    def scan(self, prefix: bytes, *, start: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        """Keys with this prefix in order, from `start` on. Raises StoreDamaged where RocksDB cannot read on."""
        with typed_errors(self.path):
            cursor = self._db.iter()
            try:
                cursor.seek(prefix if start is None else start)
                while cursor.valid():
                    key = cursor.key()
                    if not key.startswith(prefix):
                        return
                    yield key, cursor.value()
                    cursor.next()
                cursor.status()
            finally:
                # An error's traceback would keep it, and with it the database open.
                del cursor

    def files(self) -> list[dict[str, Any]]:
        """RocksDB's table files: name, size, start_key, end_key, …"""
        with typed_errors(self.path):
            return self._db.live_files()

    def compact(self) -> None:
        """Raises StoreDamaged, which RocksDB itself does not tell; after that it takes no writes."""
        with typed_errors(self.path):
            self._db.compact_range(None, None)
            if self._db.property_int_value("rocksdb.background-errors"):
                raise StoreDamaged(f"{self.path}: a compaction met damage")

    def flush(self) -> None:
        with typed_errors(self.path):
            self._db.flush()

    def close(self) -> None:
        with typed_errors(self.path):
            self._handles.clear()
            for family in self._families.values():
                family.close()
