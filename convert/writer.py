"""A file that is whole or not there.

Bytes go to NAME.partial in the same folder; when all are synced the file is renamed and the folder synced. A process
that is killed leaves a .partial, which no reader opens under that name, whose header is still zero, and which the next
run takes over. A lock on it keeps a second converter out.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from .errors import OutputError
from .format import Bytes

try:
    import fcntl
except ImportError:  # Windows: two converters on one file are then the user's to avoid
    fcntl = None  # type: ignore[assignment]


class AtomicFile:
    """Use as a context manager: leaving it without commit() removes what was written."""

    def __init__(self, path: Path, n_bytes: int, n_bytes_beside: int = 0) -> None:
        """Opens and reserves n_bytes. OutputError if there is no room for them and for what will be written beside, no
        permission, or another converter at work.
        """
        self.path = path
        self.partial = path.with_name(path.name + ".partial")
        self._committed = False
        self._fd = self._open()
        try:
            self._reserve(n_bytes, n_bytes_beside)
        except BaseException:
            self._discard()
            raise

    def _error(self, error: OSError) -> OutputError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return OutputError(f"no room for the file: {error.strerror}", where=str(self.path))
        return OutputError(f"cannot be written: {error.strerror}", where=str(self.path))

    def _open(self) -> int:
        """The partial file, locked. What a killed run left there is taken over."""
        if self.path.is_dir():
            raise OutputError("is a folder", where=str(self.path))
        while True:
            try:
                fd = os.open(self.partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except OSError as error:
                raise self._error(error) from None
            if self._lock(fd):
                return fd
            os.close(fd)

    def _lock(self, fd: int) -> bool:
        """False where the file was renamed or removed by its former owner between our open and our lock."""
        if fcntl is None:
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise OutputError("another converter is writing it", where=str(self.path)) from None
        try:
            return os.path.samestat(os.fstat(fd), os.stat(self.partial))
        except FileNotFoundError:
            return False

    def _reserve(self, n_bytes: int, n_bytes_beside: int) -> None:
        needed = n_bytes + n_bytes_beside
        try:
            os.ftruncate(self._fd, 0)
            free = shutil.disk_usage(self.partial.parent).free
            if needed > free:
                raise OutputError(f"no room: it takes {needed} bytes, {free} are free", where=str(self.path))
            os.ftruncate(self._fd, n_bytes)
        except OSError as error:
            raise self._error(error) from None

    def write_at(self, offset: int, data: bytes | Bytes) -> None:
        """Writes all of data at an offset."""
        view = memoryview(data)  # type: ignore[arg-type]  # numpy arrays are buffers; the stubs say so from 3.12 on
        try:
            while view:
                written = os.pwrite(self._fd, view, offset)
                view, offset = view[written:], offset + written
        except OSError as error:
            raise self._error(error) from None

    def sync(self) -> None:
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise self._error(error) from None

    def rename_partial(self, partial: Path) -> None:
        """Gives the file that is being written another name."""
        try:
            os.replace(self.partial, partial)
        except OSError as error:
            raise self._error(error) from None
        self.partial = partial

    def commit(self) -> None:
        """Makes the file visible under its name, durably."""
        self.sync()
        try:
            os.replace(self.partial, self.path)
            self._committed = True
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise self._error(error) from None

    def _discard(self) -> None:
        self.partial.unlink(missing_ok=True)
        os.close(self._fd)

    def __enter__(self) -> AtomicFile:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._committed:
            os.close(self._fd)
        else:
            self._discard()
