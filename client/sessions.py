"""A named session: a conversation that the daemon keeps, with its KV cache, from process to process."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Unpack

from .protocol.errors import SessionExists, SessionNotFound
from .protocol.messages import Completing, SessionDelete, SessionFork, SessionGet, SessionInfo, SessionTruncate
from .requests import ChatOptions, Messages, Options, Prompt, chat_request, generate_request

if TYPE_CHECKING:
    from .replies import OnProgress, Reply, Stream
    from .sync import Client


class SessionView:
    """What a client knows of a session, and what its next turn is to say; no I/O, so both clients share it.

    A session that was made exists in the daemon from its first turn on. `n_tokens`, `n_turns` and `age_s` are as of
    the last turn, or of opening it.
    """

    def __init__(self, name: str, info: SessionInfo | None, *, resume: bool | None) -> None:
        """`info` is None where there is no such session yet. Raises SessionExists if there must be none."""
        if info is not None and resume is False:
            raise SessionExists("there is a session of this name", where=name, hint="resume it, or choose another")
        self.name = name
        self.n_tokens = 0
        self.n_turns = 0
        self.age_s = 0.0
        self.state = "new"
        self.resumed = info is not None
        if info is not None:
            self._remember(info)
        # Told with every turn: a session that was made here must not turn out to be another program's, nor one that
        # was resumed be silently made anew after it was deleted.
        self._expected: bool | None = self.resumed

    def __str__(self) -> str:
        if not self.resumed:
            return f"session {self.name!r}: new"
        length = f"{counted(self.n_turns, 'turn')}, {counted(self.n_tokens, 'token')}"
        return f"session {self.name!r}: resumed, {age(self.age_s)} old, {length}"

    def __repr__(self) -> str:
        return f"<{self}>"

    def _addressed(self, request: Completing) -> Completing:
        """The request as a turn of this session."""
        return dataclasses.replace(request, session=self.name, resume=self._expected)

    def _remember(self, info: SessionInfo) -> None:
        self.n_tokens, self.n_turns, self.state = info.n_tokens, info.n_turns, info.state
        self.age_s = max(0.0, time.time() - info.created)

    def _turn_begun(self) -> None:
        """From its first turn on the session may be there, whatever becomes of the turn."""
        self._expected = self._expected or None

    def _turn_ended(self, reply: Reply | None) -> None:
        if reply is None or reply.session is None:
            return
        self._expected = True
        self.n_tokens, self.n_turns = reply.session.n_tokens, reply.session.n_turns
        self.age_s = reply.session.age_s


class Session(SessionView):
    """A session, made or resumed: `str(session)` says which, how old and how long it is."""

    def __init__(self, client: Client, name: str, *, resume: bool | None = None) -> None:
        """Use Client.session(). Raises SessionNotFound, SessionExists."""
        self._client = client
        info: SessionInfo | None = None
        try:
            info = client._call(SessionGet(name=name))
        except SessionNotFound:
            if resume:
                raise
        super().__init__(name, info, resume=resume)

    def chat(
        self, messages: Messages, *, on_progress: OnProgress | None = None, **options: Unpack[ChatOptions]
    ) -> Reply:
        """Adds messages (a text is one of the user), and gives the whole reply."""
        return self.chat_stream(messages, on_progress=on_progress, **options).result

    def chat_stream(
        self, messages: Messages, *, on_progress: OnProgress | None = None, **options: Unpack[ChatOptions]
    ) -> Stream:
        """Adds messages, and gives the reply in pieces."""
        return self._client._stream(chat_request(messages, options), on_progress, self)

    def generate(self, prompt: Prompt, *, on_progress: OnProgress | None = None, **options: Unpack[Options]) -> Stream:
        """Goes on with raw text or token ids, without the template; an empty prompt goes on from where it is."""
        return self._client._stream(generate_request(prompt, options), on_progress, self)

    def info(self, *, include_tokens: bool = False) -> SessionInfo:
        """All that the daemon keeps of it: messages, times, counts, and where asked for the token ids."""
        info: SessionInfo = self._client._call(SessionGet(name=self.name, include_tokens=include_tokens))
        return info

    def fork(self, to: str, *, n_tokens: int | None = None) -> Session:
        """A copy under another name, of the first n_tokens or all; no KV is copied. Raises SessionExists."""
        self._client._call(SessionFork(name=self.name, to=to, n_tokens=n_tokens))
        return Session(self._client, to, resume=True)

    def truncate(self, n_tokens: int) -> None:
        """Forgets what comes after the first n_tokens."""
        self._client._call(SessionTruncate(name=self.name, n_tokens=n_tokens))
        self._remember(self.info())

    def delete(self) -> None:
        """Forgets it all. A later turn raises SessionNotFound."""
        self._client._call(SessionDelete(name=self.name))


def counted(n: int, what: str) -> str:
    """1 turn, 2 turns."""
    return f"{n} {what}{'' if n == 1 else 's'}"


# Seconds in a unit, and its name.
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


def age(seconds: float) -> str:
    """A time as a person says it: 45 s, 12 min, 3 h, 9 d."""
    for unit, name in _UNITS:
        if seconds >= unit:
            return f"{seconds // unit:.0f} {name}"
    return f"{seconds:.0f} s"
