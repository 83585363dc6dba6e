"""Decoding with experts in less memory than they take, beside what the disk could give at that moment.

    python -m colibri.bench.expert_ram model.colibri --gib 2,6,8

Two streams of tokens: `one text`, a sequence that goes on, and `all new`, every token the first of a sequence, which
routes random weights evenly: nothing but the share that fits is hit. Each run stands between two probes of the disk:
random experts read directly, as many at once as the engine reads.

The bound is the time that steps did not wait for experts, or what reading the experts that were missed takes at the
disk's speed, whichever is longer: as if both went on at once. `serial` is their sum, which an engine reaches that does
one after the other.
"""

from __future__ import annotations

import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

from colibri.convert.inspection import ModelFile
from colibri.native import PAGE_TOKENS, ROW_LOGITS, Batch, Context, Model

from .report import write_json

READERS = 4  # COLIBRI_READERS
PROBE_BLOCKS = 48  # of a probe: a third of a second
HUGE_BYTES = 2 << 20
STREAMS = ("one text", "all new")


@dataclass(frozen=True)
class Run:
    """Steps of one stream. Seconds are of one token; `disk` in bytes a second."""

    stream: str
    budget_bytes: int
    token_s: float
    compute_s: float
    hit_rate: float
    missed_bytes: float  # of one token
    read_bytes: float  # of one token, with what was read ahead
    ahead_rate: float | None  # of what was read ahead, how much was needed
    wait_s: float
    disk: float

    @property
    def bound_s(self) -> float:
        return max(self.compute_s, self.missed_bytes / self.disk)

    @property
    def serial_s(self) -> float:
        return self.compute_s + self.missed_bytes / self.disk


class Disk:
    """Reads random experts of a file past the page cache."""

    def __init__(self, path: Path) -> None:
        with ModelFile(path) as file:
            self._offset, self._stride = file["expert_offset"], file["expert_stride"]
            self._n_blocks = file["n_expert_blocks"]
            self._n_bytes = -(-file["expert_bytes"] // mmap.PAGESIZE) * mmap.PAGESIZE
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self._random = np.random.default_rng(0)
        self._buffers = [self._buffer() for _ in range(READERS)]

    def _buffer(self) -> Any:
        """In huge pages, which numpy asks for, as the engine's: disks take more at once of memory in one piece."""
        room = np.ones(self._n_bytes + 2 * HUGE_BYTES, np.uint8)
        return room[-room.ctypes.data % HUGE_BYTES :][: self._n_bytes]

    def _read(self, reader: int, blocks: Any) -> None:
        for block in blocks:
            os.preadv(self._fd, [self._buffers[reader]], self._offset + int(block) * self._stride)

    def bytes_per_s(self) -> float:
        blocks = self._random.integers(self._n_blocks, size=PROBE_BLOCKS)
        begin = time.perf_counter()
        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(self._read, range(READERS), np.array_split(blocks, READERS)))
        return PROBE_BLOCKS * self._n_bytes / (time.perf_counter() - begin)


