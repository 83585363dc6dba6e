"""Connecting: what is found, and what is said when there is nobody."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

import colibri
from colibri.protocol.messages import Request
from support.fake_daemon import Connection, FakeDaemon
from support.wire import SERVER_INFO


def unavailable(path: Path, **options: float) -> colibri.DaemonUnavailable:
    with pytest.raises(colibri.DaemonUnavailable) as caught:
        colibri.connect(str(path), **options)
    assert caught.value.where == str(path)
    return caught.value


def test_a_client_knows_the_model_and_the_limits(client: colibri.Client) -> None:
    assert client.server == SERVER_INFO


def test_the_socket_is_found_in_the_environment(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLIBRI_SOCKET", daemon.path)
    with colibri.connect() as client:
        assert client.path == daemon.path


def test_a_path_object_is_a_path(daemon: FakeDaemon) -> None:
    with colibri.connect(Path(daemon.path)) as client:
        assert client.path == daemon.path


def test_what_is_no_path_is_a_type_error_that_says_so() -> None:
    with pytest.raises(TypeError, match=r"str, bytes or os\.PathLike object, not int"):
        colibri.connect(5)  # type: ignore[arg-type]


def test_no_socket_says_how_to_start_the_daemon(tmp_path: Path) -> None:
    error = unavailable(tmp_path / "none")
    assert "no daemon listens here" in str(error)
    assert "colibrid --model" in str(error.hint)


def test_a_dead_daemons_socket_says_how_to_start_one(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "s"))
    assert "no daemon answers" in str(unavailable(tmp_path / "s"))


@pytest.mark.skipif(os.getuid() == 0, reason="root may connect to every socket")
def test_a_socket_of_another_user_says_so(daemon: FakeDaemon) -> None:
    os.chmod(daemon.path, 0)
    assert "may not connect" in str(unavailable(Path(daemon.path)))


def test_a_path_too_long_for_a_socket_is_named(tmp_path: Path) -> None:
    assert "cannot connect" in str(unavailable(tmp_path / ("x" * 200)))


def test_a_daemon_that_does_not_greet_is_not_waited_for_forever(daemon: FakeDaemon) -> None:
    daemon.script["hello"] = lambda connection, id, request: None
    assert "no greeting within 0.05 s" in str(unavailable(Path(daemon.path), timeout_s=0.05))


def test_a_daemon_of_another_version_is_named(daemon: FakeDaemon) -> None:
    def refuse(connection: Connection, id: int, request: Request) -> None:
        connection.socket.sendall(connection.protocol.send_failure(colibri.UnsupportedVersion("I speak 2 only")))

    daemon.script["hello"] = refuse
    with pytest.raises(colibri.UnsupportedVersion, match="I speak 2 only"):
        colibri.connect(daemon.path)


def test_something_that_is_no_colibrid_is_refused(daemon: FakeDaemon) -> None:
    daemon.script["hello"] = lambda connection, id, request: connection.socket.sendall(b"HTTP/1.1 400 Bad Request\r\n")
    with pytest.raises(colibri.ProtocolError):
        colibri.connect(daemon.path)


def test_a_closed_client_says_so(client: colibri.Client) -> None:
    client.close()
    client.close()
    with pytest.raises(colibri.ConnectionLost, match="closed by this program"):
        client.health()
