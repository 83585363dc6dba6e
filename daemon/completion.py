"""generate and chat: from a request to its last token, on disk before it is called done.

The way of a turn, and where it may end:

    wait        for earlier turns of the same session                     cancelled, deadline
    prepare     history + request → tokens                                refused: nothing was changed
    check       would the engine take it?                                 refused: nothing was changed
    begin       the accepted prompt, synced
    generate    tokens → text → client; batches to disk, not synced       cancelled, deadline, engine or storage error
    finish      the tokens that were sent, the reply's message, synced
    done

However generating ends, the turn is finished with exactly the tokens that the client was sent. What blocks on the disk
or takes long (template, tokenizer) runs in an executor.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from colibri.daemon.call import Call
from colibri.daemon.engine import EngineThread
from colibri.daemon.scheduler import Event, Failed, Finished, Progress, Request, Token, Usage
from colibri.daemon.sessions import Session, Sessions, Turn
from colibri.daemon.template import ROLES, ChatEncoder
from colibri.daemon.text import TextStream, Tokenizer
from colibri.native import Sampling
from colibri.protocol import messages as wire
from colibri.protocol.errors import (
    ColibriError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    SessionExists,
    SessionNotFound,
    StorageError,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

# Role of what is given to and comes from `generate` in a session: text without a template.
RAW = "raw"
# Tokens and seconds after which generated tokens go to disk. A crash of the process loses no more than this.
_BATCH_TOKENS = 16
_BATCH_S = 0.5


@dataclass(frozen=True)
class Defaults:
    """How a model wants to be sampled where a request does not say: its generation configuration."""

    sampling: Sampling = field(default_factory=Sampling)

    @staticmethod
    def from_generation_config(config: Mapping[str, Any] | None) -> Defaults:
        """Greedy unless the configuration says do_sample; then with what it gives."""
        config = config or {}
        names = ("top_k", "top_p", "min_p", "repetition_penalty")
        given = {name: config[name] for name in names if config.get(name) is not None}
        temperature = float(config.get("temperature") or 1.0) if config.get("do_sample") else 0.0
        return Defaults(Sampling(temperature=temperature, **given))

    def sampling_for(self, request: wire.Completing, seed: int) -> Sampling:
        """The request's own parameters over the model's."""
        given = {f.name: getattr(request.sampling, f.name) for f in dataclasses.fields(request.sampling)}
        bias = given.pop("logit_bias") or {}
        given = {name: value for name, value in given.items() if value is not None}
        return dataclasses.replace(
            self.sampling, **given | {"seed": seed, "bias": bias, "n_top_logprobs": request.logprobs or 0}
        )


@dataclass(frozen=True)
class Prompt:
    """What a request comes to: `tokens` for the engine, of which the first `keep` are the session's already."""

    tokens: list[int]
    keep: int
    messages: list[dict[str, Any]]  # for the session
    created: bool = False  # the session is new
    note: str | None = None
    continues: list[int] | None = None  # the reply that goes on, where nothing new was said


@dataclass
class _Ending:
    """How generating ended."""

    reason: str
    usage: Usage
    timings: wire.Timings
    error: ColibriError | None = None


class StepEvents:
    """Carries the engine's events into the event loop, all those of one step together."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._batch: list[tuple[asyncio.Queue[Event], Event]] = []

    def listener(self, queue: asyncio.Queue[Event]) -> Callable[[Event], None]:
        """An `on_event` whose events come out of `queue`."""
        return lambda event: self._batch.append((queue, event))

    def step_ended(self) -> None:
        """The engine's `on_step_end`."""
        batch, self._batch = self._batch, []
        if batch and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_deliver, batch)


def _deliver(batch: list[tuple[asyncio.Queue[Event], Event]]) -> None:
    for queue, event in batch:
        queue.put_nowait(event)


