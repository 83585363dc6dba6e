"""The store of colibri: what is on disk, in two RocksDB databases below one data directory.

    DATA/VERSION   the layout, checked before anything is opened
    DATA/LOCK      held by the one process that may use the directory; its pid is in it
    DATA/truth/    session records: small, checked, synced at commit points; never evicted
    DATA/pages/    KV pages: large, a cache, kept within a budget; may be lost at any time

The two are apart because column families of one database share its log and its errors: a full or damaged cache must
not stop the truth. This package imports nothing else of colibri and knows neither sessions nor models.
"""

from colibri.kvstore.datadir import DataDir
from colibri.kvstore.errors import (
    NotFound,
    PageCorrupt,
    RecordCorrupt,
    StoreDamaged,
    StoreError,
    StoreFull,
    StoreLocked,
    StoreVersionError,
)
from colibri.kvstore.pages import PageMeta, PageStore, PageWrite
from colibri.kvstore.truth import Record, TruthStore

__all__ = [
    "DataDir",
    "NotFound",
    "PageCorrupt",
    "PageMeta",
    "PageStore",
    "PageWrite",
    "Record",
    "RecordCorrupt",
    "StoreDamaged",
    "StoreError",
    "StoreFull",
    "StoreLocked",
    "StoreVersionError",
    "TruthStore",
]
