"""The 64-bit checksum of docs/format.md: the engine's where it is there, else the same in numpy, a hundred times
slower."""

from __future__ import annotations

import numpy as np

_M64 = (1 << 64) - 1


def reference_checksum(data: object) -> int:
    raw = np.frombuffer(data, np.uint8)  # type: ignore[call-overload]
    blocks = np.zeros((-(-len(raw) // 256), 256), np.uint8)
    blocks.reshape(-1)[: len(raw)] = raw
    h = np.arange(1, 65, dtype=np.uint32) * np.uint32(0x9E3779B1)
    for words in blocks.view("<u4"):
        h = (h ^ words) * np.uint32(0x85EBCA77)
        h ^= h >> np.uint32(15)
    a = len(raw) * 0x9E3779B97F4A7C15 & _M64
    for lane in h.tolist():
        a = (a ^ lane) * 0x9FB21C651E98DF25 & _M64
        a ^= a >> 32
    return a


try:
    from colibri.native import checksum
except ImportError:
    checksum = reference_checksum
