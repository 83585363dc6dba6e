"""One connection as two state machines without I/O: bytes in, events out, and what to send as bytes back.

The daemon, the sync client and an async one put the same objects between a socket and their own logic:

    events = protocol.receive_data(data)      # b"…" of any length, split anywhere; never raises for what the peer sent
    data = protocol.send(...)                 # to be written; raises for what *we* do wrong, and then changes nothing

What the peer does wrong beyond repair is an event, ConnectionFailed, and the last one: what came before it in the same
bytes still counts. A request that is wrong in itself is a BadRequest, and the connection lives on. What the caller does
wrong (an answer to nobody's request, a request before hello) is a ProtocolMisuse: a bug to be mended, not handled.

                 hello                    answers, requests              failure sent
    server   NEW ──────────────▶ OPEN ───────────────────┐        FAILED ────────────▶ CLOSED
                 hello sent               hello's done   │ peer breaks the protocol
    client   NEW ──────▶ GREETING ──────▶ OPEN ──────────┴──────▶ FAILED
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from enum import Enum, auto
from typing import Any

import msgpack

from .errors import (
    ColibriError,
    ConnectionLost,
    InvalidRequest,
    Overloaded,
    ProtocolError,
    UnknownOperation,
    UnsupportedVersion,
)
from .frames import MAX_FRAME_BYTES, MAX_HELLO_BYTES, FrameDecoder, encode_frame, frame, pack
from .messages import (
    PROTOCOL_VERSION,
    REQUESTS,
    Answer,
    Body,
    Cancel,
    Done,
    Failure,
    Hello,
    Progress,
    Request,
    ServerInfo,
    Token,
)
from .records import Record, integer, mapping

# What an array of a result holds in one answer; longer ones come in parts. Far from every limit of a frame.
PART_ITEMS = 1 << 16
# Small answers share a frame up to this: so few bytes cannot hold more maps and arrays than a frame may.
JOINED_BYTES = 1 << 20
# What a client joins of an answer's parts: a text of 16 MiB has no more tokens than that.
MAX_JOINED_ITEMS = 1 << 24
# Enough for a program with many threads; more wait in the program, not in the daemon.
MAX_REQUESTS_PER_CONNECTION = 64

_check_id = integer(1, (1 << 63) - 1)


class ProtocolMisuse(RuntimeError):
    """Our own code asked for what the protocol does not allow; nothing was changed."""


class State(Enum):
    NEW = auto()
    GREETING = auto()  # client only: hello is sent and not answered
    OPEN = auto()
    FAILED = auto()  # the peer broke the protocol: a server may still say why
    CLOSED = auto()


class Step(Enum):
    """What may happen to a connection."""

    RECEIVE_HELLO = auto()
    RECEIVE_REQUEST = auto()
    SEND_ANSWER = auto()
    SEND_FAILURE = auto()
    SEND_HELLO = auto()
    SEND_REQUEST = auto()
    RECEIVE_WELCOME = auto()
    RECEIVE_ANSWER = auto()
    FAIL = auto()
    END = auto()


_ENDINGS = {
    (State.NEW, Step.FAIL): State.FAILED,
    (State.GREETING, Step.FAIL): State.FAILED,
    (State.OPEN, Step.FAIL): State.FAILED,
} | {(state, Step.END): State.CLOSED for state in State}

SERVER_TRANSITIONS = _ENDINGS | {
    (State.NEW, Step.RECEIVE_HELLO): State.OPEN,
    (State.OPEN, Step.RECEIVE_REQUEST): State.OPEN,
    (State.OPEN, Step.SEND_ANSWER): State.OPEN,
    (State.NEW, Step.SEND_FAILURE): State.CLOSED,
    (State.OPEN, Step.SEND_FAILURE): State.CLOSED,
    (State.FAILED, Step.SEND_FAILURE): State.CLOSED,
}

CLIENT_TRANSITIONS = _ENDINGS | {
    (State.NEW, Step.SEND_HELLO): State.GREETING,
    (State.GREETING, Step.RECEIVE_WELCOME): State.OPEN,
    (State.GREETING, Step.RECEIVE_ANSWER): State.GREETING,
    (State.OPEN, Step.SEND_REQUEST): State.OPEN,
    (State.OPEN, Step.RECEIVE_ANSWER): State.OPEN,
}


# Events.


@dataclasses.dataclass(frozen=True)
class RequestReceived:
    id: int
    request: Request

    @property
    def op(self) -> str:
        return self.request.op


@dataclasses.dataclass(frozen=True)
class BadRequest:
    """A request that cannot be served; it is to be answered with `Failure(error)` like any other."""

    id: int
    error: ColibriError


@dataclasses.dataclass(frozen=True)
class ConnectionFailed:
    """Nothing more will come of this connection. A server answers send_failure(error) and closes; a client closes."""

    error: ColibriError


ServerEvent = RequestReceived | BadRequest | ConnectionFailed
ClientEvent = Answer | ConnectionFailed


class _Connection:
    """What both roles share: the decoder, the table of transitions, failing once."""

    _transitions: dict[tuple[State, Step], State]

    def __init__(self, limit: int) -> None:
        self.state = State.NEW
        self._decoder = FrameDecoder(limit)

    def _allows(self, step: Step) -> bool:
        return (self.state, step) in self._transitions

    def _take(self, step: Step) -> None:
        self.state = self._transitions[self.state, step]

    def _require(self, step: Step) -> None:
        if not self._allows(step):
            raise ProtocolMisuse(f"{step.name} in state {self.state.name}")

    def _receive(self, data: bytes | bytearray | memoryview) -> Iterable[dict[str, Any] | ConnectionFailed]:
        """The messages that the data completes; a failure ends the connection and comes last."""
        if self.state in (State.FAILED, State.CLOSED):
            return
        self._decoder.feed(data)
        try:
            while self.state not in (State.FAILED, State.CLOSED):
                message = self._decoder.next_message()
                if message is None:
                    return
                yield message
        except ProtocolError as error:
            yield self._fail(error)

    def _fail(self, error: ColibriError) -> ConnectionFailed:
        self._take(Step.FAIL)
        return ConnectionFailed(error)


class ServerProtocol(_Connection):
    """The daemon's end: gives out requests, takes answers.

    Requests may be in flight together, at most `max_requests` of them (more are BadRequests with Overloaded; a
    cancel is always let through and counts for none). Ids rise from request to request, so that none is used twice.
    """

    _transitions = SERVER_TRANSITIONS

    def __init__(self, *, frame_bytes: int = MAX_FRAME_BYTES, max_requests: int = MAX_REQUESTS_PER_CONNECTION) -> None:
        super().__init__(min(frame_bytes, MAX_HELLO_BYTES))
        self._frame_bytes = frame_bytes
        self._max_requests = max_requests
        self._last_id = 0
        self._streams: dict[int, bool] = {}  # requests in flight: whether they may be answered with tokens
        self._cancels: set[int] = set()  # those of them that are cancels

    @property
    def in_flight(self) -> frozenset[int]:
        """Ids of the requests that are not answered to the end."""
        return frozenset(self._streams)

    @property
    def inside_frame(self) -> bool:
        """Whether the client has begun a frame and not finished it."""
        return bool(self._decoder.pending_bytes)

    def receive_data(self, data: bytes | bytearray | memoryview) -> list[ServerEvent]:
        """What the client's bytes mean."""
        events: list[ServerEvent] = []
        for message in self._receive(data):
            events.append(message if isinstance(message, ConnectionFailed) else self._receive_message(message))
        return events

    def receive_eof(self) -> list[ServerEvent]:
        """The client has closed its end; a ConnectionFailed if that was inside a frame."""
        cut = self._decoder.pending_bytes and self.state not in (State.FAILED, State.CLOSED)
        self._take(Step.END)
        return [ConnectionFailed(ProtocolError("the connection ended inside a frame", where="frame"))] if cut else []

    def send_hello(self, id: int, info: ServerInfo) -> bytes:
        """Answers hello."""
        return self.send(Answer(id, Done(info)))

    def send(self, *answers: Answer) -> bytes:
        """The bytes of answers, together in one frame where the limit allows; long results are sent in parts.

        Raises ProtocolMisuse for a request that is not in flight, FrameTooLarge (with `where` the id) for a single
        answer over the limit, and has then changed nothing: the request can still be answered with a Failure.
        """
        self._require(Step.SEND_ANSWER)
        left = dict(self._streams)
        for answer in answers:
            if answer.id not in left:
                raise ProtocolMisuse(f"request {answer.id} is not in flight")
            if not answer.final and not left[answer.id]:
                raise ProtocolMisuse(f"request {answer.id} has no tokens")
            if answer.final:
                del left[answer.id]
        data = _encode_answers(answers, self._frame_bytes)
        self._streams = left
        self._cancels &= left.keys()
        return data

    def send_failure(self, error: ColibriError) -> bytes:
        """Tells the client that the connection ends, and why: an error with id 0. To be written before closing."""
        self._require(Step.SEND_FAILURE)
        data = encode_frame({"id": 0, "error": error.to_wire()}, self._frame_bytes)
        self._take(Step.SEND_FAILURE)
        self._streams = {}
        return data

    def _receive_message(self, message: dict[str, Any]) -> ServerEvent:
        fields = dict(message)
        try:
            id = _read_id(fields.pop("id", None), self._last_id)
        except ProtocolError as error:
            return self._fail(error)
        op = fields.pop("op", None)
        if self.state is State.NEW:
            return self._receive_hello(id, op, fields)
        self._take(Step.RECEIVE_REQUEST)
        self._last_id = id
        try:
            request = _read_request(op, fields)
            self._check_room(request)
        except ColibriError as error:
            self._streams[id] = False
            return BadRequest(id, error)
        self._streams[id] = request.streams
        if isinstance(request, Cancel):
            self._cancels.add(id)
        return RequestReceived(id, request)

    def _receive_hello(self, id: int, op: Any, fields: dict[str, Any]) -> ServerEvent:
        if op != Hello.op:
            return self._fail(ProtocolError("the first request must be hello", where="op"))
        # The version before all else: other versions may have other fields.
        version = fields.get("version")
        if type(version) is int and version != PROTOCOL_VERSION:
            hint = "use a client of the daemon's version"
            error = UnsupportedVersion(
                f"protocol version {version} is not spoken here, {PROTOCOL_VERSION} is",
                where="version",
                hint=hint,
                versions=[PROTOCOL_VERSION],
            )
            return self._fail(error)
        try:
            hello = Hello.from_wire(fields)
        except InvalidRequest as error:
            return self._fail(ProtocolError(f"hello is wrong: {error.message}", where=error.where))
        self._take(Step.RECEIVE_HELLO)
        self._decoder.limit = self._frame_bytes
        self._last_id = id
        self._streams[id] = False
        return RequestReceived(id, hello)

    def _check_room(self, request: Request) -> None:
        n_busy = len(self._streams) - len(self._cancels)
        if n_busy >= self._max_requests and not isinstance(request, Cancel):
            raise Overloaded(
                f"{n_busy} requests are in flight on this connection",
                where="connection",
                hint="wait for one to end, or use another connection",
                limit=self._max_requests,
            )


