"""A listening socket that was passed to the daemon by its parent, as systemd's socket units do (sd_listen_fds(3)).

    LISTEN_PID       who the sockets are for; another process's are not ours
    LISTEN_FDS       how many there are, from descriptor 3 on

Whoever bound the socket decides who may open it and keeps its path: it is never unlinked here, so that clients may
connect while no daemon runs and wait in its backlog for the next one.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from pathlib import Path

from colibri.daemon.socket_path import BACKLOG

# SD_LISTEN_FDS_START: behind the standard streams.
FIRST_DESCRIPTOR = 3
_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")


class BadPassedSocket(Exception):
    """What was passed is not one listening Unix stream socket; the message says what it is."""


class PassedSocket:
    """A socket that somebody else bound. Takes the place of a SocketPath."""

    def __init__(self, passed: socket.socket) -> None:
        self._socket = passed
        self.path = _readable_path(passed)

    def listen(self) -> socket.socket:
        """It listens already; its backlog becomes ours."""
        self._socket.listen(BACKLOG)
        return self._socket

    def close(self) -> None:
        """Closes our descriptor; the socket itself lives on with whoever passed it."""
        self._socket.close()


def take_passed_socket(
    environ: MutableMapping[str, str] = os.environ, *, first_descriptor: int = FIRST_DESCRIPTOR
) -> PassedSocket | None:
    """The socket that was passed to this process, or None. Raises BadPassedSocket.

    Takes the variables out of `environ`, and the descriptor is not inherited: no child may think that it was passed
    to it.
    """
    pid, count, _ = (environ.pop(name, None) for name in _VARIABLES)
    if count is None or pid != str(os.getpid()):
        return None
    if not count.isascii() or not count.isdigit():
        raise BadPassedSocket(f"LISTEN_FDS is {count!r}, not a number of sockets")
    if int(count) == 0:
        return None
    if int(count) > 1:
        raise BadPassedSocket(f"{count} sockets were passed (LISTEN_FDS); the daemon serves one")
    return PassedSocket(_checked(first_descriptor))


def _checked(descriptor: int) -> socket.socket:
    try:
        passed = socket.socket(fileno=descriptor)
    except OSError as error:
        raise BadPassedSocket(f"descriptor {descriptor} was passed as a socket: {error.strerror}") from None
    try:
        if passed.family != socket.AF_UNIX:
            raise BadPassedSocket(f"the socket that was passed is of family {_name(passed.family)}, not AF_UNIX")
        if passed.type != socket.SOCK_STREAM:
            raise BadPassedSocket(f"the socket that was passed is of type {_name(passed.type)}, not SOCK_STREAM")
        if not passed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise BadPassedSocket("the socket that was passed does not listen (a systemd unit needs Accept=no)")
        passed.setblocking(False)
        passed.set_inheritable(False)
    except BaseException:
        passed.detach()  # not ours, so not ours to close
        raise
    return passed


def _name(kind: int) -> str:
    return str(getattr(kind, "name", kind))


def _readable_path(passed: socket.socket) -> Path:
    """For messages; an abstract name, which begins with a null, is shown with @ as ss(8) does."""
    name = passed.getsockname()
    return Path("@" + name[1:].decode(errors="replace") if isinstance(name, bytes) else name)
