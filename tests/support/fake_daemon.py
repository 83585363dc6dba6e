"""A daemon without a model, in a thread: speaks the protocol by ServerProtocol, keeps sessions in memory, echoes.

What a test wants otherwise it scripts: `daemon.script["generate"] = handler`, where the handler gets the connection,
the request's id and the request, and answers by `connection.answer(id, body, …)` or does something worse.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

from colibri.protocol import Answer, ConnectionFailed, Done, Failure, ServerProtocol, Token
from colibri.protocol.errors import ColibriError, SessionExists, SessionNotFound
from colibri.protocol.messages import (
    Body,
    Cancel,
    Chat,
    Completing,
    Detokenize,
    Generate,
    Request,
    Score,
    Scores,
    SessionDelete,
    SessionFork,
    SessionGet,
    SessionInfo,
    SessionList,
    SessionPage,
    SessionState,
    SessionSummary,
    SessionTruncate,
    StoredMessage,
    Text,
    TokenIds,
    Tokenize,
)

from .wire import SERVER_INFO, completion

# Longer than anything that is waited for takes, on a busy machine.
PATIENCE_S = 30.0


def encode(text: str) -> list[int]:
    """The fake tokenizer: bytes."""
    return list(text.encode())


class Connection:
    """One client's connection."""

    def __init__(self, daemon: FakeDaemon, sock: socket.socket) -> None:
        self.daemon = daemon
        self.socket = sock
        self.protocol = ServerProtocol()
        self.open_streams: set[int] = set()

    def answer(self, id: int, *bodies: Body) -> None:
        self.socket.sendall(self.protocol.send(*(Answer(id, body) for body in bodies)))

    def serve(self) -> None:
        while data := self._receive():
            for event in self.protocol.receive_data(data):
                if isinstance(event, ConnectionFailed):
                    self.socket.sendall(self.protocol.send_failure(event.error))
                    return
                try:
                    self.daemon.handle(self, event)
                except ColibriError as error:
                    self.answer(event.id, Failure(error))
                except OSError:
                    return

    def _receive(self) -> bytes:
        try:
            return self.socket.recv(1 << 16)
        except OSError:
            return b""


Handler = Callable[[Connection, int, Any], None]


