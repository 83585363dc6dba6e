"""The daemon's end of a connection: what it takes, what it refuses, and that an illegal step changes nothing."""

from __future__ import annotations

from typing import Any

import pytest

from colibri.protocol import (
    Answer,
    BadRequest,
    ConnectionFailed,
    Done,
    Failure,
    FrameDecoder,
    Progress,
    ProtocolMisuse,
    RequestReceived,
    ServerProtocol,
    State,
    Token,
    encode_frame,
)
from colibri.protocol.errors import (
    FrameTooLarge,
    InternalError,
    InvalidRequest,
    Overloaded,
    ProtocolError,
    ShuttingDown,
    UnknownOperation,
    UnsupportedVersion,
)
from colibri.protocol.messages import Generate, Health, Hello, Text
from support.wire import SERVER_INFO, completion, greeted_pair

HELLO = encode_frame({"id": 1, "op": "hello", "version": 1, "client": "test"})


def request(id: int, op: str, **fields: Any) -> bytes:
    return encode_frame({"id": id, "op": op} | fields)


def opened(**options: Any) -> ServerProtocol:
    server = ServerProtocol(**options)
    server.receive_data(HELLO)
    server.send_hello(1, SERVER_INFO)
    return server


def frames_of(data: bytes) -> list[dict[str, Any]]:
    decoder = FrameDecoder()
    decoder.feed(data)
    return list(iter(decoder.next_message, None))


def failure(server: ServerProtocol, data: bytes) -> ProtocolError:
    """The error of the one event that the bytes give, which must end the connection."""
    (event,) = server.receive_data(data)
    assert isinstance(event, ConnectionFailed)
    assert isinstance(event.error, ProtocolError)
    assert server.state is State.FAILED
    return event.error


def bad(server: ServerProtocol, data: bytes) -> BadRequest:
    (event,) = server.receive_data(data)
    assert isinstance(event, BadRequest)
    assert server.state is State.OPEN
    return event


# Receiving.


def test_hello_opens() -> None:
    server = ServerProtocol()
    assert server.receive_data(HELLO) == [RequestReceived(1, Hello(version=1, client="test"))]
    assert server.state is State.OPEN


def test_requests_may_follow_hello_at_once() -> None:
    events = ServerProtocol().receive_data(HELLO + request(2, "health"))
    assert [event.op for event in events if isinstance(event, RequestReceived)] == ["hello", "health"]


def test_a_request_arrives_with_its_fields_checked() -> None:
    events = opened().receive_data(request(2, "generate", prompt="a", max_tokens=3))
    assert events == [RequestReceived(2, Generate(prompt="a", max_tokens=3))]


def test_the_first_request_must_be_hello() -> None:
    assert "must be hello" in str(failure(ServerProtocol(), request(1, "health")))


def test_another_version_is_refused_before_its_other_fields_are_looked_at() -> None:
    error = failure(ServerProtocol(), request(1, "hello", version=2, clients=["a"]))
    assert isinstance(error, UnsupportedVersion)
    assert error.extra == {"versions": [1]}


@pytest.mark.parametrize("fields", [{}, {"version": "1", "client": "a"}, {"version": 1}, {"version": 1, "client": 2}])
def test_a_wrong_hello_ends_the_connection(fields: dict[str, Any]) -> None:
    assert "hello is wrong" in str(failure(ServerProtocol(), request(1, "hello", **fields)))


def test_before_hello_a_large_frame_is_refused() -> None:
    assert isinstance(failure(ServerProtocol(), b"\x00\x10\x00\x00"), FrameTooLarge)


def test_after_hello_a_frame_may_be_as_large_as_told() -> None:
    server = opened(frame_bytes=1 << 20)
    assert server.receive_data(b"\x00\x10\x00\x00") == []
    assert isinstance(failure(opened(frame_bytes=1 << 20), b"\x00\x10\x00\x01"), FrameTooLarge)


@pytest.mark.parametrize("id", [0, -1, 1 << 63, True, "2", 2.0, None])
def test_an_id_that_is_no_positive_integer_ends_the_connection(id: Any) -> None:
    assert failure(opened(), request(id, "health")).where == "id"


def test_a_message_without_id_ends_the_connection() -> None:
    assert failure(opened(), encode_frame({"op": "health"})).where == "id"


