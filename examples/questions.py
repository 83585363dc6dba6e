"""Asks several questions at once over one connection, and gives up on those that take too long.

python examples/questions.py "Who wrote Faust?" "What is a hummingbird?"
"""

from __future__ import annotations

import asyncio
import sys

import colibri


async def ask(client: colibri.aio.Client, question: str) -> None:
    """Prints the question and its answer, or what there was of it after 30 seconds."""
    stream = client.chat_stream(question, max_tokens=64)
    note = ""
    try:
        async with asyncio.timeout(30), stream:
            async for _ in stream:
                pass
    except TimeoutError:  # leaving the stream cancelled it; the connection serves the others
        note = " …"
    except colibri.ColibriError as error:
        note = f" [{error}]"
    print(f"{question}\n    {stream.text}{note}")


async def main(questions: list[str]) -> None:
    async with colibri.aio.connect() as client:
        await asyncio.gather(*(ask(client, question) for question in questions))


if __name__ == "__main__":
    try:
        asyncio.run(main(sys.argv[1:]))
    except colibri.ColibriError as error:
        sys.exit(str(error))
