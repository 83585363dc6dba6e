"""The one place that knows rocksdict: raw databases of bytes, with errors that have types.

rocksdict raises bare `Exception`s with RocksDB's text, its mapping iterators end silently at a damaged block, and a
closed database stays locked while a handle to one of its column families lives. All three are dealt with here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from colibri.kvstore.errors import StoreDamaged, StoreError, StoreFull, StoreLocked
from rocksdict import ColumnFamily, DBCompressionType, DBRecoveryMode, Options, Rdict, WriteBatch, WriteOptions

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
    # With paranoid checks one damaged block that a compaction happens to read stops all writes. Reads verify
    # checksums either way.
    options.set_paranoid_checks(False)
    # What can be read of a damaged log is wanted: whoever needs to know opens it strictly first.
    options.set_wal_recovery_mode(DBRecoveryMode.skip_any_corrupted_record())
    options.set_keep_log_file_num(3)
    return options


def strict(options: Options) -> Options:
    """The same, but a damaged log (other than a torn end, which every crash leaves) refuses to open."""
    options.set_paranoid_checks(True)
    options.set_wal_recovery_mode(DBRecoveryMode.tolerate_corrupted_tail_records())
    return options


class Batch:
    """Writes that become visible, and durable, together or not at all."""

    def __init__(self, database: Database) -> None:
        self._handles = database._handles
        self.raw = WriteBatch(raw_mode=True)

    def put(self, key: bytes, value: bytes, family: str = "default") -> None:
        self.raw.put(key, value, self._handles[family])

    def delete(self, key: bytes, family: str = "default") -> None:
        self.raw.delete(key, self._handles[family])

    def delete_range(self, begin: bytes, end: bytes) -> None:
        self.raw.delete_range(begin, end)


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
        with typed_errors(self.path):
            self._db.write(batch.raw, self._synced if sync else self._unsynced)

    def scan(self, prefix: bytes, *, start: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        """Keys with this prefix in order, from `start` on. Raises StoreDamaged where RocksDB cannot read on."""
        with typed_errors(self.path):
            cursor = self._db.iter()
            cursor.seek(prefix if start is None else start)
            while cursor.valid():
                key = cursor.key()
                if not key.startswith(prefix):
                    return
                yield key, cursor.value()
                cursor.next()
            cursor.status()

    def files(self) -> list[dict[str, Any]]:
        """RocksDB's table files: name, size, start_key, end_key, …"""
        with typed_errors(self.path):
            return self._db.live_files()

    def flush(self) -> None:
        with typed_errors(self.path):
            self._db.flush()

    def close(self) -> None:
        with typed_errors(self.path):
            self._handles.clear()
            for family in self._families.values():
                family.close()
            self._families.clear()
