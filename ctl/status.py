"""status: what the daemon is, and how it does."""

from __future__ import annotations

import click

import colibri

from .command import online
from .output import print_figures, print_json


@click.command()
@online
def status(client: colibri.Client, as_json: bool) -> None:
    """Whether the daemon serves, which model, and its figures."""
    health, stats = client.health(), client.stats()
    server = client.server
    if as_json:
        print_json({"server": server.to_wire(), "socket": client.path, "health": health, "stats": stats})
        return
    model = server.model
    click.echo(f"{server.server} at {client.path}")
    click.echo(
        f"{model.name} ({model.family}): {model.layers} layers, {model.experts} experts, {model.top_k} per token, "
        f"context {model.context}, fingerprint {model.fingerprint[:16]}"
    )
    print_figures({"health": health} | stats)
