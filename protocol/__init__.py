"""The wire between daemon and client: messages, codec, framing, errors. Bytes in, events out, no I/O.

docs/protocol.md specifies it. From below: frames (bytes ↔ maps), records (checked fields), messages (what may be said),
connection (in which order); errors and paths stand beside them.
"""

from __future__ import annotations

from .connection import (
    BadRequest,
    ClientEvent,
    ClientProtocol,
    ConnectionFailed,
    ProtocolMisuse,
    RequestReceived,
    ServerEvent,
    ServerProtocol,
    State,
)
from .frames import MAX_FRAME_BYTES, FrameDecoder, encode_frame
from .messages import PROTOCOL_VERSION, Answer, Done, Failure, Progress, Token
from .paths import default_socket_path

__all__ = [
    "MAX_FRAME_BYTES",
    "PROTOCOL_VERSION",
    "Answer",
    "BadRequest",
    "ClientEvent",
    "ClientProtocol",
    "ConnectionFailed",
    "Done",
    "Failure",
    "FrameDecoder",
    "Progress",
    "ProtocolMisuse",
    "RequestReceived",
    "ServerEvent",
    "ServerProtocol",
    "State",
    "Token",
    "default_socket_path",
    "encode_frame",
]
