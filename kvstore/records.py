"""The envelope of everything small on disk: CRC-32 over key and body, then a msgpack array that starts with a version.

The key is under the checksum, so that a record that turns up in another's place is found out.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from collections.abc import Iterable
from typing import Any

import msgpack

from colibri.kvstore.errors import StoreVersionError

VERSION = 1


class BadRecord(Exception):
    """The checksum does not fit."""


def seal(key: bytes, *fields: Any) -> bytes:
    body: bytes = msgpack.packb([VERSION, *fields])
    return _checksum(key, body) + body


def unseal(key: bytes, value: bytes) -> list[Any]:
    """The fields given to `seal`. Raises BadRecord, or StoreVersionError for a record of a later version."""
    body = value[4:]
    if value[:4] != _checksum(key, body):
        raise BadRecord
    fields: list[Any]
    version, *fields = msgpack.unpackb(body, strict_map_key=False)
    if version != VERSION:
        raise StoreVersionError(f"a record of version {version}; this colibri reads version {VERSION}")
    return fields


def _checksum(key: bytes, body: bytes) -> bytes:
    return zlib.crc32(body, zlib.crc32(key)).to_bytes(4, "little")


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Token ids as little-endian 32-bit integers: four bytes each, and twenty times faster to read than a list."""
    packed = array("i", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    tokens = array("i", data)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tolist()