class TurnOrder:
    """One turn at a time in a session, in the order in which they came."""

    def __init__(self) -> None:
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}  # and how many hold it or wait

    def is_busy(self, name: str) -> bool:
        """Whether a turn of this session runs or waits."""
        return name in self._locks

    @asynccontextmanager
    async def turn(self, name: str, call: Call) -> AsyncIterator[bool]:
        """False if the call was cancelled before its turn came. Raises DeadlineExceeded."""
        lock, n = self._locks.get(name, (asyncio.Lock(), 0))
        self._locks[name] = lock, n + 1
        try:
            got = await call.unless_cancelled(lock.acquire())
            try:
                yield bool(got)
            finally:
                if got:
                    lock.release()
        finally:
            lock, n = self._locks.pop(name)
            if n > 1:
                self._locks[name] = lock, n - 1


class Reply:
    """One reply while it is generated: tokens in, answers to the client and batches to the disk out."""

    def __init__(
        self,
        call: Call,
        request: wire.Completing,
        tokenizer: Tokenizer,
        end_tokens: frozenset[int],
        turn: Turn | None,
        role: str,
        before: Sequence[int],
        run: Callable[..., Any],
    ) -> None:
        self._call = call
        self._request = request
        self._end_tokens = end_tokens
        self._turn = turn
        self._run = run
        self._role = role
        self._stream = TextStream(tokenizer, request.stop or (), at_start=role != RAW)
        self._unsent: list[Token] = []
        self._unsaved: list[int] = []
        self._saved_at = time.monotonic()
        self._text = [self._stream.prime(token for token in before if token not in end_tokens)]

    @property
    def stop_string(self) -> str | None:
        """The stop string that was reached; tokens after it are not taken."""
        return self._stream.stop_string

    async def take(self, token: Token) -> None:
        """The next token. Raises StorageError if a batch cannot be written."""
        if self.stop_string is not None:
            return
        self._unsent.append(token)
        piece = self._stream.feed(token.id, is_end=token.id in self._end_tokens)
        self._send(piece.text, piece.n_tokens)
        late = time.monotonic() - self._saved_at >= _BATCH_S
        if len(self._unsaved) >= _BATCH_TOKENS or (late and self._unsaved):
            await self._save()

    def flush(self) -> None:
        """The reply is whole: what was held back goes out."""
        piece = self._stream.flush()
        self._send(piece.text, piece.n_tokens)

    async def finish(self, reason: str) -> None:
        """Ends the turn, if there is one: synced when this returns. Raises StorageError."""
        if self._turn is None:
            return
        content = "".join(self._text)
        message = {"role": self._role, "content": content} if content or self._stream.n_sent else None
        await self._run(_finish, self._turn, self._unsaved, reason, self._stream.n_sent, message)

    def _send(self, text: str, n_tokens: int) -> None:
        if not text and not n_tokens:
            return
        tokens, self._unsent = self._unsent[:n_tokens], self._unsent[n_tokens:]
        ids = [token.id for token in tokens]
        self._unsaved += ids
        self._text.append(text)
        wanted = self._request.logprobs
        self._call.send(
            wire.Token(
                text=text,
                ids=ids,
                logprobs=None if wanted is None else [token.logprob for token in tokens],
                top=[list(token.top) for token in tokens] if wanted else None,
            )
        )

    async def _save(self) -> None:
        self._saved_at = time.monotonic()
        if self._turn is not None:
            tokens, self._unsaved = self._unsaved, []
            await self._run(self._turn.append, tokens)


def _finish(turn: Turn, unsaved: list[int], reason: str, n_tokens: int, message: dict[str, Any] | None) -> None:
    """The turn is over whatever happens, or its session would be busy for ever."""
    if unsaved:
        with suppress(StorageError):  # they are written with the end, which tells what is wrong
            turn.append(unsaved)
    turn.finish(reason=reason, n_tokens=n_tokens, message=message)


