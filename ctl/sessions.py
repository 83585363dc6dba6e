"""sessions list, show, fork, truncate, delete."""

from __future__ import annotations

import sys

import click

import colibri

from .command import online
from .output import ago, length, print_json, print_table, printable


@click.group()
def sessions() -> None:
    """The conversations that the daemon keeps."""


@sessions.command("list")
@online
def list_sessions(client: colibri.Client, as_json: bool) -> None:
    """All sessions."""
    found = client.sessions()
    if as_json:
        print_json([summary.to_wire() for summary in found])
    elif not found:
        click.echo("no sessions", err=True)
    else:
        columns = ["name", "turns", "tokens", "state", "made", "last used"]
        print_table(columns, ((s.name, s.n_turns, s.n_tokens, s.state, ago(s.created), ago(s.updated)) for s in found))


@sessions.command()
@click.argument("name")
@click.option("--tokens", is_flag=True, help="Show the token ids too.")
@online
def show(client: colibri.Client, name: str, tokens: bool, as_json: bool) -> None:
    """The messages of session NAME."""
    info = client.session(name, resume=True).info(include_tokens=tokens)
    if as_json:
        print_json(info.to_wire())
        return
    click.echo(
        f"{info.name}: {length(info.n_turns, info.n_tokens)}, {info.state}, "
        f"made {ago(info.created)}, last used {ago(info.updated)}"
    )
    if info.note:
        click.echo(f"note: {info.note}")
    for message in info.messages:
        click.echo(f"\n{message.role}:\n{printable(message.content)}")
    if info.tokens is not None:
        click.echo(f"\ntokens: {' '.join(map(str, info.tokens))}")


@sessions.command()
@click.argument("name")
@click.argument("to")
@click.option("--n-tokens", type=click.IntRange(min=0), help="Only the first N tokens. [default: all]")
@online
def fork(client: colibri.Client, name: str, to: str, n_tokens: int | None, as_json: bool) -> None:
    """Copy session NAME to a new one called TO; the KV cache is shared."""
    made = client.session(name, resume=True).fork(to, n_tokens=n_tokens)
    if as_json:
        print_json({"name": made.name, "n_tokens": made.n_tokens, "n_turns": made.n_turns})
    else:
        click.echo(f"session {to!r} has the first {made.n_tokens} tokens of {name!r}")


@sessions.command()
@click.argument("name")
@click.argument("n_tokens", type=click.IntRange(min=0))
@online
def truncate(client: colibri.Client, name: str, n_tokens: int, as_json: bool) -> None:
    """Forget what comes after the first N_TOKENS of session NAME."""
    session = client.session(name, resume=True)
    session.truncate(n_tokens)
    if as_json:
        print_json({"name": name, "n_tokens": session.n_tokens, "n_turns": session.n_turns})
    else:
        click.echo(f"session {name!r} has {session.n_tokens} tokens")


@sessions.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@online
def delete(client: colibri.Client, name: str, yes: bool, as_json: bool) -> None:
    """Forget session NAME."""
    session = client.session(name, resume=True)
    if not yes and sys.stdin.isatty():
        click.confirm(f"delete {name!r}, {length(session.n_turns, session.n_tokens)}?", abort=True, err=True)
    session.delete()
    print_json({"name": name, "deleted": True}) if as_json else click.echo(f"session {name!r} is deleted")
