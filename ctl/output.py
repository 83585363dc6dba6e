"""Printing: JSON, tables, figures in human units, and text that came from a model."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click

import colibri
from colibri.sessions import age, counted

# Control characters but newline and tab: what a model writes must not steer the terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, ensure_ascii=False))


def printable(text: str) -> str:
    """Text as a terminal may be given it; a pipe gets what the model wrote."""
    return _CONTROL.sub("�", text) if sys.stdout.isatty() else text


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table whose numbers stand to the right."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rows = [list(row) for row in rows]
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for i, name in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[i], int | float) for row in rows)
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(str(value))) for value in row))
    width = None if sys.stdout.isatty() else 10_000  # a pipe has no edge to fold at
    Console(highlight=False, width=width).print(table)


def print_figures(figures: Mapping[str, Any], indent: int = 0) -> None:
    """Nested figures, a name and a value per line."""
    width = max((len(name) for name, value in figures.items() if not isinstance(value, Mapping)), default=0)
    for name, value in figures.items():
        if rows := _rows(value):
            click.echo(f"{'':{indent}}{name}")
            print_table(list(rows[0]), ([human(key, cell) for key, cell in row.items()] for row in rows))
        elif isinstance(value, Mapping):
            click.echo(f"{'':{indent}}{name}")
            print_figures(value, indent + 2)
        else:
            click.echo(f"{'':{indent}}{name:<{width}}  {human(name, value)}")


def _rows(value: Any) -> list[dict[str, Any]]:
    """The rows of what is a table: several maps with the same keys, in an array or by name; else none."""
    if isinstance(value, Mapping) and all(isinstance(row, Mapping) for row in value.values()):
        rows = [{"": name, **row} for name, row in value.items()]
    elif isinstance(value, list | tuple) and all(isinstance(row, Mapping) for row in value):
        rows = [dict(row) for row in value]
    else:
        return []
    return rows if len(rows) > 1 and all(row.keys() == rows[0].keys() for row in rows) else []


def human(name: str, value: Any) -> str:
    """A figure in the unit that its name ends in, as a person reads it."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, int | float) and (name == "bytes" or name.endswith("_bytes")):
        return size(value)
    if isinstance(value, float):
        return f"{value:.3f}" if name.endswith("_s") else f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(human(name, item) for item in value) or "-"
    return printable(str(value))


def size(n_bytes: float) -> str:
    """Bytes as 512 B, 1.5 MiB, 3.0 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.0f} B" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} TiB"


def length(n_turns: int, n_tokens: int) -> str:
    """How long a conversation is."""
    return f"{counted(n_turns, 'turn')}, {counted(n_tokens, 'token')}"


def ago(when_s: float) -> str:
    """A time since 1970 as how long ago it was."""
    return f"{age(max(0.0, time.time() - when_s))} ago"


def reply_json(reply: colibri.Reply) -> dict[str, Any]:
    """A reply as a map, without what it does not have."""
    return {name: value for name, value in dataclasses.asdict(reply).items() if value is not None}


def reply_line(reply: colibri.Reply) -> str:
    """What a reply cost, in a line."""
    usage, timings = reply.usage, reply.timings
    wait_s = timings.queue_s + timings.load_s + timings.prefill_s
    rate = f", {usage.completion_tokens / timings.decode_s:.1f} tokens/s" if timings.decode_s > 0 else ""
    return (
        f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached) in {wait_s:.2f} s, "
        f"{usage.completion_tokens} generated{rate}, ended by {reply.finish_reason}"
    )


class ProgressLine:
    """How far a long prompt is read, on one line of a terminal; nothing elsewhere."""

    def __init__(self) -> None:
        self._shown = False

    def __call__(self, done: int, total: int) -> None:
        if sys.stderr.isatty():
            self._shown = True
            click.echo(f"\r\x1b[Kreading {done} of {total} tokens", nl=False, err=True)

    def clear(self) -> None:
        if self._shown:
            self._shown = False
            click.echo("\r\x1b[K", nl=False, err=True)


def print_stream(stream: colibri.Stream, progress: ProgressLine) -> None:
    """Prints pieces as they come, and ends the line however they end."""
    wrote = False
    try:
        for piece in stream:
            progress.clear()
            if piece.text:
                wrote = True
                click.echo(printable(piece.text), nl=False)
    finally:
        progress.clear()
        if wrote:
            click.echo()
