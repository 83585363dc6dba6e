"""What messages are made of: dataclasses whose every field carries the check that a received value must pass.

A check takes (value, where) and gives the value to keep, or raises InvalidRequest that names the field:
`sampling.top_p: must be a number over 0 and at most 1, not 1.5`. Requests are read strictly (an unknown field is
refused: who sent it believes in it); answers leniently (a newer daemon may say more).
"""

from __future__ import annotations

import dataclasses
import math
import struct
import unicodedata
from collections.abc import Callable
from typing import Any, ClassVar, Self

from .errors import InvalidRequest
from .frames import MAX_ARRAY

Check = Callable[[Any, str], Any]
Encode = Callable[[Any], Any]


def field(check: Check, default: Any = dataclasses.MISSING, *, encode: Encode | None = None) -> Any:
    """A field of a Record; without a default it is required. `encode` turns a kept value into what is sent."""
    return dataclasses.field(default=default, metadata={"check": check, "encode": encode or _encode})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """Base of all that is sent as a map. A field that is None is not sent."""

    strict: ClassVar[bool] = False
    # Fields with arrays of any length: where they are long, an answer is sent in parts.
    arrays: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def from_wire(cls, value: Any, where: str = "") -> Self:
        """The record in a received map. Raises InvalidRequest whose `where` is the path of the field."""
        wire = mapping(value, where)
        prefix = f"{where}." if where else ""
        fields = {item.name: item for item in dataclasses.fields(cls)}
        if cls.strict and (unknown := sorted(wire.keys() - fields.keys())):
            raise InvalidRequest("unknown field", where=prefix + unknown[0], hint=f"known are {', '.join(fields)}")
        kept = {}
        for name, item in fields.items():
            if name not in wire:
                if item.default is dataclasses.MISSING:
                    raise InvalidRequest("is missing", where=prefix + name)
            elif wire[name] is not None or item.default is not None:  # null means: as if left out
                kept[name] = item.metadata["check"](wire[name], prefix + name)
        record = cls(**kept)
        record.validate(where)
        return record

    def validate(self, where: str) -> None:
        """Checks that concern more than one field; raises InvalidRequest."""

    def to_wire(self) -> dict[str, Any]:
        """The map that from_wire reads."""
        wire = {}
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if value is not None:
                wire[item.name] = item.metadata["encode"](value)
        return wire


def _encode(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_wire()
    if isinstance(value, list | tuple) and value and isinstance(value[0], Record):
        return [item.to_wire() for item in value]
    return value


# Checks.


def boolean(value: Any, where: str) -> bool:
    if type(value) is not bool:
        raise _refusal(value, where, "true or false")
    return value


def integer(low: int, high: int) -> Check:
    """An integer in [low, high]; true and false are none."""

    def check(value: Any, where: str) -> int:
        if type(value) is not int or not low <= value <= high:
            raise _refusal(value, where, f"an integer from {low} to {high}")
        return value

    return check


def number(low: float, high: float, *, above_low: bool = False) -> Check:
    """A finite number in [low, high], or in (low, high]: also when rounded to float32, as the engine has it."""
    wanted = f"a number over {low:g} and at most {high:g}" if above_low else f"a number from {low:g} to {high:g}"

    def check(value: Any, where: str) -> float:
        if type(value) not in (int, float) or not low <= value <= high or (above_low and _float32(value) == low):
            raise _refusal(value, where, wanted)
        return float(value)

    return check


def _float32(value: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def text(*, max_bytes: int | None = None, empty: bool = True) -> Check:
    wanted = "text" if empty else "text that is not empty"
    if max_bytes is not None:
        wanted += f", at most {max_bytes} bytes"

    def check(value: Any, where: str) -> str:
        if type(value) is not str or not (value or empty):
            raise _refusal(value, where, wanted)
        if max_bytes is not None and _utf8_length(value, where) > max_bytes:
            raise _refusal(value, where, wanted)
        return value

    return check


def array(check_item: Check, *, max_items: int, empty: bool = True) -> Check:
    wanted = f"an array of {'' if empty else '1 to '}{'at most ' if empty else ''}{max_items} items"

    def check(value: Any, where: str) -> list[Any]:
        if type(value) is not list or not (value or empty) or len(value) > max_items:
            raise _refusal(value, where, wanted)
        return [check_item(item, f"{where}[{i}]") for i, item in enumerate(value)]

    return check


# Token ids are int32 in the engine.
MAX_TOKEN_ID = (1 << 31) - 1


def token_ids(value: Any, where: str) -> list[int]:
    """A list of token ids. Whether the model has them is the daemon's to say."""
    if type(value) is not list:
        raise _refusal(value, where, "an array of token ids")
    # Arrays of a hundred thousand ids are common: look at all at once, and for the culprit only if there is one.
    if value and (set(map(type, value)) != {int} or min(value) < 0 or max(value) > MAX_TOKEN_ID):
        check = integer(0, MAX_TOKEN_ID)
        for i, item in enumerate(value):
            check(item, f"{where}[{i}]")
    return value


def prompt_ids(value: Any, where: str) -> list[int]:
    """Token ids of a request, which is one frame: no more than an array may have there."""
    ids = token_ids(value, where)
    if len(ids) > MAX_ARRAY:
        raise InvalidRequest(
            f"must be at most {MAX_ARRAY} token ids, not {len(ids)}", where=where, hint="send less at once"
        )
    return ids


def mapping(value: Any, where: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise _refusal(value, where or "message", "a map")
    return value


def json_map(value: Any, where: str) -> dict[str, Any]:
    """A map of what JSON can hold."""
    _check_json(mapping(value, where), where)
    checked: dict[str, Any] = value
    return checked


def _check_json(value: Any, where: str) -> None:
    if type(value) is dict:
        for key, item in value.items():
            _check_json(text()(key, where), where)
            _check_json(item, f"{where}.{key[:40]}")
    elif type(value) is list:
        for i, item in enumerate(value):
            _check_json(item, f"{where}[{i}]")
    elif not (value is None or type(value) in (str, bool, int) or (type(value) is float and math.isfinite(value))):
        raise _refusal(value, where, "a value that JSON has")


# Control characters, line and paragraph separators.
_BREAKS = frozenset({"Cc", "Zl", "Zp"})


def session_name(value: Any, where: str) -> str:
    """A session's name: a key, never a path; what would be read as a path or break a line of output is refused."""
    text(max_bytes=200, empty=False)(value, where)
    if value in (".", "..") or any(c == "/" or unicodedata.category(c) in _BREAKS for c in value):
        raise InvalidRequest(
            f"{value[:40]!r} cannot name a session", where=where, hint="no '/', no control characters, not '.' or '..'"
        )
    name: str = value
    return name


def _utf8_length(value: str, where: str) -> int:
    try:
        return len(value.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"cannot be sent as UTF-8: {error.reason} at {error.start}", where=where) from None


def _refusal(value: Any, where: str, wanted: str) -> InvalidRequest:
    return InvalidRequest(f"must be {wanted}, not {_shown(value)}", where=where)


def _shown(value: Any) -> str:
    """A received value as a few words, however large it is."""
    if value is None:
        return "null"
    if type(value) is bool:
        return "true" if value else "false"
    if type(value) is int:
        return str(value) if abs(value) < 1 << 64 else "an integer over 64 bits"
    if type(value) is float:
        return "a NaN" if math.isnan(value) else f"{value:g}"
    if type(value) is str:
        return repr(value) if len(value) <= 40 else f"text of {len(value)} characters"
    if type(value) is list:
        return f"an array of {len(value)}"
    return "a map" if type(value) is dict else type(value).__name__
