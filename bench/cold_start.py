"""How soon the first token comes from a file of which nothing is in memory, and what is read until then.

    python -m colibri.bench.cold_start qwen model.colibri --repeats 9

Each run drops the file from the page cache, opens it, and computes a prompt of one token; then drops it again and
reads the whole file, which is what an engine does that loads its model. What was read is counted in pages that are in
the cache afterwards, beside the bytes that the token needed: the trunk, a row of the embedding, and the experts that it
was routed to.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import click
import numpy as np

from colibri.convert.format import Role
from colibri.convert.inspection import ModelFile
from colibri.native import ROW_LOGITS, Batch, Context, Model

from .cost import cost_of
from .models import SHAPES, make_model
from .page_cache import PAGE_BYTES, evict, resident_pages
from .report import write_json

READ_BYTES = 8 << 20  # in one call, when the whole file is read


@dataclass(frozen=True)
class ColdStart:
    """One run. Shares are of the file; `bytes_ratio`: read until the first token, over what the token needed."""

    file_bytes: int
    open_ms: float
    resident_after_open: float
    first_token_s: float
    resident_after_token: float
    needed_bytes: int
    bytes_ratio: float
    read_all_s: float

    @property
    def sooner(self) -> float:
        return self.read_all_s / self.first_token_s


def needed_bytes(path: Path, routing: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> int:
    """Bytes of weights that one token reads: routing is [1, n_layers, top_k]."""
    cost = cost_of(path)
    with ModelFile(path) as file:
        embeddings = [entry for entry in file.tensors if entry["role"] == Role.EMBEDDING]
        tied = all(entry["role"] != Role.HEAD for entry in file.tensors)
    row = 0 if tied else sum(int(entry["bytes"]) * 16 // int(entry["rows"]) for entry in embeddings)  # a tile of rows
    return cost.trunk_bytes + row + int((routing >= 0).sum()) * cost.expert_bytes


def read_all(path: Path) -> float:
    """Seconds to read the file from its beginning to its end."""
    begin, buffer = time.perf_counter(), bytearray(READ_BYTES)
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while file.readinto(buffer):
            pass
    return time.perf_counter() - begin


def cold_start(path: Path, *, token: int = 1, threads: int = 0) -> ColdStart:
    """One run of a file that holds its experts itself. Raises click.ClickException if it cannot be dropped."""
    if not evict(path):
        raise click.ClickException(f"{path}: stays in the page cache; is another process using it?")
    begin = time.perf_counter()
    with Model(path) as model:
        opened = time.perf_counter()
        after_open = resident_pages(path)
        resumed = time.perf_counter()
        context = Context(model, n_pages=1, max_rows=1, max_logits=1, max_context=32, decode_threads=threads)
        with context:
            batch = Batch([token], [0], [0], [ROW_LOGITS], [[0]], want_routing=True)
            result = context.forward(batch)
            first_token_s = time.perf_counter() - resumed + opened - begin
            assert result.routing is not None
            after_token = resident_pages(path)
    needed = needed_bytes(path, result.routing)
    evict(path)
    read_all_s = read_all(path)
    return ColdStart(
        file_bytes=path.stat().st_size,
        open_ms=(opened - begin) * 1000,
        resident_after_open=float(after_open.mean()),
        first_token_s=first_token_s,
        resident_after_token=float(after_token.mean()),
        needed_bytes=needed,
        bytes_ratio=int(after_token.sum()) * PAGE_BYTES / needed,
        read_all_s=read_all_s,
    )


def line(name: str, runs: list[ColdStart]) -> str:
    """Medians, and the spread of the ratio that counts."""
    middle = {key: median(asdict(run)[key] for run in runs) for key in asdict(runs[0])}
    sooner = sorted(run.sooner for run in runs)
    return (
        f"{name}: {middle['file_bytes'] / 1e9:.2f} GB, opened in {middle['open_ms']:.2f} ms with "
        f"{middle['resident_after_open']:.3%} resident; first token after {middle['first_token_s']:.2f} s with "
        f"{middle['resident_after_token']:.1%} resident, {middle['bytes_ratio']:.3f} of the bytes it needed; "
        f"reading the file {middle['read_all_s']:.2f} s, {median(sooner):.1f} times as long "
        f"({sooner[0]:.1f} to {sooner[-1]:.1f})"
    )


@click.command()
@click.argument("models", nargs=-1, required=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--threads", default=0, show_default="usable cores")
@click.option("--quantize", default="q8", show_default=True, help="Format of the models that are made.")
@click.option("--layers", type=click.IntRange(min=1), help="Depth of the models that are made.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the figures here as well.")
def main(
    models: tuple[str, ...], repeats: int, threads: int, quantize: str, layers: int | None, json_path: Path | None
) -> None:
    """Measure MODELS: files, or the names of shapes."""
    found = {}
    for name in models:
        path = make_model(name, quantize, n_layers=layers) if name in SHAPES else Path(name)
        found[path.stem] = [cold_start(path, threads=threads, token=1 + run) for run in range(repeats)]
        click.echo(line(path.stem, found[path.stem]))
    if json_path is not None:
        write_json(json_path, [{"model": stem} | asdict(run) for stem, runs in found.items() for run in runs])


if __name__ == "__main__":
    main()
