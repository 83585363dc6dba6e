"""A scheduler on the fake engine, with everything checked after every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from colibri.daemon.pages import PageTable, numerics_key
from colibri.daemon.scheduler import (
    Event,
    Failed,
    Finished,
    Limits,
    Progress,
    Request,
    Scheduler,
    Started,
    Ticket,
    Token,
)
from support.fake_engine import FakeEngine, MemoryPageStore, Reference, Sampling

KEY = numerics_key(b"\x01" * 32, kv_format="f16", version=1)
VOCABULARY = 1000
REFERENCE = Reference(VOCABULARY)


def tokens_of(seed: int, n: int) -> list[int]:
    """A prompt of n tokens; the same seed gives the same beginning."""
    return [(seed * 7919 + i * i * 31 + i) % VOCABULARY for i in range(n)]


class Call:
    """One request and what came of it."""

    ticket: Ticket

    def __init__(self, prompt: Sequence[int]) -> None:
        self.prompt = list(prompt)
        self.events: list[Event] = []

    @property
    def text(self) -> list[int]:
        return [event.id for event in self.events if isinstance(event, Token)]

    @property
    def done(self) -> Finished | None:
        return next((event for event in self.events if isinstance(event, Finished)), None)

    @property
    def error(self) -> Exception | None:
        return next((event.error for event in self.events if isinstance(event, Failed)), None)

    @property
    def ended(self) -> bool:
        return self.done is not None or self.error is not None

    @property
    def cached(self) -> int:
        return next(event.cached_tokens for event in self.events if isinstance(event, Started))

    @property
    def progress(self) -> list[int]:
        return [event.prefilled for event in self.events if isinstance(event, Progress)]


class Rig:
    """Engine, page table and scheduler. `store` outlives a rig as a disk outlives a process."""

    def __init__(
        self,
        *,
        n_pages: int = 64,
        store: MemoryPageStore | None = None,
        write_queue_bytes: int = 1 << 20,
        **limits: Any,
    ) -> None:
        self.limits = Limits(**({"vocabulary": VOCABULARY, "max_context": 4096} | limits))
        self.engine = FakeEngine(
            n_pages=n_pages,
            vocabulary=VOCABULARY,
            max_rows=self.limits.max_step_rows,
            max_logits=self.limits.max_logits,
        )
        self.pages = PageTable(self.engine, n_pages=n_pages, key=KEY, store=store, write_queue_bytes=write_queue_bytes)
        self.engine.is_immutable = self.pages.is_immutable
        self.now = 0.0
        self.scheduler = Scheduler(self.engine, self.pages, self.limits, clock=lambda: self.now)
        self.calls: list[Call] = []

    def submit(self, prompt: Sequence[int], max_tokens: int = 8, **fields: Any) -> Call:
        call = Call(prompt)
        fields.setdefault("sampling", Sampling())
        request = Request(tokens=call.prompt, max_tokens=max_tokens, on_event=call.events.append, **fields)
        call.ticket = self.scheduler.submit(request)
        self.calls.append(call)
        return call

    def step(self) -> bool:
        worked = self.scheduler.step()
        self.pages.check_integrity()
        return worked

    def run(self, max_steps: int = 10_000) -> None:
        """Steps until nothing is left to do, then sees that everything was given back."""
        for _ in range(max_steps):
            if not self.step():
                break
        else:
            raise AssertionError(f"still at work after {max_steps} steps")
        assert all(call.ended for call in self.calls)
        assert self.pages.n_available == self.pages.n_pages

    def complete(self, prompt: Sequence[int], max_tokens: int = 8, **fields: Any) -> Call:
        """Submits and runs to the end."""
        call = self.submit(prompt, max_tokens, **fields)
        self.run()
        return call

    def close(self) -> None:
        assert self.pages.close(timeout_s=10)


def expected(prompt: Sequence[int], max_tokens: int = 8, sampling: Any = None) -> list[int]:
    return REFERENCE.generate(prompt, max_tokens, sampling)
