"""Calls with one answer."""

from __future__ import annotations

import pytest

import colibri
from support.wire import SERVER_INFO


def test_scores_are_one_fewer_than_the_tokens(client: colibri.Client) -> None:
    scores = client.score([1, 2, 3])
    assert scores.tokens == [1, 2, 3]
    assert scores.logprobs == [-0.5, -0.5]
    assert client.score("ab").tokens == [97, 98]


def test_text_and_tokens_go_both_ways(client: colibri.Client) -> None:
    assert client.detokenize(client.tokenize("für 🐦")) == "für 🐦"


def test_figures_are_plain_maps(client: colibri.Client) -> None:
    assert client.stats()["pages"] == {"total": 10, "free": 8}
    assert client.model() == SERVER_INFO.model.to_wire()
    assert client.health() == {"status": "ok"}


def test_what_is_no_token_id_is_refused(client: colibri.Client) -> None:
    with pytest.raises(colibri.InvalidRequest, match="must be token ids"):
        client.detokenize([1.5])  # type: ignore[list-item]
    with pytest.raises(colibri.InvalidRequest) as caught:
        client.score([1, -1])
    assert caught.value.where == "tokens[1]"
