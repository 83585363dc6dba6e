"""convert, inspect, calibrate: model files, without a daemon.

The work is done by colibri.convert, imported when asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TextIO

import click

from .command import EXIT_ERROR, EXIT_NOT_INSTALLED, carried_model, fail, offline
from .output import print_figures, print_json


@contextmanager
def converter(as_json: bool) -> Iterator[ModuleType]:
    """colibri.convert, with its errors as a line, and a missing package as a sentence."""
    try:
        from colibri import convert as library
    except ModuleNotFoundError as error:
        words = f"{(error.name or '').split('.')[0]} is not installed: pip install 'colibri-moe[daemon]'"
        fail({"type": "not_installed", "message": words}, words, as_json, EXIT_NOT_INSTALLED)
    try:
        yield library
    except library.ConvertError as error:
        fail(error.to_wire(), str(error), as_json, EXIT_ERROR)


def model_file(model: Path) -> Path:
    """The file that MODEL names: `default` is the one that comes with colibri."""
    return Path((str(model) == "default" and carried_model()) or model)


@click.command()
@click.argument("source", metavar="SRC")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--quantize", default="q8", show_default=True, metavar="FORMAT", help="q8, q4, bf16, f16 or f32.")
@click.option(
    "--expert-shard",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Write the experts to N files beside OUT; 1: into it.",
)
@click.option(
    "--flash-attn-compatible/--no-flash-attn-compatible",
    default=True,
    show_default=True,
    help="Fuse q, k and v into one matrix; the results are the same.",
)
@offline
def convert(
    source: str, out: Path, quantize: str, expert_shard: int, flash_attn_compatible: bool, as_json: bool
) -> None:
    """Make OUT, a .colibri file, of SRC: a Hugging Face folder, or a model id in the local cache.

    \b
    colibrictl convert ./Qwen3-30B-A3B qwen3.colibri
    """
    with converter(as_json) as library, progress_bar(as_json, "bytes") as show:
        progress = (lambda step: show(step.done_bytes, step.total_bytes, step.what)) if show else None
        report = library.convert(
            source,
            out,
            quantize=quantize,
            expert_shards=expert_shard,
            flash_attn_compatible=flash_attn_compatible,
            progress=progress,
        )
    print_json(report.to_dict()) if as_json else print_figures(report.to_dict())


@contextmanager
def progress_bar(as_json: bool, unit: str) -> Iterator[Callable[[int, int, str], None] | None]:
    """A bar on stderr where that is a terminal: what to call with how much is done, of how much, and what is at hand.
    unit: bytes, or what else is counted.
    """
    if as_json or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    amount = DownloadColumn(binary_units=True) if unit == "bytes" else MofNCompleteColumn()
    columns = (BarColumn(), amount, TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--verify", is_flag=True, help="Read it all and compare every checksum.")
@offline
def inspect(model: Path, verify: bool, as_json: bool) -> None:
    """What a .colibri file holds, checked as strictly as the daemon checks it.

    MODEL may be `default`, the model that comes with colibri.
    """
    with converter(as_json) as library:
        inspection = library.inspect(model_file(model), verify=verify)
    print_json(inspection.to_dict()) if as_json else print_figures(inspection.to_dict())


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("text", type=click.File("r", encoding="utf-8"))
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="FILE", help="Where the table goes. [default: MODEL.table]"
)
@offline
def calibrate(model: Path, text: TextIO, out: Path | None, as_json: bool) -> None:
    """Learn from TEXT to which experts MODEL sends each token, for `colibrid --static-table`.

    MODEL may be `default`, the model that comes with colibri; TEXT may be `-`, the standard input.

    \b
    colibrictl calibrate qwen3.colibri letters.txt
    """
    out = out or (Path("default.colibri.table") if str(model) == "default" else model.with_name(model.name + ".table"))
    with converter(as_json) as library, progress_bar(as_json, "tokens") as show:
        progress = (lambda done, total: show(done, total, "tokens")) if show else None
        try:
            report = library.calibrate(model_file(model), text.read(), out, progress=progress)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="TEXT") from error
    print_json(report.to_dict()) if as_json else print_figures(report.to_dict())
