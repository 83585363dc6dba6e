"""What can go wrong in the store.

StoreError             the disk or the database refused; the message says what and where
├── StoreFull          no space; nothing was written
├── StoreLocked        another process holds the data directory
├── StoreVersionError  written by another version of colibri
├── StoreDamaged       a database's own checksum failed
├── NotFound           no records under this name
├── RecordCorrupt      a name's records are damaged; `turns` says which
└── PageCorrupt        a page is missing, short or damaged; it has been dropped
"""

from __future__ import annotations

from collections.abc import Sequence


class StoreError(Exception):
    pass


class StoreFull(StoreError):
    pass


class StoreLocked(StoreError):
    pass


class StoreVersionError(StoreError):
    pass


class StoreDamaged(StoreError):
    pass


class NotFound(StoreError):
    pass


class RecordCorrupt(StoreError):
    def __init__(self, name: str, turns: Sequence[int]) -> None:
        self.name = name
        self.turns = sorted(set(turns))
        what = "turn" if len(self.turns) == 1 else "turns"
        super().__init__(f"{name!r}: damaged {what} {', '.join(map(str, self.turns))}")


class PageCorrupt(StoreError):
    pass
