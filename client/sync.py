"""The sync client: connect(), Client and what its methods take."""

from __future__ import annotations

import operator
import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

from .protocol import default_socket_path
from .protocol.errors import DaemonUnavailable, DeadlineExceeded, InvalidRequest
from .protocol.messages import (
    Chat,
    Detokenize,
    Generate,
    Health,
    Message,
    Model,
    Request,
    Sampling,
    Score,
    Scores,
    ServerInfo,
    SessionList,
    SessionPage,
    SessionSummary,
    Stats,
    Text,
    TokenIds,
    Tokenize,
)
from .replies import OnProgress, Reply, Stream
from .sessions import Session
from .transport import Transport, open_socket

Prompt = str | Iterable[int]
# One text of the user, or messages as maps with role and content.
Messages = str | Sequence[Mapping[str, str] | Message]

CONNECT_TIMEOUT_S = 10.0


class Options(TypedDict, total=False):
    """What generate and chat take besides their input; docs/protocol.md says what each means."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    logit_bias: Mapping[int, float]
    stop: Sequence[str] | str
    logprobs: int
    deadline_s: float


_SAMPLING = frozenset(Sampling.__dataclass_fields__)


def connect(
    path: str | None = None,
    *,
    timeout_s: float | None = CONNECT_TIMEOUT_S,
    reply_timeout_s: float | None = None,
    client: str = "colibri-python",
) -> Client:
    """Connects to the daemon at `path`, else at $COLIBRI_SOCKET, else where colibrid listens by default.

    `timeout_s` bounds connecting; `reply_timeout_s` the silence between answers (DeadlineExceeded), by default none,
    since a long prompt takes its time. Raises DaemonUnavailable, which says what to do; UnsupportedVersion.
    """
    path = default_socket_path() if path is None else path
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    transport = Transport(open_socket(path, timeout_s))
    try:
        server = transport.greet(client, None if deadline is None else max(0.0, deadline - time.monotonic()))
    except DeadlineExceeded:
        transport.close()
        raise DaemonUnavailable(
            f"no greeting within {timeout_s:g} s", where=path, hint="is this colibrid's socket, and is it overloaded?"
        ) from None
    except BaseException:
        transport.close()
        raise
    return Client(transport, server, path, reply_timeout_s)


class Client:
    """A connection to the daemon. Any thread may use it, and any number of requests may run at once on it; a Stream
    belongs to one thread at a time. Not to be used after a fork of the process: connect anew there."""

    def __init__(
        self, transport: Transport, server: ServerInfo, path: str, reply_timeout_s: float | None = None
    ) -> None:
        """Use connect()."""
        self._transport = transport
        self._reply_timeout_s = reply_timeout_s
        self.server = server  # .model, .limits, .server as told in hello
        self.path = path

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection; the daemon ends what is in flight. May be called twice."""
        self._transport.close()

    def generate(
        self,
        prompt: Prompt,
        *,
        parse_special: bool = False,
        on_progress: OnProgress | None = None,
        **options: Unpack[Options],
    ) -> Stream:
        """Goes on from raw text or token ids, without a template, and gives the reply in pieces.

        `parse_special`: text like <|im_end|> becomes control tokens. `on_progress(prefilled, total)` is called while
        a long prompt is read.
        """
        return self._generate(prompt, options, None, on_progress, parse_special)

    def chat(self, messages: Messages, *, on_progress: OnProgress | None = None, **options: Unpack[Options]) -> Reply:
        """Answers a whole conversation (a text is one message of the user) and keeps nothing; see session()."""
        return self._chat(messages, options, None, on_progress).result

    def chat_stream(
        self, messages: Messages, *, on_progress: OnProgress | None = None, **options: Unpack[Options]
    ) -> Stream:
        """Like chat, in pieces."""
        return self._chat(messages, options, None, on_progress)

    def session(self, name: str, *, resume: bool | None = None) -> Session:
        """Opens a session; what it gives says whether it was made or resumed, how old and how long it is.

        `resume=True`: it must exist (SessionNotFound); `resume=False`: it must not (SessionExists); None: either.
        """
        return Session(self, name, resume=resume)

    def sessions(self) -> list[SessionSummary]:
        """All sessions, by name."""
        found: list[SessionSummary] = []
        after: str | None = None
        while True:
            page: SessionPage = self._call(SessionList(after=after, limit=1000))
            found += page.sessions
            if page.next is None:
                return found
            after = page.next

    def score(self, tokens: Prompt) -> Scores:
        """The log-probability of each token after those before it: one fewer than the tokens. Takes text too."""
        request = Score(text=tokens) if isinstance(tokens, str) else Score(tokens=_ids(tokens))
        scores: Scores = self._call(request)
        return scores

    def tokenize(self, text: str, *, parse_special: bool = False, add_special: bool = False) -> list[int]:
        """Token ids of a text. `add_special` adds what the tokenizer puts around a text."""
        result: TokenIds = self._call(Tokenize(text=text, parse_special=parse_special, add_special=add_special))
        return result.tokens

    def detokenize(self, tokens: Iterable[int]) -> str:
        """The text of token ids."""
        result: Text = self._call(Detokenize(tokens=_ids(tokens)))
        return result.text

    def stats(self) -> dict[str, Any]:
        """Figures of the running daemon: memory, pages, queue, rates."""
        return dict(self._call(Stats()))

    def model(self) -> dict[str, Any]:
        """The model in full."""
        return dict(self._call(Model()))

    def health(self) -> dict[str, Any]:
        """Whether the daemon serves."""
        return dict(self._call(Health()))

    def _call(self, request: Request) -> Any:
        return self._transport.call(request, self._reply_timeout_s).result

    def _generate(
        self,
        prompt: Prompt,
        options: Options,
        session: Session | None,
        on_progress: OnProgress | None,
        parse_special: bool = False,
    ) -> Stream:
        source = {"prompt": prompt} if isinstance(prompt, str) else {"tokens": _ids(prompt)}
        request = Generate(**source, parse_special=parse_special, **_common(options, session))
        return self._stream(request, session, on_progress)

    def _chat(
        self, messages: Messages, options: Options, session: Session | None, on_progress: OnProgress | None
    ) -> Stream:
        request = Chat(messages=_messages(messages), **_common(options, session))
        return self._stream(request, session, on_progress)

    def _stream(self, request: Request, session: Session | None, on_progress: OnProgress | None) -> Stream:
        id = self._transport.send(request)
        if session is not None:
            session._turn_begun()
        return Stream(
            self._transport,
            id,
            timeout_s=self._reply_timeout_s,
            on_progress=on_progress,
            on_end=None if session is None else session._turn_ended,
        )


