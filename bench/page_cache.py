"""What of a file is in the page cache, and how to get it out again."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np

PAGE_BYTES = mmap.PAGESIZE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def resident_pages(path: Path) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """For each page of the file whether it is in memory. The file must be one's own, or all seem to be."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        view = np.frombuffer(mapping, np.uint8)
        found = np.zeros(-(-len(view) // PAGE_BYTES), np.uint8)
        failed = _libc.mincore(view.ctypes.data, len(view), found.ctypes.data)
        del view  # or the mapping cannot be closed
        if failed:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
        return (found & 1).astype(np.bool_)


def evict(path: Path) -> bool:
    """Drops the file from the page cache; whether nothing of it is left (others may have it mapped)."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return not resident_pages(path).any()
