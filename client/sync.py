"""The sync client: connect() and Client."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self, Unpack

from .protocol.errors import DeadlineExceeded
from .protocol.messages import (
    Completing,
    Health,
    Model,
    Request,
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
from .requests import (
    CONNECT_TIMEOUT_S,
    PAGE_SESSIONS,
    ChatOptions,
    Messages,
    Options,
    Prompt,
    chat_request,
    detokenize_request,
    generate_request,
    not_greeted,
    score_request,
    socket_path,
)
from .sessions import Session
from .transport import Transport, open_socket


def connect(
    path: str | os.PathLike[str] | None = None,
    *,
    timeout_s: float | None = CONNECT_TIMEOUT_S,
    reply_timeout_s: float | None = None,
    client: str = "colibri-python",
) -> Client:
    """Connects to the daemon at `path`, else at $COLIBRI_SOCKET, else where colibrid listens by default.

    `timeout_s` bounds connecting; `reply_timeout_s` the silence between answers (DeadlineExceeded), by default none,
    since a long prompt takes its time. Raises DaemonUnavailable, which says what to do; UnsupportedVersion.
    """
    path = socket_path(path)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    transport = Transport(open_socket(path, timeout_s))
    try:
        server = transport.greet(client, None if deadline is None else max(0.0, deadline - time.monotonic()))
    except DeadlineExceeded:
        transport.close()
        raise not_greeted(path, timeout_s) from None
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

    def __repr__(self) -> str:
        state = ", of no further use" if self._transport.failed else ""
        return f"<colibri.Client of {self.server.model.name} at {self.path}{state}>"

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
        return self._stream(generate_request(prompt, options, parse_special=parse_special), on_progress)

    def chat(
        self, messages: Messages, *, on_progress: OnProgress | None = None, **options: Unpack[ChatOptions]
    ) -> Reply:
        """Answers a whole conversation (a text is one message of the user) and keeps nothing; see session()."""
        return self.chat_stream(messages, on_progress=on_progress, **options).result

    def chat_stream(
        self, messages: Messages, *, on_progress: OnProgress | None = None, **options: Unpack[ChatOptions]
    ) -> Stream:
        """Like chat, in pieces."""
        return self._stream(chat_request(messages, options), on_progress)

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
            page: SessionPage = self._call(SessionList(after=after, limit=PAGE_SESSIONS))
            found += page.sessions
            if page.next is None:
                return found
            after = page.next

    def score(self, tokens: Prompt, *, deadline_s: float | None = None) -> Scores:
        """The log-probability of each token after those before it: one fewer than the tokens. Takes text too."""
        scores: Scores = self._call(score_request(tokens, deadline_s))
        return scores

    def tokenize(self, text: str, *, parse_special: bool = False, add_special: bool = False) -> list[int]:
        """Token ids of a text. `add_special` adds what the tokenizer puts around a text."""
        result: TokenIds = self._call(Tokenize(text=text, parse_special=parse_special, add_special=add_special))
        return result.tokens

    def detokenize(self, tokens: Iterable[int]) -> str:
        """The text of token ids."""
        result: Text = self._call(detokenize_request(tokens))
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

    def _stream(self, request: Completing, on_progress: OnProgress | None, session: Session | None = None) -> Stream:
        if session is not None:
            request = session._addressed(request)
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
