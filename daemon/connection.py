"""One client: bytes from its socket become calls of the dispatcher, answers become bytes.

Owns the transport, the protocol state and the calls in flight. Its rules:

  - Only the daemon's own user and root are served (SO_PEERCRED).
  - Answers that are given in one round of the event loop leave in one frame: the tokens of one step do.
  - A client that does not read is not read from; one that goes on not reading is dropped at `max_output_bytes`.
  - A client that starts a frame finishes it in time.
  - When the client goes away, what it had in flight is cancelled; what the calls have to save, they still save.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable
from typing import cast

from colibri.daemon.call import Call
from colibri.daemon.dispatcher import Dispatcher
from colibri.protocol import (
    Answer,
    BadRequest,
    ConnectionFailed,
    Done,
    Failure,
    RequestReceived,
    ServerProtocol,
    State,
)
from colibri.protocol.errors import ColibriError, FrameTooLarge, InternalError, ProtocolError
from colibri.protocol.messages import Cancel, Hello

log = logging.getLogger(__name__)

# 16 MiB over a local socket take milliseconds; a person at a debugger gets some more.
FRAME_TIMEOUT_S = 30.0
# Above this the client is not read from until it has read.
_HIGH_WATER_BYTES = 1 << 20


class Connection(asyncio.Protocol):
    """An asyncio protocol; every method runs in the event loop."""

    def __init__(
        self, dispatcher: Dispatcher, *, max_output_bytes: int, frame_timeout_s: float = FRAME_TIMEOUT_S
    ) -> None:
        self._dispatcher = dispatcher
        self._max_output_bytes = max_output_bytes
        self._frame_timeout_s = frame_timeout_s
        limits = dispatcher.server_info.limits
        self._protocol = ServerProtocol(frame_bytes=limits.frame_bytes, max_requests=limits.requests_per_connection)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._calls: dict[int, Call] = {}
        self._answers: list[Answer] = []  # of this round of the loop
        self._frame_timer: asyncio.TimerHandle | None = None
        self._refusal: ColibriError | None = None
        self.on_closed: Callable[[Connection], None] = lambda _: None

    # -- what the transport says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if not _is_own_user(self._transport.get_extra_info("socket")):
            log.warning("a connection by another user was refused")
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=_HIGH_WATER_BYTES)
        if self._refusal is not None:
            self.close(self._refusal)
            return
        self._await_frame()

    def data_received(self, data: bytes) -> None:
        for event in self._protocol.receive_data(data):
            match event:
                case RequestReceived(id, Hello()):
                    self._answer(Answer(id, Done(self._dispatcher.server_info)))
                case RequestReceived():
                    self._receive(event)
                case BadRequest(id, error):
                    self._answer(Answer(id, Failure(error)))
                case ConnectionFailed(error):
                    log.info("connection closed: %s", error)
                    self.close(error)
        self._await_frame()

    def eof_received(self) -> None:
        """The transport closes itself; a client that only closed one direction has gone as well."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._await_frame()
        for call in list(self._calls.values()):
            call.cancel()
        self.on_closed(self)

    def pause_writing(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    # -- what the server says

    def refuse(self, error: ColibriError) -> None:
        """From now on new requests are answered with `error`; before the connection is made, it is closed with it."""
        self._refusal = error

    def close(self, error: ColibriError) -> None:
        """Says why and closes, after what was already answered (unless the client broke the protocol)."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._protocol.state is State.OPEN:
            self._flush()
        if self._protocol.state is not State.CLOSED:
            self._transport.write(self._protocol.send_failure(error))
        self._transport.close()

    @property
    def calls(self) -> list[Call]:
        """The requests in flight."""
        return list(self._calls.values())

    # -- requests

    def _receive(self, event: RequestReceived) -> None:
        if isinstance(event.request, Cancel):
            self._answer(Answer(event.id, Done({"found": self._cancel(event.request.target)})))
        elif self._refusal is not None:
            self._answer(Answer(event.id, Failure(self._refusal)))
        else:
            call = Call(event.request, lambda body: self._answer(Answer(event.id, body)))
            self._calls[event.id] = call
            call.task = self._loop.create_task(self._serve(event.id, call))

    def _cancel(self, target: int) -> bool:
        call = self._calls.get(target)
        if call is not None:
            call.cancel()
        return call is not None

    async def _serve(self, id: int, call: Call) -> None:
        """Runs one request to its last answer."""
        body: Done | Failure
        try:
            body = Done(await self._dispatcher.serve(call))
        except ColibriError as error:
            body = Failure(error)
        except Exception:
            log.exception("request %d (%s) failed", id, call.request.op)
            body = Failure(InternalError("a bug in the daemon; its log has the details", where=call.request.op))
        finally:
            del self._calls[id]
        self._answer(Answer(id, body))

    # -- answers

    def _answer(self, answer: Answer) -> None:
        """Sends in the next round of the loop, with all that is answered in this one."""
        if self._transport is None or self._transport.is_closing():
            return
        if not self._answers:
            self._loop.call_soon(self._flush)
        self._answers.append(answer)

    def _flush(self) -> None:
        answers, self._answers = self._answers, []
        if not answers or self._transport is None or self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() > self._max_output_bytes:
            log.warning("a client that does not read its answers was dropped")
            self._transport.abort()
            return
        try:
            self._transport.write(self._protocol.send(*answers))
        except FrameTooLarge:
            for answer in answers:
                self._transport.write(self._send_or_fail(answer))

    def _send_or_fail(self, answer: Answer) -> bytes:
        """An answer, or, if no frame can hold it, the words for that."""
        try:
            return self._protocol.send(answer)
        except FrameTooLarge as error:
            return self._protocol.send(Answer(answer.id, Failure(error)))

    # -- time

    def _await_frame(self) -> None:
        """Keeps a timer while the client owes us the rest of a frame, or its hello."""
        owes = self._transport is not None and (self._protocol.inside_frame or self._protocol.state is State.NEW)
        if owes and self._frame_timer is None:
            self._frame_timer = self._loop.call_later(self._frame_timeout_s, self._frame_late)
        elif not owes and self._frame_timer is not None:
            self._frame_timer.cancel()
            self._frame_timer = None

    def _frame_late(self) -> None:
        self._frame_timer = None
        self.close(ProtocolError(f"a frame was not finished within {self._frame_timeout_s:g} s", where="frame"))


def _is_own_user(client: socket.socket) -> bool:
    """Whether the process at the other end runs as this user or as root."""
    credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return uid in (0, os.geteuid())