class ClientProtocol(_Connection):
    """The client's end: takes requests, gives out answers."""

    _transitions = CLIENT_TRANSITIONS

    def __init__(self, *, frame_bytes: int = MAX_FRAME_BYTES) -> None:
        super().__init__(frame_bytes)
        self._frame_bytes = frame_bytes
        self._last_id = 0
        self._requests: dict[int, Request] = {}
        self._parts: dict[int, dict[str, list[Any]]] = {}  # of results, until done comes
        self.server: ServerInfo | None = None  # what hello was answered with

    @property
    def in_flight(self) -> frozenset[int]:
        """Ids of the requests that are not answered to the end."""
        return frozenset(self._requests)

    def send_hello(self, client: str) -> bytes:
        """The first bytes of a connection; its answer must come before other requests are sent."""
        self._require(Step.SEND_HELLO)
        _, data = self._send(Step.SEND_HELLO, Hello(version=PROTOCOL_VERSION, client=client))
        return data

    def send_request(self, request: Request) -> tuple[int, bytes]:
        """The id of a new request and its bytes.

        Raises what the daemon would (InvalidRequest naming the field, FrameTooLarge), before anything is sent.
        """
        self._require(Step.SEND_REQUEST)
        return self._send(Step.SEND_REQUEST, request)

    def receive_data(self, data: bytes | bytearray | memoryview) -> list[ClientEvent]:
        """What the daemon's bytes mean."""
        events: list[ClientEvent] = []
        for message in self._receive(data):
            if isinstance(message, ConnectionFailed):
                events.append(message)
            else:
                self._receive_message(message, events)
        return events

    def receive_eof(self) -> list[ClientEvent]:
        """The daemon has closed its end; a ConnectionFailed if answers were still to come."""
        waiting = self._requests and self.state not in (State.FAILED, State.CLOSED)
        self._take(Step.END)
        error = ConnectionLost("the daemon closed the connection before it had answered")
        return [ConnectionFailed(error)] if waiting else []

    def _send(self, step: Step, request: Request) -> tuple[int, bytes]:
        wire = request.to_wire()
        type(request).from_wire(wire)  # the checks of the other side
        id = self._last_id + 1
        data = encode_frame({"id": id, "op": request.op} | wire, self._frame_bytes)
        self._take(step)
        self._last_id = id
        self._requests[id] = request
        return id, data

    def _receive_message(self, message: dict[str, Any], events: list[ClientEvent]) -> None:
        """One frame's answers, in order; a wrong one ends the connection, those before it count."""
        try:
            for wire in _read_answers(message):
                event = self._receive_answer(wire)
                if event is not None:
                    events.append(event)
                if self.state is State.FAILED:
                    return
        except ProtocolError as error:
            events.append(self._fail(error))
        except InvalidRequest as error:  # a field of an answer: the daemon's fault here
            events.append(
                self._fail(ProtocolError(f"the daemon's answer is wrong: {error.message}", where=error.where))
            )

    def _receive_answer(self, wire: dict[str, Any]) -> ClientEvent | None:
        """What an answer means; None for a part of a result."""
        id = wire.get("id")
        if type(id) is int and id == 0 and "error" in wire:
            return self._fail(ColibriError.from_wire(mapping(wire["error"], "error")))
        request = self._requests.get(id) if type(id) is int else None
        if type(id) is not int or request is None:
            raise ProtocolError("an answer to no request of ours", where="id")
        if "data" in wire:
            _join_part(self._parts.setdefault(id, {}), wire["data"])
            return None
        if "done" in wire and (parts := self._parts.pop(id, None)):
            _join_part(parts, {name: items for name, items in wire["done"].items() if name in parts})
            wire = wire | {"done": wire["done"] | parts}
        answer = Answer(id, _read_body(wire, request))
        if isinstance(answer.body, Done) and isinstance(request, Hello):
            self._take(Step.RECEIVE_WELCOME)
            self.server = answer.body.result
            self._frame_bytes = self.server.limits.frame_bytes
            self._decoder.limit = max(self._decoder.limit, self._frame_bytes)
        else:
            self._take(Step.RECEIVE_ANSWER)
        if answer.final:
            del self._requests[id]
            self._parts.pop(id, None)
        return answer


