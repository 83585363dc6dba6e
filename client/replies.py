"""What a generation gives back: pieces while it runs, and the reply when it has ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self, TypeVar

from .protocol import Failure, Progress
from .protocol.errors import Cancelled, ColibriError, ConnectionLost
from .protocol.messages import Body, Completion, SessionState, Timings, Token, Usage
from .transport import CANCEL_TIMEOUT_S, Transport

# A piece of a reply: .text, .ids, and where asked for .logprobs and .top.
Piece = Token

# Of a text in a repr.
_SHOWN_CHARACTERS = 40

T = TypeVar("T")

OnProgress = Callable[[int, int], object]
OnEnd = Callable[["Reply | None"], object]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    """A whole reply.

    `finish_reason` is stop (an end token), stop_string, length (max_tokens or the context), or cancelled. `durable`
    says whether the turn is on disk. `logprobs` and `top` have one entry per token where logprobs were asked for.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    usage: Usage
    timings: Timings
    seed: int
    durable: bool
    session: SessionState | None = None
    note: str | None = None
    logprobs: list[float] | None = None
    top: list[list[tuple[int, float]]] | None = None


class Received:
    """What has come of a reply; no I/O, so the streams of both clients share it."""

    def __init__(self, on_progress: OnProgress | None, on_end: OnEnd | None) -> None:
        """`on_end` is called once, with the reply, or None if it failed."""
        self._on_progress = on_progress
        self._on_end = on_end
        self._pieces: list[Piece] = []
        self._reply: Reply | None = None
        self._error: ColibriError | None = None
        self._open = True  # more is to come

    @property
    def text(self) -> str:
        """What has come so far."""
        return "".join(piece.text for piece in self._pieces)

    @property
    def tokens(self) -> list[int]:
        """The token ids that have come so far."""
        return [token for piece in self._pieces for token in piece.ids]

    def __repr__(self) -> str:
        """How far it is, and the beginning of its text."""
        if self._open:
            state = "open"
        elif self._reply is not None:
            state = f"ended by {self._reply.finish_reason}"
        else:
            state = f"ended by {type(self._error or Cancelled('')).__name__}"
        return f"<{type(self).__name__} {state}, {len(self.tokens)} tokens: {shorten(self.text)!r}>"

    def _take(self, body: Body) -> Piece | None:
        """Takes an answer in; gives it back if it is a piece."""
        if isinstance(body, Token):
            self._pieces.append(body)
            return body
        if isinstance(body, Progress):
            if self._on_progress is not None:
                self._on_progress(body.prefilled, body.total)
        elif isinstance(body, Failure):
            self._end(None, body.error)
        else:
            self._end(self._whole(body.result), None)
        return None

    def _fail(self, error: ColibriError) -> None:
        """The connection is gone: the error keeps what was received."""
        error.extra |= {"text": self.text, "tokens": self.tokens}
        self._end(None, error)

    def _end(self, reply: Reply | None, error: ColibriError | None) -> None:
        self._open = False
        self._reply, self._error = reply, error
        if self._on_end is not None:
            self._on_end(reply)

    def _ended_reply(self) -> Reply:
        """The reply. Raises the error that ended it, if one did."""
        if self._reply is None:
            raise self._error or Cancelled("the reply was given up")
        return self._reply

    def _whole(self, done: Completion) -> Reply:
        pieces = self._pieces
        return Reply(
            text=self.text,
            tokens=self.tokens,
            finish_reason=done.finish_reason,
            usage=done.usage,
            timings=done.timings,
            seed=done.seed,
            durable=done.durable,
            session=done.session,
            note=done.note,
            logprobs=_joined([piece.logprobs for piece in pieces]),
            top=_joined([piece.top for piece in pieces]),
        )


class Stream(Received, Iterator[Piece]):
    """The pieces of a reply as they come; one thread at a time.

    Leaving it early (break, an exception, Ctrl-C, close()) cancels the rest, and the connection stays usable:

        with c.generate("Once") as stream:
            for piece in stream: ...
        stream.result.usage
    """

    def __init__(
        self,
        transport: Transport,
        id: int,
        *,
        timeout_s: float | None = None,
        on_progress: OnProgress | None = None,
        on_end: OnEnd | None = None,
    ) -> None:
        """Takes over request `id`."""
        super().__init__(on_progress, on_end)
        self._transport = transport
        self._id = id
        self._timeout_s = timeout_s

    def __next__(self) -> Piece:
        try:
            while self._open:
                if piece := self._take(self._transport.receive(self._id, self._timeout_s)):
                    return piece
                if self._error is not None:
                    raise self._error
        except BaseException as error:
            if self._open and isinstance(error, ColibriError) and self._transport.failed:
                self._fail(error)
            self.close()
            raise
        raise StopIteration

    @property
    def result(self) -> Reply:
        """The whole reply; reads what is still to come. Raises the error that ended the stream, if one did."""
        for _ in self:
            pass
        return self._ended_reply()

    def close(self) -> None:
        """Cancels what is still to come, and waits until the daemon has stopped. `result` is then what there is."""
        if not self._open:
            return
        try:
            self._transport.cancel(self._id)
            while self._open:
                self._take(self._transport.receive(self._id, CANCEL_TIMEOUT_S))
        except ColibriError as error:
            self._transport.fail(ConnectionLost("the daemon did not end a cancelled reply", hint="connect again"))
            self._fail(error)
        except BaseException:  # a second Ctrl-C: do not wait
            self._open = False
            self._transport.drop(self._id)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self._open = False
            self._transport.drop(self._id)


def shorten(text: str) -> str:
    """The beginning of a long text."""
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"


def _joined(parts: list[list[T] | None]) -> list[T] | None:
    """One list of those that the pieces had; None if none had any."""
    given = [part for part in parts if part is not None]
    return [item for part in given for item in part] if given else None
