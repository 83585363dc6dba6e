"""A named session, for tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from ..protocol.errors import SessionNotFound
from ..protocol.messages import SessionDelete, SessionFork, SessionGet, SessionInfo, SessionTruncate
from ..requests import ChatOptions, Messages, Options, Prompt, chat_request, generate_request
from ..sessions import SessionView

if TYPE_CHECKING:
    from ..replies import OnProgress, Reply
    from .client import Client
    from .streams import Stream


class Session(SessionView):
    """A session, made or resumed: `str(session)` says which, how old and how long it is."""

    def __init__(self, client: Client, name: str, info: SessionInfo | None, *, resume: bool | None) -> None:
        """Use Client.session()."""
        super().__init__(name, info, resume=resume)
        self._client = client

    @classmethod
    async def _open(cls, client: Client, name: str, *, resume: bool | None) -> Session:
        """Use Client.session(). Raises SessionNotFound, SessionExists."""
        info: SessionInfo | None = None
        try:
            info = await client._call(SessionGet(name=name))
        except SessionNotFound:
            if resume:
                raise
        return cls(client, name, info, resume=resume)

    async def chat(
        self, messages: Messages, *, on_progress: OnProgress | None = None, **options: Unpack[ChatOptions]
    ) -> Reply:
        """Adds messages (a text is one of the user), and gives the whole reply."""
        return await self.chat_stream(messages, on_progress=on_progress, **options).result()

    def chat_stream(
        self, messages: Messages, *, on_progress: OnProgress | None = None, **options: Unpack[ChatOptions]
    ) -> Stream:
        """Adds messages, and gives the reply in pieces."""
        return self._client._stream(chat_request(messages, options), on_progress, self)

    def generate(self, prompt: Prompt, *, on_progress: OnProgress | None = None, **options: Unpack[Options]) -> Stream:
        """Goes on with raw text or token ids, without the template; an empty prompt goes on from where it is."""
        return self._client._stream(generate_request(prompt, options), on_progress, self)

    async def info(self, *, include_tokens: bool = False) -> SessionInfo:
        """All that the daemon keeps of it: messages, times, counts, and where asked for the token ids."""
        info: SessionInfo = await self._client._call(SessionGet(name=self.name, include_tokens=include_tokens))
        return info

    async def fork(self, to: str, *, n_tokens: int | None = None) -> Session:
        """A copy under another name, of the first n_tokens or all; no KV is copied. Raises SessionExists."""
        await self._client._call(SessionFork(name=self.name, to=to, n_tokens=n_tokens))
        return await Session._open(self._client, to, resume=True)

    async def truncate(self, n_tokens: int) -> None:
        """Forgets what comes after the first n_tokens."""
        await self._client._call(SessionTruncate(name=self.name, n_tokens=n_tokens))
        self._remember(await self.info())

    async def delete(self) -> None:
        """Forgets it all. A later turn raises SessionNotFound."""
        await self._client._call(SessionDelete(name=self.name))
