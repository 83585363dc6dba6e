"""The model file while it is served: mapped, and not ours to lock.

A file that was replaced by renaming, or removed, is still there for the daemon, which goes on and says so. One that was
changed in place is lost: what is computed with it is nobody's model, so no request is taken any more.
"""

from __future__ import annotations

import os
from pathlib import Path

from colibri.protocol.errors import ModelLost

UNCHANGED = "unchanged"


class ModelFile:
    """Remembers what the file was when it was opened. Raises OSError where there is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._was = os.stat(path)

    def state(self) -> str:
        """`unchanged`, `removed`, `replaced: …` (both served from the old file), or `changed in place: …`."""
        try:
            now = os.stat(self.path)
        except OSError:
            return "removed: the daemon serves it until it ends"
        if (now.st_dev, now.st_ino) != (self._was.st_dev, self._was.st_ino):
            return "replaced: the daemon serves the old one until it ends"
        if now.st_size != self._was.st_size:
            return f"changed in place: {self._was.st_size} bytes, now {now.st_size}"
        if now.st_mtime_ns != self._was.st_mtime_ns:
            return "changed in place: written to since it was opened"
        return UNCHANGED

    @property
    def is_lost(self) -> bool:
        return self.state().startswith("changed")

    def check(self) -> None:
        """Raises ModelLost if the file was changed in place."""
        if self.is_lost:
            raise ModelLost(
                self.state(), where=str(self.path), hint="replace a model by renaming, and restart colibrid"
            )
