"""The engine thread: what other threads may ask of it, and how it ends. No test waits by the clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from colibri.daemon.engine import EngineThread
from colibri.daemon.scheduler import Event, Failed, Finished, Request, Ticket, Token
from colibri.protocol.errors import InternalError, InvalidRequest, Overloaded, ShuttingDown
from support.fake_engine import Canceled, MemoryPageStore, Sampling
from support.scheduler_rig import Rig, expected, tokens_of

# Long enough for the slowest machine; nothing waits so long unless it is broken.
PATIENCE_S = 60


class Listener:
    """Collects the events of one request, on the engine thread, and lets a test wait for them."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.ended = threading.Event()
        self.drew = threading.Event()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Token):
            self.drew.set()
        if isinstance(event, Finished | Failed):
            self.ended.set()

    @property
    def last(self) -> Event:
        assert self.ended.wait(PATIENCE_S), "the request never ended"
        return self.events[-1]

    @property
    def text(self) -> list[int]:
        assert self.ended.wait(PATIENCE_S), "the request never ended"
        return [event.id for event in self.events if isinstance(event, Token)]


class Running:
    """An engine thread over a rig. `gate`, while closed, holds up the next forward."""

    def __init__(self, *, idle_s: float = 0.01, **options: Any) -> None:
        self.rig = Rig(**options)
        self.gate = threading.Event()
        self.gate.set()
        self.in_forward = threading.Event()
        self.rig.engine.before_forward = self._before_forward
        self.n_step_ends = 0
        self.thread = EngineThread(
            self.rig.engine, self.rig.pages, self.rig.scheduler, on_step_end=self._on_step_end, idle_s=idle_s
        )
        self.thread.start()

    def _before_forward(self, batch: Any) -> None:
        self.in_forward.set()
        assert self.gate.wait(PATIENCE_S)

    def _on_step_end(self) -> None:
        self.n_step_ends += 1

    def submit(self, prompt: list[int], max_tokens: int = 8) -> tuple[Ticket, Listener]:
        listener = Listener()
        request = Request(tokens=prompt, max_tokens=max_tokens, sampling=Sampling(), on_event=listener)
        return self.thread.submit(request), listener

    def stop(self, *, drain: bool = True) -> None:
        self.gate.set()
        assert self.thread.stop(drain=drain, timeout_s=PATIENCE_S)


@pytest.fixture
def running() -> Iterator[Running]:
    running = Running(max_batch_size=2, max_queue=2)
    yield running
    running.stop(drain=False)
    running.rig.pages.check_integrity()
    assert running.rig.pages.n_available == running.rig.pages.n_pages


def test_requests_from_other_threads_are_answered(running: Running) -> None:
    listeners = [running.submit(tokens_of(seed, 40), 10)[1] for seed in range(2)]
    for seed, listener in enumerate(listeners):
        assert listener.text == expected(tokens_of(seed, 40), 10)


def test_the_events_of_a_step_are_followed_by_its_end(running: Running) -> None:
    _, listener = running.submit(tokens_of(1, 10), 5)
    assert listener.text
    assert running.thread.call(lambda: running.n_step_ends).result(PATIENCE_S) == 5


def test_a_bad_request_is_refused_at_once(running: Running) -> None:
    with pytest.raises(InvalidRequest):
        running.submit([])


def test_check_refuses_and_queues_nothing(running: Running) -> None:
    request = Request(tokens=[1], sampling=Sampling(), on_event=Listener())
    running.thread.check(request)
    request.tokens = [10**6]
    with pytest.raises(InvalidRequest):
        running.thread.check(request)
    assert running.thread.call(lambda: running.rig.scheduler.has_work).result(PATIENCE_S) is False


def test_a_full_queue_is_refused_while_a_step_is_under_way(running: Running) -> None:
    running.gate.clear()
    first = running.submit(tokens_of(1, 5))
    assert running.in_forward.wait(PATIENCE_S)
    others = [running.submit(tokens_of(seed, 5)) for seed in (2, 3)]
    with pytest.raises(Overloaded) as refusal:
        running.submit(tokens_of(4, 5))
    assert refusal.value.extra["retry_after_s"] >= 1
    running.gate.set()
    for _, listener in [first, *others]:
        assert isinstance(listener.last, Finished)


def test_cancel_interrupts_a_prompt_that_is_being_computed(running: Running) -> None:
    running.gate.clear()
    ticket, listener = running.submit(tokens_of(1, 100))
    assert running.in_forward.wait(PATIENCE_S)
    running.thread.cancel(ticket)
    assert running.rig.engine.n_cancels == 1
    running.gate.set()
    assert listener.last.reason == "cancelled"


def test_an_interrupted_forward_harms_nobody_else(running: Running) -> None:
    interrupted = threading.Event()

    def interrupt_once(batch: Any) -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise Canceled("canceled")

    running.rig.engine.before_forward = interrupt_once
    _, listener = running.submit(tokens_of(1, 100))
    assert listener.text == expected(tokens_of(1, 100))
    assert interrupted.is_set()


def test_cancel_during_decode_does_not_interrupt_the_step(running: Running) -> None:
    ticket, listener = running.submit(tokens_of(1, 3), 2000)
    assert listener.drew.wait(PATIENCE_S)
    running.thread.cancel(ticket)
    assert listener.last.reason == "cancelled"
    assert running.rig.engine.n_cancels == 0
    assert listener.text == expected(tokens_of(1, 3), len(listener.text))


