"""One socket and the requests of many tasks: an asyncio protocol around the ClientProtocol.

Its rules:

  - A frame is handed to the event loop whole, so a task may be cancelled anywhere without tearing the stream of bytes.
  - The socket is always read. What a task does not fetch waits for it alone, at most `max_unread` pieces: a reply that
    would leave more is cancelled, and its stream ends with Overloaded after the pieces that it kept.
  - At most `limits.requests_per_connection` requests are in flight; more wait here, in order.
  - An answer that nobody wants any more is thrown away as it comes. Only requests about the same session wait for its
    end, so that they do not find the session busy.

All methods but `drop` belong to the event loop that the connection was made in.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
from collections import deque
from collections.abc import Callable
from typing import TypeVar, cast

from ..protocol import ClientProtocol, ConnectionFailed, Done, Failure, Token
from ..protocol.errors import Cancelled, ColibriError, ConnectionLost, DeadlineExceeded, Overloaded
from ..protocol.messages import Body, Cancel, Request, ServerInfo

# The daemon stops within a layer, and a layer of a large model's prefill may take seconds on a small machine.
CANCEL_TIMEOUT_S = 30.0

R = TypeVar("R", bound=Request)


class Exchange:
    """A request that was sent, and the answers that wait to be fetched; one task at a time fetches them."""

    def __init__(self, id: int, sessions: frozenset[str], loop: asyncio.AbstractEventLoop) -> None:
        self.id = id
        self.sessions = sessions  # that it is about
        self.unread: deque[Body] = deque()
        self.wanted = True
        self.ended: asyncio.Future[None] = loop.create_future()  # the last answer came, or none will
        self._loop = loop
        self._error: ColibriError | None = None
        self._arrival: asyncio.Future[None] | None = None

    async def receive(self) -> Body:
        """The next answer. Raises what the connection failed with, after all that had come before."""
        while not self.unread:
            if self._error is not None:
                raise copy.copy(self._error)  # each task gets a traceback of its own
            self._arrival = self._loop.create_future()
            try:
                await self._arrival
            finally:
                self._arrival = None
        return self.unread.popleft()

    def deliver(self, body: Body) -> None:
        """Takes an answer in."""
        if self.wanted:
            self.unread.append(body)
        if isinstance(body, Done | Failure):
            self._end()
        self._wake()

    def cut_off(self, error: ColibriError) -> None:
        """What comes from now on is thrown away; after what is here, the task gets this error."""
        self.unread.append(Failure(error))
        self.wanted = False
        self._wake()

    def fail(self, error: ColibriError) -> None:
        """No more will come."""
        self._error = error
        self._end()
        self._wake()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)


class Transport(asyncio.Protocol):
    """Sends requests and gives out their answers."""

    def __init__(self, *, max_unread: int) -> None:
        self._max_unread = max_unread
        self._loop = asyncio.get_running_loop()
        self._protocol = ClientProtocol()
        self._transport: asyncio.Transport | None = None
        self._exchanges: dict[int, Exchange] = {}  # that are not answered to the end
        self._dropped: deque[Exchange] = deque()  # by drop(), to be cancelled
        self._room = asyncio.Semaphore(0)
        self._writable = asyncio.Event()
        self._closed = asyncio.Event()
        self._error: ColibriError | None = None  # why the connection is of no further use

    # What asyncio says.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        if self._error is not None:
            return
        for event in self._protocol.receive_data(data):
            if isinstance(event, ConnectionFailed):
                self.fail(event.error)
            else:
                self._deliver(event.id, event.body)

    def connection_lost(self, exc: Exception | None) -> None:
        for event in self._protocol.receive_eof():
            assert isinstance(event, ConnectionFailed)
            self.fail(ConnectionLost(event.error.message, hint="connect again"))
        self.fail(ConnectionLost(f"the daemon closed the connection{f': {exc}' if exc else ''}", hint="connect again"))
        self._closed.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # What the client says.

    async def greet(self, client: str) -> ServerInfo:
        """Says hello. Raises what the daemon answers."""
        assert self._transport is not None
        exchange = self._exchanges[1] = Exchange(1, frozenset(), self._loop)
        self._transport.write(self._protocol.send_hello(client))
        body = await exchange.receive()
        if isinstance(body, Failure):
            raise body.error
        assert self._protocol.server is not None
        self._room = asyncio.Semaphore(self._protocol.server.limits.requests_per_connection)
        return self._protocol.server

    async def send(self, request: Request, on_sent: Callable[[], object] | None = None) -> Exchange:
        """Sends a request as soon as there is room; its answers are to be received to the last, or dropped.

        `on_sent` is called when the daemon may get it, even if the task is cancelled right after.
        """
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("this client belongs to another event loop")
        self._cancel_dropped()
        if self._must_wait(request):
            request = await self._wait_for_room(request)
        else:
            await self._room.acquire()
        try:
            exchange = self._send(request)
        except BaseException:
            self._room.release()
            raise
        exchange.ended.add_done_callback(lambda _: self._room.release())
        if on_sent is not None:
            on_sent()
        try:
            await self._writable.wait()
        except BaseException:
            self.abandon(exchange)
            raise
        return exchange

    async def call(self, request: Request) -> Done:
        """Sends a request that is answered once, and gives its answer. Raises the error that it is answered with."""
        exchange = await self.send(request)
        try:
            body = await exchange.receive()
        except BaseException:
            self.abandon(exchange)
            raise
        if isinstance(body, Failure):
            raise body.error
        assert isinstance(body, Done)
        return body

    def cancel(self, exchange: Exchange) -> None:
        """Asks the daemon to end a request; its last answers are still to be received."""
        if not exchange.ended.done():
            self._send(Cancel(target=exchange.id)).wanted = False

    def abandon(self, exchange: Exchange) -> None:
        """Cancels a request whose answers nobody will receive."""
        exchange.unread.clear()
        exchange.cut_off(Cancelled("the reply was given up"))
        with contextlib.suppress(ColibriError):  # the next request will say it
            self.cancel(exchange)

    def drop(self, exchange: Exchange) -> None:
        """Like abandon, for __del__: may be called by any thread, in the middle of anything."""
        self._dropped.append(exchange)
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the connection with it
            self._loop.call_soon_threadsafe(self._cancel_dropped)

    @property
    def failed(self) -> bool:
        """Whether the connection is of no further use."""
        return self._error is not None

    def fail(self, error: ColibriError) -> None:
        """Gives the connection up: everybody who waits or comes later gets this error, unless there was one before."""
        if self._error is not None:
            return
        self._error = error
        exchanges, self._exchanges = self._exchanges, {}
        for exchange in exchanges.values():
            exchange.fail(error)
        self._room.release()  # who waits for room learns it, one after the other
        self._writable.set()
        if self._transport is not None:
            self._transport.abort()

    def abort(self) -> None:
        """Gives the connection up, and does not wait until it is closed."""
        self.fail(ConnectionLost("the connection was closed by this program"))

    async def close(self) -> None:
        """Closes the connection; the daemon ends what is in flight. May be called twice."""
        self.abort()
        await self._closed.wait()

    # Sending.

    def _send(self, request: Request) -> Exchange:
        if self._error is not None:
            raise copy.copy(self._error)
        assert self._transport is not None
        id, data = self._protocol.send_request(request)
        exchange = self._exchanges[id] = Exchange(id, _sessions(request), self._loop)
        self._transport.write(data)
        return exchange

    def _cancel_dropped(self) -> None:
        while self._dropped:
            self.abandon(self._dropped.popleft())

    def _unsettled(self, request: Request) -> list[asyncio.Future[None]]:
        """The ends of unwanted requests about the same session."""
        about = _sessions(request)
        return [other.ended for other in self._exchanges.values() if not other.wanted and other.sessions & about]

    def _must_wait(self, request: Request) -> bool:
        return self._error is None and (self._room.locked() or bool(self._unsettled(request)))

    async def _wait_for_room(self, request: R) -> R:
        """Takes room when there is some. Gives the request with what is left of its time; or DeadlineExceeded."""
        type(request).from_wire(request.to_wire())  # what is wrong in itself is refused at once
        deadline_s: float | None = getattr(request, "deadline_s", None)
        begun = self._loop.time()
        try:
            async with asyncio.timeout(deadline_s):
                while unsettled := self._unsettled(request):
                    await asyncio.wait(unsettled)
                await self._room.acquire()
        except TimeoutError:
            raise DeadlineExceeded(
                "the time given with the request is over before it could be sent",
                where="deadline_s",
                hint="other requests of this connection came first: give it more time, or another connection",
            ) from None
        if deadline_s is None:
            return request
        left = deadline_s - (self._loop.time() - begun)
        return dataclasses.replace(request, deadline_s=max(left, 1e-3))  # type: ignore[call-arg]

    # Receiving.

    def _deliver(self, id: int, body: Body) -> None:
        exchange = self._exchanges[id]
        if isinstance(body, Done | Failure):
            del self._exchanges[id]
        elif exchange.wanted and isinstance(body, Token) and len(exchange.unread) >= self._max_unread:
            exchange.cut_off(_too_slow(self._max_unread))
            self.cancel(exchange)
        exchange.deliver(body)


def _sessions(request: Request) -> frozenset[str]:
    """Names of the sessions that a request is about."""
    names = (getattr(request, field, None) for field in ("session", "name", "to"))
    return frozenset(name for name in names if name is not None)


def _too_slow(n_pieces: int) -> Overloaded:
    return Overloaded(
        f"{n_pieces} pieces of the reply were not fetched, and the rest was cancelled",
        where="max_unread",
        hint="fetch pieces as they come, ask for fewer tokens, or connect with a larger max_unread",
        limit=n_pieces,
    )
