"""A call: asking for an end, and waiting for something unless the end comes first."""

from __future__ import annotations

import asyncio

import pytest

from colibri.daemon.call import Call
from colibri.daemon.completion import TurnOrder
from colibri.protocol import messages as wire
from colibri.protocol.errors import DeadlineExceeded, ShuttingDown


def call(deadline_s: float | None = None) -> Call:
    return Call(wire.Generate(prompt="x", deadline_s=deadline_s), lambda body: None)


async def answer() -> int:
    return 42


async def test_work_that_ends_first_gives_its_result() -> None:
    assert await call().unless_cancelled(answer()) == 42


async def test_cancelling_gives_the_work_up() -> None:
    given_up = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            given_up.set()

    ours = call()
    waiting = asyncio.ensure_future(ours.unless_cancelled(work()))
    await asyncio.sleep(0)
    ours.cancel()
    assert await waiting is None
    assert given_up.is_set()


async def test_work_that_fails_fails_the_waiting() -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await call().unless_cancelled(fail())


async def test_a_deadline_ends_the_waiting() -> None:
    with pytest.raises(DeadlineExceeded):
        await call(deadline_s=0.001).unless_cancelled(asyncio.Event().wait())


async def test_the_first_cause_counts() -> None:
    ours = call()
    ours.cancel()
    ours.cancel(ShuttingDown("late"))
    assert ours.cause is None


async def test_what_is_to_be_done_on_cancelling_is_done_once_even_if_told_late() -> None:
    ours, done = call(), []
    ours.cancel()
    ours.on_cancel(lambda: done.append(1))
    ours.cancel()
    assert done == [1]


# Turns of one session


async def take_turn(order: TurnOrder, name: str, ours: Call, log: list[str], label: str) -> None:
    async with order.turn("s", ours) as is_ours:
        log.append(f"{label} {'begins' if is_ours else 'gives way'}")
        if is_ours:
            for _ in range(3):
                await asyncio.sleep(0)
            log.append(f"{label} ends")


async def test_turns_run_one_after_another_as_they_came() -> None:
    order, log = TurnOrder(), []
    await asyncio.gather(*(take_turn(order, "s", call(), log, label) for label in "abc"))
    assert log == ["a begins", "a ends", "b begins", "b ends", "c begins", "c ends"]
    assert not order.is_busy("s")


async def test_a_waiting_turn_that_is_cancelled_gives_way() -> None:
    order, log = TurnOrder(), []
    calls = [call() for _ in "abc"]
    turns = [asyncio.ensure_future(take_turn(order, "s", c, log, label)) for c, label in zip(calls, "abc", strict=True)]
    await asyncio.sleep(0)
    calls[1].cancel()
    await asyncio.gather(*turns)
    assert "b gives way" in log
    assert log[-2:] == ["c begins", "c ends"]
    assert not order.is_busy("s")


@pytest.mark.parametrize("n_rounds", range(12))
async def test_cancelling_at_any_moment_leaves_the_order_free(n_rounds: int) -> None:
    order, log = TurnOrder(), []
    calls = [call() for _ in "abc"]
    turns = [asyncio.ensure_future(take_turn(order, "s", c, log, label)) for c, label in zip(calls, "abc", strict=True)]
    for _ in range(n_rounds):
        await asyncio.sleep(0)
    for ours in calls:
        ours.cancel()
    await asyncio.gather(*turns)
    assert not order.is_busy("s")
    await take_turn(order, "s", call(), log, "next")
    assert log[-1] == "next ends"
