"""What the machine can do at this moment: int8 and f32 operations and bytes read per second, with a number of threads.

On a shared machine each of them moves within seconds, so a measurement means something only beside limits that were
probed right before and after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np

from colibri.bench._limits import ffi as _ffi  # type: ignore[import-not-found]
from colibri.bench._limits import lib as _lib

# Larger than any cache: server processors have up to half a GiB that is shared by all their cores.
READ_BYTES = 2 << 30
REPEATS = 5  # of each limit; the median counts


@dataclass(frozen=True)
class Limits:
    """Operations (a multiplication and an addition are two) and bytes per second; None where it cannot be told."""

    int8_ops: float | None
    f32_flops: float | None
    read_bytes: float

    def between(self, other: Limits) -> Limits:
        """Those of a measurement that lay between two probes: their means."""
        return Limits(
            _mean(self.int8_ops, other.int8_ops),
            _mean(self.f32_flops, other.f32_flops),
            (self.read_bytes + other.read_bytes) / 2,
        )


def _mean(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else (one + other) / 2


def _repeated(probe: Callable[[], float]) -> float:
    return median(probe() for _ in range(REPEATS))


class Probe:
    """Holds the memory that is read, so that a probe does not have to fill it again."""

    def __init__(self, n_threads: int, n_bytes: int = READ_BYTES) -> None:
        self.n_threads = n_threads
        self._memory = np.ones(n_bytes, np.uint8)  # numpy asks for huge pages

    def limits(self, isa: str) -> Limits:
        """The limits now; isa names the instructions that int8 and f32 operations are done with."""
        name = _ffi.new("char[]", isa.encode())
        memory = _ffi.from_buffer(self._memory)
        return Limits(
            _repeated(lambda: _lib.colibri_limit_int8(name, self.n_threads)) or None,
            _repeated(lambda: _lib.colibri_limit_f32(name, self.n_threads)) or None,
            _repeated(lambda: _lib.colibri_limit_read(memory, len(memory), self.n_threads)),
        )
