"""The client's end of a connection: what it sends, what it believes, and that an illegal step changes nothing."""

from __future__ import annotations

from typing import Any

import pytest

from colibri.protocol import (
    Answer,
    ClientProtocol,
    ConnectionFailed,
    Done,
    Failure,
    Progress,
    ProtocolMisuse,
    State,
    Token,
    encode_frame,
)
from colibri.protocol.errors import (
    ColibriError,
    ConnectionLost,
    FrameTooLarge,
    InvalidRequest,
    ProtocolError,
    ShuttingDown,
    UnsupportedVersion,
)
from colibri.protocol.messages import Generate, Health, Sampling, SessionGet, Tokenize
from support.wire import SERVER_INFO, completion, greeted_pair


def failure(client: ClientProtocol, data: bytes) -> ColibriError:
    """The error of the one event that the bytes give, which must end the connection."""
    (event,) = client.receive_data(data)
    assert isinstance(event, ConnectionFailed)
    assert client.state is State.FAILED
    return event.error


def generating() -> ClientProtocol:
    """A client that has sent a generate request with id 2."""
    client, _ = greeted_pair()
    client.send_request(Generate(prompt="a"))
    return client


# Sending.


def test_hello_is_the_first_thing_sent() -> None:
    client = ClientProtocol()
    assert client.send_hello("x") == encode_frame({"id": 1, "op": "hello", "version": 1, "client": "x"})
    assert client.state is State.GREETING


def test_hello_is_said_once() -> None:
    client = ClientProtocol()
    client.send_hello("x")
    with pytest.raises(ProtocolMisuse):
        client.send_hello("x")


@pytest.mark.parametrize("greet", [False, True])
def test_no_request_is_sent_before_hello_is_answered(greet: bool) -> None:
    client = ClientProtocol()
    if greet:
        client.send_hello("x")
    with pytest.raises(ProtocolMisuse):
        client.send_request(Health())


def test_ids_rise() -> None:
    client, _ = greeted_pair()
    assert [client.send_request(Health())[0] for _ in range(3)] == [2, 3, 4]


def test_a_request_is_checked_before_it_is_sent() -> None:
    client, _ = greeted_pair()
    with pytest.raises(InvalidRequest) as caught:
        client.send_request(Generate(prompt="a", sampling=Sampling(top_p=2.0)))
    assert caught.value.where == "sampling.top_p"
    assert client.send_request(Health())[0] == 2


def test_text_that_is_not_unicode_is_the_callers_error() -> None:
    client, _ = greeted_pair()
    with pytest.raises(InvalidRequest):
        client.send_request(Tokenize(text="\ud800"))
    with pytest.raises(InvalidRequest):
        client.send_request(SessionGet(name="\ud800"))
    assert client.in_flight == frozenset()


def test_a_request_over_the_daemons_limit_is_not_sent() -> None:
    client, _ = greeted_pair()
    with pytest.raises(FrameTooLarge):
        client.send_request(Tokenize(text="x" * SERVER_INFO.limits.frame_bytes))
    assert client.in_flight == frozenset()


# Receiving.


def test_a_stream_ends_with_done() -> None:
    client, server = greeted_pair()
    id, data = client.send_request(Generate(prompt="a"))
    server.receive_data(data)
    answers = [
        Answer(id, Progress(prefilled=1, total=2)),
        Answer(id, Token(text="x", ids=[1], logprobs=[-0.5], top=[[(1, -0.5)]])),
        Answer(id, Done(completion())),
    ]
    assert client.receive_data(server.send(*answers)) == answers
    assert client.in_flight == frozenset()


def test_requests_may_be_answered_in_any_order() -> None:
    client, server = greeted_pair()
    first, data = client.send_request(Health())
    second, more = client.send_request(Health())
    server.receive_data(data + more)
    events = client.receive_data(server.send(Answer(second, Done({})), Answer(first, Done({}))))
    assert [event.id for event in events if isinstance(event, Answer)] == [second, first]


def test_an_error_ends_its_request_alone() -> None:
    client, server = greeted_pair()
    id, data = client.send_request(Generate(prompt="a"))
    server.receive_data(data)
    (event,) = client.receive_data(server.send(Answer(id, Failure(InvalidRequest("words", where="prompt")))))
    assert isinstance(event, Answer)
    assert isinstance(event.body, Failure)
    assert isinstance(event.body.error, InvalidRequest)
    assert client.state is State.OPEN


def test_an_error_with_id_zero_ends_the_connection() -> None:
    client, server = greeted_pair()
    assert isinstance(failure(client, server.send_failure(ShuttingDown("bye"))), ShuttingDown)


def test_a_daemon_of_another_version_is_named() -> None:
    client = ClientProtocol()
    client.send_hello("x")
    data = encode_frame({"id": 0, "error": UnsupportedVersion("not 1").to_wire()})
    assert isinstance(failure(client, data), UnsupportedVersion)


def test_hello_may_be_refused_like_any_request() -> None:
    client = ClientProtocol()
    client.send_hello("x")
    (event,) = client.receive_data(encode_frame({"id": 1, "error": ShuttingDown("bye").to_wire()}))
    assert isinstance(event, Answer)
    assert client.server is None


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"id": 2},
        {"id": 3, "done": {}},
        {"id": True, "done": {}},
        {"id": "2", "done": {}},
        {"id": 0, "done": {}},
        {"id": 0, "error": "words"},
        {"id": 2, "done": {}},
        {"id": 2, "done": {}, "error": {}},
        {"id": 2, "error": []},
        {"id": 2, "token": {"text": 1, "ids": []}},
        {"id": 2, "token": {"text": "a"}},
        {"id": 2, "progress": {"prefilled": -1, "total": 0}},
        {"answers": {}},
        {"answers": [7]},
        {"answers": [{"answers": []}]},
    ],
)
def test_an_answer_that_makes_no_sense_ends_the_connection(message: dict[str, Any]) -> None:
    assert isinstance(failure(generating(), encode_frame(message)), ProtocolError)


def test_tokens_for_a_request_that_does_not_stream_end_the_connection() -> None:
    client, _ = greeted_pair()
    client.send_request(Health())
    error = failure(client, encode_frame({"id": 2, "token": {"text": "a", "ids": [1]}}))
    assert "health is not answered with token" in str(error)


def test_an_answer_after_done_ends_the_connection() -> None:
    client = generating()
    done = encode_frame({"id": 2, "done": completion().to_wire()})
    events = client.receive_data(done + done)
    assert [type(event) for event in events] == [Answer, ConnectionFailed]


def test_answers_before_a_wrong_one_in_the_same_frame_count() -> None:
    good = {"id": 2, "token": {"text": "a", "ids": [1]}}
    events = generating().receive_data(encode_frame({"answers": [good, {"id": 9, "done": {}}, good]}))
    assert [type(event) for event in events] == [Answer, ConnectionFailed]


def test_the_end_while_answers_are_due_is_a_lost_connection() -> None:
    client = generating()
    (event,) = client.receive_eof()
    assert isinstance(event, ConnectionFailed)
    assert isinstance(event.error, ConnectionLost)


def test_the_end_of_an_idle_connection_is_no_event() -> None:
    client, _ = greeted_pair()
    assert client.receive_eof() == []
    with pytest.raises(ProtocolMisuse):
        client.send_request(Health())
