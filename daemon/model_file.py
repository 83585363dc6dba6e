"""The model file while it is served: mapped, and not ours to lock.

A file that was replaced by renaming, or removed, is still there for the daemon, which goes on and says so. One that was
changed in place is lost: what is computed with it is nobody's model, so no request is taken any more.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from colibri.protocol.errors import ModelLost

UNCHANGED = "unchanged"


class ModelFile:
    """Remembers what the file and its shards were when they were opened. Raises OSError where there is none."""

    def __init__(self, path: Path, shards: Sequence[Path] = ()) -> None:
        self.path = path
        self._was = {file: os.stat(file) for file in (path, *shards)}

    def state(self) -> str:
        """`unchanged`, `removed`, `replaced: …` (both served from the old file), or `changed in place: …`.

        The last is told of any shard; the others of the file alone, as a new conversion clears the old shards away.
        """
        own, *shards = (self._state_of(file) for file in self._was)
        return next((state for state in shards if state.startswith("changed")), own)

    def _state_of(self, path: Path) -> str:
        was = self._was[path]
        try:
            now = os.stat(path)
        except OSError:
            return "removed: the daemon serves it until it ends"
        if (now.st_dev, now.st_ino) != (was.st_dev, was.st_ino):
            return "replaced: the daemon serves the old one until it ends"
        if now.st_size != was.st_size:
            return f"changed in place: {was.st_size} bytes, now {now.st_size}"
        if now.st_mtime_ns != was.st_mtime_ns:
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
