"""What one request may keep from another."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from colibri.daemon.call import Call
from colibri.daemon.dispatcher import Dispatcher
from colibri.protocol import messages as wire


class SlowTokenizer:
    """Does not get to the end of a text before it is told."""

    def __init__(self) -> None:
        self.may_end = threading.Event()

    def encode(self, text: str, **_: Any) -> list[int]:
        self.may_end.wait(60)
        return [len(text)]


class NoSessions:
    def list(self, after: str | None, limit: int) -> list[Any]:
        return []


def test_long_texts_do_not_hold_up_sessions() -> None:
    tokenizer = SlowTokenizer()
    unused = cast(Any, None)

    async def scenario() -> None:
        with ThreadPoolExecutor(1) as executor, ThreadPoolExecutor(1) as text_executor:
            dispatcher = Dispatcher(
                server_info=unused,
                completer=unused,
                engine=unused,
                events=unused,
                sessions=cast(Any, NoSessions()),
                tokenizer=cast(Any, tokenizer),
                executor=executor,
                text_executor=text_executor,
                model_file=unused,
                figures={},
            )

            def serve(request: wire.Request) -> asyncio.Task[Any]:
                return asyncio.create_task(dispatcher.serve(Call(request, lambda _: None)))

            try:
                texts = [serve(wire.Tokenize(text="long")) for _ in range(8)]
                await asyncio.wait_for(serve(wire.SessionList()), 30)
                assert not any(text.done() for text in texts)
            finally:
                tokenizer.may_end.set()
            assert [result.tokens for result in await asyncio.gather(*texts)] == [[4]] * 8

    asyncio.run(scenario())