def _read_id(value: Any, last_id: int) -> int:
    try:
        id: int = _check_id(value, "id")
    except InvalidRequest as error:
        raise ProtocolError(error.message, where="id") from None
    if id <= last_id:
        raise ProtocolError(f"ids must rise, and {id} comes after {last_id}", where="id")
    return id


def _read_request(op: Any, fields: dict[str, Any]) -> Request:
    """The request in a message without its id and op. Raises InvalidRequest."""
    if type(op) is not str:
        raise InvalidRequest("must be the name of an operation", where="op")
    if op == Hello.op:
        raise InvalidRequest("hello was said already", where="op")
    if op not in REQUESTS:
        hint = f"known are {', '.join(sorted(REQUESTS))}"
        raise UnknownOperation(f"no operation is called {op[:40]!r}", where="op", hint=hint)
    return REQUESTS[op].from_wire(fields)


def _read_answers(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The answers in one frame: itself, or those under `answers`."""
    if "answers" not in message:
        return [message]
    answers = message["answers"]
    if type(answers) is not list:
        raise ProtocolError("must be an array", where="answers")
    return [mapping(answer, "answers") for answer in answers]


def _read_body(wire: dict[str, Any], request: Request) -> Body:
    """The body of an answer. Raises InvalidRequest or ProtocolError."""
    kinds = wire.keys() & {"token", "progress", "done", "error"}
    if len(kinds) != 1:
        raise ProtocolError("an answer must hold one of token, progress, data, done, error", where="answer")
    kind = kinds.pop()
    if kind == "done":
        return Done(request.read_result(wire["done"]))
    if kind == "error":
        return Failure(ColibriError.from_wire(mapping(wire["error"], "error")))
    if not request.streams:
        raise ProtocolError(f"{request.op} is not answered with {kind}", where=kind)
    return Token.from_wire(wire["token"], "token") if kind == "token" else Progress.from_wire(wire[kind], kind)


def _join_part(joined: dict[str, list[Any]], part: Any) -> None:
    """Appends the arrays of a part. Raises ProtocolError for what is none, or too much."""
    for name, items in mapping(part, "data").items():
        if type(items) is not list:
            raise ProtocolError("a part of a result must hold arrays", where=f"data.{name[:40]}")
        joined.setdefault(name, []).extend(items)
        if len(joined[name]) > MAX_JOINED_ITEMS:
            raise ProtocolError(f"a result has more than {MAX_JOINED_ITEMS} items", where=f"data.{name[:40]}")


def _encode_answers(answers: Iterable[Answer], limit: int) -> bytes:
    """Frames of as many answers as the limit allows, in order. Raises FrameTooLarge for what cannot be divided."""
    batches: list[list[bytes]] = []
    room = 0
    for answer in answers:
        for wire in _in_parts(answer, limit):
            body = pack(wire)
            if not batches or len(body) > room:
                batches.append([])
                room = min(limit, JOINED_BYTES) - _ENVELOPE_BYTES
            batches[-1].append(body)
            room -= len(body)
    return b"".join(frame(batch[0] if len(batch) == 1 else _join(batch), limit) for batch in batches)


def _in_parts(answer: Answer, limit: int) -> Iterator[dict[str, Any]]:
    """An answer as it is sent: the long arrays of a result in `data` before `done`, where they are then empty."""
    wire = answer.to_wire()
    result = answer.body.result if isinstance(answer.body, Done) else None
    names = result.arrays if isinstance(result, Record) else ()
    arrays = {name: wire["done"][name] for name in names if wire["done"].get(name)}
    if not arrays or (max(map(len, arrays.values())) <= PART_ITEMS and len(pack(wire)) <= limit):
        yield wire
        return
    for name, items in arrays.items():
        for part in _slices(items, limit - _PART_BYTES - len(name)):
            yield {"id": answer.id, "data": {name: part}}
    yield wire | {"done": wire["done"] | {name: [] for name in arrays}}


def _slices(items: list[Any], room: int) -> Iterator[list[Any]]:
    """An array cut to parts that fit in as many bytes, unless a single item does not."""
    start = 0
    while start < len(items):
        part = items[start : start + PART_ITEMS]
        while len(part) > 1 and len(pack({"": part})) > room:
            part = part[: len(part) // 2]
        yield part
        start += len(part)


# {"id": n, "data": {name: [ … ]}} around the items, name not counted.
_PART_BYTES = 32
# {"answers": [ … ]} around the bodies: a map of one, an 8-byte key, an array header.
_ENVELOPE_BYTES = 1 + 8 + 5


def _join(bodies: list[bytes]) -> bytes:
    """{"answers": [...]} of answers that are encoded already."""
    header: bytes = msgpack.Packer().pack_array_header(len(bodies))
    return b"".join([b"\x81\xa7answers", header, *bodies])