class FakeDaemon:
    """Listens at `path` while it is entered."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.script: dict[str, Handler] = {}
        self.sessions: dict[str, list[StoredMessage]] = {}
        self.tokens: dict[str, list[int]] = {}
        self._received: list[Request] = []
        self._changed = threading.Condition()
        self._connections: list[socket.socket] = []

    def __enter__(self) -> Self:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for sock in [self._listener, *self._connections]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    @property
    def received(self) -> list[Request]:
        """The requests so far, without hello."""
        with self._changed:
            return list(self._received)

    def wait_for(self, kind: type[Request], n: int = 1) -> list[Request]:
        """The requests of a kind, when there are n of them."""
        with self._changed:
            found: list[Request] = []

            def enough() -> bool:
                found[:] = [request for request in self._received if isinstance(request, kind)]
                return len(found) >= n

            assert self._changed.wait_for(enough, PATIENCE_S), f"no {n} of {kind.op} among {self._received}"
            return found

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(sock)
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            Connection(self, sock).serve()

    def handle(self, connection: Connection, event: Any) -> None:
        """Answers one request; a BadRequest with its error."""
        if error := getattr(event, "error", None):
            raise error
        request: Request = event.request
        if request.op == "hello":
            handler = self.script.get("hello", _hello)
        else:
            with self._changed:
                self._received.append(request)
                self._changed.notify_all()
            handler = self.script.get(request.op) or getattr(self, "_" + request.op.replace(".", "_"))
        handler(connection, event.id, request)

    # What it does by default.

    def _generate(self, connection: Connection, id: int, request: Generate) -> None:
        prompt = encode(request.prompt) if request.prompt is not None else request.tokens or []
        self._complete(connection, id, request, prompt, [])

    def _chat(self, connection: Connection, id: int, request: Chat) -> None:
        messages = [StoredMessage(role=message.role, content=message.content) for message in request.messages]
        prompt = encode("".join(message.content for message in messages))
        self._complete(connection, id, request, prompt, messages)

    def _complete(
        self, connection: Connection, id: int, request: Completing, prompt: list[int], messages: list[StoredMessage]
    ) -> None:
        words = ["You", " said", ": ", bytes(prompt).decode(errors="replace")][: request.max_tokens]
        reply = "".join(words)
        for word in words:
            connection.answer(id, token(word, logprobs=request.logprobs))
        state = None
        if request.session is not None:
            created = request.session not in self.sessions
            if request.resume is True and created:
                raise SessionNotFound("there is none", where=request.session)
            if request.resume is False and not created:
                raise SessionExists("there is one", where=request.session)
            stored = self.sessions.setdefault(request.session, [])
            stored += [*messages, StoredMessage(role="assistant", content=reply)]
            history = self.tokens.setdefault(request.session, [])
            history += prompt + encode(reply)
            state = SessionState(
                name=request.session, n_tokens=len(history), n_turns=len(stored) // 2, created=created, age_s=0.5
            )
        reason = "length" if len(words) == request.max_tokens else "stop"
        done = completion(reason, prompt=len(prompt), generated=len(encode(reply)), session=state)
        connection.answer(id, Done(done))

    def _score(self, connection: Connection, id: int, request: Score) -> None:
        tokens = encode(request.text) if request.text is not None else request.tokens or []
        connection.answer(id, Done(Scores(logprobs=[-0.5] * (len(tokens) - 1), tokens=tokens)))

    def _tokenize(self, connection: Connection, id: int, request: Tokenize) -> None:
        connection.answer(id, Done(TokenIds(tokens=encode(request.text))))

    def _detokenize(self, connection: Connection, id: int, request: Detokenize) -> None:
        connection.answer(id, Done(Text(text=bytes(request.tokens).decode())))

    def _summary(self, name: str) -> dict[str, Any]:
        if name not in self.sessions:
            raise SessionNotFound("there is no session of this name", where=name)
        now = time.time()
        return {
            "name": name,
            "created": now - 2.5 * 3600,  # in the middle of what is said as 2 h, and 1 h: the machine may be slow
            "updated": now - 1.5 * 3600,
            "n_turns": len(self.sessions[name]) // 2,
            "n_tokens": len(self.tokens[name]),
            "state": "idle",
        }

    def _session_list(self, connection: Connection, id: int, request: SessionList) -> None:
        names = sorted(name for name in self.sessions if request.after is None or name > request.after)
        page = [SessionSummary(**self._summary(name)) for name in names[: request.limit]]
        more = page[-1].name if len(names) > request.limit else None
        connection.answer(id, Done(SessionPage(sessions=page, next=more)))

    def _session_get(self, connection: Connection, id: int, request: SessionGet) -> None:
        summary = self._summary(request.name)
        tokens = self.tokens[request.name] if request.include_tokens else None
        connection.answer(id, Done(SessionInfo(**summary, messages=self.sessions[request.name], tokens=tokens)))

    def _session_fork(self, connection: Connection, id: int, request: SessionFork) -> None:
        self._summary(request.name)
        if request.to in self.sessions:
            raise SessionExists("there is a session of this name", where=request.to)
        self.sessions[request.to] = list(self.sessions[request.name])
        self.tokens[request.to] = self.tokens[request.name][: request.n_tokens]
        connection.answer(id, Done({}))

    def _session_truncate(self, connection: Connection, id: int, request: SessionTruncate) -> None:
        self._summary(request.name)
        del self.tokens[request.name][request.n_tokens :]
        connection.answer(id, Done({}))

    def _session_delete(self, connection: Connection, id: int, request: SessionDelete) -> None:
        self._summary(request.name)
        del self.sessions[request.name], self.tokens[request.name]
        connection.answer(id, Done({}))

    def _stats(self, connection: Connection, id: int, request: Request) -> None:
        connection.answer(id, Done({"pages": {"total": 10, "free": 8}, "queue": 0}))

    def _model(self, connection: Connection, id: int, request: Request) -> None:
        connection.answer(id, Done(SERVER_INFO.model))

    def _health(self, connection: Connection, id: int, request: Request) -> None:
        connection.answer(id, Done({"status": "ok"}))

    def _cancel(self, connection: Connection, id: int, request: Cancel) -> None:
        found = request.target in connection.open_streams
        if found:
            connection.open_streams.discard(request.target)
            connection.answer(request.target, Done(completion("cancelled", generated=1)))
        connection.answer(id, Done({"found": found}))


def _hello(connection: Connection, id: int, request: Request) -> None:
    connection.socket.sendall(connection.protocol.send_hello(id, SERVER_INFO))


def token(text: str, *, logprobs: int | None = None) -> Token:
    """A piece of the echo."""
    ids = encode(text)
    if logprobs is None:
        return Token(text=text, ids=ids)
    return Token(text=text, ids=ids, logprobs=[-0.25] * len(ids), top=[[(id, -0.25)] * logprobs for id in ids])


def holding(texts: Iterable[str]) -> Handler:
    """A handler that sends these pieces and then nothing more until the request is cancelled."""

    def handler(connection: Connection, id: int, request: Request) -> None:
        connection.open_streams.add(id)
        for text in texts:
            connection.answer(id, token(text))

    return handler
