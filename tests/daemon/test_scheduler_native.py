"""Scheduler and page table on the real engine and the real store: law 1 as a client sees it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from colibri import native
from colibri.daemon import kv_types
from colibri.daemon.pages import PageTable, numerics_key
from colibri.daemon.scheduler import Event, Finished, Limits, Request, Scheduler, Scored, Started, Token
from colibri.kvstore import PageMeta, PageStore

GREEDY = native.Sampling()
WARM = native.Sampling(temperature=0.9, top_p=0.95, seed=7, repetition_penalty=1.1)


@pytest.fixture(scope="module")
def model(tiny_q8_model_path: Path) -> Iterator[native.Model]:
    with native.Model(tiny_q8_model_path) as model:
        yield model


@pytest.fixture(scope="module")
def prompt(model: native.Model) -> list[int]:
    return [(17 * i + i * i) % model.info.vocabulary for i in range(150)]


class Bench:
    """One context with its page table and scheduler; a process, as far as the store can tell."""

    def __init__(self, model: native.Model, context: native.Context, n_pages: int, store: PageStore | None) -> None:
        key = numerics_key(model.info.fingerprint, kv_format="f16", version=native.NUMERICS_VERSION)
        self.pages = PageTable(context, n_pages=n_pages, key=key, store=store)
        limits = Limits(vocabulary=model.info.vocabulary, max_context=1024, max_step_rows=64)
        self.scheduler = Scheduler(context, self.pages, limits)

    def submit(self, tokens: Sequence[int], max_tokens: int = 24, **fields: object) -> list[Event]:
        events: list[Event] = []
        fields = {"sampling": GREEDY} | fields
        self.scheduler.submit(Request(tokens=list(tokens), max_tokens=max_tokens, on_event=events.append, **fields))
        return events

    def run(self) -> None:
        while self.scheduler.step():
            self.pages.check_integrity()

    def complete(self, tokens: Sequence[int], max_tokens: int = 24, **fields: object) -> list[Event]:
        events = self.submit(tokens, max_tokens, **fields)
        self.run()
        assert isinstance(events[-1], Finished)
        return events


@contextmanager
def bench(model: native.Model, *, n_pages: int = 64, store: PageStore | None = None) -> Iterator[Bench]:
    with native.Context(model, n_pages=n_pages, max_rows=64, max_logits=8) as context:
        it = Bench(model, context, n_pages, store)
        yield it
        assert it.pages.close(timeout_s=60)


def drawn(events: list[Event]) -> list[tuple[int, float]]:
    return [(event.id, event.logprob) for event in events if isinstance(event, Token)]


def cached(events: list[Event]) -> int:
    return next(event.cached_tokens for event in events if isinstance(event, Started))


@pytest.fixture(scope="module", params=[GREEDY, WARM], ids=["greedy", "drawn"])
def sampling(request: pytest.FixtureRequest) -> native.Sampling:
    return request.param


@pytest.fixture(scope="module")
def alone(model: native.Model, prompt: list[int], sampling: native.Sampling) -> list[tuple[int, float]]:
    """Tokens and log-probabilities of an undisturbed, cold run."""
    with bench(model) as it:
        return drawn(it.complete(prompt, sampling=sampling))


def test_the_constants_are_those_of_the_engine() -> None:
    assert kv_types.PAGE_TOKENS == native.PAGE_TOKENS
    assert (kv_types.ROW_NONE, kv_types.ROW_LOGITS, kv_types.ROW_SCORE) == (
        native.ROW_NONE,
        native.ROW_LOGITS,
        native.ROW_SCORE,
    )
    assert native.Canceled.code == kv_types.E_CANCELED
    assert native.IOFailure.code == kv_types.E_IO
    assert native.NumericFailure.code == kv_types.E_NUMERIC


def test_greedy_text_is_what_infer_writes(model: native.Model, prompt: list[int]) -> None:
    with native.Context(model, n_pages=64, max_rows=64) as context:
        written = context.infer(prompt, 24)
    with bench(model) as it:
        events = it.complete(prompt, end_tokens=frozenset(model.info.end_tokens))
    assert [token for token, _ in drawn(events)] == written


def test_a_prompt_in_the_cache_gives_the_same_bits(
    model: native.Model, prompt: list[int], sampling: native.Sampling, alone: list[tuple[int, float]]
) -> None:
    with bench(model) as it:
        it.complete(prompt, sampling=sampling)
        again = it.complete(prompt, sampling=sampling)
    assert cached(again) == len(prompt) - 1
    assert drawn(again) == alone


def test_company_and_a_tight_pool_give_the_same_bits(
    model: native.Model, prompt: list[int], sampling: native.Sampling, alone: list[tuple[int, float]]
) -> None:
    with bench(model, n_pages=12) as it:
        others = [it.submit([*prompt[: 20 * n], n], 40, sampling=sampling) for n in range(1, 6)]
        mine = it.submit(prompt, sampling=sampling)
        it.run()
        assert it.scheduler.n_preempted + it.pages.counters.evicted > 0
    assert all(isinstance(events[-1], Finished) for events in others)
    assert drawn(mine) == alone


def test_restored_pages_give_the_same_bits(
    model: native.Model, prompt: list[int], sampling: native.Sampling, alone: list[tuple[int, float]], tmp_path: Path
) -> None:
    store = PageStore(tmp_path / "pages", low_water_bytes=0)
    with bench(model, store=store) as it:
        it.complete(prompt, sampling=sampling)
    store.close()
    store = PageStore(tmp_path / "pages", low_water_bytes=0)
    with bench(model, store=store) as it:
        restored = it.complete(prompt, sampling=sampling)
        assert it.pages.counters.disk_hits == 5
    store.close()
    assert cached(restored) == len(prompt) - 1
    assert drawn(restored) == alone


def test_a_damaged_page_is_refused_by_the_engine_and_computed_again(
    model: native.Model, prompt: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = PageStore(tmp_path / "pages", low_water_bytes=0)
    with bench(model, store=store) as it:
        first = it.complete(prompt)
    read = store.read

    def damage_the_third(meta: PageMeta) -> bytes:
        data = bytearray(read(meta))
        data[len(data) // 2] ^= 1 if meta.number == 3 else 0
        return bytes(data)

    monkeypatch.setattr(store, "read", damage_the_third)
    with bench(model, store=store) as it:
        again = it.complete(prompt)
        assert it.pages.counters.bad == 1
    store.close()
    assert cached(again) == 64
    assert drawn(again) == drawn(first)


def test_a_score_agrees_with_the_tokens_drawn(model: native.Model, prompt: list[int]) -> None:
    with bench(model) as it:
        tokens = drawn(it.complete(prompt))
        scored = it.complete(prompt + [token for token, _ in tokens], score=True)
    logprobs = next(event.logprobs for event in scored if isinstance(event, Scored))
    assert list(logprobs[len(prompt) - 1 :]) == [logprob for _, logprob in tokens]
