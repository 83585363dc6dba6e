"""docs/cli.md and the commands say the same."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from colibri.ctl import command
from colibri.ctl.cli import cli
from colibri.ctl.main import EXIT_NOT_INSTALLED

DOC = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text()
# Heading of a command → its section.
SECTIONS = {
    title.split(" [")[0].rstrip(): body
    for title, body in re.findall(r"^### colibrictl (.+?)\n(.*?)(?=^##|\Z)", DOC, re.MULTILINE | re.DOTALL)
}


def commands(group: click.Group, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command and its name as typed."""
    for name, child in group.commands.items():
        if isinstance(child, click.Group):
            yield from commands(child, f"{prefix}{name} ")
        else:
            yield prefix + name, child


COMMANDS = dict(commands(cli))
EVERYWHERE = {"--json", "--socket"}


def section(name: str) -> str:
    (found,) = [body for title, body in SECTIONS.items() if re.sub(r"( [A-Z_]+)+$", "", title) == name]
    return found


def test_every_command_is_documented_and_every_documented_one_exists() -> None:
    assert sorted(re.sub(r"( [A-Z_]+)+$", "", title) for title in SECTIONS) == sorted(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_documented_and_every_documented_one_exists(name: str) -> None:
    spellings = {option for param in COMMANDS[name].params for option in (*param.opts, *param.secondary_opts)}
    options = {option for option in spellings if option.startswith("--")}
    text = section(name).partition("####")[0]
    if "options of generation" in text:
        text += DOC.partition("#### Options of generation")[2].partition("\n#")[0]
    documented = set(re.findall(r"`(--[a-z-]+)", text)) - EVERYWHERE
    assert options - EVERYWHERE == documented


def test_what_every_command_takes_is_documented_once() -> None:
    head = DOC.partition("\n## ")[0]
    assert all(f"`{option}" in head for option in EVERYWHERE)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_takes_json(name: str) -> None:
    assert any("--json" in param.opts for param in COMMANDS[name].params)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_argument_stands_in_the_heading(name: str) -> None:
    (heading,) = re.findall(rf"^### colibrictl {re.escape(name)}(?![a-z])(.*)$", DOC, re.MULTILINE)
    context = click.Context(COMMANDS[name])
    arguments = [param for param in COMMANDS[name].params if isinstance(param, click.Argument)]
    assert heading.split() == [argument.make_metavar(context) for argument in arguments]


def test_the_exit_codes_are_those_of_the_code() -> None:
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", DOC, re.MULTILINE)}
    codes = {value for name, value in vars(command).items() if name.startswith("EXIT_")}
    assert documented == codes | {0, click.UsageError.exit_code}
    assert command.EXIT_NOT_INSTALLED == EXIT_NOT_INSTALLED
