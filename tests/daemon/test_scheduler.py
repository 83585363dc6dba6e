"""The scheduler: one text whatever happens around it, everything given back, and every limit answered.

Every step of every test is followed by the page table's check_integrity (scheduler_rig).
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from colibri.daemon import pages
from colibri.daemon.scheduler import Event, Finished, Limits, Progress, Scored, Started, Token
from colibri.protocol.errors import (
    CapacityExceeded,
    InternalError,
    InvalidRequest,
    NumericError,
    Overloaded,
    PromptTooLong,
    ShuttingDown,
)
from support.fake_engine import FakeNativeError, MemoryPageStore, NumericFailure, Sampling
from support.scheduler_rig import REFERENCE, Call, Rig, expected, tokens_of

DRAWN = Sampling(temperature=0.8, seed=11)
PENALIZED = Sampling(temperature=0.8, seed=11, repetition_penalty=1.2)


# -- one text --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [Sampling(), DRAWN, PENALIZED], ids=["greedy", "drawn", "penalized"])
def test_a_request_alone_gives_the_reference_text(sampling: Sampling) -> None:
    call = Rig().complete(tokens_of(1, 50), 40, sampling=sampling)
    assert call.text == expected(call.prompt, 40, sampling)
    assert call.done.reason == "length"


@pytest.mark.parametrize("sampling", [Sampling(), DRAWN, PENALIZED], ids=["greedy", "drawn", "penalized"])
def test_company_changes_nothing(sampling: Sampling) -> None:
    rig = Rig()
    calls = [rig.submit(tokens_of(seed, 5 + 13 * seed), 30 - seed, sampling=sampling) for seed in range(12)]
    rig.run()
    for call in calls:
        assert call.text == expected(call.prompt, len(call.text), sampling)


@pytest.mark.parametrize("rows", [1, 7, 32, 512])
def test_chunks_of_any_size_give_the_same_text(rows: int) -> None:
    call = Rig(max_step_rows=rows).complete(tokens_of(3, 150))
    assert call.text == expected(call.prompt)


def test_a_small_pool_sets_requests_back_and_changes_nothing() -> None:
    rig = Rig(n_pages=12)
    calls = [rig.submit(tokens_of(seed, 40 + seed), 120) for seed in range(6)]
    rig.run()
    assert rig.scheduler.n_preempted > 0
    for call in calls:
        assert call.text == expected(call.prompt, 120)


def test_a_text_is_the_same_while_another_queues_and_disappears() -> None:
    rig = Rig(max_batch_size=1)
    mine = rig.submit(tokens_of(1, 60), 30)
    rig.step()
    other = rig.submit(tokens_of(2, 60), 30)
    rig.step()
    rig.scheduler.cancel(other.ticket)
    rig.run()
    assert mine.text == expected(mine.prompt, 30)
    assert other.events == [other.done]
    assert other.done.reason == "cancelled"


@pytest.mark.parametrize("seed", range(3))
def test_a_random_day_gives_every_request_its_reference_text(seed: int) -> None:
    """Arrivals, cancels, shared beginnings, scores, a small pool, a store with faults, restarts in between."""
    chance = random.Random(seed)
    store = MemoryPageStore()
    for _ in range(3):
        rig = Rig(
            n_pages=chance.randint(10, 24),
            store=store,
            write_queue_bytes=chance.choice([1, 4000, 1 << 20]),
            max_step_rows=chance.choice([3, 16, 64]),
            max_batch_size=chance.randint(1, 6),
            max_logits=chance.randint(1, 6),
            restore_pages_per_step=chance.randint(1, 4),
        )
        for _ in range(150):
            _random_event(chance, rig, store)
            rig.step()
        rig.run()
        for call in rig.calls:
            _check_random_call(call)
        store.fail_writes = store.fail_reads = False
        rig.pages.close(timeout_s=5)


def _random_event(chance: random.Random, rig: Rig, store: MemoryPageStore) -> None:
    kind = chance.random()
    if kind < 0.25:
        prompt = tokens_of(chance.randint(1, 3), chance.randint(1, 120))
        if chance.random() < 0.3:
            prompt[chance.randrange(len(prompt))] = 999
        score = chance.random() < 0.2
        rig.submit(prompt, chance.randint(1, 60), sampling=chance.choice([Sampling(), DRAWN, PENALIZED]), score=score)
    elif kind < 0.30 and rig.calls:
        rig.scheduler.cancel(chance.choice(rig.calls).ticket)
    elif kind < 0.33:
        store.fail_writes = not store.fail_writes
    elif kind < 0.36:
        store.fail_reads = not store.fail_reads
    elif kind < 0.40 and store.pages:
        store.corrupt(chance.randrange(len(store.pages)))


def _check_random_call(call: Call) -> None:
    request = call.ticket.request
    assert call.error is None
    if request.score:
        assert [e.logprobs for e in call.events if isinstance(e, Scored)] in ([], [tuple(REFERENCE.score(call.prompt))])
    else:
        assert call.text == expected(call.prompt, len(call.text), request.sampling)
        assert call.done.reason == ("length" if len(call.text) == request.max_tokens else "cancelled")


# -- the cache -------------------------------------------------------------------------------------------------------


def test_the_same_prompt_again_computes_its_last_token_only() -> None:
    rig = Rig()
    first = rig.complete(tokens_of(1, 100))
    rows = rig.engine.n_rows
    again = rig.complete(tokens_of(1, 100))
    assert again.cached == 99
    assert rig.engine.n_rows - rows == 1 + len(again.text) - 1
    assert again.text == first.text


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 63, 64, 65, 96])
def test_around_page_borders_all_but_the_last_token_is_cached(length: int) -> None:
    rig = Rig()
    rig.complete(tokens_of(1, length), 40)
    again = rig.complete(tokens_of(1, length), 40)
    assert again.cached == length - 1
    assert again.text == expected(again.prompt, 40)


def test_a_next_turn_computes_only_what_is_new() -> None:
    rig = Rig()
    first = rig.complete(tokens_of(1, 45), 20)
    history = first.prompt + first.text
    second = rig.complete([*history, 7, 8, 9])
    assert second.cached == len(history) - 1  # the last token drawn was never computed
    assert second.text == expected(second.prompt)


def test_a_fork_in_the_middle_of_a_page_keeps_the_common_part() -> None:
    rig = Rig()
    trunk = tokens_of(1, 80)
    rig.complete(trunk)
    fork = rig.complete([*trunk[:41], 5, *trunk[42:]])
    assert fork.cached == 41
    assert fork.text == expected(fork.prompt)
    assert rig.complete(trunk).text == expected(trunk)


def test_requests_share_the_pages_of_a_common_beginning() -> None:
    rig = Rig(n_pages=16)
    system = tokens_of(1, 320)  # ten pages; two copies would not fit
    rig.complete(system, 1)
    calls = [rig.submit([*system, seed], 30) for seed in range(3)]
    rig.run()
    assert [call.cached for call in calls] == [320] * 3
    assert rig.scheduler.n_preempted == 0
    assert rig.pages.counters.evicted == 0
    for call in calls:
        assert call.text == expected(call.prompt, 30)


def test_a_beginning_that_many_ask_for_at_once_is_computed_once() -> None:
    rig = Rig(max_step_rows=50)
    calls = [rig.submit([*tokens_of(1, 96), seed], 4) for seed in range(4)]
    rig.run()
    assert rig.engine.n_rows == 96 + 4 * (1 + 3)
    assert [call.cached for call in calls] == [0, 96, 96, 96]
    for call in calls:
        assert call.text == expected(call.prompt, 4)


def test_who_waits_for_the_beginning_of_a_cancelled_request_computes_the_rest() -> None:
    rig = Rig(max_step_rows=40)
    first, second = rig.submit(tokens_of(1, 200)), rig.submit([*tokens_of(1, 150), 5])
    rig.step()
    rig.step()
    rig.scheduler.cancel(first.ticket)
    rig.run()
    assert second.cached == 80
    assert second.text == expected(second.prompt)


def test_after_a_restart_the_whole_history_comes_from_the_store() -> None:
    store = MemoryPageStore()
    rig = Rig(store=store)
    first = rig.complete(tokens_of(1, 150), 30)
    rig.close()
    history = first.prompt + first.text
    rig = Rig(store=store)
    second = rig.complete([*history, 3])
    assert second.cached == len(history) - 1
    assert second.text == expected(second.prompt)
    assert rig.engine.n_rows == 2 + len(second.text) - 1


def test_after_a_kill_at_most_a_tail_is_computed_again() -> None:
    store = MemoryPageStore()
    rig = Rig(store=store)
    first = rig.complete(tokens_of(1, 150), 30)
    rig.pages.flush(timeout_s=10)  # full pages reached the disk; tails did not, and nothing is closed
    history = first.prompt + first.text
    second = Rig(store=store).complete([*history, 3])
    assert second.cached == (len(history) - 1) // 32 * 32
    assert len(history) - second.cached <= 32
    assert second.text == expected(second.prompt)


def test_evicted_pages_come_back_from_the_store() -> None:
    rig = Rig(n_pages=8, store=MemoryPageStore())
    first = rig.complete(tokens_of(1, 100), 20)
    rig.complete(tokens_of(2, 200), 20)  # takes nearly every page
    rig.pages.flush(timeout_s=10)
    again = rig.complete(tokens_of(1, 100), 20)
    assert rig.pages.counters.disk_hits > 0
    assert again.cached == 99
    assert again.text == first.text


class HeldStore(MemoryPageStore):
    """Stops in the middle of a batch until it is told to go on; a page is visible when it is written."""

    def __init__(self) -> None:
        super().__init__()
        self.holds_after = 2
        self.in_the_middle, self.may_go_on = threading.Event(), threading.Event()

    def write(self, pages: Sequence[Any]) -> None:
        super().write(pages[: self.holds_after])
        self.in_the_middle.set()
        assert self.may_go_on.wait(60)
        super().write(pages[self.holds_after :])


def test_a_session_that_is_resumed_while_its_pages_are_being_written_says_the_same() -> None:
    """S5: a read in the middle of a spill, by the process that spills and by one that comes after its death."""
    store = HeldStore()
    rig = Rig(n_pages=16, store=store)
    first = rig.complete(tokens_of(1, 200), 20)
    assert store.in_the_middle.wait(60)
    assert rig.complete(tokens_of(2, 300), 10).text == expected(tokens_of(2, 300), 10)  # takes the room of the first
    again = rig.complete(tokens_of(1, 200), 20)
    assert again.text == first.text == expected(tokens_of(1, 200), 20)
    other = Rig(store=store)  # reads what is there of the spill that is still under way
    assert other.complete(tokens_of(1, 200), 20).text == first.text
    store.may_go_on.set()
    other.close()
    rig.close()


def test_restoring_is_spread_over_steps_and_decoding_goes_on() -> None:
    store = MemoryPageStore()
    rig = Rig(store=store)
    rig.complete(tokens_of(1, 320), 1)
    rig.close()
    rig = Rig(store=store, restore_pages_per_step=2)
    decoding = rig.submit(tokens_of(2, 5), 50)
    rig.step()
    restored = rig.submit(tokens_of(1, 320), 5)
    before = len(decoding.text)
    for n in range(1, 5):
        rig.step()
        assert len(decoding.text) == before + n
        assert store.n_reads == 2 * n
    rig.run()
    assert restored.cached == 319
    assert restored.text == expected(restored.prompt, 5)


def test_a_damaged_page_is_dropped_once_counted_and_computed_again() -> None:
    store = MemoryPageStore()
    rig = Rig(store=store)
    first = rig.complete(tokens_of(1, 150), 20)
    rig.close()
    bad = store.corrupt(2)
    rig = Rig(store=store)
    again = rig.complete(tokens_of(1, 150), 20)
    other = rig.complete(tokens_of(2, 150), 20)
    assert again.cached == 64
    assert again.text == first.text
    assert other.text == expected(other.prompt, 20)
    assert rig.pages.counters.bad == 1
    assert store.dropped == [bad.id]
    rig.close()
    healed = Rig(store=store).complete(tokens_of(1, 150), 20)
    assert healed.cached == 149
    assert healed.text == first.text


def test_one_failure_of_the_engine_on_a_restored_page_costs_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryPageStore()
    rig = Rig(store=store)
    first = rig.complete(tokens_of(1, 150), 20)
    rig.close()
    rig = Rig(store=store)
    load, failures = rig.engine.kv_load, iter([FakeNativeError("out of luck")])

    def fail_once(*args: Any) -> None:
        for failure in failures:
            raise failure
        load(*args)

    monkeypatch.setattr(rig.engine, "kv_load", fail_once)
    assert rig.complete(tokens_of(1, 150), 20).text == first.text
    assert rig.pages.counters.bad == 1
    rig.close()
    assert Rig(store=store).complete(tokens_of(1, 150), 20).cached == 149


def test_a_store_that_cannot_write_never_stalls_and_is_counted() -> None:
    store = MemoryPageStore()
    store.fail_writes = True
    rig = Rig(n_pages=8, store=store)
    for seed in range(4):
        assert rig.complete(tokens_of(seed, 150), 20).text == expected(tokens_of(seed, 150), 20)
    rig.pages.flush(timeout_s=10)
    stats = rig.pages.stats()
    assert stats["write_failures"] > 0
    assert stats["dropped"] > 0
    assert stats["written"] == 0


def test_a_store_that_cannot_read_is_an_empty_one() -> None:
    store = MemoryPageStore()
    rig = Rig(store=store)
    rig.complete(tokens_of(1, 100))
    rig.close()
    store.fail_reads = True
    rig = Rig(store=store)
    call = rig.complete(tokens_of(1, 100))
    assert call.cached == 0
    assert call.text == expected(call.prompt)
    assert rig.pages.counters.store_errors == 1


@pytest.mark.parametrize("restart", [False, True])
def test_equal_hashes_do_not_serve_foreign_tokens(monkeypatch: pytest.MonkeyPatch, restart: bool) -> None:
    real = pages.page_id
    monkeypatch.setattr(pages, "page_id", lambda key, parent, tokens: real(key, b"", ())[:1] * 16)
    store = MemoryPageStore()
    rig = Rig(store=store)
    trunk = tokens_of(1, 64)
    for beginning in (3, 4, 5):  # the second pages are equal, the first ones differ, all ids are the same
        if restart:
            rig.close()
            rig = Rig(store=store)
        call = rig.complete([beginning, *trunk[1:], 9])
        assert call.text == expected(call.prompt)
        assert call.cached == 0


def test_equal_hashes_in_ram_leave_nothing_foreign_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    real = pages.page_id
    monkeypatch.setattr(pages, "page_id", lambda key, parent, tokens: real(key, parent, [*tokens][1:]))
    store = MemoryPageStore()
    trunk = tokens_of(1, 100)
    rig = Rig(store=store)
    store.fail_reads = True  # so that only RAM can tell
    rig.complete([3, *trunk[1:]])
    rig.complete([4, *trunk[1:64]], 1)
    assert rig.pages.counters.collisions > 0
    rig.close()
    store.fail_reads = False
    for beginning in (3, 4):
        call = Rig(store=store).complete([beginning, *trunk[1:]])
        assert call.text == expected(call.prompt)


def test_two_beginnings_with_the_same_hash_do_not_share_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    real = pages.page_id

    def forced(key: bytes, parent: bytes, tokens: Any) -> bytes:
        return real(key, parent, (0, *tokens[1:])) if len(tokens) else real(key, parent, tokens)

    monkeypatch.setattr(pages, "page_id", forced)  # blind to the first token of a page
    store = MemoryPageStore()
    trunk = tokens_of(1, 100)
    for beginning in (3, 4):
        rig = Rig(store=store)
        call = rig.complete([beginning, *trunk[1:]])
        assert call.cached == 0
        assert call.text == expected(call.prompt)
        rig.close()
    again = Rig(store=store).complete([3, *trunk[1:]])
    assert again.cached == 99
    assert again.text == expected(again.prompt)


# -- limits ----------------------------------------------------------------------------------------------------------


def test_a_full_queue_is_refused_with_a_time_to_come_back() -> None:
    rig = Rig(max_batch_size=1, max_queue=2)
    rig.submit(tokens_of(1, 5))
    rig.step()
    for seed in (2, 3):
        rig.submit(tokens_of(seed, 5))
    with pytest.raises(Overloaded) as refusal:
        rig.submit(tokens_of(4, 5))
    assert refusal.value.extra["retry_after_s"] > 0
    rig.run()
    assert rig.complete(tokens_of(4, 5)).text == expected(tokens_of(4, 5))


def test_a_sequence_larger_than_the_pool_is_refused_with_figures() -> None:
    rig = Rig(n_pages=4)
    with pytest.raises(CapacityExceeded) as refusal:
        rig.submit(tokens_of(1, 100), 30)
    assert refusal.value.extra == {
        "needed_bytes": 5 * rig.engine.page_bytes,
        "available_bytes": 4 * rig.engine.page_bytes,
    }
    assert rig.complete(tokens_of(1, 100), 29).done.reason == "length"  # 128 positions are computed


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers() -> None:
    with pytest.raises(PromptTooLong, match=r"100 tokens of prompt and 30 of reply exceed the context of 129"):
        Rig(max_context=129).submit(tokens_of(1, 100), 30)


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "where"),
    [([], 1, "tokens"), ([1000], 1, "tokens"), ([-1], 1, "tokens"), ([1], 0, "max_tokens")],
)
def test_a_senseless_request_is_refused_by_field(tokens: list[int], max_tokens: int, where: str) -> None:
    rig = Rig()
    with pytest.raises(InvalidRequest) as refusal:
        rig.submit(tokens, max_tokens)
    assert refusal.value.where == where
    assert not rig.scheduler.has_work


def test_limits_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="max_batch_size"):
        Limits(vocabulary=10, max_context=10, max_batch_size=0)


def test_no_more_than_max_batch_size_run_and_the_first_come_first() -> None:
    rig = Rig(max_batch_size=2)
    calls = [rig.submit(tokens_of(seed, 5), 4) for seed in range(5)]
    started: list[int] = []
    while rig.step():
        assert rig.scheduler.n_running <= 2
        started += [i for i, call in enumerate(calls) if call.events and i not in started]
    assert started == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("max_logits", [1, 3])
def test_more_sequences_than_logits_take_turns(max_logits: int) -> None:
    rig = Rig(max_logits=max_logits, max_batch_size=8)
    calls = [rig.submit(tokens_of(seed, 10), 12) for seed in range(8)]
    while rig.step():
        lengths = [len(call.text) for call in calls if not call.ended]
        assert max(lengths, default=0) - min(lengths, default=0) <= 8 // max_logits + 1
    for call in calls:
        assert call.text == expected(call.prompt, 12)


def test_a_decoding_sequence_gets_a_token_in_every_step_beside_a_long_prompt() -> None:
    rig = Rig(max_step_rows=16)
    decoding = rig.submit(tokens_of(1, 3), 60)
    rig.step()
    rig.submit(tokens_of(2, 500), 1)
    for n in range(2, 30):
        rig.step()
        assert len(decoding.text) == n
    rig.run()


def test_prompts_share_the_rows_of_a_step() -> None:
    rig = Rig(max_step_rows=60)
    short, *long = [rig.submit(tokens_of(seed, n), 1) for seed, n in ((1, 10), (2, 200), (3, 200))]
    rig.step()
    assert short.text
    assert [call.progress for call in long] == [[25], [25]]
    rig.run()


# -- ends ------------------------------------------------------------------------------------------------------------


def test_an_end_token_is_given_and_ends_the_text() -> None:
    text = expected(tokens_of(1, 20), 10)
    call = Rig().complete(tokens_of(1, 20), 10, end_tokens=frozenset({text[4]}))
    assert call.text == text[: text.index(text[4]) + 1]
    assert call.done.reason == "stop"


def test_the_events_come_in_order_and_the_counts_are_true() -> None:
    rig = Rig(max_step_rows=32)
    call = rig.complete(tokens_of(1, 70), 3)
    kinds = [type(event) for event in call.events]
    assert kinds == [Started, Progress, Progress, Progress, Token, Token, Token, Finished]
    assert call.progress == [32, 64, 70]
    assert vars_of(call.done.usage) == (70, 0, 3)
    assert vars_of(rig.complete(tokens_of(1, 70), 3).done.usage) == (70, 69, 3)


def vars_of(usage: Any) -> tuple[int, int, int]:
    return usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens


def test_timings_add_up() -> None:
    rig = Rig(max_batch_size=1, max_step_rows=32)
    rig.submit(tokens_of(1, 5), 3)
    call = rig.submit(tokens_of(2, 64), 3)
    while rig.step():
        rig.now += 1
    timings = call.done.timings
    assert (timings.queue_s, timings.load_s, timings.prefill_s, timings.decode_s) == (3, 0, 1, 2)


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 9])
def test_cancel_frees_everything_in_queue_prefill_and_decode(steps: int) -> None:
    rig = Rig(max_batch_size=1, max_step_rows=20)
    first = rig.submit(tokens_of(1, 50), 8)
    second = rig.submit(tokens_of(2, 50), 8)
    for _ in range(steps):
        rig.step()
    rig.scheduler.cancel(first.ticket)
    rig.scheduler.cancel(first.ticket)
    rig.run()
    assert first.done.reason == "cancelled"
    assert first.text == expected(first.prompt, len(first.text))
    assert second.text == expected(second.prompt)


def test_pages_of_a_cancelled_prompt_are_kept() -> None:
    rig = Rig(max_step_rows=40)
    call = rig.submit(tokens_of(1, 200))
    rig.step()
    rig.step()
    rig.scheduler.cancel(call.ticket)
    rig.run()
    again = rig.complete(tokens_of(1, 200))
    assert again.cached == 80
    assert again.text == expected(again.prompt)


@pytest.mark.parametrize("running", [False, True])
def test_a_deadline_ends_a_request_that_waits_or_runs(running: bool) -> None:
    rig = Rig(max_batch_size=1)
    other = rig.submit(tokens_of(1, 5), 20)
    call = rig.submit(tokens_of(2, 5), 200, deadline=10.0)
    if running:
        rig.scheduler.cancel(other.ticket)
    rig.step()
    rig.step()
    rig.now = 10.0
    rig.run()
    assert call.done.reason == "deadline"
    assert bool(call.text) == running
    assert other.done.reason == ("cancelled" if running else "length")


def test_a_row_that_is_not_finite_fails_its_request_only() -> None:
    rig = Rig(max_step_rows=64)
    rig.engine.poison = {777}
    bad_prompt = [*tokens_of(1, 40), 777, *tokens_of(2, 20)]
    bad, good = rig.submit(bad_prompt), rig.submit(tokens_of(3, 50))
    rig.run()
    assert isinstance(bad.error, NumericError)
    assert "token 40" in str(bad.error)
    assert good.text == expected(good.prompt)
    rig.engine.poison = set()
    again = rig.complete(bad_prompt)
    assert again.cached == 40  # nothing of the failed row or behind it was kept
    assert again.text == expected(bad_prompt)


@pytest.mark.parametrize(
    ("failure", "error"), [(NumericFailure("nothing is allowed"), NumericError), (RuntimeError("a bug"), InternalError)]
)
def test_a_failing_draw_fails_its_request_only(
    monkeypatch: pytest.MonkeyPatch, failure: Exception, error: type[Exception]
) -> None:
    rig = Rig()
    sample = rig.engine.sample

    def fail_for_seed_13(i: int, sampling: Sampling) -> Any:
        if sampling.seed == 13:
            raise failure
        return sample(i, sampling)

    monkeypatch.setattr(rig.engine, "sample", fail_for_seed_13)
    bad, good = rig.submit(tokens_of(1, 5), sampling=Sampling(seed=13)), rig.submit(tokens_of(2, 5))
    rig.run()
    assert isinstance(bad.error, error)
    assert good.text == expected(good.prompt)


def test_a_batch_that_the_engine_refuses_fails_the_culprit_only() -> None:
    rig = Rig()

    def refuse(batch: Any) -> None:
        if 666 in batch.tokens:
            raise FakeNativeError("no")

    rig.engine.before_forward = refuse
    bad, good = rig.submit([*tokens_of(1, 5), 666]), rig.submit(tokens_of(2, 50))
    rig.run()
    assert isinstance(bad.error, InternalError)
    assert good.text == expected(good.prompt)


def test_a_listener_that_raises_loses_its_request_only() -> None:
    rig = Rig()

    def raise_on_token(event: Event) -> None:
        if isinstance(event, Token):
            raise RuntimeError("the loop is closed")

    bad, good = rig.submit(tokens_of(1, 5)), rig.submit(tokens_of(2, 5))
    bad.ticket.request.on_event = lambda event: (bad.events.append(event), raise_on_token(event))
    rig.run()
    assert bad.done.reason == "cancelled"
    assert len(bad.text) == 1
    assert good.text == expected(good.prompt)


def test_a_listener_may_cancel_and_submit() -> None:
    rig = Rig()
    followers: list[Call] = []

    def follow(event: Event) -> None:
        if isinstance(event, Token):
            rig.scheduler.cancel(call.ticket)
            followers.append(rig.submit(tokens_of(2, 5)))

    call = rig.submit(tokens_of(1, 5))
    call.ticket.request.on_event = lambda event: (call.events.append(event), follow(event))
    rig.run()
    assert call.done.reason == "cancelled"
    assert [follower.text for follower in followers] == [expected(tokens_of(2, 5))]


def test_fail_all_ends_everything() -> None:
    rig = Rig(max_batch_size=1)
    calls = [rig.submit(tokens_of(seed, 5)) for seed in range(3)]
    rig.step()
    rig.scheduler.fail_all(ShuttingDown("bye"))
    assert all(isinstance(call.error, ShuttingDown) for call in calls)
    rig.run()


# -- scores ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 32, 33, 150])
@pytest.mark.parametrize("rows", [7, 512])
def test_a_score_gives_one_fewer_than_the_tokens(length: int, rows: int) -> None:
    call = Rig(max_step_rows=rows).complete(tokens_of(1, length), score=True)
    assert scored(call) == REFERENCE.score(call.prompt)
    assert call.done.reason == "stop"


def scored(call: Call) -> list[float]:
    return next(list(event.logprobs) for event in call.events if isinstance(event, Scored))


def test_a_score_is_computed_even_where_its_pages_are_cached() -> None:
    rig = Rig()
    rig.complete(tokens_of(1, 100))
    call = rig.complete(tokens_of(1, 100), score=True)
    assert call.cached == 0
    assert scored(call) == REFERENCE.score(call.prompt)


def test_scores_in_company_and_under_pressure_are_the_same() -> None:
    rig = Rig(n_pages=10, max_step_rows=3)
    texts = [rig.submit(tokens_of(seed, 30), 100) for seed in range(2)]
    scores = [rig.submit(tokens_of(seed, 100 + seed), score=True) for seed in range(2, 5)]
    rig.run()
    assert rig.scheduler.n_preempted > 0
    for call in scores:
        assert scored(call) == REFERENCE.score(call.prompt)
    for call in texts:
        assert call.text == expected(call.prompt, 100)
