"""The engine thread: the one thread that computes, and everything that others may ask of it.

Owns the scheduler, the page table and, while it runs, the engine: nobody else calls them. Other threads put things
into an inbox and go on at once; answers come as events, called on this thread. After each step `on_step_end` is
called, so that the daemon can send the tokens of one step together.

    start → (drain inbox, step, on_step_end)* → stop: refuse, finish or fail what is there, write what is unsaved, end
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from colibri.daemon.kv_types import Engine
from colibri.daemon.pages import PageTable
from colibri.daemon.scheduler import Limits, Request, Scheduler, Ticket
from colibri.protocol.errors import ColibriError, InternalError, ShuttingDown

log = logging.getLogger(__name__)

T = TypeVar("T")

# A pause in the work as short as this is the moment to write tails: long enough that two turns of a busy client do not
# each write one, short enough that a person typing has the last turn on disk before the next.
IDLE_S = 0.25
# How soon pages that the writer did not take are offered again.
RETRY_S = 0.25
# What shutting down may take to write unsaved pages; they are a cache, so no reason to hang.
SAVE_TIMEOUT_S = 10.0


SHUTTING_DOWN = "the daemon is shutting down"


def _nothing() -> None: ...


class EngineThread:
    """Runs a scheduler on its own thread. Every method may be called from any thread, before, during and after."""

    def __init__(
        self,
        engine: Engine,
        pages: PageTable,
        scheduler: Scheduler,
        *,
        on_step_end: Callable[[], None] = _nothing,
        idle_s: float = IDLE_S,
        save_timeout_s: float = SAVE_TIMEOUT_S,
    ) -> None:
        self._engine = engine
        self._pages = pages
        self._scheduler = scheduler
        self._on_step_end = on_step_end
        self._idle_s = idle_s
        self._save_timeout_s = save_timeout_s
        self._inbox: deque[Callable[[], None]] = deque()
        self._n_unqueued = 0  # submitted, and still in the inbox
        # Over the inbox's end: nothing gets in once the thread has looked for the last time.
        self._lock = threading.Lock()
        self._last_step_s = time.monotonic()
        self._wake = threading.Event()
        self._stopping = False
        self._draining = True
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="colibri-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def limits(self) -> Limits:
        return self._scheduler.limits

    def check(self, request: Request) -> None:
        """Raises what `submit` would, queueing nothing: InvalidRequest, PromptTooLong, CapacityExceeded, Overloaded,
        ShuttingDown."""
        if self._stopping:
            raise ShuttingDown(SHUTTING_DOWN)
        self._scheduler.check(request)
        self._scheduler.check_queue(self._scheduler.n_waiting + self._n_unqueued)

    def submit(self, request: Request) -> Ticket:
        """Queues a request and returns at once. Raises what `check` raises; after that all comes as events, in a rare
        race also Overloaded and ShuttingDown."""
        self.check(request)
        ticket = self._scheduler.ticket(request)
        with self._lock:
            if self._stopping:
                raise ShuttingDown(SHUTTING_DOWN)
            self._n_unqueued += 1
            self._inbox.append(lambda: self._enqueue(ticket))
        self._wake.set()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Ends a request soon, a prompt being computed at the next layer; nothing happens if it has ended."""
        self._scheduler.cancel(ticket)
        if self._scheduler.is_prefilling(ticket):
            self._engine.cancel()
        self._wake.set()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Runs `function` on the engine thread, between steps; ShuttingDown in the future if that is too late."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                future.set_exception(ShuttingDown(SHUTTING_DOWN))
            else:
                self._inbox.append(lambda: _resolve(future, function))
        self._wake.set()
        return future

    def stop(self, *, drain: bool, timeout_s: float | None = None) -> bool:
        """Takes no more requests, finishes those it has (`drain`) or fails them with ShuttingDown, saves, and ends.
        Waits at most `timeout_s`; whether the thread has ended. A second call may hurry a draining one.
        """
        with self._lock:
            self._stopping = True
            self._draining = self._draining and drain
        self._wake.set()
        if self._thread.ident is None:  # never started, or it would end at once
            self._thread.start()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # -- on the engine thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not (self._stopping and not (self._draining and self._has_work)):
                self._wake.clear()
                self._empty_inbox()
                if not self._step():
                    self._rest()
        except Exception:
            log.exception("the engine thread ends by a bug")
        finally:  # nobody may wait for answers that will not come
            self._shut_down()

    @property
    def _has_work(self) -> bool:
        return bool(self._inbox) or self._scheduler.has_work

    def _empty_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _enqueue(self, ticket: Ticket) -> None:
        with self._lock:
            self._n_unqueued -= 1
        try:
            self._scheduler.enqueue(ticket)
        except ColibriError as error:
            self._scheduler.refuse(ticket, error)
            self._end_step()

    def _step(self) -> bool:
        """One step of the scheduler. A bug there ends the requests at hand, not the daemon."""
        try:
            worked = self._scheduler.step()
        except Exception as error:
            log.exception("a step failed; its requests are ended")
            self._scheduler.fail_all(InternalError(f"a step failed: {error}"))
            worked = True
        if worked:
            self._last_step_s = time.monotonic()
            self._end_step()
        return worked

    def _end_step(self) -> None:
        try:
            self._on_step_end()
        except Exception:  # the listener's trouble, a closed event loop for one; the requests find out by themselves
            log.exception("the end of a step could not be told")

    def _rest(self) -> None:
        """Waits for something to do. When no step has run for a moment, however often somebody asked for figures
        meanwhile, tails are written too."""
        idle_in_s = self._last_step_s + self._idle_s - time.monotonic()
        self._pages.write_behind(tails=idle_in_s <= 0)
        unfinished = self._pages.has_unsaved or self._pages.is_writing
        self._wake.wait((idle_in_s if idle_in_s > 0 else RETRY_S) if unfinished else None)

    def _shut_down(self) -> None:
        with self._lock:
            self._stopping = self._closed = True
        self._empty_inbox()
        self._scheduler.fail_all(ShuttingDown(SHUTTING_DOWN))
        self._end_step()
        if not self._pages.close(self._save_timeout_s):
            log.warning("not all KV pages could be saved; they will be computed again")


def _resolve(future: Future[T], function: Callable[[], T]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)
