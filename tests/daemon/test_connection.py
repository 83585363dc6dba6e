"""A connection over a socket pair, with a dispatcher that does as the test says."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from colibri.daemon import connection as connection_module
from colibri.daemon.call import Call
from colibri.daemon.connection import Connection
from colibri.protocol import Answer, ClientProtocol, ConnectionFailed, Done, Failure, Token
from colibri.protocol import messages as wire
from colibri.protocol.errors import (
    FrameTooLarge,
    InternalError,
    Overloaded,
    ProtocolError,
    SessionNotFound,
    ShuttingDown,
)
from support.wire import SERVER_INFO


class ScriptedDispatcher:
    """Serves every call with `script`."""

    server_info = SERVER_INFO

    def __init__(self) -> None:
        self.script: Callable[[Call], Awaitable[Any]] = self._ok
        self.calls: list[Call] = []
        self.arrived: asyncio.Queue[Call] = asyncio.Queue()

    async def _ok(self, call: Call) -> Any:
        return {"ok": True}

    async def serve(self, call: Call) -> Any:
        self.calls.append(call)
        self.arrived.put_nowait(call)
        return await self.script(call)


class Pair:
    """A connection and the client at the other end of it."""

    def __init__(self, **options: Any) -> None:
        self.dispatcher = ScriptedDispatcher()
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        self._ours, self.theirs = ours, theirs
        options = {"max_output_bytes": 1 << 20, "frame_timeout_s": 60.0} | options
        self.connection = Connection(self.dispatcher, **options)  # type: ignore[arg-type]
        self.closed = asyncio.get_running_loop().create_future()
        self.connection.on_closed = lambda _: self.closed.set_result(None)
        self.client = ClientProtocol()
        self.frames = 0

    async def open(self) -> None:
        await asyncio.get_running_loop().connect_accepted_socket(lambda: self.connection, sock=self._ours)

    async def hello(self) -> None:
        await self.open()
        await self.send(self.client.send_hello("test"))
        await self.receive()

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.theirs, data)

    async def request(self, request: wire.Request) -> int:
        id, data = self.client.send_request(request)
        await self.send(data)
        return id

    async def receive(self) -> list[Answer | ConnectionFailed]:
        """What comes next; [] at the end."""
        data = await asyncio.get_running_loop().sock_recv(self.theirs, 1 << 20)
        return self.client.receive_data(data)  # type: ignore[return-value]

    async def last(self) -> Answer | ConnectionFailed:
        """The last of what comes until an answer is final or the connection fails."""
        while True:
            for event in await self.receive():
                if isinstance(event, ConnectionFailed) or event.final:
                    return event


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    await pair.hello()
    yield pair
    pair.theirs.close()


def body(event: Answer | ConnectionFailed) -> Any:
    assert isinstance(event, Answer)
    return event.body


async def test_a_request_is_answered_with_its_id(pair: Pair) -> None:
    id = await pair.request(wire.Health())
    event = await pair.last()
    assert isinstance(event, Answer)
    assert event.id == id
    assert event.body == Done({"ok": True})


async def test_answers_of_one_round_share_a_frame(pair: Pair) -> None:
    release = asyncio.Event()

    async def one_token(call: Call) -> Any:
        await release.wait()
        call.send(Token(text="x", ids=[1]))
        await asyncio.Event().wait()

    pair.dispatcher.script = one_token
    for _ in range(3):
        await pair.request(wire.Generate(prompt="x"))
        await pair.dispatcher.arrived.get()
    release.set()
    data = await asyncio.get_running_loop().sock_recv(pair.theirs, 1 << 16)
    assert int.from_bytes(data[:4], "big") == len(data) - 4  # one frame
    assert len(pair.client.receive_data(data)) == 3


async def test_an_error_is_an_answer(pair: Pair) -> None:
    async def fail(call: Call) -> Any:
        raise SessionNotFound("no such session", where="x")

    pair.dispatcher.script = fail
    await pair.request(wire.Health())
    failure = body(await pair.last())
    assert isinstance(failure.error, SessionNotFound)
    assert failure.error.where == "x"


async def test_a_bug_is_logged_and_the_connection_lives(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    async def stumble(call: Call) -> Any:
        raise ZeroDivisionError("secret")

    pair.dispatcher.script = stumble
    await pair.request(wire.Health())
    failure = body(await pair.last())
    assert isinstance(failure.error, InternalError)
    assert "secret" not in failure.error.message
    assert "ZeroDivisionError" in caplog.text
    pair.dispatcher.script = pair.dispatcher._ok
    await pair.request(wire.Health())
    assert body(await pair.last()) == Done({"ok": True})


async def test_an_answer_that_no_frame_can_hold_is_an_error_for_its_request_alone(pair: Pair) -> None:
    async def size(call: Call) -> Any:
        return {"text": "x" * (17 << 20)} if isinstance(call.request, wire.Model) else {"ok": True}

    pair.dispatcher.script = size
    large, small = await pair.request(wire.Model()), await pair.request(wire.Health())
    answers = {}
    while len(answers) < 2:
        for event in await pair.receive():
            assert isinstance(event, Answer)
            answers[event.id] = event.body
    assert isinstance(answers[large], Failure)
    assert isinstance(answers[large].error, FrameTooLarge)
    assert answers[small] == Done({"ok": True})


async def test_cancel_reaches_the_call_and_says_whether_it_was_there(pair: Pair) -> None:
    async def until_cancelled(call: Call) -> Any:
        await call.unless_cancelled(asyncio.Event().wait())
        return {"cancelled": call.cancelled}

    pair.dispatcher.script = until_cancelled
    id = await pair.request(wire.Model())
    cancel = await pair.request(wire.Cancel(target=id))
    answers = {}
    while len(answers) < 2:
        for event in await pair.receive():
            assert isinstance(event, Answer)
            answers[event.id] = event.body
    assert answers == {id: Done({"cancelled": True}), cancel: Done({"found": True})}


async def test_a_client_that_leaves_cancels_its_calls_which_still_end_by_themselves(pair: Pair) -> None:
    ended = asyncio.Event()

    async def until_cancelled(call: Call) -> Any:
        await call.unless_cancelled(asyncio.Event().wait())
        await asyncio.sleep(0)  # saves its turn
        ended.set()

    pair.dispatcher.script = until_cancelled
    await pair.request(wire.Model())
    await pair.dispatcher.arrived.get()
    pair.theirs.close()
    await asyncio.wait_for(ended.wait(), 30)
    await asyncio.wait_for(pair.closed, 30)


async def test_a_client_that_does_not_read_is_dropped_at_the_limit() -> None:
    pair = Pair(max_output_bytes=1 << 20)
    await pair.hello()
    sent = 0

    async def flood(call: Call) -> Any:
        nonlocal sent
        while not call.cancelled:
            call.send(Token(text="x" * 10_000, ids=[]))
            sent += 10_000
            await asyncio.sleep(0)

    pair.dispatcher.script = flood
    await pair.request(wire.Generate(prompt="x"))
    await asyncio.wait_for(pair.closed, 30)
    assert sent < 8 << 20  # the limit and what the kernel holds
    pair.theirs.close()


async def test_a_client_that_does_not_read_is_not_read_from(pair: Pair) -> None:
    async def large(call: Call) -> Any:
        return {"text": "x" * 400_000}

    pair.dispatcher.script = large
    for _ in range(200):
        _, data = pair.client.send_request(wire.Health())
        await pair.send(data)
        for _ in range(10):
            await asyncio.sleep(0)
    assert len(pair.dispatcher.calls) < 20


@pytest.mark.parametrize("beginning", [b"", b"\x00\x00", b"\x00\x00\x00\x20half"])
async def test_an_endless_frame_ends_with_a_typed_error(beginning: bytes) -> None:
    pair = Pair(frame_timeout_s=0.05)
    await pair.open()
    await pair.send(beginning)
    event = await asyncio.wait_for(pair.last(), 30)
    assert isinstance(event, ConnectionFailed)
    assert isinstance(event.error, ProtocolError)
    assert "not finished" in event.error.message
    pair.theirs.close()


async def test_an_idle_client_between_frames_may_stay() -> None:
    pair = Pair(frame_timeout_s=0.02)
    await pair.hello()
    await asyncio.sleep(0.1)
    await pair.request(wire.Health())
    assert body(await pair.last()) == Done({"ok": True})
    pair.theirs.close()


async def test_another_user_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module.os, "geteuid", lambda: 12345)
    monkeypatch.setattr(connection_module, "struct", _credentials_of(54321))
    pair = Pair()
    await pair.open()
    await asyncio.wait_for(pair.closed, 30)
    assert pair.dispatcher.calls == []
    pair.theirs.close()


def _credentials_of(uid: int) -> Any:
    class Struct:
        @staticmethod
        def calcsize(layout: str) -> int:
            return 12

        @staticmethod
        def unpack(layout: str, data: bytes) -> tuple[int, int, int]:
            return 1, uid, 1

    return Struct


async def test_while_shutting_down_new_requests_are_refused_and_old_ones_end(pair: Pair) -> None:
    release = asyncio.Event()

    async def slow(call: Call) -> Any:
        await release.wait()
        return {"slow": True}

    pair.dispatcher.script = slow
    await pair.request(wire.Model())
    await pair.dispatcher.arrived.get()
    pair.connection.refuse(ShuttingDown("soon"))
    await pair.request(wire.Health())
    assert isinstance(body(await pair.last()).error, ShuttingDown)
    release.set()
    assert body(await pair.last()) == Done({"slow": True})


async def test_a_connection_too_many_is_told_so_and_closed() -> None:
    pair = Pair()
    pair.connection.refuse(Overloaded("256 connections are open"))
    await pair.open()
    pair.client.send_hello("test")
    event = await asyncio.wait_for(pair.last(), 30)
    assert isinstance(event, ConnectionFailed)
    assert isinstance(event.error, Overloaded)
    pair.theirs.close()
