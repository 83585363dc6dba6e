"""A fake daemon, and colibrictl run against it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import colibri
from colibri.ctl.cli import cli
from support.ctl import Ctl
from support.fake_daemon import FakeDaemon


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path / "s") as daemon:
        monkeypatch.setenv("COLIBRI_SOCKET", daemon.path)
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        yield daemon


@pytest.fixture
def ctl(daemon: FakeDaemon) -> Ctl:
    """Runs a command line; fails on exceptions that are not an exit."""

    def run(*arguments: str, stdin: str | None = None) -> Result:
        return CliRunner().invoke(cli, arguments, input=stdin, catch_exceptions=False)

    return run


@pytest.fixture
def alice(daemon: FakeDaemon) -> str:
    """A session of one turn, 14 tokens."""
    with colibri.connect(daemon.path) as client:
        client.session("alice").chat("hi")
    return "alice"