@pytest.mark.parametrize("id", [1, 5])
def test_ids_must_rise(id: int) -> None:
    server = opened()
    server.receive_data(request(5, "health"))
    assert "must rise" in str(failure(server, request(id, "health")))


def test_an_unknown_operation_is_refused_and_the_connection_lives_on() -> None:
    server = opened()
    event = bad(server, request(2, "generat"))
    assert isinstance(event.error, UnknownOperation)
    assert "generate" in str(event.error.hint)
    assert server.receive_data(request(3, "health")) == [RequestReceived(3, Health())]


@pytest.mark.parametrize("op", [None, 7, ["health"], b"health"])
def test_an_operation_that_is_no_text_is_refused(op: Any) -> None:
    assert bad(opened(), encode_frame({"id": 2, "op": op})).error.where == "op"


def test_a_second_hello_is_refused() -> None:
    assert "already" in str(bad(opened(), request(2, "hello", version=1, client="x")).error)


def test_a_bad_field_is_refused_and_waits_for_its_answer() -> None:
    server = opened()
    event = bad(server, request(2, "generate", prompt=1))
    assert isinstance(event.error, InvalidRequest)
    assert server.in_flight == {2}
    server.send(Answer(2, Failure(event.error)))
    assert server.in_flight == frozenset()


def test_more_requests_than_allowed_are_overload_but_cancel_passes() -> None:
    server = opened(max_requests=2)
    server.receive_data(request(2, "generate", prompt="a") + request(3, "generate", prompt="b"))
    event = bad(server, request(4, "health"))
    assert isinstance(event.error, Overloaded)
    assert event.error.extra == {"limit": 2}
    (passed,) = server.receive_data(request(5, "cancel", target=2))
    assert isinstance(passed, RequestReceived)


def test_room_comes_back_when_a_request_ends() -> None:
    server = opened(max_requests=1)
    server.receive_data(request(2, "health"))
    server.send(Answer(2, Done({})))
    assert server.receive_data(request(3, "health")) == [RequestReceived(3, Health())]


def test_what_came_before_a_broken_frame_still_counts() -> None:
    events = opened().receive_data(request(2, "health") + b"\x00\x00\x00\x01\xc1" + request(3, "health"))
    assert [type(event) for event in events] == [RequestReceived, ConnectionFailed]


def test_after_a_failure_nothing_is_heard() -> None:
    server = opened()
    failure(server, b"\x00\x00\x00\x01\xc1")
    assert server.receive_data(request(2, "health")) == []
    assert server.receive_eof() == []


def test_the_end_between_frames_is_no_event() -> None:
    server = opened()
    assert server.receive_eof() == []
    assert server.state is State.CLOSED


def test_the_end_inside_a_frame_is_a_failure() -> None:
    server = opened()
    server.receive_data(b"\x00\x00")
    (event,) = server.receive_eof()
    assert isinstance(event, ConnectionFailed)
    assert "inside a frame" in str(event.error)


# Sending.


def test_answers_of_one_step_share_a_frame() -> None:
    server = opened()
    server.receive_data(request(2, "generate", prompt="a") + request(3, "generate", prompt="b"))
    data = server.send(Answer(2, Token(text="x", ids=[1])), Answer(3, Token(text="y", ids=[2])))
    assert frames_of(data) == [
        {"answers": [{"id": 2, "token": {"text": "x", "ids": [1]}}, {"id": 3, "token": {"text": "y", "ids": [2]}}]}
    ]


def test_one_answer_is_a_frame_of_its_own() -> None:
    server = opened()
    server.receive_data(request(2, "generate", prompt="a"))
    assert frames_of(server.send(Answer(2, Progress(prefilled=1, total=2)))) == [
        {"id": 2, "progress": {"prefilled": 1, "total": 2}}
    ]


def test_nothing_to_send_is_no_bytes() -> None:
    assert opened().send() == b""


def test_answers_over_the_limit_are_spread_over_frames() -> None:
    server = opened(frame_bytes=2000)
    server.receive_data(request(2, "generate", prompt="a"))
    answers = [Answer(2, Token(text="x" * 300, ids=[i])) for i in range(20)]
    data = server.send(*answers)
    frames = frames_of(data)
    assert 2 < len(frames) < 20
    assert [answer["token"]["ids"][0] for frame in frames for answer in frame["answers"]] == list(range(20))


