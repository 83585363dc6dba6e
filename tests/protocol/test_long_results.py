"""Results longer than a frame: sent in parts, joined again; and what cannot be divided is refused in words."""

from __future__ import annotations

from typing import Any

import pytest

from colibri.protocol import (
    Answer,
    ClientProtocol,
    ConnectionFailed,
    Done,
    Failure,
    FrameDecoder,
    ServerProtocol,
    encode_frame,
)
from colibri.protocol import connection as module
from colibri.protocol.errors import FrameTooLarge, InvalidRequest, ProtocolError
from colibri.protocol.frames import MAX_ARRAY, MAX_CONTAINERS
from colibri.protocol.messages import (
    Detokenize,
    Health,
    Request,
    Score,
    Scores,
    SessionGet,
    SessionInfo,
    SessionList,
    SessionPage,
    SessionSummary,
    StoredMessage,
    TokenIds,
    Tokenize,
)
from support.wire import SERVER_INFO, greeted_pair

SUMMARY: dict[str, Any] = {
    "name": "alice",
    "created": 1.0,
    "updated": 2.0,
    "n_turns": 1,
    "n_tokens": 3,
    "state": "idle",
}


def small_pair(frame_bytes: int) -> tuple[ClientProtocol, ServerProtocol]:
    client, server = ClientProtocol(), ServerProtocol(frame_bytes=frame_bytes)
    server.receive_data(client.send_hello("test"))
    client.receive_data(server.send_hello(1, SERVER_INFO))
    return client, server


def frames_of(data: bytes) -> list[dict[str, Any]]:
    decoder = FrameDecoder()
    decoder.feed(data)
    return list(iter(decoder.next_message, None))


def info(n_messages: int, n_tokens: int) -> SessionInfo:
    message = StoredMessage(role="user", content="hello")
    return SessionInfo(**SUMMARY, messages=[message] * n_messages, tokens=list(range(n_tokens)), note="as it was")


RESULTS: list[tuple[Request, Any]] = [
    (Tokenize(text="a"), TokenIds(tokens=list(range(5000)))),
    (Score(text="a"), Scores(tokens=list(range(3000)), logprobs=[-i / 2 for i in range(2999)])),
    (SessionGet(name="alice", include_tokens=True), info(200, 3000)),
    (SessionList(), SessionPage(sessions=[SessionSummary(**SUMMARY)] * 300, next="alice")),
]


@pytest.mark.parametrize(("request_", "result"), RESULTS, ids=lambda value: type(value).__name__)
def test_a_result_over_the_limit_of_a_frame_arrives_whole(request_: Request, result: Any) -> None:
    client, server = small_pair(2000)
    id, data = client.send_request(request_)
    server.receive_data(data)
    data = server.send(Answer(id, Done(result)))
    assert len(data) > 3 * 2000
    for frame in frames_of(data):
        assert len(encode_frame(frame)) <= 2000 + 4
    assert client.receive_data(data) == [Answer(id, Done(result))]
    assert client.in_flight == server.in_flight == frozenset()


@pytest.mark.parametrize(
    "result", [TokenIds(tokens=[7] * (MAX_ARRAY + 1)), info(MAX_CONTAINERS + 1, 1)], ids=["tokens", "messages"]
)
def test_a_result_with_more_items_than_a_frame_may_have_arrives_whole(result: Any) -> None:
    client, server = greeted_pair()
    id, data = client.send_request(Tokenize(text="a") if isinstance(result, TokenIds) else SessionGet(name="alice"))
    server.receive_data(data)
    (event,) = client.receive_data(server.send(Answer(id, Done(result))))
    assert event == Answer(id, Done(result))


def test_a_short_result_is_one_answer() -> None:
    client, server = greeted_pair()
    id, data = client.send_request(Tokenize(text="a"))
    server.receive_data(data)
    assert frames_of(server.send(Answer(id, Done(TokenIds(tokens=[1, 2]))))) == [{"id": id, "done": {"tokens": [1, 2]}}]


def test_parts_of_several_results_may_be_mixed() -> None:
    client, _ = greeted_pair()
    for _ in range(2):
        client.send_request(Tokenize(text="a"))
    answers = [
        {"id": 2, "data": {"tokens": [1]}},
        {"id": 3, "data": {"tokens": [7]}},
        {"id": 2, "data": {"tokens": [2]}},
        {"id": 3, "done": {"tokens": [8]}},
        {"id": 2, "done": {}},
    ]
    assert client.receive_data(encode_frame({"answers": answers})) == [
        Answer(3, Done(TokenIds(tokens=[7, 8]))),
        Answer(2, Done(TokenIds(tokens=[1, 2]))),
    ]


def test_an_error_after_parts_is_an_error() -> None:
    client, _ = greeted_pair()
    client.send_request(Tokenize(text="a"))
    client.receive_data(encode_frame({"id": 2, "data": {"tokens": [1]}}))
    (event,) = client.receive_data(encode_frame({"id": 2, "error": {"type": "internal_error", "message": "boom"}}))
    assert isinstance(event, Answer)
    assert isinstance(event.body, Failure)


@pytest.mark.parametrize("data", [[], {"tokens": 7}, {"tokens": {}}])
def test_a_part_that_is_no_map_of_arrays_ends_the_connection(data: Any) -> None:
    client, _ = greeted_pair()
    client.send_request(Tokenize(text="a"))
    (event,) = client.receive_data(encode_frame({"id": 2, "data": data}))
    assert isinstance(event, ConnectionFailed)
    assert isinstance(event.error, ProtocolError)


def test_a_daemon_cannot_make_a_client_collect_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_JOINED_ITEMS", 5)
    client, _ = greeted_pair()
    client.send_request(Health())
    part = encode_frame({"id": 2, "data": {"x": [1, 2, 3]}})
    (event,) = client.receive_data(part + part)
    assert isinstance(event, ConnectionFailed)
    assert "more than 5 items" in str(event.error)


def test_one_item_over_the_limit_is_refused_and_the_request_can_still_be_failed() -> None:
    client, server = small_pair(2000)
    id, data = client.send_request(SessionGet(name="alice"))
    server.receive_data(data)
    long = SessionInfo(**SUMMARY, messages=[StoredMessage(role="user", content="x" * 3000)])
    with pytest.raises(FrameTooLarge) as caught:
        server.send(Answer(id, Done(long)))
    (event,) = client.receive_data(server.send(Answer(id, Failure(caught.value))))
    assert isinstance(event, Answer)
    assert isinstance(event.body.error, FrameTooLarge)  # type: ignore[union-attr]


@pytest.mark.parametrize("request_", [Detokenize(tokens=[7] * (MAX_ARRAY + 1)), Score(tokens=[7] * (MAX_ARRAY + 1))])
def test_more_tokens_than_a_request_may_have_are_refused_before_they_are_sent(request_: Request) -> None:
    """The daemon would have to end the connection."""
    client, _ = greeted_pair()
    with pytest.raises(InvalidRequest, match="send less at once") as caught:
        client.send_request(request_)
    assert caught.value.where == "tokens"
    assert client.in_flight == frozenset()
