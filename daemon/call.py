"""One request while it is served: how to answer it, and how to be told that nobody waits any more.

A call is never torn down at an arbitrary await: `cancel` asks, and whoever serves the call ends it where nothing is
half done. So a cancelled turn is saved like any other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from colibri.protocol.errors import ColibriError, DeadlineExceeded
from colibri.protocol.messages import Progress, Request, Token

T = TypeVar("T")


class Call:
    """One request in flight. Lives in the event loop's thread."""

    def __init__(self, request: Request, send: Callable[[Token | Progress], None]) -> None:
        self.request = request
        self.send = send
        self.task: asyncio.Task[None] | None = None
        self.cause: ColibriError | None = None
        """Why the daemon itself cancelled the call: what it is then answered with."""
        self.arrived = time.monotonic()
        deadline_s: float | None = getattr(request, "deadline_s", None)
        self.deadline = None if deadline_s is None else self.arrived + deadline_s
        self._cancelled = asyncio.get_running_loop().create_future()
        self._on_cancel: Callable[[], None] | None = None

    @property
    def cancelled(self) -> bool:
        """Whether somebody asked for an end."""
        return self._cancelled.done()

    def cancel(self, cause: ColibriError | None = None) -> None:
        """Asks for an end. The first asker's cause counts."""
        if self.cancelled:
            return
        self.cause = cause
        self._cancelled.set_result(None)
        if self._on_cancel is not None:
            self._on_cancel()

    def on_cancel(self, action: Callable[[], None]) -> None:
        """Runs `action` when the end is asked for, at once if it was."""
        self._on_cancel = action
        if self.cancelled:
            action()

    async def unless_cancelled(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`, or None if the end is asked for first; then the work is given up.

        Raises DeadlineExceeded if the request's time is over first.
        """
        task = asyncio.ensure_future(work)
        left = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
        try:
            await asyncio.wait({task, self._cancelled}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            return task.result()
        if not self.cancelled:
            raise DeadlineExceeded("the time given with the request is over", where="deadline_s")
        return None
