"""What is answered without the engine: however long a step takes, these do not wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest

from colibri.daemon.call import Call
from colibri.daemon.dispatcher import Dispatcher
from colibri.daemon.model_file import ModelFile
from colibri.protocol import messages as wire


class BusyEngine:
    """An engine thread in the middle of a step that never ends: asking it for anything is a failure here."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the engine thread was asked for {name}")


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def dispatcher(executor: ThreadPoolExecutor, model: Path, problems: list[str] | None = None) -> Dispatcher:
    sessions, tokenizer = Mock(), Mock()
    sessions.list.return_value = []
    tokenizer.encode.return_value = [1]
    return Dispatcher(
        server_info=Mock(),
        completer=Mock(),
        engine=BusyEngine(),  # type: ignore[arg-type]
        events=Mock(),
        sessions=sessions,
        tokenizer=tokenizer,
        executor=executor,
        text_executor=executor,
        model_file=ModelFile(model),
        figures={},
        problems=lambda: problems or [],
    )


async def ask(dispatcher: Dispatcher, request: wire.Request) -> Any:
    call = Mock(spec=Call)
    call.request = request
    return await dispatcher.serve(call)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "m").touch()
    return tmp_path / "m"


@pytest.mark.parametrize("request_", [wire.Health(), wire.Model(), wire.Tokenize(text="x"), wire.SessionList()])
async def test_what_needs_no_engine_is_answered_while_a_step_is_held_up(
    executor: ThreadPoolExecutor, model: Path, request_: wire.Request
) -> None:
    assert await ask(dispatcher(executor, model), request_) is not None


async def test_health_is_ok_degraded_or_failing_and_says_why(executor: ThreadPoolExecutor, model: Path) -> None:
    health = await ask(dispatcher(executor, model), wire.Health())
    assert (health["status"], health["problems"]) == ("ok", [])
    served = dispatcher(executor, model, ["sessions cannot be saved: the disk is full"])
    health = await ask(served, wire.Health())
    assert (health["status"], health["problems"]) == ("degraded", ["sessions cannot be saved: the disk is full"])
    with patch.object(ModelFile, "state", return_value="changed in place: by somebody"):
        health = await ask(served, wire.Health())
    assert health["status"] == "failing"
    assert health["model_file"].startswith("changed in place")
