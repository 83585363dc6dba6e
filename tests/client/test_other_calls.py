"""Calls with one answer."""

from __future__ import annotations

import pytest

import colibri
import colibri.aio
from colibri.protocol import Failure
from support.fake_daemon import FakeDaemon
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


# What a debugger shows


def test_a_client_shows_its_model_its_socket_and_whether_it_can_be_used(daemon: FakeDaemon) -> None:
    client = colibri.connect(daemon.path)
    assert repr(client) == f"<colibri.Client of tiny at {daemon.path}>"
    client.close()
    assert repr(client) == f"<colibri.Client of tiny at {daemon.path}, of no further use>"


async def test_an_async_client_shows_the_same(daemon: FakeDaemon) -> None:
    client = await colibri.aio.connect(daemon.path)
    assert repr(client) == f"<colibri.aio.Client of tiny at {daemon.path}>"
    await client.aclose()
    assert repr(client) == f"<colibri.aio.Client of tiny at {daemon.path}, of no further use>"


def test_a_stream_shows_how_far_it_is(client: colibri.Client) -> None:
    stream = client.generate("x" * 100)
    assert repr(stream) == "<Stream open, 0 tokens: ''>"
    reply = stream.result
    assert repr(stream) == f"<Stream ended by stop, {len(reply.tokens)} tokens: {reply.text[:40] + '…'!r}>"


def test_a_stream_that_failed_shows_the_error(client: colibri.Client, daemon: FakeDaemon) -> None:
    daemon.script["generate"] = lambda connection, id, _: connection.answer(id, Failure(colibri.Overloaded("full")))
    stream = client.generate("x")
    with pytest.raises(colibri.Overloaded):
        _ = stream.result
    assert repr(stream) == "<Stream ended by Overloaded, 0 tokens: ''>"
