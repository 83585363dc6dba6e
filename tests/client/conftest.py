"""A fake daemon, and a client of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import colibri
from support.fake_daemon import FakeDaemon


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path / "s") as daemon:
        yield daemon


@pytest.fixture
def client(daemon: FakeDaemon) -> Iterator[colibri.Client]:
    with colibri.connect(daemon.path) as client:
        yield client
