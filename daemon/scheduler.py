"""The scheduler: which rows of which sequences go into the next forward.

Owns the queue and the running sequences. It is synchronous and deterministic: `step` does one round and returns, and
the same calls give the same steps. It computes nothing itself; the engine and the page table do what it decides. One
thread uses it; `cancel` alone may be called from any.

One step (continuous batching, Yu et al. 2022, "Orca"):

    sweep     end what was cancelled or is past its deadline
    admit     from the queue, first come first served, while there is room in the batch and in the pool
    restore   bring back cached pages, a bounded number, so that those that decode do not wait for the disk
    plan      one row for every sequence that decodes, then chunks of prompts, shared evenly, up to max_step_rows
    reserve   pages for these rows; if the pool is exhausted the youngest sequence goes back to the queue
    forward   one batch
    process   commit pages, draw tokens, end what is finished

Nobody starves and nothing deadlocks: a sequence is only ever set back by an older one, the oldest always proceeds,
and one that would not fit the pool alone is refused on arrival. A sequence set back keeps its tokens, and its pages
stay cached as long as there is room.

The token at index i of a sequence is drawn with position i as the counter, so its text does not depend on company.
What a step does for a sequence that decodes does not grow with its length.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from colibri.daemon.kv_types import (
    E_CANCELED,
    E_IO,
    E_NUMERIC,
    PAGE_TOKENS,
    ROW_LOGITS,
    ROW_NONE,
    ROW_OK,
    ROW_SCORE,
    Batch,
    BatchResult,
    Engine,
)
from colibri.daemon.pages import PageTable, SequencePages
from colibri.protocol.errors import (
    CapacityExceeded,
    ColibriError,
    InternalError,
    InvalidRequest,
    ModelLost,
    NumericError,
    Overloaded,
    PromptTooLong,
)

log = logging.getLogger(__name__)

FinishReason = Literal["stop", "length", "cancelled", "deadline"]


@dataclass(frozen=True, slots=True)
class Limits:
    """The scheduler's budgets; each is refused or waited for by name when reached."""

    vocabulary: int
    max_context: int  # tokens of prompt and reply together
    max_batch_size: int = 8  # sequences in work at once
    max_step_rows: int = 512  # rows of one forward: the engine's max_rows
    max_logits: int = 8  # rows of one forward that give logits: the engine's max_logits
    max_queue: int = 256  # requests waiting
    # A page of a large model is about 1 MiB and a disk gives 500 MiB/s and more: 16 pages hold a step up for some 30
    # ms.
    restore_pages_per_step: int = 16

    def __post_init__(self) -> None:
        for name in ("vocabulary", "max_context", "max_batch_size", "max_step_rows", "max_logits", "max_queue"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.restore_pages_per_step < 1:
            raise ValueError("restore_pages_per_step must be at least 1")


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request. cached_tokens: leading prompt tokens whose K and V were not computed for it."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds a request spent waiting, bringing back pages, on its prompt, and on its reply."""

    queue_s: float
    load_s: float
    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class Started:
    """The request left the queue; so much of its prompt was there already."""

    cached_tokens: int
    queue_s: float


@dataclass(frozen=True, slots=True)
class Progress:
    """So many of the prompt's tokens are done, cached ones included."""

    prefilled: int
    total: int


@dataclass(frozen=True, slots=True)
class Token:
    """A token drawn. An end token comes too, just before Finished("stop")."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Scored:
    """logprobs[i] is that of tokens[i + 1] after those before it; one fewer than the tokens."""

    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a request that was not refused."""

    reason: FinishReason
    usage: Usage
    timings: Timings


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a request that could not be served."""

    error: ColibriError


Event = Started | Progress | Token | Scored | Finished | Failed


@dataclass(slots=True, kw_only=True)
class Request:
    """What to do with a sequence of tokens. `on_event` is called within `step`.

    `sampling` is a dataclass with the fields of colibri.native.Sampling; position, history and n_prompt are filled in
    here. The last `n_replied` tokens are the beginning of the reply, which goes on: penalties count them as generated.
    """

    tokens: list[int]
    on_event: Callable[[Event], None]
    sampling: Any = None
    max_tokens: int = 256
    end_tokens: frozenset[int] = frozenset()
    n_replied: int = 0
    score: bool = False
    deadline: float | None = None  # on the scheduler's clock (time.monotonic)


@dataclass(eq=False, slots=True)
class Ticket:
    """A submitted request: what to cancel it by. Everything but `cancelled` is the scheduler's own."""

    request: Request
    tokens: array[int]  # prompt and reply
    submitted: float
    cancelled: bool = False
    order: int = 0  # of arrival: the greater, the younger
    pages: SequencePages | None = None  # while running
    restoring: bool = False
    logprobs: list[float] = field(default_factory=list)  # of a score, so far
    cached_tokens: int = 0
    started: float | None = None
    announced: bool = False  # Started was told
    first_token: float | None = None
    load_s: float = 0.0

    @property
    def n_prompt(self) -> int:
        return len(self.request.tokens)

    @property
    def n_generated(self) -> int:
        return len(self.tokens) - self.n_prompt

    @property
    def n_rows_total(self) -> int:
        """Rows that the next result needs, computed or cached. The last token of a score predicts nothing."""
        return len(self.tokens) - 1 if self.request.score else len(self.tokens)

    @property
    def n_pending(self) -> int:
        """Rows that are still to be computed; 1 when decoding. For a running sequence."""
        assert self.pages is not None
        return self.n_rows_total - self.pages.n_tokens

    @property
    def n_reusable(self) -> int:
        """Leading positions that may come from the cache: all but those whose outcome is still wanted."""
        return len(self.logprobs) if self.request.score else len(self.tokens) - 1


@dataclass(slots=True)
class Chunk:
    """Rows of one sequence in one step: positions start to start + n_rows - 1."""

    ticket: Ticket
    pages: SequencePages
    start: int
    n_rows: int
    wants_logits: bool

    @staticmethod
    def of(ticket: Ticket, n_rows: int, *, wants_logits: bool) -> Chunk:
        """The next `n_rows` rows of a running sequence."""
        assert ticket.pages is not None
        assert 0 < n_rows <= ticket.n_pending
        return Chunk(ticket, ticket.pages, ticket.pages.n_tokens, n_rows, wants_logits)

    @property
    def end(self) -> int:
        return self.start + self.n_rows


class Scheduler:
    """Continuous batching over one engine and one page table."""

    def __init__(
        self, engine: Engine, pages: PageTable, limits: Limits, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._pages = pages
        self.limits = limits
        self._clock = clock
        self._waiting: deque[Ticket] = deque()  # oldest first
        self._running: list[Ticket] = []  # oldest first
        self._n_submitted = 0
        self._turn = 0  # rotates who decodes when not all can
        self._admission_blocked = False  # until a page is released
        self._request_s = 1.0  # how long requests took lately
        self.n_preempted = 0
        self.n_steps = 0

    # -- from outside ---------------------------------------------------------------------------------------------

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    @property
    def n_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def check(self, request: Request) -> None:
        """Raises InvalidRequest, PromptTooLong or CapacityExceeded; changes nothing. Any thread."""
        n, limits = len(request.tokens), self.limits
        if n == 0:
            raise InvalidRequest("there are no tokens", where="tokens", hint="give at least one")
        for token in (min(request.tokens), max(request.tokens)):
            if not 0 <= token < limits.vocabulary:
                raise InvalidRequest(f"token {token} is not in the vocabulary of {limits.vocabulary}", where="tokens")
        if not request.score and request.max_tokens < 1:
            raise InvalidRequest(f"must be at least 1, is {request.max_tokens}", where="max_tokens")
        n_total = n if request.score else n + request.max_tokens
        if n_total > limits.max_context:
            raise PromptTooLong(
                f"{n} tokens of prompt and {n_total - n} of reply exceed the context of {limits.max_context}",
                hint="shorten the prompt or lower max_tokens",
                prompt_tokens=n,
                max_tokens=n_total - n,
                context=limits.max_context,
            )
        self._check_capacity(n_total)

    def submit(self, request: Request) -> Ticket:
        """Queues a request. Raises what `ticket` raises, and Overloaded."""
        ticket = self.ticket(request)
        self.enqueue(ticket)
        return ticket

    def ticket(self, request: Request) -> Ticket:
        """What `enqueue` takes; raises what `check` raises. Any thread."""
        self.check(request)
        return Ticket(request, array("i", request.tokens), self._clock())

    def enqueue(self, ticket: Ticket) -> None:
        """Queues a checked request; Overloaded if too many wait."""
        self.check_queue(self.n_waiting)
        self._n_submitted += 1
        ticket.order = self._n_submitted
        self._waiting.append(ticket)

    def check_queue(self, n_waiting: int) -> None:
        """Overloaded if one more than `n_waiting` is too many, with a guess when to try again."""
        if n_waiting >= self.limits.max_queue:
            retry_after_s = round(max(1.0, self._request_s * n_waiting / self.limits.max_batch_size), 1)
            raise Overloaded(
                f"{n_waiting} requests are waiting, which is the limit",
                hint=f"try again in about {retry_after_s:g} s",
                retry_after_s=retry_after_s,
            )

    def cancel(self, ticket: Ticket) -> None:
        """Ends a request at the next step, wherever it is; nothing happens if it has ended. Any thread."""
        ticket.cancelled = True

    def is_prefilling(self, ticket: Ticket) -> bool:
        """Whether a forward under way may have many rows of this request: it is worth interrupting. Any thread."""
        pages = ticket.pages
        return pages is not None and ticket.n_rows_total - pages.n_tokens > 1

    def step(self) -> bool:
        """One round; whether there was anything to do."""
        if not self.has_work:
            return False
        self._sweep()
        self._admit()
        self._restore()
        chunks = self._reserve(self._plan())
        if chunks:
            self._compute(chunks)
        self._pages.write_behind()
        self.n_steps += 1
        return True

    @staticmethod
    def refuse(ticket: Ticket, error: ColibriError) -> None:
        """Tells the listener of a request that was never queued."""
        _tell(ticket, Failed(error))

    def fail_all(self, error: ColibriError) -> None:
        """Ends every request with `error`."""
        for ticket in [*self._running, *self._waiting]:
            self._fail(ticket, error)

    def stats(self) -> dict[str, int]:
        """Figures for `status`."""
        return {
            "running": self.n_running,
            "waiting": self.n_waiting,
            "submitted": self._n_submitted,
            "preempted": self.n_preempted,
            "steps": self.n_steps,
            "max_batch_size": self.limits.max_batch_size,
            "max_queue": self.limits.max_queue,
        }

    # -- arrival --------------------------------------------------------------------------------------------------

    def _check_capacity(self, n_total: int) -> None:
        """Refuses what would not fit if it were alone. The last token is drawn or scored, never computed."""
        needed = _n_pages(n_total - 1)
        if needed > self._pages.n_pages:
            page_bytes = self._pages.page_bytes
            raise CapacityExceeded(
                f"{n_total} tokens need {needed} KV pages ({needed * page_bytes} bytes), "
                f"there are {self._pages.n_pages} ({self._pages.n_pages * page_bytes} bytes)",
                hint=f"a KV budget (--kv-ram) of {needed * page_bytes} bytes would do",
                needed_bytes=needed * page_bytes,
                available_bytes=self._pages.n_pages * page_bytes,
            )

    def _sweep(self) -> None:
        now = self._clock()
        for ticket in [*self._running, *self._waiting]:
            if ticket.cancelled:
                self._finish(ticket, "cancelled")
            elif ticket.request.deadline is not None and now >= ticket.request.deadline:
                self._finish(ticket, "deadline")

    def _admit(self) -> None:
        """Takes from the queue while the batch has a place and the pool has room for the whole prompt."""
        while self._waiting and len(self._running) < self.limits.max_batch_size and not self._admission_blocked:
            ticket = self._waiting[0]
            pages = self._pages.acquire(ticket.tokens, ticket.n_reusable)
            if self._running and self._n_promised() + _n_missing(ticket, pages) > self._pages.n_available:
                self._pages.release(pages)
                self._admission_blocked = True
                return
            self._waiting.popleft()
            ticket.pages = pages
            ticket.restoring = True
            if ticket.started is None:
                ticket.started = self._clock()
            self._running.append(ticket)
            self._running.sort(key=_order)

    def _n_promised(self) -> int:
        """Pages that running sequences will still take: what is left of their prompts, and one to grow into."""
        return sum(_n_missing(ticket, ticket.pages) + 1 for ticket in self._running if ticket.pages is not None)

    def _restore(self) -> None:
        budget = self.limits.restore_pages_per_step
        for ticket in tuple(self._running):
            if ticket.restoring and budget > 0 and ticket.pages is not None:
                began, before = self._clock(), ticket.pages.n_tokens
                ticket.restoring = not self._pages.restore(ticket.pages, budget)
                budget -= _n_pages(ticket.pages.n_tokens - before)
                ticket.load_s += self._clock() - began
                if not ticket.restoring:
                    self._start(ticket, ticket.pages)

    def _start(self, ticket: Ticket, pages: SequencePages) -> None:
        """What the cache has is known; a score that was set back forgets what it will compute again."""
        del ticket.logprobs[pages.n_tokens :]
        if not ticket.announced:
            ticket.announced = True
            ticket.cached_tokens = pages.n_tokens
            assert ticket.started is not None
            _tell(ticket, Started(ticket.cached_tokens, ticket.started - ticket.submitted))
        if ticket.request.score:
            self._finish_score(ticket)  # of a single token there is nothing to compute

    # -- planning -------------------------------------------------------------------------------------------------

    def _plan(self) -> list[Chunk]:
        """Rows for the next forward: those that decode first, then even shares of what is left for the others."""
        rows, logits = self.limits.max_step_rows, self.limits.max_logits
        ready = [ticket for ticket in self._running if not ticket.restoring]
        chunks = self._plan_decoding([ticket for ticket in ready if ticket.n_pending == 1], min(rows, logits))
        rows -= len(chunks)
        logits -= sum(chunk.wants_logits for chunk in chunks)
        # Short ones first, so that what they leave of their share goes to the longer ones.
        prefilling = sorted((ticket for ticket in ready if ticket.n_pending > 1), key=lambda ticket: ticket.n_pending)
        return chunks + self._plan_prefilling(prefilling, rows, logits)

    def _plan_decoding(self, tickets: list[Ticket], n: int) -> list[Chunk]:
        """One row for each of at most `n` sequences; if there are more, they take turns."""
        if len(tickets) > n:
            self._turn = (self._turn + 1) % len(tickets)
            tickets = tickets[self._turn :] + tickets[: self._turn]
        return [Chunk.of(ticket, 1, wants_logits=not ticket.request.score) for ticket in tickets[:n]]

    @staticmethod
    def _plan_prefilling(tickets: list[Ticket], rows: int, logits: int) -> list[Chunk]:
        """Shares `rows` among prompts; only `logits` of them may get to their end."""
        chunks = []
        for i, ticket in enumerate(tickets):
            n_rows = min(ticket.n_pending, -(-rows // (len(tickets) - i)))
            wants_logits = n_rows == ticket.n_pending and not ticket.request.score
            if wants_logits and logits == 0:
                wants_logits, n_rows = False, n_rows - 1
            if n_rows > 0:
                chunks.append(Chunk.of(ticket, n_rows, wants_logits=wants_logits))
                rows -= n_rows
                logits -= wants_logits
        return chunks

    def _reserve(self, chunks: list[Chunk]) -> list[Chunk]:
        """Gives the rows their pages, the oldest sequence first, setting back the youngest where there are too few."""
        for chunk in sorted(chunks, key=lambda chunk: chunk.ticket.order):
            while chunk.ticket.pages is not None and not self._pages.reserve(chunk.pages, chunk.end):
                self._preempt(self._running[-1])
        return [chunk for chunk in chunks if chunk.ticket.pages is not None]

    def _preempt(self, ticket: Ticket) -> None:
        """Back to the head of the queue: it is older than all that wait."""
        self._leave(ticket)
        self._waiting.appendleft(ticket)
        self._admission_blocked = True
        self.n_preempted += 1

    # -- computing ------------------------------------------------------------------------------------------------

    def _compute(self, chunks: list[Chunk]) -> None:
        """Runs the chunks together. If the engine refuses them, each alone, so that only the culprit fails."""
        try:
            result = self._engine.forward(_batch(chunks))
        except Exception as error:
            if getattr(error, "code", None) == E_CANCELED:
                return  # nothing changed; whoever asked for it is swept in the next step, the others go on
            if len(chunks) == 1:
                log.exception("the engine failed")
                self._fail(chunks[0].ticket, _engine_error(error))
                return
        else:
            self._process(chunks, result)
            return
        for chunk in chunks:
            self._compute([chunk])

    def _process(self, chunks: list[Chunk], result: BatchResult) -> None:
        row = logits = 0
        for chunk in chunks:
            status = result.row_status[row : row + chunk.n_rows]
            logprobs = result.logprobs[row : row + chunk.n_rows] if result.logprobs is not None else ()
            self._process_chunk(chunk, status, logprobs, logits)
            row += chunk.n_rows
            logits += chunk.wants_logits

    def _process_chunk(self, chunk: Chunk, status: Iterable[int], logprobs: Iterable[float], logits: int) -> None:
        ticket, pages = chunk.ticket, chunk.pages
        bad = next((i for i, code in enumerate(status) if code != ROW_OK), None)
        if bad is not None:
            self._pages.commit(pages, chunk.start + bad)
            self._fail(ticket, NumericError(f"the model's values at token {chunk.start + bad} are not finite"))
            return
        self._pages.commit(pages, chunk.end)
        if not ticket.n_generated:
            _tell(ticket, Progress(chunk.end, ticket.n_rows_total))
        if ticket.request.score:
            ticket.logprobs.extend(logprobs)
            self._finish_score(ticket)
        elif chunk.wants_logits:
            self._draw(ticket, logits)

    def _finish_score(self, ticket: Ticket) -> None:
        if len(ticket.logprobs) == ticket.n_rows_total:
            _tell(ticket, Scored(tuple(ticket.logprobs)))
            self._finish(ticket, "stop")

    def _draw(self, ticket: Ticket, logits: int) -> None:
        """Draws the next token of a sequence and ends it if that was the last."""
        try:
            sampled = self._engine.sample(logits, self._sampling(ticket))
        except Exception as error:
            if getattr(error, "code", None) == E_NUMERIC:
                self._fail(ticket, NumericError(f"no token can be drawn: {error}"))
            else:
                log.exception("sampling failed")
                self._fail(ticket, InternalError(f"sampling failed: {error}"))
            return
        ticket.tokens.append(sampled.token)
        if ticket.first_token is None:
            ticket.first_token = self._clock()
        _tell(ticket, Token(sampled.token, sampled.logprob, tuple(sampled.top)))
        if sampled.token in ticket.request.end_tokens:
            self._finish(ticket, "stop")
        elif ticket.n_generated >= ticket.request.max_tokens:
            self._finish(ticket, "length")

    @staticmethod
    def _sampling(ticket: Ticket) -> Any:
        """The request's parameters at this position. Penalties look at the history; the array itself, not a copy."""
        n_prompt = ticket.n_prompt - ticket.request.n_replied
        return dataclasses.replace(
            ticket.request.sampling, position=len(ticket.tokens), history=ticket.tokens, n_prompt=n_prompt
        )

    # -- departure ------------------------------------------------------------------------------------------------

    def _finish(self, ticket: Ticket, reason: FinishReason) -> None:
        self._remove(ticket)
        timings = self._timings(ticket)
        if reason in ("stop", "length"):
            took_s = timings.load_s + timings.prefill_s + timings.decode_s
            self._request_s += (took_s - self._request_s) / 8  # the last eight or so
        usage = Usage(ticket.n_prompt, ticket.cached_tokens, ticket.n_generated)
        _tell(ticket, Finished(reason, usage, timings))

    def _fail(self, ticket: Ticket, error: ColibriError) -> None:
        self._remove(ticket)
        _tell(ticket, Failed(error))

    def _remove(self, ticket: Ticket) -> None:
        if ticket.pages is not None:
            self._leave(ticket)
        else:
            self._waiting.remove(ticket)
        self._admission_blocked = False

    def _leave(self, ticket: Ticket) -> None:
        """Takes a running sequence out of the batch; what it computed stays cached."""
        assert ticket.pages is not None
        self._running.remove(ticket)
        self._pages.release(ticket.pages)
        ticket.pages = None
        ticket.restoring = False

    def _timings(self, ticket: Ticket) -> Timings:
        now = self._clock()
        started = now if ticket.started is None else ticket.started
        first = now if ticket.first_token is None else ticket.first_token
        return Timings(
            queue_s=started - ticket.submitted,
            load_s=ticket.load_s,
            prefill_s=max(0.0, first - started - ticket.load_s),
            decode_s=now - first,
        )


def _engine_error(error: Exception) -> ColibriError:
    """What a refused step means for the request that was alone in it."""
    if getattr(error, "code", None) == E_IO:
        return ModelLost(str(error), hint="replace a model by renaming, and restart colibrid")
    return InternalError(f"the engine failed: {error}")


def _tell(ticket: Ticket, event: Event) -> None:
    """A listener that raises loses its request, and nobody else's."""
    try:
        ticket.request.on_event(event)
    except Exception:
        log.exception("a listener failed; its request is cancelled")
        ticket.cancelled = True


def _batch(chunks: list[Chunk]) -> Batch:
    """The engine's view of a step. Page tables are handed over as they are, not copied."""
    batch = Batch()
    scores = any(chunk.ticket.request.score for chunk in chunks)
    targets = array("i")
    for index, chunk in enumerate(chunks):
        tokens, n = chunk.ticket.tokens, chunk.n_rows
        score = chunk.ticket.request.score
        batch.tokens.extend(tokens[chunk.start : chunk.end])
        batch.positions.extend(range(chunk.start, chunk.end))
        batch.sequences.extend([index] * n)
        batch.flags.extend([ROW_SCORE if score else ROW_NONE] * n)
        if chunk.wants_logits:
            batch.flags[-1] = ROW_LOGITS
        if scores:
            targets.extend(tokens[chunk.start + 1 : chunk.end + 1] if score else [0] * n)
        batch.page_tables.append(chunk.pages.pages)
    batch.targets = targets if scores else None
    return batch


def _order(ticket: Ticket) -> int:
    return ticket.order


def _n_pages(n_tokens: int) -> int:
    return -(-n_tokens // PAGE_TOKENS)


def _n_missing(ticket: Ticket, pages: SequencePages) -> int:
    """Pages that the rows known so far still need."""
    return max(0, _n_pages(ticket.n_rows_total) - len(pages.pages))
