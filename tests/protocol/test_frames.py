"""Frames: any split gives the same messages, and every kind of bad bytes a typed error."""

from __future__ import annotations

import struct
import tracemalloc
from itertools import pairwise
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri.protocol.errors import FrameTooLarge, InvalidRequest, ProtocolError
from colibri.protocol.frames import MAX_ARRAY, MAX_CONTAINERS, MAX_DEPTH, FrameDecoder, encode_frame, pack


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def decode(data: bytes, limit: int = 1 << 24) -> list[dict[str, Any]]:
    decoder = FrameDecoder(limit)
    decoder.feed(data)
    messages = []
    while (message := decoder.next_message()) is not None:
        messages.append(message)
    return messages


def refusal(body: bytes) -> str:
    """The words of the error that a frame with this body gives."""
    with pytest.raises(ProtocolError) as caught:
        decode(framed(body))
    return str(caught.value)


def nested(depth: int) -> dict[str, Any]:
    """A map that holds depth - 1 arrays in each other."""
    value: Any = []
    for _ in range(depth - 2):
        value = [value]
    return {"a": value}


def test_a_frame_is_a_big_endian_length_and_one_map() -> None:
    assert encode_frame({"id": 1}) == b"\x00\x00\x00\x05\x81\xa2id\x01"


def test_a_message_comes_back_as_it_was() -> None:
    message = {"text": "für 🐦", "ids": [0, 2**64 - 1, -1], "x": 0.5, "none": None, "raw": b"\x00", "map": {"": True}}
    assert decode(encode_frame(message)) == [message]


def test_an_empty_map_is_a_message_too() -> None:
    assert decode(framed(b"\x80") * 2) == [{}, {}]


@given(
    messages=st.lists(st.dictionaries(st.text(max_size=4), st.integers(-5, 5) | st.text(max_size=9)), max_size=5),
    cuts=st.lists(st.integers(0, 200), max_size=12),
)
def test_any_split_of_the_bytes_gives_the_same_messages(messages: list[dict[str, Any]], cuts: list[int]) -> None:
    data = b"".join(encode_frame(message) for message in messages)
    decoder, received = FrameDecoder(), []
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for begin, end in pairwise(edges):
        decoder.feed(data[begin:end])
        while (message := decoder.next_message()) is not None:
            received.append(message)
    assert received == messages
    assert decoder.pending_bytes == 0


def test_a_frame_over_the_limit_is_refused_by_its_header_alone() -> None:
    decoder = FrameDecoder(1000)
    decoder.feed(struct.pack(">I", 1001))
    with pytest.raises(FrameTooLarge, match="1001 bytes is over the limit of 1000") as caught:
        decoder.next_message()
    assert caught.value.extra == {"limit": 1000}


def test_a_frame_at_the_limit_passes() -> None:
    data = encode_frame({"t": "x" * 100})
    assert decode(data, limit=len(data) - 4)


def test_an_endless_partial_frame_holds_no_more_than_was_sent() -> None:
    decoder = FrameDecoder(1 << 30)
    tracemalloc.start()
    decoder.feed(struct.pack(">I", 1 << 30) + b"\x81")
    assert decoder.next_message() is None
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10_000
    assert decoder.pending_bytes == 5


@pytest.mark.parametrize("head", [b"\xdd", b"\xdf", b"\xdb", b"\xc6"], ids=["array", "map", "text", "bytes"])
def test_a_tiny_frame_that_claims_four_billion_items_allocates_nothing(head: bytes) -> None:
    tracemalloc.start()
    refusal(b"\x81\xa1a" + head + b"\xff\xff\xff\xff")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


def test_an_array_longer_than_any_context_is_refused() -> None:
    assert "max_array_len" in refusal(msgpack.packb({"a": [0] * (MAX_ARRAY + 1)}))


def test_a_frame_full_of_empty_maps_is_refused_before_it_fills_memory() -> None:
    assert "more than" in refusal(msgpack.packb({"a": [{}] * (MAX_CONTAINERS + 1)}))


def test_nesting_to_the_limit_passes_and_one_more_is_refused() -> None:
    assert decode(encode_frame(nested(MAX_DEPTH))) == [nested(MAX_DEPTH)]
    assert "nested" in refusal(msgpack.packb(nested(MAX_DEPTH + 1)))


def test_nesting_that_would_overflow_a_stack_is_refused() -> None:
    assert "nested" in refusal(b"\x81\xa1a" + b"\x91" * 100_000 + b"\xc0")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not one msgpack map"),
        (b"\xc1", "not msgpack"),
        (b"\x81\xa1a", "not one msgpack map"),
        (b"\x80\x80", "not one msgpack map"),
        (b"\x93\x01\x02\x03", "list, not a map"),
        (b"\xc0", "NoneType, not a map"),
        (b"\x81\xa1a\xa2\xc3\x28", "not UTF-8"),
        (b"\x81\xa3\xed\xa0\x80\x01", "not UTF-8"),
        (b"\x81\x01\x02", "map key"),
        (b"\x81\xc4\x01a\x02", "not text"),
        (b"\x81\x90\x02", "map key"),
        (b"\x82\xa1a\x01\xa1a\x02", "same key twice"),
        (b"\x81\xa1a\xd4\x05x", "extension"),
        (b"\x81\xa1a\xd6\xff\x00\x00\x00\x00", "extension"),
    ],
    ids=[
        "empty",
        "reserved byte",
        "cut",
        "two messages",
        "array",
        "nil",
        "invalid UTF-8",
        "surrogate",
        "integer key",
        "bytes key",
        "array key",
        "duplicate key",
        "extension",
        "timestamp",
    ],
)
def test_a_body_that_is_not_one_plain_map_is_refused(body: bytes, words: str) -> None:
    assert words in refusal(body)


@given(st.binary(max_size=200))
def test_random_bodies_give_a_map_or_a_protocol_error(body: bytes) -> None:
    try:
        (message,) = decode(framed(body))
    except ProtocolError:
        return
    assert type(message) is dict


@pytest.mark.parametrize("value", ["\ud800", 1 << 64, object(), {1, 2}], ids=["surrogate", "2^64", "object", "set"])
def test_what_cannot_be_expressed_is_our_callers_error(value: Any) -> None:
    with pytest.raises(InvalidRequest):
        pack({"a": value})


def test_a_message_over_the_limit_is_not_sent() -> None:
    with pytest.raises(FrameTooLarge, match="send less"):
        encode_frame({"a": "x" * 100}, limit=50)
