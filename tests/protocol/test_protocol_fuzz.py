"""Whatever bytes come, split however: the same events, and errors of our own types only."""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from colibri.protocol import (
    Answer,
    BadRequest,
    ClientProtocol,
    ConnectionFailed,
    RequestReceived,
    ServerProtocol,
)
from colibri.protocol.errors import ColibriError
from colibri.protocol.messages import REQUESTS, Generate, Health
from support.wire import SERVER_INFO, completion, greeted_pair

HELLO = {"id": 1, "op": "hello", "version": 1, "client": "fuzz"}

plain: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
FIELDS = sorted({name for cls in REQUESTS.values() for name in cls.__dataclass_fields__} - {"version", "client"})
requests = st.fixed_dictionaries(
    {},
    optional={"id": st.integers(-1, 9) | plain, "op": st.sampled_from([*REQUESTS]) | plain},
).flatmap(lambda head: st.dictionaries(st.sampled_from(FIELDS), plain, max_size=3).map(lambda fields: head | fields))
answers = st.fixed_dictionaries(
    {},
    optional={
        "id": st.integers(0, 4) | plain,
        "done": st.just(completion().to_wire()) | plain,
        "token": st.fixed_dictionaries(
            {"text": st.text(max_size=3) | plain, "ids": st.lists(st.integers(-1, 2**32)) | plain}
        ),
        "error": st.dictionaries(st.sampled_from(["type", "message", "where", "hint", "self", "x"]), plain) | plain,
        "progress": plain,
    },
)


def framed(message: Any) -> bytes:
    body = msgpack.packb(message)
    return struct.pack(">I", len(body)) + body


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[begin:end] for begin, end in pairwise(edges)]


def described(events: list[Any]) -> list[str]:
    """Events as text; errors compare by identity, and NaN not at all."""
    return [repr(event) for event in events]


def mutated(data: bytes, flips: list[tuple[int, int]]) -> bytes:
    changed = bytearray(data)
    for at, value in flips:
        if changed:
            changed[at % len(changed)] ^= value
    return bytes(changed)


cuts = st.lists(st.integers(0, 10_000), max_size=8)
flips = st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=3)


@given(messages=st.lists(requests, max_size=4), cuts=cuts, flips=flips)
@example(messages=[{"id": 2, "op": "health"}, {}], cuts=[40, 41, 60], flips=[])
def test_a_server_gives_the_same_events_for_any_split(
    messages: list[dict[str, Any]], cuts: list[int], flips: list[tuple[int, int]]
) -> None:
    data = mutated(b"".join(map(framed, [HELLO, *messages])), flips)
    whole, pieces = ServerProtocol(), ServerProtocol()
    expected = whole.receive_data(data)
    received = [event for piece in split(data, cuts) for event in pieces.receive_data(piece)]
    assert described(received) == described(expected)
    assert pieces.state is whole.state
    for event in expected:
        assert isinstance(event, RequestReceived) or isinstance(event.error, ColibriError)
    assert not any(isinstance(event, ConnectionFailed) for event in expected[:-1])


@given(messages=st.lists(requests, max_size=6))
def test_every_request_is_in_flight_until_it_is_answered(messages: list[dict[str, Any]]) -> None:
    server = ServerProtocol()
    events = server.receive_data(b"".join(map(framed, [HELLO, *messages])))
    ids = [event.id for event in events if isinstance(event, RequestReceived | BadRequest)]
    assert sorted(server.in_flight) == ids


@given(messages=st.lists(answers | plain, max_size=4), cuts=cuts, flips=flips)
def test_a_client_gives_the_same_events_for_any_split(
    messages: list[Any], cuts: list[int], flips: list[tuple[int, int]]
) -> None:
    data = mutated(b"".join(map(framed, messages)), flips)

    def client() -> ClientProtocol:
        client, _ = greeted_pair()
        client.send_request(Generate(prompt="a"))
        client.send_request(Health())
        return client

    whole, pieces = client(), client()
    expected = whole.receive_data(data)
    received = [event for piece in split(data, cuts) for event in pieces.receive_data(piece)]
    assert described(received) == described(expected)
    for event in expected:
        assert isinstance(event, Answer) or isinstance(event.error, ColibriError)


@given(st.binary(max_size=300))
def test_random_bytes_never_open_a_connection(data: bytes) -> None:
    events = ServerProtocol().receive_data(data)
    assert all(isinstance(event, ConnectionFailed) for event in events)


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_greeting_cut_anywhere_is_no_greeting(cut: int) -> None:
    client = ClientProtocol()
    client.send_hello("x")
    data = framed({"id": 1, "done": SERVER_INFO.to_wire()})
    assert client.receive_data(data[:-cut]) == []
    assert client.server is None
    client.receive_data(data[-cut:])
    assert client.server == SERVER_INFO
