"""Sampling through the socket: every parameter reaches the engine; a seed gives the same text in any circumstances."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from colibri.protocol import messages as wire
from support.daemon import DaemonProcess, Reply, WireClient

# Neither of the tiny models' end tokens: a reply ends when the test wants it to.
NO_END = {0: -1000.0, 2: -1000.0}
HOT: dict[str, Any] = {"temperature": 1.5, "logit_bias": NO_END}
PROMPT = "Once upon a time there was a hummingbird that drank from a hundred flowers before breakfast"


def ask(
    client: WireClient, *, max_tokens: int = 24, prompt: str = PROMPT, session: str | None = None, **sampling: Any
) -> Reply:
    request = wire.Generate(
        prompt=prompt, session=session, max_tokens=max_tokens, sampling=wire.Sampling(**{**HOT, **sampling})
    )
    return client.ask(request)


# Every parameter


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.0},
        {"temperature": 9.0},
        {"top_k": 2},
        {"top_p": 0.1},
        {"min_p": 0.9},
        {"repetition_penalty": 50.0},
        {"presence_penalty": -50.0},
        {"frequency_penalty": -50.0},
        {"seed": 2},
        {"logit_bias": {**NO_END, 77: 1000.0}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_parameter_reaches_the_engine(client: WireClient, change: dict[str, Any]) -> None:
    assert ask(client, **{"seed": 1, **change}).ids != ask(client, seed=1).ids


def test_one_candidate_leaves_no_choice(client: WireClient) -> None:
    greedy = ask(client, temperature=0.0).ids
    for only in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
        assert ask(client, seed=3, **only).ids == greedy


def test_penalties_are_about_what_was_said(client: WireClient) -> None:
    """With presence a token comes again and again; against it none comes twice; the prompt does not count."""
    again = ask(client, seed=1, presence_penalty=-90.0, max_tokens=12).ids
    assert len(set(again)) == 1
    for against in ({"presence_penalty": 90.0}, {"frequency_penalty": 90.0}):
        ids = ask(client, seed=1, max_tokens=100, **against).ids
        assert len(set(ids)) == 100
    prompt = client.ask(wire.Tokenize(text=PROMPT)).result.tokens
    assert again[0] == ask(client, seed=1, max_tokens=1).ids[0]
    repeated = ask(client, seed=1, temperature=0.0, repetition_penalty=0.01, max_tokens=12).ids
    assert set(repeated) <= set(prompt)  # the repetition penalty counts the prompt too


def test_a_bias_bans_and_forces(client: WireClient) -> None:
    assert set(ask(client, seed=1, logit_bias={77: 1000.0}).ids) == {77}
    free = ask(client, seed=1)
    banned = ask(client, seed=1, logit_bias={**NO_END, free.ids[0]: -1000.0})
    assert free.ids[0] not in banned.ids


def test_a_seed_that_is_not_given_is_drawn_and_told(client: WireClient) -> None:
    first, second = ask(client), ask(client)
    assert first.result.seed != second.result.seed
    assert first.ids != second.ids
    assert ask(client, seed=first.result.seed).ids == first.ids
    largest = ask(client, seed=(1 << 64) - 1)
    assert largest.result.seed == (1 << 64) - 1
    assert ask(client, seed=(1 << 64) - 1).ids == largest.ids


# One seed, one text


def settings(seed: int) -> dict[str, Any]:
    """All of them at once: penalties too have to see the same history."""
    return {
        "seed": seed,
        "top_k": 100,
        "top_p": 0.95,
        "min_p": 0.001,
        "repetition_penalty": 1.2,
        "presence_penalty": 4.0,
        "frequency_penalty": 3.0,
    }


def test_a_seed_gives_the_same_text_cold_cached_resumed_and_in_company(tiny_model_path: Path, tmp_path: Path) -> None:
    daemon = DaemonProcess(tiny_model_path, tmp_path)
    with daemon, daemon.connect() as client:
        cold = ask(client, **settings(7))
        assert cold.result.usage.cached_tokens == 0
        cached = ask(client, **settings(7))
        assert cached.result.usage.cached_tokens > 0
        assert cached.ids == cold.ids
        company = [
            client.send(
                wire.Generate(prompt=PROMPT, max_tokens=24, sampling=wire.Sampling(**{**HOT, **settings(seed)}))
            )
            for seed in (5, 6, 7, 8, 7)
        ]
        texts = [client.finish(id).ids for id in company]
        assert texts[2] == texts[4] == cold.ids
        assert len({tuple(ids) for ids in texts}) == 4
        in_session = ask(client, session="s", **settings(7))
        assert in_session.ids == cold.ids
        client.ask(wire.SessionTruncate(name="s", n_tokens=in_session.result.usage.prompt_tokens))
        daemon.stop()
    with daemon, daemon.connect() as client:
        resumed = ask(client, prompt="", session="s", **settings(7))
        assert resumed.result.usage.cached_tokens == cold.result.usage.prompt_tokens - 1
        assert resumed.ids == cold.ids


def test_a_seed_goes_on_where_a_reply_was_cut(client: WireClient) -> None:
    """Draws are counted by position, and penalties by what the whole reply said: two parts are the reply in one."""
    whole = ask(client, max_tokens=24, **settings(9))
    part = ask(client, max_tokens=10, session="in-parts", **settings(9))
    rest = ask(client, max_tokens=14, session="in-parts", prompt="", **settings(9))
    assert part.ids + rest.ids == whole.ids
