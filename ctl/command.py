"""What all commands have in common: --socket and --json, the connection, and errors as one line and an exit code."""

from __future__ import annotations

import errno
import functools
import importlib.resources
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import Any, NoReturn, TypeVar

import click

import colibri

EXIT_ERROR = 1  # 2 is click's, for wrong usage
EXIT_UNAVAILABLE = 3
EXIT_NOT_INSTALLED = 4
EXIT_INTERRUPTED = 130  # as shells say for SIGINT

# Underscores in names are as good as hyphens.
SETTINGS = {"token_normalize_func": lambda name: name.replace("_", "-"), "help_option_names": ["-h", "--help"]}

MEMORY_HINT = "free memory, or raise the limit: ulimit -v, or LimitAS= and MemoryMax= of its unit"

F = TypeVar("F", bound=Callable[..., Any])


class Commands(click.Group):
    """A group that tells wrong usage as JSON where that was asked for."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        self._as_json = "--json" in takewhile(lambda arg: arg != "--", args)
        with _usage_errors(self._as_json):
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _usage_errors(self._as_json):
            return super().invoke(ctx)


@contextmanager
def _usage_errors(as_json: bool) -> Iterator[None]:
    try:
        yield
    except click.UsageError as error:
        if not as_json:
            raise
        wire = {"type": "usage_error", "message": error.format_message()}
        if error.ctx is not None:
            wire |= {"where": error.ctx.command_path, "hint": f"{error.ctx.command_path} --help"}
        fail(wire, "", True, error.exit_code)


def offline(function: F) -> F:
    """Adds --json (given as `as_json`) and turns errors into a line and an exit code."""

    @click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
    @functools.wraps(function)
    def command(as_json: bool, **arguments: Any) -> Any:
        try:
            return function(as_json=as_json, **arguments)
        except KeyboardInterrupt:
            click.echo("", err=True)
            raise SystemExit(EXIT_INTERRUPTED) from None
        except colibri.ColibriError as error:
            fail(error.to_wire(), str(error), as_json, exit_code(error))
        except MemoryError as error:
            fail_for_memory(str(error), as_json)
        except OSError as error:
            if isinstance(error, BrokenPipeError):  # `colibrictl … | head`: click ends quietly
                raise
            if error.errno == errno.ENOMEM:
                fail_for_memory(str(error), as_json)
            words = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            fail({"type": "os_error", "message": words}, words, as_json, EXIT_ERROR)

    return command  # type: ignore[return-value]


def online(function: F) -> F:
    """Like offline, with --socket and a connected client as the first argument."""

    @offline
    @click.option(
        "--socket",
        metavar="PATH",
        help="The daemon's socket. [default: $COLIBRI_SOCKET, else where colibrid listens by default]",
    )
    @functools.wraps(function)
    def command(socket: str | None, **arguments: Any) -> Any:
        with colibri.connect(socket, client="colibrictl") as client:
            return function(client, **arguments)

    return command  # type: ignore[return-value]


def carried_model() -> str | None:
    """Path of the model that the package carries, if it does."""
    path = importlib.resources.files("colibri").joinpath("models", "default.colibri")
    return str(path) if path.is_file() else None


def exit_code(error: colibri.ColibriError) -> int:
    """3 where there is no daemon (any more), 1 for what it answers."""
    gone = isinstance(error, colibri.DaemonUnavailable | colibri.ConnectionLost | colibri.ShuttingDown)
    return EXIT_UNAVAILABLE if gone else EXIT_ERROR


def fail(wire: dict[str, Any], line: str, as_json: bool, code: int) -> NoReturn:
    """Says what is wrong, on stderr, or as JSON on stdout, and exits."""
    if as_json:
        click.echo(json.dumps({"error": wire}, ensure_ascii=False))
    else:
        click.echo(f"colibrictl: {' '.join(line.split())}", err=True)
    raise SystemExit(code)


def fail_for_memory(words: str, as_json: bool) -> NoReturn:
    """Memory that the system, or a limit set for the process, does not give."""
    words = words or "no memory"
    wire = {"type": "out_of_memory", "message": words, "hint": MEMORY_HINT}
    fail(wire, f"{words} ({MEMORY_HINT})", as_json, EXIT_ERROR)


def text_or_stdin(text: str | None, what: str) -> str:
    """An argument's text; what is piped in where there is none, or where it is '-'."""
    if text is not None and text != "-":
        return text
    if text is None and sys.stdin.isatty():
        raise click.UsageError(f"give {what} as an argument, or on standard input")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"standard input is not UTF-8: {error.reason} at byte {error.start}") from None


def sampling_options(function: F) -> F:
    """Adds what generate and chat take, named as in colibri.Client.generate."""
    number, count = click.FloatRange, click.IntRange
    options = [
        click.option("--max-tokens", type=count(min=1), help="Most tokens to generate. [default: 256]"),
        click.option("--temperature", type=number(min=0), help="0 is greedy. [default: the model's]"),
        click.option("--top-k", type=count(min=0), help="Draw from the k likeliest tokens; 0: from all."),
        click.option(
            "--top-p", type=number(min=0, max=1, min_open=True), help="Draw from the likeliest that sum to this."
        ),
        click.option("--min-p", type=number(min=0, max=1), help="Drop what is less likely than this part of the best."),
        click.option("--repetition-penalty", type=number(min=0, min_open=True), help="1 is off."),
        click.option("--presence-penalty", type=float, help="Off each token that was generated; 0 is off."),
        click.option("--frequency-penalty", type=float, help="As often as it was generated; 0 is off."),
        click.option("--seed", type=count(min=0), help="The same seed gives the same text."),
        click.option("--stop", multiple=True, help="End before this text; may be given several times."),
        click.option("--logprobs", type=count(0, 20), help="With --json: log-probabilities, and N alternatives."),
        click.option("--deadline-s", type=number(min=0, min_open=True), help="Give up after so many seconds."),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def given(options: dict[str, Any]) -> Any:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None and value != ()}
