"""Generating and chatting: pieces, replies, leaving early, and losing the daemon."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

import colibri
from colibri.protocol import Answer, Done, Failure, Progress
from colibri.protocol.messages import Cancel, Chat, Generate, Message, Request, Sampling
from support.fake_daemon import PATIENCE_S, Connection, FakeDaemon, holding, token
from support.wire import completion


def test_pieces_join_to_the_reply(client: colibri.Client) -> None:
    stream = client.generate("hello")
    pieces = [piece.text for piece in stream]
    assert pieces == ["You", " said", ": ", "hello"]
    assert stream.result.text == "You said: hello"
    assert stream.result.finish_reason == "stop"
    assert bytes(stream.result.tokens).decode() == "You said: hello"


def test_the_result_reads_what_is_left(client: colibri.Client) -> None:
    stream = client.generate("hello")
    next(stream)
    assert stream.result.text == "You said: hello"
    assert list(stream) == []


def test_usage_and_timings_come_with_the_reply(client: colibri.Client) -> None:
    reply = client.chat("hello")
    assert reply.usage.prompt_tokens == 5
    assert reply.usage.completion_tokens == len("You said: hello")
    assert reply.timings.prefill_s == 0.01
    assert reply.seed == 7
    assert reply.session is None


def test_logprobs_are_joined_where_asked_for(client: colibri.Client) -> None:
    reply = client.generate("a", logprobs=2).result
    assert reply.logprobs == [-0.25] * len(reply.tokens)
    assert reply.top is not None
    assert reply.top[0] == [(ord("Y"), -0.25)] * 2
    assert client.generate("a").result.logprobs is None


def test_options_become_the_fields_of_the_request(client: colibri.Client, daemon: FakeDaemon) -> None:
    stream = client.generate(
        [1, 2], max_tokens=9, temperature=0.5, seed=3, logit_bias={7: -1}, stop="END", deadline_s=60, parse_special=True
    )
    assert stream.result
    assert daemon.received == [
        Generate(
            tokens=[1, 2],
            max_tokens=9,
            sampling=Sampling(temperature=0.5, seed=3, logit_bias={7: -1.0}),
            stop=["END"],
            deadline_s=60.0,
            parse_special=True,
        )
    ]


def test_a_text_is_a_message_of_the_user(client: colibri.Client, daemon: FakeDaemon) -> None:
    client.chat("hi")
    client.chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}])
    user = Message(role="user", content="hi")
    assert daemon.received == [
        Chat(messages=[user]),
        Chat(messages=[Message(role="system", content="Be brief."), user]),
    ]


def test_integers_of_any_kind_are_token_ids(client: colibri.Client, daemon: FakeDaemon) -> None:
    class Id:
        def __index__(self) -> int:
            return 5

    assert client.generate(iter([Id(), 6])).result  # type: ignore[list-item]
    assert daemon.received == [Generate(tokens=[5, 6])]


@pytest.mark.parametrize(
    ("options", "where"),
    [({"temperature": -1}, "sampling.temperature"), ({"max_tokens": 0}, "max_tokens"), ({"stop": [""]}, "stop[0]")],
)
def test_a_bad_option_is_refused_by_name_and_nothing_is_sent(
    client: colibri.Client, daemon: FakeDaemon, options: Any, where: str
) -> None:
    with pytest.raises(colibri.InvalidRequest) as caught:
        client.generate("a", **options)
    assert caught.value.where == where
    assert client.health() == {"status": "ok"}
    assert len(daemon.received) == 1


def test_an_unknown_option_is_a_type_error(client: colibri.Client) -> None:
    with pytest.raises(TypeError, match="temprature"):
        client.generate("a", temprature=1)  # type: ignore[call-arg]


def test_messages_without_content_are_refused_by_place(client: colibri.Client) -> None:
    with pytest.raises(colibri.InvalidRequest) as caught:
        client.chat([{"role": "user", "content": "a"}, {"role": "user"}])
    assert caught.value.where == "messages[1].content"


def test_progress_is_told(client: colibri.Client, daemon: FakeDaemon) -> None:
    def slowly(connection: Connection, id: int, request: Request) -> None:
        connection.answer(id, Progress(prefilled=512, total=1000), Progress(prefilled=1000, total=1000))
        connection.answer(id, token("a"), Done(completion()))

    daemon.script["generate"] = slowly
    seen: list[tuple[int, int]] = []
    assert client.generate("a", on_progress=lambda *figures: seen.append(figures)).result.text == "a"
    assert seen == [(512, 1000), (1000, 1000)]


# Errors.


def test_an_error_of_the_daemon_is_raised_as_its_class_and_the_connection_lives_on(
    client: colibri.Client, daemon: FakeDaemon
) -> None:
    def fail(connection: Connection, id: int, request: Request) -> None:
        connection.answer(id, token("so far"))
        raise colibri.DeadlineExceeded("1 s is over", where="deadline_s")

    daemon.script["generate"] = fail
    stream = client.generate("a")
    with pytest.raises(colibri.DeadlineExceeded, match="1 s is over"):
        list(stream)
    assert stream.text == "so far"
    with pytest.raises(colibri.DeadlineExceeded):
        _ = stream.result
    assert client.health() == {"status": "ok"}


def test_a_daemon_that_goes_away_is_a_lost_connection_with_what_came(
    client: colibri.Client, daemon: FakeDaemon
) -> None:
    def die(connection: Connection, id: int, request: Request) -> None:
        connection.answer(id, token("so"), token(" far"))
        connection.socket.close()

    daemon.script["generate"] = die
    pieces: list[str] = []
    with pytest.raises(colibri.ConnectionLost) as caught:
        pieces.extend(piece.text for piece in client.generate("a"))
    assert caught.value.extra["text"] == "so far"
    assert bytes(caught.value.extra["tokens"]) == b"so far"
    with pytest.raises(colibri.ConnectionLost):
        client.health()


def test_a_daemon_that_shuts_down_says_so(client: colibri.Client, daemon: FakeDaemon) -> None:
    def stop(connection: Connection, id: int, request: Request) -> None:
        connection.answer(id, token("so far"))
        connection.socket.sendall(connection.protocol.send_failure(colibri.ShuttingDown("bye")))

    daemon.script["generate"] = stop
    with pytest.raises(colibri.ShuttingDown) as caught:
        list(client.generate("a"))
    assert caught.value.extra["text"] == "so far"


def test_what_the_daemon_said_before_it_left_an_idle_client_is_what_the_next_request_raises(
    client: colibri.Client, daemon: FakeDaemon
) -> None:
    closed = threading.Event()

    def leave(connection: Connection, id: int, request: Request) -> None:
        connection.answer(id, Done({}))
        connection.socket.sendall(connection.protocol.send_failure(colibri.ShuttingDown("bye")))
        connection.socket.close()
        closed.set()

    daemon.script["health"] = leave
    client.health()
    assert closed.wait(PATIENCE_S)
    with pytest.raises(colibri.ShuttingDown, match="bye"):
        client.stats()


def test_a_request_that_was_cut_by_ctrl_c_gives_the_connection_up(
    client: colibri.Client, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> bool:
        raise KeyboardInterrupt

    done = threading.Event()
    daemon.script["generate"] = lambda *_: done.wait(PATIENCE_S)  # reads nothing meanwhile
    stream = client.generate("a")
    daemon.wait_for(Generate)
    monkeypatch.setattr(client._transport, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.tokenize("x" * 5_000_000)  # more than the kernel takes at once
    with pytest.raises(colibri.ConnectionLost, match="interrupted in the middle of a request"):
        client.health()
    done.set()
    del stream


def test_a_daemon_that_talks_nonsense_is_given_up(client: colibri.Client, daemon: FakeDaemon) -> None:
    daemon.script["generate"] = lambda connection, id, request: connection.socket.sendall(b"\x00\x00\x00\x01\xc1")
    with pytest.raises(colibri.ProtocolError):
        list(client.generate("a"))
    with pytest.raises(colibri.ProtocolError):
        client.health()


def test_silence_is_waited_for_as_long_as_asked(daemon: FakeDaemon) -> None:
    daemon.script["generate"] = holding(["a"])
    with colibri.connect(daemon.path, reply_timeout_s=0.05) as client:
        stream = client.generate("a")
        with pytest.raises(colibri.DeadlineExceeded, match=r"no answer for 0\.05 s"):
            list(stream)
        assert stream.result.finish_reason == "cancelled"


# Leaving early.


def assert_cancelled(client: colibri.Client, daemon: FakeDaemon) -> None:
    """The daemon was told, nothing is left on the connection, and it can be used."""
    assert client.tokenize("ab") == [97, 98]
    assert len(daemon.wait_for(Cancel)) == 1


def test_break_cancels(client: colibri.Client, daemon: FakeDaemon) -> None:
    daemon.script["generate"] = holding(["a", "b"])
    for _ in client.generate("a"):
        break
    daemon.wait_for(Cancel)  # told at once, not with the next request
    assert_cancelled(client, daemon)


def test_close_waits_for_the_end_and_keeps_what_came(client: colibri.Client, daemon: FakeDaemon) -> None:
    daemon.script["generate"] = holding(["a", "b"])
    stream = client.generate("a")
    next(stream)
    stream.close()
    stream.close()
    assert stream.result.text == "ab"
    assert stream.result.finish_reason == "cancelled"
    assert_cancelled(client, daemon)


def test_the_end_of_a_with_block_cancels(client: colibri.Client, daemon: FakeDaemon) -> None:
    daemon.script["generate"] = holding(["a"])
    with client.generate("a") as stream:
        assert next(stream).text == "a"
    assert stream.result.finish_reason == "cancelled"
    assert_cancelled(client, daemon)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_exception_in_the_loop_cancels(
    client: colibri.Client, daemon: FakeDaemon, error: type[BaseException]
) -> None:
    daemon.script["generate"] = holding(["a"])

    def consume() -> None:
        for _ in client.generate("a"):
            raise error

    with pytest.raises(error):
        consume()
    gc.collect()  # what pytest keeps of the traceback may hold the stream
    assert_cancelled(client, daemon)


def test_ctrl_c_while_waiting_cancels(
    client: colibri.Client, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.script["generate"] = holding(["a"])
    stream = client.generate("a")
    assert next(stream).text == "a"
    wait = client._transport._wait

    def interrupted(*_: Any) -> bool:
        monkeypatch.setattr(client._transport, "_wait", wait)
        raise KeyboardInterrupt

    monkeypatch.setattr(client._transport, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert stream.result.finish_reason == "cancelled"
    assert_cancelled(client, daemon)


def test_ctrl_c_in_the_middle_of_a_read_gives_the_connection_up(
    client: colibri.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(data: bytes) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(client._transport, "_dispatch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.health()
    with pytest.raises(colibri.ConnectionLost, match="interrupted in the middle of an answer"):
        client.health()


def test_a_stream_that_has_ended_is_not_cancelled(client: colibri.Client, daemon: FakeDaemon) -> None:
    stream = client.generate("a")
    assert stream.result
    stream.close()
    del stream
    client.health()
    assert not any(isinstance(request, Cancel) for request in daemon.received)


def test_the_next_request_waits_until_what_was_dropped_has_ended(client: colibri.Client, daemon: FakeDaemon) -> None:
    """Else a turn right after a break would find its session busy."""
    order: list[str] = []

    def cancel(connection: Connection, id: int, request: Cancel) -> None:
        connection.answer(id, Done({"found": True}))

        def finish() -> None:
            order.append("ended")
            connection.answer(request.target, Done(completion("cancelled")))

        threading.Timer(0.05, finish).start()

    def health(connection: Connection, id: int, request: Request) -> None:
        order.append("asked")
        connection.answer(id, Done({}))

    daemon.script |= {"generate": holding(["a"]), "cancel": cancel}
    daemon.script["health"] = lambda connection, id, request: (order.append("asked"), connection.answer(id, Done({})))[
        1
    ]
    for _ in client.generate("a"):
        break
    client.health()
    assert order == ["ended", "asked"]


# Several at once.


def test_two_streams_of_one_client_may_be_read_in_turns(client: colibri.Client) -> None:
    first, second = client.generate("one"), client.generate("two")
    assert next(second).text == next(first).text == "You"
    assert client.tokenize("a") == [97]
    assert (second.result.text, first.result.text) == ("You said: two", "You said: one")


def test_threads_share_a_client(client: colibri.Client) -> None:
    replies: dict[int, list[str]] = {}

    def ask(i: int) -> None:
        replies[i] = [client.generate(f"{i}/{n}").result.text for n in range(10)]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert replies == {i: [f"You said: {i}/{n}" for n in range(10)] for i in range(8)}


def test_a_lost_connection_wakes_every_thread_that_waits(client: colibri.Client, daemon: FakeDaemon) -> None:
    daemon.script["generate"] = holding([])
    errors: list[colibri.ColibriError] = []

    def wait() -> None:
        try:
            _ = client.generate("a").result
        except colibri.ColibriError as error:
            errors.append(error)

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    daemon.wait_for(Generate, n=4)
    client.close()
    for thread in threads:
        thread.join()
    assert [type(error) for error in errors] == [colibri.ConnectionLost] * 4
    assert len(set(map(id, errors))) == 4


def test_a_large_request_is_sent_while_answers_come(client: colibri.Client, daemon: FakeDaemon) -> None:
    """Neither end may wait for the other to read first."""

    def flood(connection: Connection, id: int, request: Request) -> None:
        for _ in range(200):
            connection.answer(id, token("x" * 5000))
        connection.answer(id, Done(completion()))

    daemon.script["generate"] = flood
    stream = client.generate("a")
    daemon.wait_for(Generate)
    text = "y" * 900_000
    assert client.detokenize(client.tokenize(text)) == text
    assert len(stream.result.text) == 1_000_000


def test_answers_of_many_requests_in_one_frame_find_their_streams(client: colibri.Client, daemon: FakeDaemon) -> None:
    waiting: list[int] = []

    def together(connection: Connection, id: int, request: Request) -> None:
        waiting.append(id)
        if len(waiting) == 2:
            bodies = [token("x"), Done(completion())]
            answers = [Answer(id, body) for body in bodies for id in waiting]
            connection.socket.sendall(connection.protocol.send(*answers))

    daemon.script["generate"] = together
    first, second = client.generate("a"), client.generate("b")
    assert first.result.text == second.result.text == "x"


def test_a_failure_for_a_dropped_stream_is_not_raised_elsewhere(client: colibri.Client, daemon: FakeDaemon) -> None:
    def cancel(connection: Connection, id: int, request: Cancel) -> None:
        connection.answer(request.target, Failure(colibri.InternalError("boom")))
        connection.answer(id, Done({"found": True}))

    daemon.script |= {"generate": holding(["a"]), "cancel": cancel}
    for _ in client.generate("a"):
        break
    assert client.health() == {"status": "ok"}


@pytest.mark.parametrize("wrong", [5, None, b"abc"], ids=repr)
def test_a_prompt_of_the_wrong_type_is_shown(client: colibri.Client, wrong: Any) -> None:
    with pytest.raises(colibri.InvalidRequest) as caught:
        client.generate(wrong)
    assert str(caught.value) == f"prompt: must be text or token ids, not {wrong!r}"


@pytest.mark.parametrize("wrong", [["hello"], {"role": "user", "content": "hello"}, 5, [5]], ids=repr)
def test_messages_of_the_wrong_type_are_told_what_a_message_is(client: colibri.Client, wrong: Any) -> None:
    with pytest.raises(colibri.InvalidRequest) as caught:
        client.chat(wrong)
    assert str(caught.value.where).startswith("messages")
    assert "{'role': 'user', 'content': " in str(caught.value.hint)