def _common(options: Options, session: Session | None) -> dict[str, Any]:
    """Options as the fields of a request: those of sampling apart, those that are None left out."""
    given = {name: value for name, value in options.items() if value is not None}
    if unknown := given.keys() - Options.__annotations__.keys():
        raise TypeError(
            f"unknown option {sorted(unknown)[0]!r}; known are {', '.join(sorted(Options.__annotations__))}"
        )
    sampling = {name: given.pop(name) for name in list(given) if name in _SAMPLING}
    if isinstance(stop := given.get("stop"), str):
        given["stop"] = [stop]
    elif stop is not None:
        given["stop"] = list(stop)  # type: ignore[call-overload]
    if session is not None:
        given |= {"session": session.name, "resume": session._expected}
    return given | {"sampling": Sampling(**sampling)}  # type: ignore[arg-type]


def _messages(messages: Messages) -> list[Message]:
    if isinstance(messages, str):
        return [Message(role="user", content=messages)]
    return [
        message if isinstance(message, Message) else Message.from_wire(dict(message), f"messages[{i}]")
        for i, message in enumerate(messages)
    ]


def _ids(tokens: Iterable[int]) -> list[int]:
    """Token ids as plain integers: numpy's are welcome."""
    try:
        return [operator.index(token) for token in tokens]
    except TypeError as error:
        raise InvalidRequest(f"must be token ids: {error}", where="tokens") from None
