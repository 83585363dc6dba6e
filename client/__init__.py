"""colibri: the thin client. It needs msgpack and nothing else, and asks a running `colibrid` over its Unix socket.

    import colibri

    with colibri.connect() as c:
        for piece in c.generate("Once upon a time", max_tokens=64):
            print(piece.text, end="", flush=True)
        alice = c.session("alice")                       # made or resumed: print(alice) says which
        reply = alice.chat("What did I ask you yesterday?")
        print(reply.text, reply.usage.cached_tokens)

The same for asyncio is `colibri.aio`, which is loaded when it is first used.
Every error is a ColibriError that says what is wrong, `where`, and as its `hint` what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .protocol.errors import (
    Cancelled,
    CapacityExceeded,
    ColibriError,
    ConnectionLost,
    DaemonUnavailable,
    DeadlineExceeded,
    FrameTooLarge,
    InternalError,
    InvalidRequest,
    ModelLost,
    NumericError,
    Overloaded,
    PromptTooLong,
    ProtocolError,
    SessionBusy,
    SessionCorrupt,
    SessionError,
    SessionExists,
    SessionMismatch,
    SessionNotFound,
    ShuttingDown,
    StorageError,
    StorageFull,
    TemplateError,
    UnknownOperation,
    UnsupportedVersion,
)
from .protocol.messages import Scores, SessionInfo, SessionSummary, Timings, Usage
from .replies import Piece, Reply, Stream
from .sessions import Session
from .sync import Client, connect

if TYPE_CHECKING:
    from . import aio as aio

__all__ = [
    "Cancelled",
    "CapacityExceeded",
    "Client",
    "ColibriError",
    "ConnectionLost",
    "DaemonUnavailable",
    "DeadlineExceeded",
    "FrameTooLarge",
    "InternalError",
    "InvalidRequest",
    "ModelLost",
    "NumericError",
    "Overloaded",
    "Piece",
    "PromptTooLong",
    "ProtocolError",
    "Reply",
    "Scores",
    "Session",
    "SessionBusy",
    "SessionCorrupt",
    "SessionError",
    "SessionExists",
    "SessionInfo",
    "SessionMismatch",
    "SessionNotFound",
    "SessionSummary",
    "ShuttingDown",
    "StorageError",
    "StorageFull",
    "Stream",
    "TemplateError",
    "Timings",
    "UnknownOperation",
    "UnsupportedVersion",
    "Usage",
    "connect",
]


def __getattr__(name: str) -> Any:
    """`colibri.aio`, when first asked for: asyncio takes longer to import than all the rest."""
    if name != "aio":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return import_module(".aio", __name__)
