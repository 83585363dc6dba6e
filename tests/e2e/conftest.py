"""A daemon on the tiny Mixtral: one that a module's tests share, and folders for those that need their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.daemon import DaemonProcess, WireClient


@pytest.fixture(scope="module")
def daemon(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """Small steps, so that a long prompt is many of them."""
    folder = tmp_path_factory.mktemp("daemon")
    with DaemonProcess(tiny_model_path, folder, "--max-step-rows", "64", "--max-batch-size", "4") as process:
        yield process


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[WireClient]:
    with daemon.connect() as client:
        yield client
