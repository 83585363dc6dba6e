"""The scheduler: one text whatever happens around it, and everything given back."""

from __future__ import annotations

import pytest
from scheduler_rig import Rig, expected, tokens_of


def test_a_request_alone_gives_the_reference_text() -> None:
    call = Rig().complete(tokens_of(1, 50), 40)
    assert call.text == expected(call.prompt, 40)
    assert call.done.reason == "length"


def test_company_changes_nothing() -> None:
    rig = Rig()
    calls = [rig.submit(tokens_of(seed, 5 + 13 * seed), 30 - seed) for seed in range(12)]
    rig.run()
    for call in calls:
        assert call.text == expected(call.prompt, len(call.text))


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
