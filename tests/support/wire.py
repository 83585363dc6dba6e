"""Both ends of a connection in memory, and answers of every kind to send."""

from __future__ import annotations

from colibri.protocol import ClientProtocol, ServerProtocol
from colibri.protocol.messages import Completion, Limits, ModelInfo, ServerInfo, SessionState, Timings, Usage

SERVER_INFO = ServerInfo(
    version=1,
    server="colibrid 0.1.0",
    model=ModelInfo(
        name="tiny",
        family="mixtral",
        fingerprint="ab" * 16,
        vocabulary=256,
        context=4096,
        layers=2,
        experts=8,
        top_k=2,
        numerics_key="cd" * 16,
    ),
    limits=Limits(frame_bytes=1 << 24, requests_per_connection=64, queue=100),
)


def completion(
    reason: str = "stop", *, prompt: int = 3, cached: int = 0, generated: int = 2, session: SessionState | None = None
) -> Completion:
    return Completion(
        finish_reason=reason,
        usage=Usage(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=generated),
        timings=Timings(queue_s=0.0, load_s=0.0, prefill_s=0.01, decode_s=0.02),
        seed=7,
        durable=session is not None,
        session=session,
    )


def greeted_pair() -> tuple[ClientProtocol, ServerProtocol]:
    """A client and a server that have said hello."""
    client, server = ClientProtocol(), ServerProtocol()
    server.receive_data(client.send_hello("test"))
    client.receive_data(server.send_hello(1, SERVER_INFO))
    return client, server
