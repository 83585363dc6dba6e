"""The async client: many tasks on one connection, tasks that are cancelled, slow ones, and losing the daemon."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import colibri
from colibri.protocol import Done, Failure
from colibri.protocol.messages import Cancel, Generate, Progress, Request, Score, SessionTruncate
from support.fake_daemon import PATIENCE_S, Connection, FakeDaemon, holding, token
from support.wire import SERVER_INFO, completion


@pytest_asyncio.fixture
async def c(daemon: FakeDaemon) -> AsyncIterator[colibri.aio.Client]:
    async with colibri.aio.connect(daemon.path) as client:
        yield client


async def told(daemon: FakeDaemon, kind: type[Request], n: int = 1) -> list[Any]:
    """The requests of a kind, when the daemon has n of them."""
    return await asyncio.to_thread(daemon.wait_for, kind, n)


async def read(stream: colibri.aio.Stream) -> list[str]:
    """The texts of the rest of a stream."""
    return [piece.text async for piece in stream]


def test_importing_colibri_does_not_load_asyncio_until_aio_is_used() -> None:
    code = (
        "import sys, colibri; assert 'asyncio' not in sys.modules; colibri.aio.connect; assert 'asyncio' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# What the sync client does too.


async def test_pieces_join_to_the_reply(c: colibri.aio.Client) -> None:
    stream = c.generate("hello")
    assert [piece.text async for piece in stream] == ["You", " said", ": ", "hello"]
    reply = await stream.result()
    assert (reply.text, reply.finish_reason, reply.usage.prompt_tokens) == ("You said: hello", "stop", 5)


async def test_every_call_gives_what_the_sync_client_gives(c: colibri.aio.Client, client: colibri.Client) -> None:
    assert c.server == client.server == SERVER_INFO
    assert await c.chat("hello") == client.chat("hello")
    assert await c.score([1, 2, 3]) == client.score([1, 2, 3])
    assert await c.detokenize(await c.tokenize("für 🐦")) == "für 🐦"
    assert await c.stats() == client.stats()
    assert await c.model() == client.model()
    assert await c.health() == client.health()


def test_both_clients_have_the_same_methods() -> None:
    def public(cls: type[Any]) -> set[str]:
        names = {name for name in dir(cls) if not name.startswith("_")}
        return {"close" if name == "aclose" else name for name in names}

    assert public(colibri.aio.Client) == public(colibri.Client)
    assert public(colibri.aio.Session) == public(colibri.Session)
    assert public(colibri.aio.Stream) == public(colibri.Stream)


async def test_options_become_the_same_request_as_in_the_sync_client(
    c: colibri.aio.Client, client: colibri.Client, daemon: FakeDaemon
) -> None:
    options: Any = {"max_tokens": 9, "temperature": 0.5, "logit_bias": {7: -1}, "stop": "END", "deadline_s": 60}
    await c.generate([1, 2], parse_special=True, **options).result()
    assert client.generate([1, 2], parse_special=True, **options).result
    await c.score("ab", deadline_s=5)
    client.score("ab", deadline_s=5)
    first, second, third, fourth = daemon.received
    assert first == second
    assert third == fourth == Score(text="ab", deadline_s=5.0)


async def test_progress_is_told(c: colibri.aio.Client, daemon: FakeDaemon) -> None:
    def slowly(connection: Connection, id: int, request: Request) -> None:
        connection.answer(id, Progress(prefilled=512, total=1000), token("a"), Done(completion()))

    daemon.script["generate"] = slowly
    seen: list[tuple[int, int]] = []
    assert (await c.generate("a", on_progress=lambda *figures: seen.append(figures)).result()).text == "a"
    assert seen == [(512, 1000)]


async def test_a_session_is_made_then_resumed_forked_truncated_and_deleted(c: colibri.aio.Client) -> None:
    alice = await c.session("alice")
    assert str(alice) == "session 'alice': new"
    assert (await alice.chat("hi")).durable
    assert [piece.text async for piece in alice.chat_stream("yo")] == ["You", " said", ": ", "yo"]
    assert (alice.n_turns, alice.n_tokens) == (2, 28)
    again = await c.session("alice", resume=True)
    assert str(again) == "session 'alice': resumed, 2 h old, 2 turns, 28 tokens"
    with pytest.raises(colibri.SessionExists):
        await c.session("alice", resume=False)
    fork = await again.fork("bob", n_tokens=5)
    assert (fork.name, fork.n_tokens) == ("bob", 5)
    await fork.truncate(3)
    assert (await fork.info(include_tokens=True)).tokens == list(b"hiY")
    assert [summary.name for summary in await c.sessions()] == ["alice", "bob"]
    await fork.delete()
    with pytest.raises(colibri.SessionNotFound):
        await c.session("bob", resume=True)


async def test_a_bad_option_is_refused_by_name_and_the_connection_lives_on(c: colibri.aio.Client) -> None:
    with pytest.raises(colibri.InvalidRequest) as caught:
        await c.generate("a", temperature=-1).result()
    assert caught.value.where == "sampling.temperature"
    with pytest.raises(TypeError, match="temprature"):
        c.generate("a", temprature=1)  # type: ignore[call-arg]
    assert await c.health() == {"status": "ok"}


async def test_a_refused_first_turn_does_not_loosen_what_the_session_expects(
    c: colibri.aio.Client, client: colibri.Client
) -> None:
    alice = await c.session("alice")
    with pytest.raises(colibri.InvalidRequest):
        await alice.chat("hi", max_tokens=0)
    client.session("alice").chat("of another program")
    with pytest.raises(colibri.SessionExists):
        await alice.chat("hi")


# Leaving early.


async def test_break_cancels_and_the_connection_lives_on(c: colibri.aio.Client, daemon: FakeDaemon) -> None:
    daemon.script["generate"] = holding(["a", "b"])
    async for _ in c.generate("a"):
        break
    await told(daemon, Cancel)
    assert await c.tokenize("ab") == [97, 98]


async def test_a_cancelled_task_cancels_its_request(c: colibri.aio.Client, daemon: FakeDaemon) -> None:
    daemon.script["generate"] = holding(["a"])
    task = asyncio.create_task(c.generate("a").result())
    await told(daemon, Generate)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await told(daemon, Cancel)
    assert await c.tokenize("ab") == [97, 98]


async def test_a_timeout_of_the_program_cancels_its_request(c: colibri.aio.Client, daemon: FakeDaemon) -> None:
    daemon.script["generate"] = holding(["a", "b"])
    stream = c.generate("a")

    async def consume() -> None:
        async with asyncio.timeout(None) as timeout:
            async for _ in stream:
                if stream.text == "ab":
                    timeout.reschedule(asyncio.get_running_loop().time())

    with pytest.raises(TimeoutError):
        await consume()
    await told(daemon, Cancel)
    assert stream.text == "ab"
    with pytest.raises(colibri.Cancelled):
        await stream.result()


async def test_a_call_that_is_cancelled_leaves_nothing_behind(c: colibri.aio.Client, daemon: FakeDaemon) -> None:
    def cancel(connection: Connection, id: int, request: Cancel) -> None:
        connection.answer(request.target, Failure(colibri.Cancelled("the request was cancelled")))
        connection.answer(id, Done({"found": True}))

    daemon.script |= {"score": lambda connection, id, request: None, "cancel": cancel}
    task = asyncio.create_task(c.score([1, 2]))
    await told(daemon, Score)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (cancel,) = await told(daemon, Cancel)
    assert cancel.target == 2
    assert await c.health() == {"status": "ok"}


async def test_the_end_of_a_with_block_waits_until_the_daemon_has_stopped(
    c: colibri.aio.Client, daemon: FakeDaemon
) -> None:
    daemon.script["generate"] = holding(["a", "b"])
    async with c.generate("a") as stream:
        assert (await anext(stream)).text == "a"
    reply = await stream.result()
    assert (reply.text, reply.finish_reason) == ("ab", "cancelled")


async def test_a_stream_that_is_never_read_asks_nothing(c: colibri.aio.Client, daemon: FakeDaemon) -> None:
    stream = c.generate("a")
    await stream.aclose()
    del stream
    await c.health()
    assert [request.op for request in daemon.received] == ["health"]


async def test_a_dropped_turn_has_ended_before_its_session_is_changed(
    c: colibri.aio.Client, daemon: FakeDaemon
) -> None:
    """Else the change would find the session busy. Others do not wait."""
    daemon.sessions["alice"], daemon.tokens["alice"] = [], [1, 2, 3]
    may_end = threading.Event()
    ended = threading.Event()

    def cancel(connection: Connection, id: int, request: Cancel) -> None:
        connection.answer(id, Done({"found": True}))

        def finish() -> None:
            may_end.wait(PATIENCE_S)
            ended.set()
            connection.answer(request.target, Done(completion("cancelled")))

        threading.Thread(target=finish).start()

    def truncate(connection: Connection, id: int, request: SessionTruncate) -> None:
        assert ended.is_set()
        connection.answer(id, Done({}))

    daemon.script |= {"chat": holding(["a"]), "cancel": cancel, "session.truncate": truncate}
    alice = await c.session("alice")
    async for _ in alice.chat_stream("hi"):
        break
    change = asyncio.create_task(alice.truncate(1))
    await told(daemon, Cancel)
    assert await c.tokenize("ab") == [97, 98]
    assert not change.done()
    may_end.set()
    await change


async def test_after_a_first_turn_that_was_cancelled_the_session_may_exist_or_not(
    c: colibri.aio.Client, daemon: FakeDaemon
) -> None:
    alice = await c.session("alice")
    daemon.sessions["alice"], daemon.tokens["alice"] = [], []  # as the daemon does when it accepts the prompt
    daemon.script["chat"] = holding(["a"])
    async for _ in alice.chat_stream("hi"):
        break
    del daemon.script["chat"]
    assert (await alice.chat("hi")).text == "You said: hi"


async def test_a_task_may_be_cancelled_at_any_moment_and_takes_no_room_with_it(
    c: colibri.aio.Client, daemon: FakeDaemon
) -> None:
    limit = SERVER_INFO.limits.requests_per_connection
    tasks = set()
    for n_rounds in range(48):
        task: asyncio.Task[object]
        if n_rounds % 2:
            task = asyncio.create_task(c.chat("a", deadline_s=PATIENCE_S))
        else:
            task = asyncio.create_task(c.tokenize("a" * 250_000))  # more than the kernel takes at once
        for _ in range(n_rounds % 16):
            await asyncio.sleep(0)
        task.cancel()
        tasks.add(task)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert any(isinstance(result, asyncio.CancelledError) for result in results)
    daemon.script["generate"] = holding([])
    held = [asyncio.create_task(c.generate("a").result()) for _ in range(limit)]
    await told(daemon, Generate, limit)
    assert c._transport._room.locked(), "exactly so many have room"
    for task in held:
        task.cancel()
    assert await c.tokenize("ab") == [97, 98]


# Many at once.


async def test_many_tasks_share_one_connection_and_get_their_own_replies(c: colibri.aio.Client) -> None:
    """More than may be in flight: the rest waits in the program."""
    n = 3 * SERVER_INFO.limits.requests_per_connection
    replies = await asyncio.gather(*(c.chat(f"{i}") for i in range(n)))
    assert [reply.text for reply in replies] == [f"You said: {i}" for i in range(n)]


async def test_who_waits_for_room_is_served_when_there_is_some(c: colibri.aio.Client, daemon: FakeDaemon) -> None:
    daemon.script["generate"] = holding([])
    limit = SERVER_INFO.limits.requests_per_connection
    tasks = [asyncio.create_task(c.generate("a").result()) for _ in range(limit)]
    await told(daemon, Generate, limit)
    with pytest.raises(colibri.DeadlineExceeded) as caught:
        await c.score([1, 2], deadline_s=0.02)
    assert caught.value.where == "deadline_s"
    with pytest.raises(colibri.InvalidRequest):
        await c.score([1, 2], deadline_s=-1)
    waiting = asyncio.create_task(c.score([1, 2], deadline_s=PATIENCE_S))
    await asyncio.sleep(0)
    tasks[0].cancel()
    assert (await waiting).tokens == [1, 2]
    (score,) = await told(daemon, Score)
    assert 0 < score.deadline_s < PATIENCE_S, "what it waited here is taken off"
    await c.aclose()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(result) for result in results} == {asyncio.CancelledError, colibri.ConnectionLost}


async def test_a_slow_reader_does_not_hold_up_another(daemon: FakeDaemon) -> None:
    def flood(connection: Connection, id: int, request: Request) -> None:
        for i in range(100):
            connection.answer(id, token(f"{i} "))
        connection.answer(id, Done(completion()))

    daemon.script["generate"] = flood
    async with colibri.aio.connect(daemon.path, max_unread=100) as c:
        slow = c.generate("a")
        assert (await anext(slow)).text == "0 "
        assert len((await c.generate("b").result()).tokens) == len((await slow.result()).tokens)


async def test_a_reply_that_is_not_fetched_is_cancelled_at_a_limit_and_says_so(daemon: FakeDaemon) -> None:
    daemon.script["generate"] = holding("abcdefgh")
    async with colibri.aio.connect(daemon.path, max_unread=3) as c:
        stream = c.generate("a")
        await anext(stream)
        await told(daemon, Cancel)
        assert await c.health() == {"status": "ok"}, "the connection lives on"
        with pytest.raises(colibri.Overloaded, match="3 pieces of the reply were not fetched"):
            await read(stream)
        assert len(stream.text) >= 3
        assert "abcdefgh".startswith(stream.text)
        with pytest.raises(colibri.Overloaded):
            await stream.result()


async def test_two_tasks_cannot_read_one_stream(c: colibri.aio.Client, daemon: FakeDaemon) -> None:
    daemon.script["generate"] = holding(["a"])
    stream = c.generate("a")
    await anext(stream)
    tasks = {asyncio.create_task(read(stream)) for _ in range(2)}
    (refused,), (reader,) = await asyncio.wait(tasks, return_when="FIRST_COMPLETED")
    with pytest.raises(RuntimeError, match="two tasks"):
        await refused
    await stream.aclose()
    assert await reader == []
    assert (await stream.result()).finish_reason == "cancelled"


# Losing the daemon.


async def test_a_lost_connection_ends_every_task_with_what_it_had(c: colibri.aio.Client, daemon: FakeDaemon) -> None:
    connections: list[Connection] = []

    def hold(connection: Connection, id: int, request: Request) -> None:
        connections.append(connection)
        connection.answer(id, token("so far"))

    daemon.script["generate"] = hold
    streams = [c.generate("a"), c.generate("b")]
    for stream in streams:
        await anext(stream)
    connections[0].socket.shutdown(2)
    for stream in streams:
        with pytest.raises(colibri.ConnectionLost) as caught:
            await anext(stream)
        assert caught.value.extra["text"] == "so far"
    with pytest.raises(colibri.ConnectionLost, match="connect again"):
        await c.health()


async def test_a_daemon_that_shuts_down_says_so(c: colibri.aio.Client, daemon: FakeDaemon) -> None:
    def stop(connection: Connection, id: int, request: Request) -> None:
        connection.answer(id, token("so far"))
        connection.socket.sendall(connection.protocol.send_failure(colibri.ShuttingDown("bye")))

    daemon.script["generate"] = stop
    with pytest.raises(colibri.ShuttingDown) as caught:
        await c.generate("a").result()
    assert caught.value.extra["text"] == "so far"


async def test_a_daemon_that_talks_nonsense_is_given_up(c: colibri.aio.Client, daemon: FakeDaemon) -> None:
    daemon.script["health"] = lambda connection, id, request: connection.socket.sendall(b"\x00\x00\x00\x01\xc1")
    for _ in range(2):
        with pytest.raises(colibri.ProtocolError):
            await c.health()


async def test_a_closed_client_says_so(c: colibri.aio.Client) -> None:
    await c.aclose()
    await c.aclose()
    with pytest.raises(colibri.ConnectionLost, match="closed by this program"):
        await c.health()


async def test_no_daemon_says_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(colibri.DaemonUnavailable, match="colibrid --model"):
        await colibri.aio.connect(str(tmp_path / "none"))


async def test_a_daemon_that_does_not_greet_is_not_waited_for_forever(daemon: FakeDaemon) -> None:
    daemon.script["hello"] = lambda connection, id, request: None
    with pytest.raises(colibri.DaemonUnavailable, match=r"no greeting within 0\.05 s"):
        await colibri.aio.connect(daemon.path, timeout_s=0.05)


async def test_a_daemon_of_another_version_is_named(daemon: FakeDaemon) -> None:
    def refuse(connection: Connection, id: int, request: Request) -> None:
        connection.socket.sendall(connection.protocol.send_failure(colibri.UnsupportedVersion("I speak 2 only")))

    daemon.script["hello"] = refuse
    with pytest.raises(colibri.UnsupportedVersion, match="I speak 2 only"):
        async with colibri.aio.connect(daemon.path):
            pass


def test_a_client_of_another_event_loop_is_refused(daemon: FakeDaemon) -> None:
    with asyncio.Runner() as first, asyncio.Runner() as second:
        client = first.run(_connected(daemon.path))
        with pytest.raises(RuntimeError, match="another event loop"):
            second.run(client.health())
        first.run(client.aclose())


async def _connected(path: str) -> colibri.aio.Client:
    return await colibri.aio.connect(path)
