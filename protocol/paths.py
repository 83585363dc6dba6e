"""Where the daemon listens unless told otherwise: one answer for daemon, client and command line."""

from __future__ import annotations

import os
from collections.abc import Mapping


def default_socket_path(environ: Mapping[str, str] = os.environ) -> str:
    """`$COLIBRI_SOCKET`, else a socket in the user's runtime folder, else the system service's."""
    if path := environ.get("COLIBRI_SOCKET"):
        return path
    runtime = environ.get("XDG_RUNTIME_DIR") or "/run"
    return f"{runtime}/colibri/colibri.sock"
