"""The listening socket: private from its first moment, one daemon at a path, and only our own is ever removed.

Owns the path of the socket and the lock file beside it. The lock decides who may bind; it is never removed, since a
removed lock file can be held by two.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import stat
from pathlib import Path

log = logging.getLogger(__name__)

# Clients that connect while the loop is busy; the kernel caps it at net.core.somaxconn.
BACKLOG = socket.SOMAXCONN
# A daemon that is stopped in a debugger does not answer; the kernel does, unless its backlog is full.
_PROBE_TIMEOUT_S = 2.0


class SocketInUse(Exception):
    """The path cannot be had; the message says who has it."""


class SocketPath:
    """Binds a Unix socket at a path on which nobody listens, and removes it in the end.

    Raises SocketInUse if another daemon lives there or the path is not a socket, OSError if the system refuses.
    Between construction and `listen` the path is ours, but nobody can connect.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = _take_lock(path.with_name(path.name + ".lock"))
        try:
            _remove_stale(path)
            self._socket = _bind_private(path)
        except BaseException:
            os.close(self._lock)
            raise
        self._identity = _identity(path)

    def listen(self) -> socket.socket:
        """From now on clients can connect."""
        self._socket.listen(BACKLOG)
        return self._socket

    def close(self) -> None:
        """Removes the socket if it is still the one we bound."""
        self._socket.close()
        with contextlib.suppress(FileNotFoundError):
            if _identity(self.path) == self._identity:
                self.path.unlink()
        os.close(self._lock)


def _take_lock(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise SocketInUse(f"another daemon holds {path}") from None
    return descriptor


def _remove_stale(path: Path) -> None:
    """Removes what a killed daemon left. Refuses a socket that answers, and anything that is not a socket."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise SocketInUse(f"{path} exists and is not a socket")
    if _answers(path):
        raise SocketInUse(f"another process answers at {path}")
    log.info("removing the socket of a daemon that is gone: %s", path)
    path.unlink()


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            # A full backlog, no permission, another kind of socket: somebody is there.
            return True
    return True


def _bind_private(path: Path) -> socket.socket:
    """A bound socket that has mode 0600 before anybody can see it."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    mask = os.umask(0o177)
    try:
        bound.bind(str(path))
    except OSError as error:
        bound.close()
        if "too long" in str(error):
            raise OSError(errno.ENAMETOOLONG, f"a socket path has at most 107 bytes, {path} has more") from None
        raise
    finally:
        os.umask(mask)
    return bound


def _identity(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino
