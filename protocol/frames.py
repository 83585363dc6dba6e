"""Frames: a 4-byte big-endian length, then that many bytes of msgpack holding one map.

The bytes come from anybody who may open the socket, so decoding is bounded in every direction: the length of a frame
(checked before its body is buffered), the length of an array or map (before it is allocated), the number of containers
(an empty map is one byte on the wire and 64 in memory), and the depth. Keys are distinct strings, text is UTF-8, and
extension types are refused. Whatever is wrong is a ProtocolError; after one, the decoder is of no further use.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Any

import msgpack

from .errors import FrameTooLarge, InvalidRequest, ProtocolError

# Holds a million token ids three times over, or a session's whole text; small enough to buffer for every connection.
MAX_FRAME_BYTES = 16 << 20
# Before hello nobody has said anything yet that deserves more memory than this.
MAX_HELLO_BYTES = 64 << 10
# The deepest message is answers → answer → token → top → alternatives → pair; twice that leaves room to grow.
MAX_DEPTH = 16
# Longer than any context that a CPU can serve.
MAX_ARRAY = 1 << 20
# Counts or messages keyed by name; the widest real map is a logit bias.
MAX_MAP = 1 << 16
# What a long session's messages need, ten times over; at 64 bytes each, 8 MiB.
MAX_CONTAINERS = 1 << 17

_HEADER = struct.Struct(">I")
_CONTAINERS = frozenset({dict, list})
_PLAIN = _CONTAINERS | {type(None), bool, int, float, str, bytes}


class FrameDecoder:
    """Cuts a stream of bytes into messages, however the bytes are split.

    `limit` may be changed between messages; it is looked at when a frame's header is complete.
    """

    def __init__(self, limit: int = MAX_FRAME_BYTES) -> None:
        self.limit = limit
        self._buffer = bytearray()
        self._start = 0  # of the first frame that was not given out

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Takes bytes in; next_message() gives out what they complete."""
        if self._start:
            del self._buffer[: self._start]
            self._start = 0
        self._buffer += data

    @property
    def pending_bytes(self) -> int:
        """Bytes of frames that were not given out: never zero inside a frame."""
        return len(self._buffer) - self._start

    def next_message(self) -> dict[str, Any] | None:
        """The next whole message, or None until more bytes come.

        Raises FrameTooLarge, or ProtocolError for a body that is not one plain map.
        """
        if self.pending_bytes < _HEADER.size:
            return None
        (n_bytes,) = _HEADER.unpack_from(self._buffer, self._start)
        if n_bytes > self.limit:
            raise FrameTooLarge(
                f"a frame of {n_bytes} bytes is over the limit of {self.limit}", where="frame", limit=self.limit
            )
        begin = self._start + _HEADER.size
        if len(self._buffer) - begin < n_bytes:
            return None
        with memoryview(self._buffer) as view, view[begin : begin + n_bytes] as body:
            message = _unpack(body)
        self._start = begin + n_bytes
        return message


def encode_frame(message: Mapping[str, Any], limit: int = MAX_FRAME_BYTES) -> bytes:
    """The frame of one message. Raises InvalidRequest for what cannot be expressed, FrameTooLarge over the limit."""
    return frame(pack(message), limit)


def frame(body: bytes, limit: int = MAX_FRAME_BYTES) -> bytes:
    """Puts the header before an encoded message. Raises FrameTooLarge."""
    if len(body) > limit:
        raise FrameTooLarge(
            f"a frame of {len(body)} bytes is over the limit of {limit}",
            where="frame",
            hint="send less at once",
            limit=limit,
        )
    return _HEADER.pack(len(body)) + body


def pack(message: Mapping[str, Any]) -> bytes:
    """One message as msgpack. Raises InvalidRequest for lone surrogates, integers over 64 bits, unknown types."""
    try:
        body: bytes = msgpack.packb(message)
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"text cannot be sent as UTF-8: {error.reason} at {error.start}", where="text") from error
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequest(f"cannot be sent: {error}", where="message") from error
    return body


class _Counter:
    """msgpack's hooks: counts containers while they are made, and lets only maps with distinct string keys through."""

    def __init__(self) -> None:
        self.n_left = MAX_CONTAINERS

    def _count(self) -> None:
        self.n_left -= 1
        if self.n_left < 0:
            raise ProtocolError(f"a frame holds more than {MAX_CONTAINERS} maps and arrays", where="frame")

    def on_list(self, items: list[Any]) -> list[Any]:
        self._count()
        return items

    def on_map(self, pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
        self._count()
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ProtocolError("a map has the same key twice", where="frame")
        if not all(type(key) is str for key in result):
            raise ProtocolError("a map has a key that is not text", where="frame")
        return result


def _unpack(body: memoryview) -> dict[str, Any]:
    counter = _Counter()
    try:
        message = msgpack.unpackb(
            body,
            object_pairs_hook=counter.on_map,
            list_hook=counter.on_list,
            max_array_len=min(MAX_ARRAY, len(body)),
            max_map_len=min(MAX_MAP, len(body)),
        )
    except UnicodeDecodeError as error:
        raise ProtocolError(f"a frame holds text that is not UTF-8: {error.reason}", where="frame") from None
    except msgpack.StackError:
        raise ProtocolError(f"a frame is nested more than {MAX_DEPTH} deep", where="frame") from None
    except msgpack.FormatError:
        raise ProtocolError("a frame is not msgpack", where="frame") from None
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a frame is not one msgpack map: {error}", where="frame") from None
    if type(message) is not dict:
        raise ProtocolError(f"a frame holds {type(message).__name__}, not a map", where="frame")
    _check_plain(message)
    return message


def _check_plain(message: dict[str, Any]) -> None:
    """Refuses extension types and depth over MAX_DEPTH, level by level; `set(map(type, …))` is quick on long arrays."""
    level: list[Any] = [message]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for container in level:
            items: Iterable[Any] = container.values() if type(container) is dict else container
            kinds = set(map(type, items))
            if not kinds <= _PLAIN:
                raise ProtocolError("a frame holds a msgpack extension type", where="frame")
            if kinds & _CONTAINERS:
                below.extend(item for item in items if type(item) in _CONTAINERS)
        if not below:
            return
        level = below
    raise ProtocolError(f"a frame is nested more than {MAX_DEPTH} deep", where="frame")
