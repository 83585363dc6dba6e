"""What is answered without the engine: however long a step takes, these do not wait for it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from colibri.daemon.call import Call
from colibri.daemon.dispatcher import Dispatcher
from colibri.daemon.model_file import ModelFile
from colibri.protocol import messages as wire


class BusyEngine:
    """An engine thread in the middle of a step that never ends: asking it for anything is a failure here."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the engine thread was asked for {name}")


@pytest.mark.parametrize("request_", [wire.Health(), wire.Model(), wire.Tokenize(text="x"), wire.SessionList()])
async def test_what_needs_no_engine_is_answered_while_a_step_is_held_up(request_: wire.Request, tmp_path: Path) -> None:
    (tmp_path / "m").touch()
    sessions, tokenizer = Mock(), Mock()
    sessions.list.return_value = []
    tokenizer.encode.return_value = [1]
    with ThreadPoolExecutor(1) as executor:
        dispatcher = Dispatcher(
            server_info=Mock(),
            completer=Mock(),
            engine=BusyEngine(),  # type: ignore[arg-type]
            events=Mock(),
            sessions=sessions,
            tokenizer=tokenizer,
            executor=executor,
            text_executor=executor,
            model_file=ModelFile(tmp_path / "m"),
            figures={},
        )
        call = Mock(spec=Call)
        call.request = request_
        assert await dispatcher.serve(call) is not None