def test_cancel_after_the_end_does_nothing(running: Running) -> None:
    ticket, listener = running.submit(tokens_of(1, 3), 1)
    assert listener.last.reason == "length"
    running.thread.cancel(ticket)
    assert running.submit(tokens_of(2, 3), 1)[1].last.reason == "length"


def test_call_runs_on_the_engine_thread_and_returns_or_raises(running: Running) -> None:
    assert running.thread.call(lambda: threading.current_thread().name).result(PATIENCE_S) == "colibri-engine"
    with pytest.raises(ZeroDivisionError):
        running.thread.call(lambda: 1 // 0).result(PATIENCE_S)


def test_a_bug_in_a_step_ends_its_requests_only(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = running.rig.scheduler._plan
    monkeypatch.setattr(running.rig.scheduler, "_plan", lambda: 1 // 0)
    _, broken = running.submit(tokens_of(1, 5))
    assert isinstance(broken.last.error, InternalError)
    monkeypatch.setattr(running.rig.scheduler, "_plan", plan)
    assert running.submit(tokens_of(2, 5))[1].text == expected(tokens_of(2, 5))


def test_a_listener_that_fails_at_the_end_of_a_step_stops_nothing() -> None:
    running = Running()
    running.thread._on_step_end = lambda: 1 // 0
    assert running.submit(tokens_of(1, 5))[1].text == expected(tokens_of(1, 5))
    running.stop()


def test_should_the_thread_end_by_a_bug_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    running = Running()
    running.gate.clear()
    _, listener = running.submit(tokens_of(1, 5))
    assert running.in_forward.wait(PATIENCE_S)
    monkeypatch.setattr(running.thread, "_step", lambda: 1 // 0)
    running.gate.set()
    assert isinstance(listener.last.error, ShuttingDown)
    running.stop()
    with pytest.raises(ShuttingDown):
        running.submit(tokens_of(2, 5))


def test_draining_finishes_what_is_there_and_refuses_the_rest() -> None:
    running = Running(max_batch_size=1)
    running.gate.clear()
    listeners = [running.submit(tokens_of(seed, 5))[1] for seed in range(3)]
    assert running.in_forward.wait(PATIENCE_S)
    assert not running.thread.stop(drain=True, timeout_s=0)
    with pytest.raises(ShuttingDown):
        running.submit(tokens_of(9, 5))
    running.stop(drain=True)
    for seed, listener in enumerate(listeners):
        assert listener.text == expected(tokens_of(seed, 5))


def test_stopping_without_draining_fails_what_is_there() -> None:
    running = Running(max_batch_size=1)
    running.gate.clear()
    listeners = [running.submit(tokens_of(seed, 5), 500)[1] for seed in range(3)]
    assert running.in_forward.wait(PATIENCE_S)
    assert not running.thread.stop(drain=True, timeout_s=0)
    running.stop(drain=False)
    assert all(isinstance(listener.last.error, ShuttingDown) for listener in listeners)
    with pytest.raises(ShuttingDown):
        running.thread.call(lambda: None).result(PATIENCE_S)


def test_a_thread_that_was_never_started_stops_too() -> None:
    rig = Rig()
    thread = EngineThread(rig.engine, rig.pages, rig.scheduler)
    listener = Listener()
    thread.submit(Request(tokens=[1], sampling=Sampling(), on_event=listener))
    assert thread.stop(drain=False, timeout_s=PATIENCE_S)
    assert isinstance(listener.last.error, ShuttingDown)


def test_stopping_saves_full_pages_and_tails() -> None:
    store = MemoryPageStore()
    running = Running(store=store, idle_s=PATIENCE_S)
    _, listener = running.submit(tokens_of(1, 70), 10)
    history = tokens_of(1, 70) + listener.text
    running.stop()
    again = Rig(store=store).complete([*history, 5, 6])
    assert again.cached == len(history) - 1
    assert again.text == expected(again.prompt)


def tail_watch(store: MemoryPageStore) -> threading.Event:
    """An event that is set when the store is given a tail."""
    wrote_tail = threading.Event()
    write = store.write

    def write_and_tell(pages: Any) -> None:
        write(pages)
        if any(len(page.tokens) < 32 for page in pages):
            wrote_tail.set()

    store.write = write_and_tell
    return wrote_tail


def test_tails_are_saved_when_idle() -> None:
    store = MemoryPageStore()
    wrote_tail = tail_watch(store)
    running = Running(store=store, idle_s=0.0)
    running.submit(tokens_of(1, 40), 3)
    assert wrote_tail.wait(PATIENCE_S)
    running.stop()


def test_asking_for_figures_all_the_time_does_not_keep_tails_from_being_saved() -> None:
    store = MemoryPageStore()
    wrote_tail = tail_watch(store)
    running = Running(store=store, idle_s=0.2)
    running.submit(tokens_of(1, 40), 3)
    deadline = time.monotonic() + PATIENCE_S
    while not wrote_tail.is_set() and time.monotonic() < deadline:
        running.thread.call(running.rig.pages.stats).result(PATIENCE_S)
    assert wrote_tail.is_set()
    running.stop()
