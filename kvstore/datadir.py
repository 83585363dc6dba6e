"""A data directory: its lock, its version, and the two databases in it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from colibri.kvstore.errors import StoreError, StoreLocked, StoreVersionError
from colibri.kvstore.pages import PageStore
from colibri.kvstore.truth import TruthStore

LAYOUT_VERSION = 1


class DataDir:
    """Opens (or makes, private to this user) the directory and keeps it locked until `close`.

    Raises StoreLocked naming the process that holds it, StoreVersionError naming both versions, StoreError.
    """

    def __init__(self, path: str | Path, *, budget_bytes: int | None = None) -> None:
        self.path = Path(path)
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _lock(self.path / "LOCK")
            try:
                _check_version(self.path / "VERSION")
                self.truth = TruthStore(self.path / "truth")
                self.pages = PageStore(self.path / "pages", budget_bytes=budget_bytes)
            except BaseException:
                os.close(self._lock)
                raise
        except OSError as error:
            raise StoreError(f"{self.path}: {error.strerror}") from error

    def close(self) -> None:
        self.pages.close()
        self.truth.close()
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _lock(path: Path) -> int:
    """Takes the lock and leaves our pid in the file. The kernel drops it when the process ends, however it ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise StoreLocked(f"{path.parent} is in use by process {holder}") from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


def _check_version(path: Path) -> None:
    try:
        found = path.read_text().strip()
    except FileNotFoundError:
        temporary = path.with_suffix(".new")
        temporary.write_text(f"{LAYOUT_VERSION}\n")
        temporary.replace(path)
        return
    if found != str(LAYOUT_VERSION):
        raise StoreVersionError(f"{path.parent} has version {found!r}; this colibri reads version {LAYOUT_VERSION}")
