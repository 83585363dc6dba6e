"""status: what the daemon is, and how it does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

import colibri
from colibri.sessions import age, counted

from .command import online
from .output import print_figures, print_json, printable, size

Figures = Mapping[str, Any]


@click.command()
@click.option("--all", "show_all", is_flag=True, help="Every figure that the daemon keeps.")
@online
def status(client: colibri.Client, show_all: bool, as_json: bool) -> None:
    """Whether the daemon serves, which model, and how busy it is."""
    health, stats = client.health(), client.stats()
    server = client.server
    if as_json:
        print_json({"server": server.to_wire(), "socket": client.path, "health": health, "stats": stats})
        return
    model = server.model
    up = f", up {age(stats['uptime_s'])}" if "uptime_s" in stats else ""
    click.echo(f"{server.server} at {client.path}: {health.get('status', 'unknown')}{up}")
    for problem in _problems(health):
        click.echo(f"  {printable(problem)}")
    click.echo(
        f"{model.name} ({model.family}): {model.layers} layers, {model.experts} experts, {model.top_k} per token, "
        f"context {model.context}, fingerprint {model.fingerprint[:16]}"
    )
    if show_all:
        print_figures({"health": health} | stats)
        return
    for name, words in _summary(stats):
        click.echo(f"{name:<11} {words}")


def _problems(health: Figures) -> Iterator[str]:
    yield from map(str, health.get("problems") or ())
    if (model_file := health.get("model_file", "unchanged")) != "unchanged":
        yield f"model file {model_file}"


def _summary(stats: Figures) -> Iterator[tuple[str, str]]:
    """A line for each part that the daemon tells of, as one of another version may tell of fewer."""
    if scheduler := stats.get("scheduler"):
        running, waiting = _of(scheduler, "running", "max_batch_size"), _of(scheduler, "waiting", "max_queue")
        yield "requests", f"{running} running, {waiting} waiting"
    if server := stats.get("server"):
        yield "connections", _of(server, "connections", "max_connections")
    if pages := stats.get("pages"):
        in_use = size(pages.get("active", 0) * pages.get("page_bytes", 0))
        yield "KV in RAM", f"{_of(pages, 'active', 'total')} pages in use ({in_use}), {pages.get('cached', 0)} cached"
    if store := stats.get("store"):
        used, budget = size(store.get("bytes", 0)), size(store.get("budget_bytes", 0))
        yield "KV on disk", f"{used} of {budget}, {counted(store.get('pages', 0), 'page')}"
    if experts := stats.get("experts"):
        yield "experts", _experts(experts)
    if engine := stats.get("engine"):
        yield "engine", f"{engine.get('isa')}, {size(engine.get('memory_bytes', 0))} of buffers and KV"
    if lost := _damage(stats):
        yield "mended", lost


def _experts(experts: Figures) -> str:
    """How often an expert was in memory when it was needed, and what of those read ahead was."""
    routed = experts.get("hits", 0) + experts.get("misses", 0)
    used = size(experts.get("slots_used", 0) * experts.get("slot_bytes", 0))
    words = f"{used} of {size(experts.get('budget_bytes', 0))}, {size(experts.get('bytes_read', 0))} read"
    if routed:
        words += f", {experts.get('hits', 0) / routed:.1%} in memory when needed"
    if ahead := experts.get("read_ahead", 0):
        words += f", {experts.get('read_ahead_used', 0) / ahead:.0%} of those read ahead were needed"
    return words


def _of(figures: Figures, name: str, limit: str) -> str:
    return f"{figures.get(name, 0)} of {figures[limit]}" if limit in figures else str(figures.get(name, 0))


def _damage(stats: Figures) -> str:
    """What went wrong and cost time only: worth a look at the disk."""
    bad = stats.get("pages", {}).get("bad", 0) + stats.get("store", {}).get("corrupt", 0)
    failures = stats.get("pages", {}).get("write_failures", 0)
    words = [counted(bad, "damaged page")] if bad else []
    return ", ".join(words + ([f"{counted(failures, 'page')} could not be written"] if failures else []))
