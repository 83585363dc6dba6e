"""A parent binds the socket and passes it, as systemd does: clients may come before the daemon, and after it."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from colibri.protocol import messages as wire
from support.daemon import TIMEOUT_S, WireClient

# Puts the socket where the protocol wants it and becomes the daemon, which so has the process id that it is told.
_EXEC = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.set_inheritable(3, True)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1")
os.execv(sys.executable, [sys.executable, "-m", "colibri.daemon.main", *sys.argv[2:]])
"""


class Parent:
    """Holds the listening socket and starts daemons on it."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.path = folder / "passed.sock"
        self._options = ["--model", str(model), "--data-dir", str(folder / "data"), "--kv-ram", "32MiB"]
        self.unused = folder / "unused.sock"
        self._options += ["--socket", str(self.unused)]
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(str(self.path))

    @contextlib.contextmanager
    def daemon(self) -> Iterator[subprocess.Popen[str]]:
        number = self.socket.fileno()
        command = [sys.executable, "-c", _EXEC, str(number), *self._options]
        process = subprocess.Popen(command, pass_fds=[number], stderr=subprocess.PIPE, text=True)
        try:
            yield process
        finally:
            process.kill()
            process.communicate(timeout=TIMEOUT_S)


def stop(process: subprocess.Popen[str]) -> int:
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=TIMEOUT_S)
    return process.returncode


@pytest.fixture
def parent(tiny_model_path: Path, tmp_path: Path) -> Iterator[Parent]:
    parent = Parent(tiny_model_path, tmp_path)
    with parent.socket:
        yield parent


def test_clients_that_come_before_a_daemon_are_served_by_it_and_by_the_next(parent: Parent) -> None:
    parent.socket.listen()
    before = parent.path.stat().st_ino
    with ThreadPoolExecutor(1) as executor:
        for _ in range(2):
            early = executor.submit(WireClient, parent.path)  # waits in the backlog for whoever will answer
            with parent.daemon() as process:
                with early.result(TIMEOUT_S) as client:
                    assert client.ask(wire.Health()).result["status"] == "ok"
                assert stop(process) == 0
            assert parent.path.stat().st_ino == before  # stopping never unlinks it
    assert not parent.unused.exists()


def test_a_passed_socket_that_does_not_listen_is_refused_in_one_sentence(parent: Parent) -> None:
    with parent.daemon() as process:
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert errors.splitlines()[-1] == (
        "colibrid: the socket that was passed does not listen (a systemd unit needs Accept=no)"
    )
