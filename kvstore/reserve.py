"""A file that only takes up space, so that there is some to give back when the volume is full."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path


class Reserve:
    """One that an earlier process left is held from the start: a daemon has to open on a full volume, too."""

    def __init__(self, path: Path, n_bytes: int) -> None:
        self._path = path
        self._n_bytes = n_bytes
        self._held = path.is_file() and path.stat().st_size == n_bytes > 0

    def has_room(self) -> bool:
        """Whether the volume has room for the reserve and as much again twice."""
        return shutil.disk_usage(self._path.parent).free >= 3 * self._n_bytes

    def take(self) -> None:
        """Fills the reserve where there is room for it and as much again twice; quietly does without otherwise."""
        if self._held or not self.has_room():
            return
        with contextlib.suppress(OSError), self._path.open("wb") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, self._n_bytes)
            else:
                file.write(bytes(self._n_bytes))
            self._held = True

    def release(self) -> bool:
        """Gives the space back; False if there was none to give."""
        if not self._held:
            return False
        self._path.unlink(missing_ok=True)
        self._held = False
        return True
