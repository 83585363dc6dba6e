"""The group of all commands."""

from __future__ import annotations

from importlib import metadata

import click

from .chat import chat
from .command import SETTINGS, Commands
from .demo import demo
from .files import calibrate, convert, inspect
from .generate import detokenize, generate, score, tokenize
from .sessions import sessions
from .status import status


def _version() -> str:
    try:
        return metadata.version("colibri-moe")
    except metadata.PackageNotFoundError:  # run from a tree that is not installed
        return "unknown"


@click.group(cls=Commands, context_settings=SETTINGS)
@click.version_option(_version(), prog_name="colibrictl")
def cli() -> None:
    """Talks to colibrid, which runs Mixture-of-Experts language models; makes and inspects model files.

    Exit codes: 0 done, 1 the daemon or the work failed, 2 wrong usage, 3 no daemon, 4 not installed, 130 interrupted.
    """


for command in (generate, chat, score, tokenize, detokenize, sessions, status, convert, inspect, calibrate, demo):
    cli.add_command(command)
