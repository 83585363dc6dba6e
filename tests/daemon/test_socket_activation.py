"""A passed socket is taken when it is one that can be served, and refused in words otherwise."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from colibri.daemon.socket_activation import BadPassedSocket, PassedSocket, take_passed_socket


@pytest.fixture
def bound(tmp_path: Path) -> Iterator[socket.socket]:
    """What a parent passes: bound and listening."""
    with socket.socket(socket.AF_UNIX) as ours:
        ours.bind(str(tmp_path / "c.sock"))
        ours.listen()
        yield ours


def environment(**changes: str) -> dict[str, str]:
    return {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "colibri", "HOME": "/root"} | changes


def take(passed: socket.socket, environ: dict[str, str]) -> PassedSocket | None:
    """Takes a copy, as a child has."""
    return take_passed_socket(environ, first_descriptor=os.dup(passed.fileno()))


def test_a_listening_socket_is_taken_and_answers(bound: socket.socket) -> None:
    passed = take(bound, environment())
    assert passed is not None
    assert str(passed.path) == bound.getsockname()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(passed.path))
        passed.listen().accept()[0].close()
    passed.close()


def test_a_passed_socket_blocks_nobody_and_is_not_inherited(bound: socket.socket) -> None:
    environ = environment()
    passed = take(bound, environ)
    assert passed is not None
    listening = passed.listen()
    assert not listening.getblocking()
    assert not listening.get_inheritable()
    assert environ == {"HOME": "/root"}
    passed.close()


def test_closing_leaves_the_path_and_the_parents_socket(bound: socket.socket) -> None:
    passed = take(bound, environment())
    assert passed is not None
    passed.close()
    assert passed.path.exists()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(passed.path))


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"LISTEN_FDS": "1"},
        {"LISTEN_FDS": "1", "LISTEN_PID": "1"},
        {"LISTEN_FDS": "0", "LISTEN_PID": str(os.getpid())},
    ],
    ids=["nothing", "for nobody", "for another process", "none"],
)
def test_what_was_not_passed_to_us_is_not_taken(environ: dict[str, str]) -> None:
    assert take_passed_socket(environ, first_descriptor=-1) is None
    assert environ == {}


@pytest.mark.parametrize("count", ["", "many", "-1", "²"])
def test_a_count_that_is_no_number_is_refused(bound: socket.socket, count: str) -> None:
    with pytest.raises(BadPassedSocket, match="not a number"):
        take(bound, environment(LISTEN_FDS=count))


def test_more_than_one_socket_is_refused(bound: socket.socket) -> None:
    with pytest.raises(BadPassedSocket, match="2 sockets were passed"):
        take(bound, environment(LISTEN_FDS="2"))


@pytest.mark.parametrize(
    ("family", "kind", "words"),
    [
        (socket.AF_INET, socket.SOCK_STREAM, "family AF_INET, not AF_UNIX"),
        (socket.AF_UNIX, socket.SOCK_DGRAM, "type SOCK_DGRAM, not SOCK_STREAM"),
        (socket.AF_UNIX, socket.SOCK_STREAM, "does not listen"),
    ],
)
def test_a_socket_of_another_kind_is_refused_and_left_open(
    family: socket.AddressFamily, kind: socket.SocketKind, words: str
) -> None:
    with socket.socket(family, kind) as other:
        with pytest.raises(BadPassedSocket, match=words):
            take_passed_socket(environment(), first_descriptor=other.fileno())
        assert other.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == kind


def test_a_descriptor_that_is_no_socket_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file, pytest.raises(BadPassedSocket, match=r"not a socket|non-socket"):
        take_passed_socket(environment(), first_descriptor=file.fileno())


def test_a_descriptor_that_is_not_open_is_refused() -> None:
    with pytest.raises(BadPassedSocket, match="descriptor 1048575"):
        take_passed_socket(environment(), first_descriptor=1_048_575)