class Completer:
    """Serves generate and chat."""

    def __init__(
        self,
        *,
        engine: EngineThread,
        events: StepEvents,
        tokenizer: Tokenizer,
        chat: ChatEncoder,
        end_tokens: frozenset[int],
        defaults: Defaults,
        sessions: Sessions,
        numerics: Mapping[str, Any],
        approximation: str | None = None,
        executor: Executor,
        text_executor: Executor,
    ) -> None:
        self._engine = engine
        self._events = events
        self._tokenizer = tokenizer
        self._chat = chat
        self._end_tokens = end_tokens
        self._defaults = defaults
        self._sessions = sessions
        self._numerics = dict(numerics)
        self._approximation = approximation
        self._executor = executor
        self._text_executor = text_executor
        self.order = TurnOrder()

    async def complete(self, call: Call) -> wire.Completion:
        """Answers a generate or chat request."""
        request = call.request
        assert isinstance(request, wire.Completing)
        if isinstance(request, wire.Chat):
            self._check_roles(request.messages)
        if request.session is None:
            return await self._serve(call, request, await self._read(self._prompt, request), None)
        async with self.order.turn(request.session, call) as is_our_turn:
            if not is_our_turn:
                return self._not_begun(call, request)
            prompt = await self._read(self._session_prompt, request)
            return await self._serve(call, request, prompt, request.session)

    async def _run(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, partial(function, *args))

    async def _read(self, function: Callable[..., T], *args: Any) -> T:
        """Template and tokenizer, apart from the disk: who brings a book must not hold up the ends of others' turns."""
        return await asyncio.get_running_loop().run_in_executor(self._text_executor, partial(function, *args))

    # -- from a request to tokens (in the executor)

    def _check_roles(self, messages: Sequence[wire.Message]) -> None:
        """A role goes into the template as it is, so it has to be one that is meant; `raw` is ours."""
        for i, message in enumerate(messages):
            role = message.role
            if role == RAW or not self._chat.knows_role(role):
                hint = f"{', '.join(sorted(ROLES))}, or one that the model's template names"
                raise InvalidRequest(f"{role[:40]!r} is not a role", where=f"messages[{i}].role", hint=hint)

    def _prompt(self, request: wire.Completing) -> Prompt:
        if isinstance(request, wire.Chat):
            return Prompt(self._chat.encode(_plain(request.messages), datetime.now(), _names(request)), 0, [])
        assert isinstance(request, wire.Generate)
        return Prompt(self._raw_tokens(request, is_first=True), 0, [])

    def _raw_tokens(self, request: wire.Generate, *, is_first: bool) -> list[int]:
        if request.tokens is not None:
            return request.tokens
        text = request.prompt or ""
        self._tokenizer.refuse_longer_than(text, self._engine.limits.max_context)
        return self._tokenizer.encode(text, parse_special=request.parse_special, add_special=is_first)

    def _session_prompt(self, request: wire.Completing) -> Prompt:
        assert request.session is not None
        session = self._find(request.session, request.resume)
        if isinstance(request, wire.Chat):
            return self._chat_prompt(request, session)
        assert isinstance(request, wire.Generate)
        history = session.tokens if session else []
        new = self._raw_tokens(request, is_first=not history)
        said = request.prompt if request.prompt is not None else self._tokenizer.decode(new)
        messages = [{"role": RAW, "content": said}] if new else []
        continues = None if new or session is None else _last_reply(session)
        note = self._note(session)
        return Prompt([*history, *new], len(history), messages, session is None, note, continues)

    def _find(self, name: str, resume: bool | None) -> Session | None:
        """The session, or None if it is to be made. Raises what `resume` asks for."""
        try:
            session = self._sessions.get(name)
        except SessionNotFound:
            if resume:
                raise
            return None
        if resume is False:
            raise SessionExists("a session of this name exists", where=name, hint="leave resume out to go on with it")
        return session

    def _chat_prompt(self, request: wire.Chat, session: Session | None) -> Prompt:
        new, names = _plain(request.messages), _names(request)
        if session is None or not session.tokens:
            now = datetime.fromtimestamp(session.created) if session else datetime.now()
            return Prompt(self._chat.encode(new, now, names), 0, new, created=session is None)
        now = datetime.fromtimestamp(session.created)
        history = session.tokens
        if any(message["role"] == RAW for message in session.messages):
            tokens = [*history, *self._chat.append(new, now, names)]
            return Prompt(tokens, len(history), new, note=self._note(session))
        past = self._past(session)
        turn = self._chat.resume(history, past, new, now, names)
        note = self._note(session)
        if turn.rewritten:
            kept = f"the template rewrote earlier turns: {turn.keep} of {len(history)} tokens are kept"
            note = f"{note}; {kept}" if note else kept
        n_stored = sum(message["end"] <= turn.keep for message in session.messages)
        return Prompt([*history[: turn.keep], *turn.tokens], turn.keep, [*past[n_stored:], *new], note=note)

    def _past(self, session: Session) -> list[dict[str, Any]]:
        """The session's messages, every question with its reply, were it cut off before its first token."""
        past = []
        for message in session.messages:
            content = message["content"]
            if content is None:  # cut off: only the tokens know its words
                said = session.tokens[message["start"] : message["end"]]
                said = said[:-1] if said[-1] in self._end_tokens else said
                content = self._tokenizer.decode(said, skip_special=True)
            extras = {name: value for name, value in message.items() if name not in ("start", "end")}
            past.append({**extras, "content": content})
        if past and past[-1]["role"] not in ("assistant", RAW):
            past.append({"role": "assistant", "content": ""})
        return past

    def _note(self, session: Session | None) -> str | None:
        """Why pages of earlier turns cannot be used, if they cannot."""
        if session is None or not session.turns:
            return None
        was = {"routing": "exact"} | session.turns[-1].sampling.get("numerics", self._numerics)
        changed = [
            f"{name} was {was.get(name)}, is {now}" for name, now in self._numerics.items() if was.get(name) != now
        ]
        if session.note or not changed:
            return session.note
        return f"{', '.join(changed)}: cached pages are not used, the history is prefilled again"

    # -- from tokens to an answer

    async def _serve(
        self, call: Call, request: wire.Completing, prompt: Prompt, session_name: str | None
    ) -> wire.Completion:
        seed = request.sampling.seed if request.sampling.seed is not None else secrets.randbits(53)
        queue: asyncio.Queue[Event] = asyncio.Queue()
        work = Request(
            tokens=prompt.tokens,
            on_event=self._events.listener(queue),
            sampling=self._sampling(request, seed),
            max_tokens=request.max_tokens,
            end_tokens=self._end_tokens,
            n_replied=len(prompt.continues or ()),
            deadline=call.deadline,
        )
        self._engine.check(work)
        turn = None if session_name is None else await self._run(self._begin, session_name, prompt, work.sampling)
        role = _reply_role(request, turn, prompt)
        before = prompt.continues or ()
        reply = Reply(call, request, self._tokenizer, self._end_tokens, turn, role, before, self._run)
        ending = await self._generate(call, work, queue, reply)
        await reply.finish(ending.reason)
        if ending.error is not None:
            raise ending.error
        return wire.Completion(
            finish_reason=ending.reason,
            usage=wire.Usage(**dataclasses.asdict(ending.usage)),
            timings=ending.timings,
            seed=seed,
            durable=turn is not None,
            session=None if turn is None else _state(turn.session, prompt.created),
            note="; ".join(filter(None, (self._approximation, prompt.note))) or None,
        )

    def _sampling(self, request: wire.Completing, seed: int) -> Sampling:
        sampling = self._defaults.sampling_for(request, seed)
        outside = [token for token in sampling.bias if token >= self._engine.limits.vocabulary]
        if outside:
            raise InvalidRequest("is not in the vocabulary", where=f"sampling.logit_bias.{outside[0]}")
        return sampling

    def _begin(self, name: str, prompt: Prompt, sampling: Sampling) -> Turn:
        session = self._sessions.get_or_create(name)
        kept = {
            f.name: getattr(sampling, f.name)
            for f in dataclasses.fields(sampling)
            if f.name not in ("position", "history", "n_prompt", "bias", "allowed", "n_top_logprobs")
        }
        return session.begin_turn(
            keep=prompt.keep,
            new_tokens=prompt.tokens[prompt.keep :],
            messages=prompt.messages,
            sampling=kept | {"numerics": self._numerics},
        )

    async def _generate(self, call: Call, work: Request, queue: asyncio.Queue[Event], reply: Reply) -> _Ending:
        """Runs the request in the engine. Every way out is an ending: the turn has to be finished whatever happens."""
        ticket = None
        try:
            ticket = self._engine.submit(work)
            call.on_cancel(partial(self._engine.cancel, ticket))
            while True:
                match await queue.get():
                    case Token() as token:
                        await reply.take(token)
                        if reply.stop_string is not None:
                            self._engine.cancel(ticket)
                    case Progress(prefilled, total):
                        call.send(wire.Progress(prefilled=prefilled, total=total))
                    case Failed(error):
                        return _failed(error)
                    case Finished() as end:
                        return self._ended(call, end, reply)
        except ColibriError as error:
            # The disk failed, or the queue filled up meanwhile.
            if ticket is not None:
                self._engine.cancel(ticket)
            return _failed(error)
        except Exception:
            log.exception("generating failed")
            if ticket is not None:
                self._engine.cancel(ticket)
            return _failed(InternalError("a bug in the daemon; its log has the details", where=call.request.op))

    @staticmethod
    def _ended(call: Call, end: Finished, reply: Reply) -> _Ending:
        timings = wire.Timings(**dataclasses.asdict(end.timings))
        ending = _Ending(end.reason, end.usage, timings)
        if reply.stop_string is not None:
            ending.reason = "stop_string"
        elif end.reason in ("stop", "length"):
            reply.flush()
            if reply.stop_string is not None:
                ending.reason = "stop_string"
        elif end.reason == "deadline":
            ending.error = DeadlineExceeded(
                "the time given with the request is over",
                where="deadline_s",
                completion_tokens=end.usage.completion_tokens,
            )
        elif call.cause is not None:
            ending.error = call.cause
        return ending

    @staticmethod
    def _not_begun(call: Call, request: wire.Completing) -> wire.Completion:
        """Cancelled while an earlier turn ran: nothing was changed."""
        if call.cause is not None:
            raise call.cause
        return wire.Completion(
            finish_reason="cancelled",
            usage=wire.Usage(prompt_tokens=0, cached_tokens=0, completion_tokens=0),
            timings=wire.Timings(queue_s=time.monotonic() - call.arrived, load_s=0.0, prefill_s=0.0, decode_s=0.0),
            seed=request.sampling.seed or 0,
            durable=False,
        )


