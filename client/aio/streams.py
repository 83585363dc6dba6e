"""The pieces of a reply for `async for`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Self

from ..protocol.errors import ColibriError, ConnectionLost
from ..protocol.messages import Completing
from ..replies import OnEnd, OnProgress, Piece, Received, Reply
from .transport import CANCEL_TIMEOUT_S, Exchange, Transport


class Stream(Received, AsyncIterator[Piece]):
    """The pieces of a reply as they come; one task at a time. The request is sent when the first is asked for.

    Leaving it early (break, an exception, a cancelled task, aclose()) cancels the rest, and the connection stays
    usable. Where the moment matters, use `async with`, which waits until the daemon has stopped:

        async with c.generate("Once") as stream:
            async for piece in stream: ...
        (await stream.result()).usage
    """

    def __init__(
        self,
        transport: Transport,
        request: Callable[[], Completing],
        *,
        on_progress: OnProgress | None = None,
        on_begin: Callable[[], object] | None = None,
        on_end: OnEnd | None = None,
    ) -> None:
        """`request` is asked for when it is to be sent, `on_begin` called when it is."""
        super().__init__(on_progress, on_end)
        self._transport = transport
        self._request = request
        self._on_begin = on_begin
        self._exchange: Exchange | None = None
        self._reading = False

    async def __anext__(self) -> Piece:
        if self._reading:
            raise RuntimeError("two tasks read one stream")
        self._reading = True
        try:
            while self._open:
                exchange = self._exchange or await self._begin()
                if piece := self._take(await exchange.receive()):
                    return piece
                if self._error is not None:
                    raise self._error
        except ColibriError as error:
            self._give_up(error)
            raise
        except BaseException:
            self._give_up()
            raise
        finally:
            self._reading = False
        raise StopAsyncIteration

    async def result(self) -> Reply:
        """The whole reply; reads what is still to come. Raises the error that ended the stream, if one did."""
        async for _ in self:
            pass
        return self._ended_reply()

    async def aclose(self) -> None:
        """Cancels what is still to come, and waits until the daemon has stopped. result() is then what there is."""
        if not self._open:
            return
        if self._exchange is None:  # nothing was asked
            self._open = False
            return
        try:
            async with asyncio.timeout(CANCEL_TIMEOUT_S):
                self._transport.cancel(self._exchange)
                if self._reading:  # by another task, which sees the end
                    await asyncio.wait({self._exchange.ended})
                    return
                while self._open:
                    self._take(await self._exchange.receive())
        except (ColibriError, TimeoutError):
            error = ConnectionLost("the daemon did not end a cancelled reply", hint="connect again")
            self._transport.fail(error)
            self._fail(error)
        except BaseException:  # cancelled once more: do not wait
            self._give_up()
            raise

    async def __aenter__(self) -> Self:
        if self._open and self._exchange is None:
            await self._begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if getattr(self, "_open", False) and self._exchange is not None:
            self._open = False
            self._transport.drop(self._exchange)

    async def _begin(self) -> Exchange:
        self._exchange = await self._transport.send(self._request(), self._on_begin)
        return self._exchange

    def _give_up(self, error: ColibriError | None = None) -> None:
        """Ends the stream here and now, if it has not ended by itself."""
        if not self._open:
            return
        if error is not None and self._transport.failed:
            self._fail(error)
        else:
            self._end(None, error)
        if self._exchange is not None:
            self._transport.abandon(self._exchange)
