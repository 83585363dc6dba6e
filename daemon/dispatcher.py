"""What the daemon can be asked: one method an operation, from a checked request to its result.

Knows nothing of sockets and frames: a caller gives a Call and gets a result or a ColibriError. What blocks runs in an
executor; what concerns the engine is asked of its thread.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, TypeVar

from colibri.daemon.call import Call
from colibri.daemon.completion import Completer, StepEvents
from colibri.daemon.engine import EngineThread
from colibri.daemon.model_file import ModelFile
from colibri.daemon.scheduler import Event, Failed, Finished, Request, Scored
from colibri.daemon.sessions import Session, Sessions
from colibri.daemon.text import Tokenizer
from colibri.protocol import messages as wire
from colibri.protocol.errors import Cancelled, DeadlineExceeded, InvalidRequest, SessionBusy, UnknownOperation

T = TypeVar("T")
Figures = dict[str, Any]


class Dispatcher:
    """Serves calls. `figures` are asked for `stats`: each a name and a function that the engine thread runs.
    `problems` are asked for `health`: what does not work although requests are served, in sentences.
    """

    def __init__(
        self,
        *,
        server_info: wire.ServerInfo,
        completer: Completer,
        engine: EngineThread,
        events: StepEvents,
        sessions: Sessions,
        tokenizer: Tokenizer,
        executor: Executor,
        model_file: ModelFile,
        text_executor: Executor,
        figures: dict[str, Callable[[], Figures]],
        problems: Callable[[], list[str]] = list,
    ) -> None:
        self.server_info = server_info
        self._completer = completer
        self._engine = engine
        self._events = events
        self._sessions = sessions
        self._tokenizer = tokenizer
        self._executor = executor
        self._model_file = model_file
        self._text_executor = text_executor
        self._figures = figures
        self._problems = problems
        self._started = time.monotonic()
        self._n_served = dict.fromkeys(wire.REQUESTS, 0)
        self._operations: dict[type[wire.Request], Callable[[Any], Awaitable[Any]]] = {
            wire.Tokenize: self._tokenize,
            wire.Detokenize: self._detokenize,
            wire.SessionList: self._list_sessions,
            wire.SessionGet: self._get_session,
            wire.SessionFork: self._fork_session,
            wire.SessionTruncate: self._truncate_session,
            wire.SessionDelete: self._delete_session,
            wire.Stats: self._stats,
            wire.Model: self._model,
            wire.Health: self._health,
        }

    async def serve(self, call: Call) -> Any:
        """The result of a call: a Record or a map. Raises ColibriError."""
        request = call.request
        self._n_served[request.op] += 1
        if isinstance(request, wire.Completing | wire.Score):
            self._model_file.check()
        if isinstance(request, wire.Completing):
            return await self._completer.complete(call)
        if isinstance(request, wire.Score):
            return await self._score(call, request)
        operation = self._operations.get(type(request))
        if operation is None:
            raise UnknownOperation(f"{request.op} is not served here", where="op")
        return await operation(request)

    async def _run(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, partial(function, *args))

    async def _read(self, function: Callable[..., T], *args: Any) -> T:
        """As `_run`, for the tokenizer, which may take long."""
        return await asyncio.get_running_loop().run_in_executor(self._text_executor, partial(function, *args))

    # -- tokens

    async def _score(self, call: Call, request: wire.Score) -> wire.Scores:
        tokens = request.tokens
        if tokens is None:
            tokens = await self._read(self._tokens_to_score, request.text or "")
        if len(tokens) < 2:
            self._check_tokens(tokens)
            return wire.Scores(logprobs=[], tokens=tokens)
        queue: asyncio.Queue[Event] = asyncio.Queue()
        work = Request(tokens=tokens, on_event=self._events.listener(queue), score=True, deadline=call.deadline)
        ticket = self._engine.submit(work)
        call.on_cancel(partial(self._engine.cancel, ticket))
        logprobs: tuple[float, ...] = ()
        while True:
            match await queue.get():
                case Scored(found):
                    logprobs = found
                case Failed(error):
                    raise error
                case Finished("stop"):
                    return wire.Scores(logprobs=list(logprobs), tokens=tokens)
                case Finished("deadline"):
                    raise DeadlineExceeded("the time given with the request is over", where="deadline_s")
                case Finished():
                    raise call.cause or Cancelled("the request was cancelled")

    def _tokens_to_score(self, text: str) -> list[int]:
        self._tokenizer.refuse_longer_than(text, self.server_info.model.context)
        return self._tokenizer.encode(text, add_special=True)

    def _check_tokens(self, tokens: list[int]) -> None:
        vocabulary = self.server_info.model.vocabulary
        for i, token in enumerate(tokens):
            if token >= vocabulary:
                raise InvalidRequest(f"token {token} is not in the vocabulary of {vocabulary}", where=f"tokens[{i}]")

    async def _tokenize(self, request: wire.Tokenize) -> wire.TokenIds:
        encode = partial(
            self._tokenizer.encode,
            request.text,
            parse_special=request.parse_special,
            add_special=request.add_special,
        )
        return wire.TokenIds(tokens=await self._read(encode))

    async def _detokenize(self, request: wire.Detokenize) -> wire.Text:
        self._check_tokens(request.tokens)
        return wire.Text(text=await self._read(self._tokenizer.decode, request.tokens))

    # -- sessions

    async def _list_sessions(self, request: wire.SessionList) -> wire.SessionPage:
        # One more than asked for tells whether any follow.
        found = await self._run(self._sessions.list, request.after, request.limit + 1)
        page = [
            wire.SessionSummary(
                name=summary.name,
                created=summary.created,
                updated=summary.updated,
                n_turns=summary.n_turns,
                n_tokens=summary.n_tokens,
                state=summary.state,
            )
            for summary in found[: request.limit]
        ]
        return wire.SessionPage(sessions=page, next=page[-1].name if len(found) > request.limit else None)

    async def _get_session(self, request: wire.SessionGet) -> wire.SessionInfo:
        return await self._run(lambda: self._session_info(self._sessions.get(request.name), request.include_tokens))

    async def _fork_session(self, request: wire.SessionFork) -> wire.SessionInfo:
        self._refuse_if_busy(request.to)
        return await self._run(
            lambda: self._session_info(self._sessions.fork(request.name, request.to, request.n_tokens))
        )

    async def _truncate_session(self, request: wire.SessionTruncate) -> wire.SessionInfo:
        self._refuse_if_busy(request.name)
        return await self._run(lambda: self._session_info(self._sessions.truncate(request.name, request.n_tokens)))

    async def _delete_session(self, request: wire.SessionDelete) -> Figures:
        self._refuse_if_busy(request.name)
        await self._run(self._sessions.delete, request.name)
        return {"name": request.name}

    def _refuse_if_busy(self, name: str) -> None:
        """Changing a session between a turn's preparation and its end would pull the floor from under it."""
        if self._completer.order.is_busy(name):
            raise SessionBusy("a turn is running or waiting", where=name, hint="wait for its end, or cancel it")

    def _session_info(self, session: Session, include_tokens: bool = False) -> wire.SessionInfo:
        tokens = list(session.tokens)
        messages = []
        for message in list(session.messages):
            content = message["content"]
            if content is None:  # cut off: only the tokens know its words
                content = self._tokenizer.decode(tokens[message["start"] : message["end"]], skip_special=True)
            messages.append(wire.StoredMessage.from_wire({**message, "content": content}))
        state = "active" if session.active else "interrupted" if session.interrupted else "idle"
        return wire.SessionInfo(
            name=session.name,
            created=session.created,
            updated=session.updated,
            n_turns=len(session.turns),
            n_tokens=len(tokens),
            state=state,
            messages=messages,
            tokens=tokens if include_tokens else None,
            note=session.note,
        )

    # -- the daemon itself

    async def _stats(self, _: wire.Stats) -> Figures:
        future: Future[Figures] = self._engine.call(
            lambda: {name: figures() for name, figures in self._figures.items()}
        )
        figures = await asyncio.wrap_future(future)
        return {
            "pid": os.getpid(),
            "uptime_s": round(time.monotonic() - self._started, 3),
            "model_file": self._model_file.state(),
            "requests": {op: n for op, n in self._n_served.items() if n},
            **figures,
        }

    async def _model(self, _: wire.Model) -> Figures:
        return self.server_info.model.to_wire()

    async def _health(self, _: wire.Health) -> Figures:
        problems = self._problems()
        return {
            "status": "failing" if self._model_file.is_lost else "degraded" if problems else "ok",
            "model_file": self._model_file.state(),
            "problems": problems,
            "uptime_s": round(time.monotonic() - self._started, 3),
        }