def test_no_frame_is_ever_over_the_limit() -> None:
    server = opened(frame_bytes=1000)
    server.receive_data(request(2, "generate", prompt="a"))
    for n_bytes in range(280, 340):  # three of them are about one frame
        decoder = FrameDecoder(limit=1000)
        decoder.feed(server.send(*[Answer(2, Token(text="x" * n_bytes, ids=[]))] * 3))
        frames = list(iter(decoder.next_message, None))
        assert sum(len(frame.get("answers", [frame])) for frame in frames) == 3


def test_an_answer_that_cannot_fit_leaves_the_request_to_be_failed() -> None:
    server = opened(frame_bytes=2000)
    server.receive_data(request(2, "detokenize", tokens=[1]))
    with pytest.raises(FrameTooLarge) as caught:
        server.send(Answer(2, Done(Text(text="x" * 3000))))
    assert server.in_flight == {2}
    assert server.send(Answer(2, Failure(caught.value)))


def test_done_ends_a_request() -> None:
    server = opened()
    server.receive_data(request(2, "generate", prompt="a"))
    server.send(Answer(2, Done(completion())))
    assert server.in_flight == frozenset()


@pytest.mark.parametrize(
    "body", [Token(text="", ids=[]), Progress(prefilled=0, total=1), Done({}), Failure(InternalError(""))]
)
def test_an_answer_to_nobody_is_misuse(body: Any) -> None:
    with pytest.raises(ProtocolMisuse, match="not in flight"):
        opened().send(Answer(2, body))


def test_an_answer_after_done_is_misuse_even_in_the_same_call_and_changes_nothing() -> None:
    server = opened()
    server.receive_data(request(2, "generate", prompt="a"))
    with pytest.raises(ProtocolMisuse):
        server.send(Answer(2, Done(completion())), Answer(2, Token(text="x", ids=[1])))
    assert server.in_flight == {2}


def test_tokens_for_a_request_that_does_not_stream_are_misuse() -> None:
    server = opened()
    server.receive_data(request(2, "health"))
    with pytest.raises(ProtocolMisuse, match="no tokens"):
        server.send(Answer(2, Token(text="x", ids=[1])))


def test_an_answer_before_hello_is_misuse() -> None:
    server = ServerProtocol()
    with pytest.raises(ProtocolMisuse, match="SEND_ANSWER in state NEW"):
        server.send(Answer(1, Done({})))
    assert server.state is State.NEW


def test_a_failure_is_told_with_id_zero_and_closes() -> None:
    server = opened()
    failure(server, b"\x00\x00\x00\x01\xc1")
    (frame,) = frames_of(server.send_failure(ProtocolError("words")))
    assert frame == {"id": 0, "error": {"type": "protocol_error", "message": "words"}}
    assert server.state is State.CLOSED


def test_a_connection_may_be_ended_by_the_daemon_at_any_time() -> None:
    for server in (ServerProtocol(), opened()):
        assert frames_of(server.send_failure(ShuttingDown("bye")))[0]["error"]["type"] == "shutting_down"
        assert server.in_flight == frozenset()


@pytest.mark.parametrize("state", [State.FAILED, State.CLOSED])
def test_no_answer_is_sent_after_the_end(state: State) -> None:
    server = opened()
    server.receive_data(request(2, "health"))
    failure(server, b"\x00\x00\x00\x01\xc1") if state is State.FAILED else server.receive_eof()
    with pytest.raises(ProtocolMisuse):
        server.send(Answer(2, Done({})))


def test_a_failure_is_told_once() -> None:
    server = opened()
    server.send_failure(ShuttingDown("bye"))
    with pytest.raises(ProtocolMisuse):
        server.send_failure(ShuttingDown("bye"))


def test_both_ends_agree_on_hello() -> None:
    client, server = greeted_pair()
    assert client.state is server.state is State.OPEN
    assert client.server == SERVER_INFO


def test_a_cancel_takes_no_room_of_requests() -> None:
    server = opened(max_requests=1)
    server.receive_data(request(2, "generate", prompt="a") + request(3, "cancel", target=2))
    server.send(Answer(2, Done(completion("cancelled"))))
    (event,) = server.receive_data(request(4, "health"))
    assert isinstance(event, RequestReceived)
