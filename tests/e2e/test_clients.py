"""Both Python clients against a real daemon: deadlines, leaving, losing the daemon and coming back."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

import colibri
from support.daemon import DaemonProcess

# The likeliest token, but no end token of the tiny model: a reply ends when the test wants it to.
ENDLESS: Any = {"temperature": 0.0, "logit_bias": {0: -1000.0, 2: -1000.0}, "max_tokens": 3500}


def test_a_deadline_ends_a_reply_and_what_was_said_is_kept(daemon: DaemonProcess) -> None:
    with colibri.connect(str(daemon.socket)) as client:
        session = client.session("deadline")
        stream = session.generate("Once", deadline_s=0.3, **ENDLESS)
        with pytest.raises(colibri.DeadlineExceeded) as caught:
            list(stream)
        assert caught.value.where == "deadline_s"
        info = session.info(include_tokens=True)
        prompt = client.tokenize("Once", add_special=True)
        assert info.tokens == prompt + stream.tokens
        assert info.state == "idle"
        assert session.generate("", max_tokens=3).result.finish_reason == "length", "the session goes on"


@pytest.mark.parametrize("deadline_s", [1e-6, 0.3])
async def test_a_deadline_is_the_same_error_in_the_async_client(daemon: DaemonProcess, deadline_s: float) -> None:
    async with colibri.aio.connect(str(daemon.socket)) as client:
        calm = asyncio.create_task(client.generate("Once", **ENDLESS | {"max_tokens": 5}).result())
        with pytest.raises(colibri.DeadlineExceeded) as caught:
            await client.generate("Once", deadline_s=deadline_s, **ENDLESS).result()
        assert caught.value.where == "deadline_s"
        assert len((await calm).tokens) == 5


async def test_scoring_has_a_deadline_too(daemon: DaemonProcess) -> None:
    tokens = [3 + i % 199 for i in range(3800)]
    async with colibri.aio.connect(str(daemon.socket)) as client:
        with pytest.raises(colibri.DeadlineExceeded):
            await client.score(tokens, deadline_s=1e-6)
        assert len((await client.score(tokens[:10], deadline_s=60)).logprobs) == 9


async def test_a_cancelled_task_leaves_the_daemon_idle_and_the_turn_saved(daemon: DaemonProcess) -> None:
    async with colibri.aio.connect(str(daemon.socket)) as client:
        session = await client.session("cancelled")
        stream = session.generate("Once", **ENDLESS)
        await anext(stream)
        task = asyncio.create_task(stream.result())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # Asking waits for the turn's end, for it is about the same session.
        info = await session.info(include_tokens=True)
        assert info.state == "idle"
        assert info.tokens is not None
        prompt = await client.tokenize("Once", add_special=True)
        assert info.tokens[: len(prompt) + len(stream.tokens)] == prompt + stream.tokens
        await session.delete()


async def test_many_tasks_of_one_connection_get_what_they_would_get_alone(daemon: DaemonProcess) -> None:
    options = ENDLESS | {"max_tokens": 8}
    prompts = [f"Prompt {i % 7}" for i in range(70)]
    async with colibri.aio.connect(str(daemon.socket)) as client:
        together = await asyncio.gather(*(client.generate(prompt, **options).result() for prompt in prompts))
        alone = {prompt: (await client.generate(prompt, **options).result()).tokens for prompt in set(prompts)}
    assert [reply.tokens for reply in together] == [alone[prompt] for prompt in prompts]


async def test_a_long_text_is_tokenised_in_parts_and_comes_back_whole(daemon: DaemonProcess) -> None:
    text = "für 🐦 " * 30_000
    async with colibri.aio.connect(str(daemon.socket)) as client:
        tokens = await client.tokenize(text)
        assert len(tokens) > 2 * 65_536
        assert await client.detokenize(tokens) == text
    with colibri.connect(str(daemon.socket)) as client:
        assert client.tokenize(text) == tokens


async def test_after_a_lost_connection_a_program_goes_on_as_the_docs_say(tiny_model_path: Path, tmp_path: Path) -> None:
    with DaemonProcess(tiny_model_path, tmp_path) as daemon:
        path = str(daemon.socket)
        client = await colibri.aio.connect(path)
        session = await client.session("alice")
        done = await session.chat("Hello", max_tokens=4)
        assert done.durable
        stream = session.generate("Once", **ENDLESS)
        await anext(stream)
        daemon.kill()
        with pytest.raises(colibri.ConnectionLost) as caught:
            await stream.result()
        assert caught.value.extra["tokens"] == stream.tokens
        with pytest.raises(colibri.ConnectionLost):
            await client.health()
        await client.aclose()
        with pytest.raises(colibri.DaemonUnavailable):
            await colibri.aio.connect(path)

        daemon.start()
        async with colibri.aio.connect(path) as client:
            session = await client.session("alice", resume=True)
            info = await session.info(include_tokens=True)
            assert info.state == "interrupted"
            assert info.tokens is not None
            prompt = await client.tokenize("Once")
            kept = done.session.n_tokens if done.session else 0
            assert info.tokens[kept : kept + len(prompt)] == prompt, "the prompt was durable before its first token"
            reply = await session.generate("", **ENDLESS | {"max_tokens": 20}).result()
            whole = info.tokens[kept + len(prompt) :] + reply.tokens
            n_both = min(len(whole), len(stream.tokens))
            assert whole[:n_both] == stream.tokens[:n_both], "it goes on with what it would have said"


def test_a_daemon_that_is_stopped_is_given_up_in_time_and_answers_when_it_goes_on(
    tiny_model_path: Path, tmp_path: Path
) -> None:
    with DaemonProcess(tiny_model_path, tmp_path) as daemon:
        patient = colibri.connect(daemon.socket)
        impatient = colibri.connect(daemon.socket, reply_timeout_s=0.3)
        daemon.signal(signal.SIGSTOP)
        try:
            with pytest.raises(colibri.DeadlineExceeded):
                impatient.health()
            with pytest.raises(colibri.ColibriError, match="no greeting within"):
                colibri.connect(daemon.socket, timeout_s=0.3)
        finally:
            daemon.signal(signal.SIGCONT)
        assert patient.health()["status"] == "ok"
        with colibri.connect(daemon.socket) as new:
            assert new.session("s").chat("hi", max_tokens=2).durable
        patient.close()
        impatient.close()
        assert daemon.stop() == 0
