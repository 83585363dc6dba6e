"""The async client: colibri's methods as coroutines, one connection for any number of tasks. For asyncio.

    async with colibri.aio.connect() as c:
        async for piece in c.generate("Once upon a time", max_tokens=64):
            print(piece.text, end="", flush=True)
        alice = await c.session("alice")
        reply = await alice.chat("What did I ask you yesterday?")

`import colibri` does not load asyncio; the first use of `colibri.aio` does. Replies and errors are those of `colibri`.
docs/client.md says what holds for tasks that are cancelled, that are slow, and that lose the daemon.
"""

from __future__ import annotations

from .client import Client, connect
from .sessions import Session
from .streams import Stream

__all__ = ["Client", "Session", "Stream", "connect"]
