"""The messages of the wire, version 1: a request class per operation, the bodies of answers, the results of `done`.

docs/protocol.md says what each field means; here is what it may be. A test holds the two against each other.
"""
# ruff: noqa: RUF009  (records.field() is a dataclass field; its defaults are immutable)

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from . import records
from .errors import ColibriError, InvalidRequest
from .records import Record, field

PROTOCOL_VERSION = 1
# Of alternatives per token; the engine holds this many.
MAX_LOGPROBS = 20
DEFAULT_MAX_TOKENS = 256

_COUNT = records.integer(0, (1 << 63) - 1)
_SECONDS = records.number(0, 1e12)
_LABEL = records.text(max_bytes=64, empty=False)
_DEADLINE = records.number(0, 1e7, above_low=True)


def _record(cls: type[Record]) -> records.Check:
    return cls.from_wire


# Parts of requests.


_JSON_MAPS = records.array(records.json_map, max_items=1 << 10)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MessageExtras(Record):
    """What some chat templates know of a message beside its content; others ignore it."""

    name: str | None = field(records.text(max_bytes=1024), None)
    reasoning_content: str | None = field(records.text(), None)
    tool_calls: list[dict[str, Any]] | None = field(_JSON_MAPS, None)
    tool_call_id: str | None = field(records.text(max_bytes=1024), None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Message(MessageExtras):
    """One message of a conversation."""

    strict = True
    role: str = field(_LABEL)
    content: str | None = field(records.text(), None)

    def validate(self, where: str) -> None:
        if self.content is None and self.tool_calls is None:
            raise InvalidRequest("is missing", where=f"{where}.content" if where else "content")


def _logit_bias(value: Any, where: str) -> dict[int, float]:
    """The map of decimal token ids to what is added to their logits."""
    bias = {}
    for key, amount in records.mapping(value, where).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidRequest("keys must be token ids in decimal", where=f"{where}.{key[:20]}")
        token = records.integer(0, records.MAX_TOKEN_ID)(int(key), where)
        bias[token] = records.number(-1000, 1000)(amount, f"{where}.{key}")
    return bias


def _encode_logit_bias(bias: Mapping[int, float]) -> dict[str, float]:
    return {str(token): amount for token, amount in bias.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling(Record):
    """How tokens are drawn. What is None is the model's own default, else off."""

    strict = True
    temperature: float | None = field(records.number(0, 100), None)
    top_k: int | None = field(records.integer(0, records.MAX_TOKEN_ID), None)
    top_p: float | None = field(records.number(0, 1, above_low=True), None)
    min_p: float | None = field(records.number(0, 1), None)
    repetition_penalty: float | None = field(records.number(0, 100, above_low=True), None)
    presence_penalty: float | None = field(records.number(-100, 100), None)
    frequency_penalty: float | None = field(records.number(-100, 100), None)
    seed: int | None = field(records.integer(0, (1 << 64) - 1), None)
    logit_bias: dict[int, float] | None = field(_logit_bias, None, encode=_encode_logit_bias)


# Requests.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request(Record):
    """Base of all requests: `op` is its name on the wire, `streams` says whether tokens come before done."""

    strict = True
    op: ClassVar[str]
    streams: ClassVar[bool] = False

    @classmethod
    def read_result(cls, value: Any) -> Any:
        """The result in a received `done` map."""
        return records.mapping(value, "done")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hello(Request):
    op = "hello"
    version: int = field(_COUNT)
    client: str = field(records.text(max_bytes=200))

    @classmethod
    def read_result(cls, value: Any) -> ServerInfo:
        return ServerInfo.from_wire(value, "done")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completing(Request):
    """What generate and chat have in common."""

    streams = True
    session: str | None = field(records.session_name, None)
    resume: bool | None = field(records.boolean, None)
    max_tokens: int = field(records.integer(1, 1 << 24), DEFAULT_MAX_TOKENS)
    sampling: Sampling = field(_record(Sampling), Sampling())
    stop: list[str] | None = field(records.array(records.text(max_bytes=1024, empty=False), max_items=16), None)
    logprobs: int | None = field(records.integer(0, MAX_LOGPROBS), None)
    deadline_s: float | None = field(_DEADLINE, None)

    def validate(self, where: str) -> None:
        if self.resume is not None and self.session is None:
            raise InvalidRequest("is about a session, and none is named", where="resume", hint="give session too")

    @classmethod
    def read_result(cls, value: Any) -> Completion:
        return Completion.from_wire(value, "done")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate(Completing):
    """Goes on from raw text or token ids, without a template."""

    op = "generate"
    prompt: str | None = field(records.text(), None)
    tokens: list[int] | None = field(records.prompt_ids, None)
    parse_special: bool = field(records.boolean, False)

    def validate(self, where: str) -> None:
        super().validate(where)
        if (self.prompt is None) == (self.tokens is None):
            raise InvalidRequest("give one of prompt and tokens", where="prompt")
        if self.session is None and not (self.prompt or self.tokens):
            raise InvalidRequest("is empty", where="prompt" if self.tokens is None else "tokens")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chat(Completing):
    """Answers messages by the model's template: all of a conversation, or with a session those that are new."""

    op = "chat"
    messages: list[Message] = field(records.array(_record(Message), max_items=1 << 14, empty=False))
    tools: list[dict[str, Any]] | None = field(_JSON_MAPS, None)
    template_args: dict[str, Any] | None = field(records.json_map, None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score(Request):
    """Asks for the log-probability of each token after those before it."""

    op = "score"
    tokens: list[int] | None = field(records.prompt_ids, None)
    text: str | None = field(records.text(), None)
    deadline_s: float | None = field(_DEADLINE, None)

    def validate(self, where: str) -> None:
        if (self.tokens is None) == (self.text is None):
            raise InvalidRequest("give one of tokens and text", where="tokens")

    @classmethod
    def read_result(cls, value: Any) -> Scores:
        return Scores.from_wire(value, "done")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenize(Request):
    op = "tokenize"
    text: str = field(records.text())
    parse_special: bool = field(records.boolean, False)
    add_special: bool = field(records.boolean, False)

    @classmethod
    def read_result(cls, value: Any) -> TokenIds:
        return TokenIds.from_wire(value, "done")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Detokenize(Request):
    op = "detokenize"
    tokens: list[int] = field(records.prompt_ids)

    @classmethod
    def read_result(cls, value: Any) -> Text:
        return Text.from_wire(value, "done")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionList(Request):
    op = "session.list"
    after: str | None = field(records.session_name, None)
    limit: int = field(records.integer(1, 10_000), 100)

    @classmethod
    def read_result(cls, value: Any) -> SessionPage:
        return SessionPage.from_wire(value, "done")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionGet(Request):
    op = "session.get"
    name: str = field(records.session_name)
    include_tokens: bool = field(records.boolean, False)

    @classmethod
    def read_result(cls, value: Any) -> SessionInfo:
        return SessionInfo.from_wire(value, "done")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionFork(Request):
    op = "session.fork"
    name: str = field(records.session_name)
    to: str = field(records.session_name)
    n_tokens: int | None = field(_COUNT, None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionTruncate(Request):
    op = "session.truncate"
    name: str = field(records.session_name)
    n_tokens: int = field(_COUNT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionDelete(Request):
    op = "session.delete"
    name: str = field(records.session_name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats(Request):
    op = "stats"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model(Request):
    op = "model"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Health(Request):
    op = "health"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cancel(Request):
    """Ends another request of this connection, which answers with its own done."""

    op = "cancel"
    target: int = field(records.integer(1, (1 << 63) - 1))


REQUESTS: dict[str, type[Request]] = {
    cls.op: cls
    for cls in (
        Hello,
        Generate,
        Chat,
        Score,
        Tokenize,
        Detokenize,
        SessionList,
        SessionGet,
        SessionFork,
        SessionTruncate,
        SessionDelete,
        Stats,
        Model,
        Health,
        Cancel,
    )
}


# Results of done.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelInfo(Record):
    """The model as hello tells it; lengths in tokens, fingerprint and numerics key in hex."""

    name: str = field(records.text())
    family: str = field(records.text())
    fingerprint: str = field(records.text())
    vocabulary: int = field(_COUNT)
    context: int = field(_COUNT)
    layers: int = field(_COUNT)
    experts: int = field(_COUNT)
    top_k: int = field(_COUNT)
    numerics_key: str = field(records.text())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits(Record):
    """What the daemon takes: bytes of a frame, requests in flight on a connection, requests waiting in all."""

    frame_bytes: int = field(records.integer(1 << 10, (1 << 32) - 1))
    requests_per_connection: int = field(records.integer(1, 1 << 31))
    queue: int = field(_COUNT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerInfo(Record):
    version: int = field(_COUNT)
    server: str = field(records.text())
    model: ModelInfo = field(_record(ModelInfo))
    limits: Limits = field(_record(Limits))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Usage(Record):
    """Tokens: of the prompt, of those how many came from the cache, and generated."""

    prompt_tokens: int = field(_COUNT)
    cached_tokens: int = field(_COUNT)
    completion_tokens: int = field(_COUNT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timings(Record):
    """Seconds waiting, loading pages, prefilling, decoding."""

    queue_s: float = field(_SECONDS)
    load_s: float = field(_SECONDS)
    prefill_s: float = field(_SECONDS)
    decode_s: float = field(_SECONDS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionState(Record):
    """A session after a turn; `created` if this turn made it; `age_s` since it was made."""

    name: str = field(records.session_name)
    n_tokens: int = field(_COUNT)
    n_turns: int = field(_COUNT)
    created: bool = field(records.boolean)
    age_s: float = field(_SECONDS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion(Record):
    """How a generation ended. `note` says what was not as usual, such as pages of another model."""

    finish_reason: str = field(_LABEL)  # stop, stop_string, length, cancelled
    usage: Usage = field(_record(Usage))
    timings: Timings = field(_record(Timings))
    seed: int = field(records.integer(0, (1 << 64) - 1))
    durable: bool = field(records.boolean)
    session: SessionState | None = field(_record(SessionState), None)
    note: str | None = field(records.text(), None)


def _logprobs(value: Any, where: str) -> list[float]:
    """Log-probabilities; -inf is what a token that cannot come has."""
    if type(value) is not list or not set(map(type, value)) <= {float, int}:
        raise InvalidRequest("must be an array of numbers", where=where)
    return [float(item) for item in value]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores(Record):
    """`logprobs[i]` is that of `tokens[i + 1]` after `tokens[:i + 1]`."""

    arrays = ("tokens", "logprobs")
    logprobs: list[float] = field(_logprobs)
    tokens: list[int] = field(records.token_ids)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenIds(Record):
    arrays = ("tokens",)
    tokens: list[int] = field(records.token_ids)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text(Record):
    text: str = field(records.text())


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionSummary(Record):
    """One line of session.list; times in seconds since 1970."""

    name: str = field(records.session_name)
    created: float = field(_SECONDS)
    updated: float = field(_SECONDS)
    n_turns: int = field(_COUNT)
    n_tokens: int = field(_COUNT)
    state: str = field(_LABEL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredMessage(MessageExtras):
    """A message of a session, as session.get gives it."""

    role: str = field(_LABEL)
    content: str = field(records.text())


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionInfo(SessionSummary):
    arrays = ("messages", "tokens")
    messages: list[StoredMessage] = field(records.array(_record(StoredMessage), max_items=1 << 24))
    tokens: list[int] | None = field(records.token_ids, None)
    note: str | None = field(records.text(), None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionPage(Record):
    """A page of session.list; `next` is what to give as `after` for those that follow."""

    arrays = ("sessions",)
    sessions: list[SessionSummary] = field(records.array(_record(SessionSummary), max_items=10_000))
    next: str | None = field(records.session_name, None)


# Bodies of answers.


def _alternatives(value: Any, where: str) -> list[list[tuple[int, float]]]:
    """For each token the likeliest ones as (id, log-probability)."""
    if type(value) is not list or not all(type(pairs) is list for pairs in value):
        raise InvalidRequest("must be an array of arrays of pairs", where=where)
    if not all(
        type(pair) is list and len(pair) == 2 and type(pair[0]) is int and type(pair[1]) in (int, float)
        for pairs in value
        for pair in pairs
    ):
        raise InvalidRequest("must hold pairs of a token id and its log-probability", where=where)
    return [[(token, float(logprob)) for token, logprob in pairs] for pairs in value]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Token(Record):
    """Tokens that came: `text` is what they complete (held back while it could become a stop string or half a
    character), `ids` the tokens, `logprobs` and `top` one entry per id where asked for."""

    text: str = field(records.text())
    ids: list[int] = field(records.token_ids)
    logprobs: list[float] | None = field(_logprobs, None)
    top: list[list[tuple[int, float]]] | None = field(_alternatives, None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress(Record):
    """Tokens of the prompt that are prefilled, cached ones included."""

    prefilled: int = field(_COUNT)
    total: int = field(_COUNT)


@dataclasses.dataclass(frozen=True)
class Done:
    """The request is answered."""

    result: Any  # the Record named by Request.read_result, or a map

    def to_wire(self) -> dict[str, Any]:
        wire: dict[str, Any] = self.result.to_wire() if isinstance(self.result, Record) else self.result
        return wire


@dataclasses.dataclass(frozen=True)
class Failure:
    """The request failed."""

    error: ColibriError

    def to_wire(self) -> dict[str, Any]:
        return self.error.to_wire()


Body = Token | Progress | Done | Failure


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answer to the request `id`; Done and Failure end it."""

    id: int
    body: Body

    @property
    def final(self) -> bool:
        return isinstance(self.body, Done | Failure)

    def to_wire(self) -> dict[str, Any]:
        return {"id": self.id, ANSWER_KINDS[type(self.body)]: self.body.to_wire()}


ANSWER_KINDS: dict[type[Any], str] = {Token: "token", Progress: "progress", Done: "done", Failure: "error"}
