"""The connections of a daemon: how many there may be, and how they end."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from typing import Any

from colibri.daemon.connection import Connection
from colibri.daemon.socket_path import BACKLOG
from colibri.protocol.errors import Overloaded, ShuttingDown


class Server:
    """Accepts connections and knows those that live."""

    def __init__(self, make_connection: Callable[[], Connection], *, max_connections: int) -> None:
        self._make_connection = make_connection
        self._max_connections = max_connections
        self._server: asyncio.Server | None = None
        self.connections: set[Connection] = set()

    async def start(self, listening: socket.socket) -> None:
        """Serves on a socket, whose path stays the caller's to remove."""
        loop = asyncio.get_running_loop()
        # From Python 3.13 on a server would unlink the path of any socket it is given, one that was passed to us too.
        keep: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}
        self._server = await loop.create_unix_server(self._accept, sock=listening, backlog=BACKLOG, **keep)

    def _accept(self) -> Connection:
        connection = self._make_connection()
        if len(self.connections) >= self._max_connections:
            connection.refuse(Overloaded(f"{len(self.connections)} connections are open, which is the limit"))
        self.connections.add(connection)
        connection.on_closed = self.connections.discard
        return connection

    def stop_accepting(self) -> None:
        """No new connections, and no new requests on those that are open."""
        if self._server is not None:
            self._server.close()
        for connection in self.connections:
            connection.refuse(ShuttingDown("the daemon is shutting down", hint="try again when it is back"))

    def close(self) -> None:
        """Says good-bye on every connection, after what was already sent."""
        for connection in list(self.connections):
            connection.close(ShuttingDown("the daemon is shutting down", hint="try again when it is back"))
