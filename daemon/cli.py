"""The command line of colibrid: options, described in docs/operations.md, become a Config that a daemon runs with."""

from __future__ import annotations

import asyncio
import importlib.resources
import logging
from collections.abc import Callable, Coroutine
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from colibri.daemon.config import Config, SizeType, default_data_dir
from colibri.daemon.service import serve
from colibri.protocol import default_socket_path


def _runner() -> Callable[[Coroutine[Any, Any, None]], None]:
    """uvloop's event loop, or asyncio's own where it is missing."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run
    return uvloop.run


def _model_path(context: click.Context, parameter: click.Parameter, value: str) -> Path:
    """`default` is the model that comes with colibri."""
    if value != "default":
        return Path(value)
    model = importlib.resources.files("colibri").joinpath("models", "default.colibri")
    if not model.is_file():
        raise click.BadParameter("this installation comes without a default model; give a .colibri file")
    return Path(str(model))


# Underscores in names are as good as hyphens.
_SETTINGS = {"token_normalize_func": lambda name: name.replace("_", "-"), "help_option_names": ["-h", "--help"]}


@click.command(context_settings=_SETTINGS)
@click.option("--model", required=True, callback=_model_path, metavar="FILE", help="A .colibri file, or `default`.")
@click.option(
    "--socket",
    type=click.Path(path_type=Path),
    default=default_socket_path,
    show_default="see docs/cli.md",
    help="Where to listen.",
)
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=default_data_dir,
    show_default="the user's state folder",
    help="Where sessions and KV pages are kept.",
)
@click.option(
    "--context",
    type=click.IntRange(min=0),
    default=0,
    show_default="the model's",
    help="Tokens that one sequence may have, prompt and reply.",
)
@click.option(
    "--kv-format",
    type=click.Choice(["f16", "f32"]),
    default="f16",
    show_default=True,
    help="How keys and values are kept.",
)
@click.option(
    "--kv-ram", "kv_ram_bytes", type=SizeType(), default="1GiB", show_default=True, help="Memory for KV pages."
)
@click.option(
    "--kv-disk", "kv_disk_bytes", type=SizeType(), default="20GiB", show_default=True, help="Disk for KV pages."
)
@click.option(
    "--expert-ram",
    "expert_ram_bytes",
    type=SizeType(),
    default=0,
    show_default="all of them",
    help="Memory for experts, where it does not hold all of them.",
)
@click.option(
    "--static-table",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="What `colibrictl calibrate` learned of the model: which experts a token will need.",
)
@click.option(
    "--routing",
    type=click.Choice(["exact", "static"]),
    default="exact",
    show_default=True,
    help="By the model's router, or by the static table: an approximation.",
)
@click.option(
    "--weights",
    type=click.Choice(["map", "read"]),
    default="map",
    show_default=True,
    help="Map the model file, or read it at the start.",
)
@click.option(
    "--max-batch-size", type=click.IntRange(1, 1024), default=8, show_default=True, help="Sequences computed together."
)
@click.option(
    "--max-step-rows",
    type=click.IntRange(1, 1 << 16),
    default=512,
    show_default=True,
    help="Tokens computed in one step.",
)
@click.option(
    "--max-queue", type=click.IntRange(1, 1 << 20), default=256, show_default=True, help="Requests that may wait."
)
@click.option(
    "--prefill-threads",
    type=click.IntRange(min=0),
    default=0,
    show_default="usable cores",
    help="Threads for steps that read prompts.",
)
@click.option(
    "--decode-threads",
    type=click.IntRange(min=0),
    default=0,
    show_default="usable cores",
    help="Threads for steps that only generate.",
)
@click.option(
    "--grace",
    "grace_s",
    type=click.FloatRange(min=0),
    default=5.0,
    show_default=True,
    help="Seconds that running requests may go on after SIGTERM.",
)
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True
)
@click.version_option(package_name="colibri-moe", prog_name="colibrid")
def colibrid(log_level: str, **options: Any) -> None:
    """Serves a Mixture-of-Experts language model at a Unix socket, and keeps its conversations.

    Example: colibrid --model default --kv-ram 512MiB
    """
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    config = Config(**{field.name: options[field.name] for field in fields(Config) if field.name in options})
    _runner()(serve(config))
