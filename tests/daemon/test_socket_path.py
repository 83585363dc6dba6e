"""The socket's path: private, one daemon at a time, and nobody else's socket is removed."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from colibri.daemon.socket_path import SocketInUse, SocketPath


def connect(path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.connect(str(path))
    return client


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "c.sock"


def test_the_socket_is_private_in_a_private_folder_whatever_the_umask(path: Path) -> None:
    mask = os.umask(0)
    try:
        ours = SocketPath(path)
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    ours.close()


def test_the_umask_is_put_back(path: Path) -> None:
    mask = os.umask(0o027)
    try:
        SocketPath(path).close()
        assert os.umask(mask) == 0o027
    finally:
        os.umask(mask)


def test_nobody_can_connect_before_listen(path: Path) -> None:
    ours = SocketPath(path)
    with pytest.raises(ConnectionRefusedError):
        connect(path)
    ours.listen()
    connect(path).close()
    ours.close()


def test_a_second_daemon_is_refused_even_before_the_first_listens(path: Path) -> None:
    ours = SocketPath(path)
    with pytest.raises(SocketInUse, match=r"c\.sock\.lock"):
        SocketPath(path)
    ours.listen()
    connect(path).close()
    ours.close()


def test_a_stranger_that_answers_is_left_alone(path: Path) -> None:
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(str(path))
        stranger.listen()
        with pytest.raises(SocketInUse, match="answers"):
            SocketPath(path)
        connect(path).close()


def test_a_socket_left_by_a_killed_daemon_is_replaced(path: Path) -> None:
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    ours = SocketPath(path)
    ours.listen()
    connect(path).close()
    ours.close()


def test_a_file_in_the_way_is_refused_and_kept(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("precious")
    with pytest.raises(SocketInUse, match="not a socket"):
        SocketPath(path)
    assert path.read_text() == "precious"


def test_a_refusal_gives_the_lock_back(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("in the way")
    with pytest.raises(SocketInUse):
        SocketPath(path)
    path.unlink()
    SocketPath(path).close()


def test_closing_removes_our_socket(path: Path) -> None:
    SocketPath(path).close()
    assert not path.exists()


def test_closing_leaves_a_socket_that_another_put_in_its_place(path: Path) -> None:
    ours = SocketPath(path)
    path.rename(path.with_name("moved"))  # so that the new one cannot get the same inode
    with socket.socket(socket.AF_UNIX) as another:
        another.bind(str(path))
        ours.close()
        assert path.exists()


def test_a_path_that_is_too_long_is_said_in_words(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="at most 107 bytes"):
        SocketPath(tmp_path / ("x" * 110))
