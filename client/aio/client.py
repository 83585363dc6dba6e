"""connect() and Client, for asyncio."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Generator, Iterable
from functools import partial
from types import TracebackType
from typing import Any, Self, Unpack

from ..protocol.messages import (
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
from ..replies import OnProgress, Reply
from ..requests import (
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
    unavailable,
)
from .sessions import Session
from .streams import Stream
from .transport import Transport

# More than most replies have; a few megabytes.
MAX_UNREAD = 1 << 14


def connect(
    path: str | os.PathLike[str] | None = None,
    *,
    timeout_s: float | None = CONNECT_TIMEOUT_S,
    max_unread: int = MAX_UNREAD,
    client: str = "colibri-python-aio",
) -> Connecting:
    """Connects to the daemon at `path`, else at $COLIBRI_SOCKET, else where colibrid listens by default.

    Use it as `async with connect() as c:` or `c = await connect()`, and then close it with `await c.aclose()`.
    `timeout_s` bounds connecting; `max_unread` the pieces of one reply that may wait to be fetched. Raises
    DaemonUnavailable, which says what to do; UnsupportedVersion.
    """
    return Connecting(socket_path(path), timeout_s, max_unread, client)


class Connecting:
    """What connect() gives: to be awaited, or entered."""

    def __init__(self, path: str, timeout_s: float | None, max_unread: int, client: str) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._max_unread = max_unread
        self._name = client
        self._client: Client | None = None

    def __await__(self) -> Generator[Any, None, Client]:
        return self._connect().__await__()

    async def __aenter__(self) -> Client:
        self._client = await self._connect()
        return self._client

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def _connect(self) -> Client:
        transport = Transport(max_unread=self._max_unread)
        loop = asyncio.get_running_loop()
        connected = False
        try:
            async with asyncio.timeout(self._timeout_s):
                await loop.create_unix_connection(lambda: transport, self._path)
                connected = True
                server = await transport.greet(self._name)
        except TimeoutError as error:
            transport.abort()
            raise (not_greeted(self._path, self._timeout_s) if connected else unavailable(self._path, error)) from None
        except OSError as error:
            raise unavailable(self._path, error) from None
        except BaseException:
            transport.abort()
            raise
        return Client(transport, server, self._path)


class Client:
    """A connection to the daemon. Any number of tasks of its event loop may use it at once; a Stream belongs to one
    task at a time. Any call may be cancelled, by asyncio.timeout() too: the daemon is told, and the client goes on."""

    def __init__(self, transport: Transport, server: ServerInfo, path: str) -> None:
        """Use connect()."""
        self._transport = transport
        self.server = server  # .model, .limits, .server as told in hello
        self.path = path

    def __repr__(self) -> str:
        state = ", of no further use" if self._transport.failed else ""
        return f"<colibri.aio.Client of {self.server.model.name} at {self.path}{state}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes the connection; the daemon ends what is in flight. May be called twice."""
        await self._transport.close()

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

    async def chat(
        self, messages: Messages, *, on_progress: OnProgress | None = None, **options: Unpack[ChatOptions]
    ) -> Reply:
        """Answers a whole conversation (a text is one message of the user) and keeps nothing; see session()."""
        return await self.chat_stream(messages, on_progress=on_progress, **options).result()

    def chat_stream(
        self, messages: Messages, *, on_progress: OnProgress | None = None, **options: Unpack[ChatOptions]
    ) -> Stream:
        """Like chat, in pieces."""
        return self._stream(chat_request(messages, options), on_progress)

    async def session(self, name: str, *, resume: bool | None = None) -> Session:
        """Opens a session; what it gives says whether it was made or resumed, how old and how long it is.

        `resume=True`: it must exist (SessionNotFound); `resume=False`: it must not (SessionExists); None: either.
        """
        return await Session._open(self, name, resume=resume)

    async def sessions(self) -> list[SessionSummary]:
        """All sessions, by name."""
        found: list[SessionSummary] = []
        after: str | None = None
        while True:
            page: SessionPage = await self._call(SessionList(after=after, limit=PAGE_SESSIONS))
            found += page.sessions
            if page.next is None:
                return found
            after = page.next

    async def score(self, tokens: Prompt, *, deadline_s: float | None = None) -> Scores:
        """The log-probability of each token after those before it: one fewer than the tokens. Takes text too."""
        scores: Scores = await self._call(score_request(tokens, deadline_s))
        return scores

    async def tokenize(self, text: str, *, parse_special: bool = False, add_special: bool = False) -> list[int]:
        """Token ids of a text. `add_special` adds what the tokenizer puts around a text."""
        result: TokenIds = await self._call(Tokenize(text=text, parse_special=parse_special, add_special=add_special))
        return result.tokens

    async def detokenize(self, tokens: Iterable[int]) -> str:
        """The text of token ids."""
        result: Text = await self._call(detokenize_request(tokens))
        return result.text

    async def stats(self) -> dict[str, Any]:
        """Figures of the running daemon: memory, pages, queue, rates."""
        return dict(await self._call(Stats()))

    async def model(self) -> dict[str, Any]:
        """The model in full."""
        return dict(await self._call(Model()))

    async def health(self) -> dict[str, Any]:
        """Whether the daemon serves."""
        return dict(await self._call(Health()))

    async def _call(self, request: Request) -> Any:
        return (await self._transport.call(request)).result

    def _stream(self, request: Completing, on_progress: OnProgress | None, session: Session | None = None) -> Stream:
        if session is None:
            return Stream(self._transport, lambda: request, on_progress=on_progress)
        return Stream(
            self._transport,
            partial(session._addressed, request),
            on_progress=on_progress,
            on_begin=session._turn_begun,
            on_end=session._turn_ended,
        )