class Stream:
    """The same tokens for every context that runs it."""

    def __init__(self, context: Context, vocabulary: int, kind: str, n_pages: int) -> None:
        self._context, self._vocabulary, self._kind = context, vocabulary, kind
        self._random = np.random.default_rng(1)
        self._position, self._n_positions = 0, n_pages * PAGE_TOKENS

    def steps(self, n: int) -> float:
        """Seconds of one token, in n steps."""
        begin = time.perf_counter()
        for _ in range(n):
            token = int(self._random.integers(self._vocabulary))
            position = self._position if self._kind == "one text" else 0
            pages = list(range(position // PAGE_TOKENS + 1))
            self._context.forward(Batch([token], [position], [0], [ROW_LOGITS], [pages]))
            self._position = (self._position + 1) % self._n_positions
        return (time.perf_counter() - begin) / n


def measure(path: Path, budget: int, *, stream: str, steps: int, warm_steps: int, repeats: int) -> list[Run]:
    """Runs of one stream with a budget, each between two probes of the disk."""
    n_pages, disk, found = 8, Disk(path), []
    n_tokens = n_pages * PAGE_TOKENS
    with (
        Model(path, weights="read-trunk") as model,
        Context(
            model, n_pages=n_pages, max_rows=64, max_logits=1, max_context=n_tokens, expert_ram_bytes=budget
        ) as context,
    ):
        limited = Stream(context, model.info.vocabulary, stream, n_pages)
        limited.steps(warm_steps)
        block_bytes = context.expert_stats().slot_bytes
        for _ in range(repeats):
            probe = disk.bytes_per_s()
            before = context.expert_stats()
            token_s = limited.steps(steps)
            after = context.expert_stats()
            hits, misses, ahead, ahead_used, read, wait_ns = (
                getattr(after, name) - getattr(before, name)
                for name in ("hits", "misses", "read_ahead", "read_ahead_used", "bytes_read", "wait_ns")
            )
            found.append(
                Run(
                    stream=stream,
                    budget_bytes=budget,
                    token_s=token_s,
                    compute_s=token_s - wait_ns / 1e9 / steps,
                    hit_rate=hits / (hits + misses),
                    missed_bytes=misses * block_bytes / steps,
                    read_bytes=read / steps,
                    ahead_rate=ahead_used / ahead if ahead else None,
                    wait_s=wait_ns / 1e9 / steps,
                    disk=(probe + disk.bytes_per_s()) / 2,
                )
            )
    return found


def line(name: str, runs: list[Run]) -> str:
    """Medians, and the spread of the share that counts."""
    shares = sorted(run.bound_s / run.token_s for run in runs)
    serial = median(run.serial_s / run.token_s for run in runs)
    ahead = [run.ahead_rate for run in runs if run.ahead_rate is not None]

    def middle(field: str) -> float:
        return median(float(getattr(run, field)) for run in runs)

    computing = f"{middle('compute_s') * 1e3:.0f} of {middle('token_s') * 1e3:.0f} ms computing"
    share = f"{median(shares):.2f} of the bound ({shares[0]:.2f} to {shares[-1]:.2f}), {serial:.2f} of the serial one"
    return (
        f"{name}, {runs[0].stream}, {runs[0].budget_bytes / (1 << 30):.2f} GiB: {1 / middle('token_s'):.1f} tokens/s, "
        f"hit rate {middle('hit_rate'):.3f}, {middle('missed_bytes') / 1e6:.0f} MB missed and "
        f"{middle('read_bytes') / 1e6:.0f} read a token, disk {middle('disk') / 1e9:.2f} GB/s, {computing}; {share}; "
        f"needed of what was read ahead {median(ahead) if ahead else 0:.2f}"
    )


@click.command()
@click.argument("models", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--gib", default="2,6", show_default=True, help="Sizes of memory for experts.")
@click.option("--streams", default=",".join(STREAMS), show_default=True)
@click.option("--steps", default=16, show_default=True, help="Tokens of a run.")
@click.option("--warm-steps", default=32, show_default=True, help="Tokens before the first run.")
@click.option("--repeats", default=3, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the figures here as well.")
def main(
    models: tuple[Path, ...],
    gib: str,
    streams: str,
    steps: int,
    warm_steps: int,
    repeats: int,
    json_path: Path | None,
) -> None:
    """Measure MODELS, files that hold their experts themselves."""
    found: list[dict[str, Any]] = []
    for path in models:
        for size in gib.split(","):
            budget = int(float(size) * (1 << 30))
            for stream in streams.split(","):
                runs = measure(path, budget, stream=stream, steps=steps, warm_steps=warm_steps, repeats=repeats)
                click.echo(line(path.stem, runs))
                found += [{"model": path.stem} | asdict(run) for run in runs]
    if json_path is not None:
        write_json(json_path, found)


if __name__ == "__main__":
    main()
