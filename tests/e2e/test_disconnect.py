"""Clients that go away, and clients that speak nonsense: their own affair, nobody else's."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest

from colibri.protocol import FrameDecoder, Progress, Token
from colibri.protocol import messages as wire
from support.daemon import GREEDY, DaemonProcess, WireClient

LONG_PROMPT = [3 + i % 199 for i in range(3800)]


def idle(stats: dict[str, object]) -> bool:
    scheduler = stats["scheduler"]
    return scheduler["running"] == scheduler["waiting"] == 0  # type: ignore[index,no-any-return]


def generate(prompt: str, max_tokens: int = 3500, **fields: object) -> wire.Generate:
    return wire.Generate(prompt=prompt, max_tokens=max_tokens, sampling=GREEDY, **fields)  # type: ignore[arg-type]


# Going away


def test_a_client_that_leaves_in_decode_ends_its_work_and_keeps_what_was_sent(
    daemon: DaemonProcess, client: WireClient
) -> None:
    leaving = daemon.connect()
    leaving.wait_for(leaving.send(generate("Once", session="left")), Token)
    leaving.close()
    client.wait_until(idle)
    info = client.ask(wire.SessionGet(name="left", include_tokens=True)).result
    assert info.state == "idle"
    undisturbed = client.ask(generate("Once", max_tokens=info.n_tokens)).ids
    prompt = client.ask(wire.Tokenize(text="Once", add_special=True)).result.tokens
    assert info.tokens == (prompt + undisturbed)[: info.n_tokens]


def test_a_client_that_leaves_in_prefill_ends_its_work_and_its_pages_are_kept(
    daemon: DaemonProcess, client: WireClient
) -> None:
    leaving = daemon.connect()
    id = leaving.send(wire.Generate(tokens=LONG_PROMPT, max_tokens=1))
    prefilled = leaving.wait_for(id, Progress).prefilled
    leaving.close()
    stats = client.wait_until(idle)
    assert stats["pages"]["active"] == 0
    result = client.ask(wire.Generate(tokens=LONG_PROMPT[:prefilled], max_tokens=1)).result
    assert result.usage.cached_tokens >= prefilled - 32


def test_a_client_that_leaves_in_the_queue_does_not_change_what_another_gets(
    daemon: DaemonProcess, client: WireClient
) -> None:
    undisturbed = client.ask(generate("A", max_tokens=200)).ids
    others = [client.send(generate(f"{i}")) for i in range(3)]
    for other in others:
        client.wait_for(other, Token)
    running = client.send(generate("A", max_tokens=200))
    leaving = daemon.connect()
    leaving.send(generate("B"))
    client.wait_until(lambda stats: stats["scheduler"]["waiting"] == 1)
    leaving.close()
    assert client.finish(running).ids == undisturbed
    for other in others:
        client.ask(wire.Cancel(target=other))
    client.wait_until(idle)


def test_a_client_that_leaves_while_its_turn_waits_gives_way(daemon: DaemonProcess, client: WireClient) -> None:
    first = client.send(generate("Once", session="shared"))
    client.wait_for(first, Token)
    leaving = daemon.connect()
    leaving.send(generate("gone", session="shared"))
    leaving.close()
    third = client.send(generate("more", session="shared", max_tokens=3))
    client.ask(wire.Cancel(target=first))
    client.finish(first)
    client.finish(third)
    messages = client.ask(wire.SessionGet(name="shared")).result.messages
    assert [message.content for message in messages if message.content in ("Once", "gone", "more")] == ["Once", "more"]


def test_cancelling_again_and_again_leaves_nothing_behind(client: WireClient) -> None:
    for turn in range(30):
        id = client.send(generate("Once", session=f"s{turn % 3}", max_tokens=100))
        for _ in range(turn % 5):
            next(client.answers(id))
        client.ask(wire.Cancel(target=id))
        client.finish(id)
    stats = client.wait_until(idle)
    assert stats["pages"]["active"] == 0
    assert client.ask(generate("Once", max_tokens=3)).result.finish_reason == "length"


# Speaking nonsense


@pytest.fixture
def raw(daemon: DaemonProcess) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30)
        connection.connect(str(daemon.socket))
        yield connection


def frame(message: object) -> bytes:
    body = msgpack.packb(message)
    return struct.pack(">I", len(body)) + body


HELLO = frame({"id": 1, "op": "hello", "version": 1, "client": "raw"})


def all_messages(connection: socket.socket) -> list[dict[str, object]]:
    """Everything until the daemon closes."""
    decoder = FrameDecoder()
    messages = []
    while data := connection.recv(1 << 16):
        decoder.feed(data)
        while (message := decoder.next_message()) is not None:
            messages.append(message)
    return messages


NONSENSE = {
    "a frame over the limit": (struct.pack(">I", 1 << 31), "frame_too_large"),
    "a header that claims a giant array": (struct.pack(">I", 5) + b"\xdd\xff\xff\xff\xff", "protocol_error"),
    "deep nesting": (frame(None)[:0] + struct.pack(">I", 5000) + b"\x91" * 5000, "protocol_error"),
    "not msgpack": (struct.pack(">I", 1) + b"\xc1", "protocol_error"),
    "not a map": (frame([1, 2]), "protocol_error"),
    "an id twice": (frame({"id": 1, "op": "health"}), "protocol_error"),
}


@pytest.mark.parametrize("nonsense", NONSENSE)
def test_a_broken_frame_gets_a_typed_error_then_the_end(raw: socket.socket, client: WireClient, nonsense: str) -> None:
    running = client.send(generate("Once", max_tokens=50))
    data, error = NONSENSE[nonsense]
    raw.sendall(HELLO)
    assert raw.recv(1 << 16)
    raw.sendall(data)
    (last,) = all_messages(raw)
    assert last["id"] == 0
    assert last["error"]["type"] == error  # type: ignore[index]
    assert client.finish(running).result.finish_reason == "length"


def test_a_first_request_that_is_not_hello_gets_a_typed_error(raw: socket.socket) -> None:
    raw.sendall(frame({"id": 1, "op": "health"}))
    (last,) = all_messages(raw)
    assert last["error"]["type"] == "protocol_error"  # type: ignore[index]


def test_another_version_is_refused_by_number(raw: socket.socket) -> None:
    raw.sendall(frame({"id": 1, "op": "hello", "version": 7, "client": "raw"}))
    (last,) = all_messages(raw)
    assert last["error"]["type"] == "unsupported_version"  # type: ignore[index]
    assert "7" in last["error"]["message"]  # type: ignore[index]


def test_a_bad_field_and_an_unknown_operation_leave_the_connection_alive(raw: socket.socket) -> None:
    raw.sendall(HELLO)
    raw.sendall(frame({"id": 2, "op": "sing"}))
    raw.sendall(frame({"id": 3, "op": "generate", "prompt": "x", "max_tokens": -1}))
    raw.sendall(frame({"id": 4, "op": "health"}))
    raw.sendall(frame({"id": 5, "op": "hello"})[:7])
    raw.shutdown(socket.SHUT_WR)
    answers: dict[object, dict[str, object]] = {}
    for message in all_messages(raw):
        for answer in message.get("answers", [message]):  # type: ignore[attr-defined]
            answers[answer["id"]] = answer
    assert answers[2]["error"]["type"] == "unknown_operation"  # type: ignore[index]
    assert answers[3]["error"]["where"] == "max_tokens"  # type: ignore[index]


def test_a_client_that_reads_nothing_does_not_grow_the_daemon(tiny_model_path: Path, tmp_path: Path) -> None:
    # Answers of some 100 KiB each, thousands of them asked for and none read: bounded by not reading more requests.
    with DaemonProcess(tiny_model_path, tmp_path) as daemon, daemon.connect() as client:
        before = _resident_bytes(daemon.pid)
        with socket.socket(socket.AF_UNIX) as silent:
            silent.connect(str(daemon.socket))
            silent.settimeout(1.0)
            silent.sendall(HELLO)
            requests = [frame({"id": id, "op": "tokenize", "text": "x" * 60_000}) for id in range(2, 2000)]
            with pytest.raises((TimeoutError, BrokenPipeError, ConnectionResetError)):
                silent.sendall(b"".join(requests))
            assert _resident_bytes(daemon.pid) - before < 150 << 20
            assert client.ask(wire.Health()).result["status"] == "ok"


def _resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) * 1024