def _last_reply(session: Session) -> list[int]:
    """Tokens that a session generates behind when it is given no prompt: of a reply that was cut, or had not begun."""
    last = session.messages[-1] if session.messages else {}
    return session.tokens[last["start"] :] if "start" in last else []


def _reply_role(request: wire.Completing, turn: Turn | None, prompt: Prompt) -> str:
    """A reply to a chat is an assistant's, also where it goes on without a prompt."""
    if isinstance(request, wire.Chat):
        return "assistant"
    past = turn.session.messages if turn is not None and prompt.continues is not None else []
    return "assistant" if past and past[-1]["role"] != RAW else RAW


def _failed(error: ColibriError) -> _Ending:
    return _Ending("error", Usage(0, 0, 0), wire.Timings(queue_s=0.0, load_s=0.0, prefill_s=0.0, decode_s=0.0), error)


def _state(session: Session, created: bool) -> wire.SessionState:
    return wire.SessionState(
        name=session.name,
        n_tokens=len(session.tokens),
        n_turns=len(session.turns),
        created=created,
        age_s=max(0.0, time.time() - session.created),
    )


def _plain(messages: Sequence[wire.Message]) -> list[dict[str, Any]]:
    return [{"content": "", **message.to_wire()} for message in messages]


def _names(request: wire.Chat) -> dict[str, Any]:
    """What the template is given beside the messages."""
    return {**(request.template_args or {}), "tools": request.tools}
