"""What a conversation costs and says after restarts, damage and change: time may be lost, text never."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from colibri.convert import convert
from colibri.protocol import Token
from colibri.protocol import messages as wire
from colibri.protocol.errors import SessionCorrupt, SessionMismatch, SessionNotFound
from support.daemon import GREEDY, DaemonProcess, WireClient, chat


def tokens_of(client: WireClient, session: str) -> list[int]:
    tokens: list[int] = client.ask(wire.SessionGet(name=session, include_tokens=True)).result.tokens
    return tokens


def hold_a_conversation(client: WireClient, session: str = "s", turns: int = 3) -> None:
    for turn in range(turns):
        assert client.chat(f"question {turn}", session=session, max_tokens=40, sampling=GREEDY).result.durable


def saved(stats: dict[str, object]) -> bool:
    pages = stats["pages"]
    return pages["unsaved"] == 0 and pages["write_queue"] == 0  # type: ignore[index,no-any-return]


@pytest.fixture
def daemon(tiny_model_path: Path, tmp_path: Path) -> DaemonProcess:
    return DaemonProcess(tiny_model_path, tmp_path)


# Restarts


def test_after_a_restart_only_the_new_turn_is_prefilled(daemon: DaemonProcess) -> None:
    with daemon, daemon.connect() as client:
        hold_a_conversation(client)
        before = tokens_of(client, "s")
        daemon.stop()
    with daemon, daemon.connect() as client:
        assert tokens_of(client, "s") == before
        result = client.chat("and now?", session="s", max_tokens=8, sampling=GREEDY).result
        assert result.usage.cached_tokens == len(before) - 1  # its last token was drawn, never computed
        assert result.note is None


def test_after_kill_9_every_acknowledged_turn_is_there_and_the_next_is_the_same(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    with daemon, daemon.connect() as client:
        hold_a_conversation(client)
        before = tokens_of(client, "s")
        client.ask(wire.SessionFork(name="s", to="undisturbed"))
        expected = client.chat("and now?", session="undisturbed", max_tokens=30, sampling=GREEDY)
        client.wait_until(saved)
        daemon.kill()
    with daemon, daemon.connect() as client:
        assert tokens_of(client, "s") == before
        reply = client.chat("and now?", session="s", max_tokens=30, sampling=GREEDY)
        assert reply.ids == expected.ids
        assert reply.result.usage.cached_tokens >= len(before) - 32


def test_a_session_that_begins_empty_round_trips(daemon: DaemonProcess) -> None:
    with daemon, daemon.connect() as client:
        client.chat("x", session="empty", max_tokens=2)
        client.ask(wire.SessionTruncate(name="empty", n_tokens=0))
        daemon.stop()
    with daemon, daemon.connect() as client:
        info = client.ask(wire.SessionGet(name="empty", include_tokens=True)).result
        assert (info.tokens, info.messages) == ([], [])
        live = client.send(wire.Generate(prompt="Once", max_tokens=60, sampling=GREEDY))
        client.wait_for(live, Token)
        with pytest.raises(SessionNotFound):
            _ = client.ask(wire.SessionGet(name="never was")).result
        assert client.finish(live).result.finish_reason == "length"
        assert client.chat("x", session="empty", max_tokens=2).result.usage.completion_tokens == 2


def test_a_turn_cancelled_before_a_restart_goes_on_after_it(daemon: DaemonProcess) -> None:
    with daemon, daemon.connect() as client:
        hold_a_conversation(client, turns=1)
        id = client.send(chat("long", session="s", max_tokens=3000, sampling=GREEDY))
        client.wait_for(id, Token)
        client.ask(wire.Cancel(target=id))
        client.finish(id)
        before = tokens_of(client, "s")
        daemon.stop()
    with daemon, daemon.connect() as client:
        assert tokens_of(client, "s") == before
        result = client.chat("more", session="s", max_tokens=4).result
        # The token after the last one that was sent may have been drawn already.
        assert result.usage.cached_tokens in (len(before) - 1, len(before))
        assert tokens_of(client, "s")[: len(before)] == before


# Damage


def flip_bytes(folder: Path, suffix: str, every: int = 997) -> int:
    """Flips bits all over the table files of a database; how many files."""
    files = [path for path in folder.iterdir() if path.suffix == suffix and path.stat().st_size]
    for path in files:
        data = bytearray(path.read_bytes())
        for at in range(len(data) // 4, 3 * len(data) // 4, every):
            data[at] ^= 0x40
        path.write_bytes(data)
    return len(files)


def test_damaged_pages_are_counted_and_computed_again(daemon: DaemonProcess, tmp_path: Path) -> None:
    with daemon, daemon.connect() as client:
        hold_a_conversation(client, turns=8)
        client.ask(wire.SessionFork(name="s", to="clean"))
        expected = client.chat("and now?", session="clean", max_tokens=30, sampling=GREEDY).ids
        other = client.chat("elsewhere", max_tokens=30, sampling=GREEDY).ids
        daemon.stop()
    assert flip_bytes(daemon.data / "pages", ".sst")
    with daemon, daemon.connect() as client:
        assert client.chat("and now?", session="s", max_tokens=30, sampling=GREEDY).ids == expected
        assert client.chat("elsewhere", max_tokens=30, sampling=GREEDY).ids == other
        stats = client.stats()
        noticed = stats["pages"]["bad"] + stats["pages"]["store_errors"]
        noticed += stats["store"]["corrupt"] + stats["store"]["rebuilt"]
        assert noticed > 0


def test_a_damaged_session_is_named_and_the_others_live(daemon: DaemonProcess) -> None:
    with daemon, daemon.connect() as client:
        hold_a_conversation(client, "healthy", turns=1)
        hold_a_conversation(client, "sick", turns=12)
        daemon.stop()
    for path in (daemon.data / "truth").glob("*.sst"):
        data = bytearray(path.read_bytes())
        beginning = data.find(b"sick\0")
        if beginning >= 0:
            data[beginning + 2500] ^= 0x40  # keys are in order and blocks are of 1 KiB: well within the sick one's
            path.write_bytes(data)
    with daemon, daemon.connect() as client:
        with pytest.raises(SessionCorrupt, match=r"sick.*turn"):
            _ = client.chat("x", session="sick", max_tokens=1).result
        assert client.chat("x", session="healthy", max_tokens=1).result.usage.cached_tokens > 32
        states = {summary.name: summary.n_turns for summary in client.ask(wire.SessionList()).result.sessions}
        assert states == {"healthy": 2, "sick": 12}


# Change


def changed_checkpoint(tiny_checkpoint: Path, folder: Path, what: str) -> Path:
    """The tiny checkpoint with one weight or the rope settings changed."""
    checkpoint = shutil.copytree(tiny_checkpoint, folder / "changed")
    if what == "rope":
        config = json.loads((checkpoint / "config.json").read_text())
        config["rope_parameters"]["rope_theta"] = 10000.0
        (checkpoint / "config.json").write_text(json.dumps(config))
    if what == "weights":
        with (checkpoint / "model.safetensors").open("r+b") as file:
            file.seek(-2, 2)
            file.write(b"\0\0")
    return checkpoint


@pytest.mark.parametrize(("what", "quantize"), [("weights", "f32"), ("quantisation", "q8"), ("rope", "f32")])
def test_another_model_goes_on_from_the_token_ids_and_says_so(
    daemon: DaemonProcess, tiny_checkpoint: Path, tmp_path: Path, what: str, quantize: str
) -> None:
    with daemon, daemon.connect() as client:
        hold_a_conversation(client)
        before = tokens_of(client, "s")
        daemon.stop()
    other = tmp_path / "other.colibri"
    convert(changed_checkpoint(tiny_checkpoint, tmp_path, what), other, quantize=quantize)
    with DaemonProcess(other, tmp_path) as changed, changed.connect() as client:
        reply = client.chat("and now?", session="s", max_tokens=8, sampling=GREEDY)
        assert reply.result.usage.cached_tokens == 0
        assert "model changed" in reply.result.note
        assert tokens_of(client, "s")[: len(before)] == before
        assert client.chat("more", session="s", max_tokens=8).result.note is None


def test_another_kv_format_is_named_and_its_pages_are_not_used(daemon: DaemonProcess) -> None:
    with daemon, daemon.connect() as client:
        hold_a_conversation(client)
        before = tokens_of(client, "s")
        daemon.stop()
    with DaemonProcess(daemon.model, daemon.folder, "--kv-format", "f32") as changed, changed.connect() as client:
        result = client.chat("and now?", session="s", max_tokens=8, sampling=GREEDY).result
        assert result.usage.cached_tokens == 0
        assert "kv_format was f16, is f32" in result.note
        assert tokens_of(client, "s")[: len(before)] == before
        changed.stop()
    with daemon, daemon.connect() as client:  # and back: the pages of the old format are still there
        result = client.chat("again", session="s", max_tokens=8, sampling=GREEDY).result
        assert len(before) - 32 <= result.usage.cached_tokens <= len(before)


def test_another_context_size_changes_nothing_but_the_limit(daemon: DaemonProcess) -> None:
    with daemon, daemon.connect() as client:
        hold_a_conversation(client)
        before = tokens_of(client, "s")
        daemon.stop()
    with DaemonProcess(daemon.model, daemon.folder, "--context", "512") as changed, changed.connect() as client:
        assert client.server.model.context == 512
        result = client.chat("and now?", session="s", max_tokens=8, sampling=GREEDY).result
        assert result.usage.cached_tokens == len(before) - 1
        assert result.note is None


def test_another_tokenizer_is_refused_by_name(daemon: DaemonProcess, tiny_checkpoint: Path, tmp_path: Path) -> None:
    with daemon, daemon.connect() as client:
        hold_a_conversation(client, turns=1)
        daemon.stop()
    checkpoint = shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    tokenizer = checkpoint / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    convert(checkpoint, tmp_path / "other.colibri", quantize="f32")
    with DaemonProcess(tmp_path / "other.colibri", tmp_path) as changed, changed.connect() as client:
        with pytest.raises(SessionMismatch, match="tokenizer"):
            _ = client.chat("and now?", session="s", max_tokens=1).result
        assert client.chat("hello", session="another", max_tokens=1).result.durable


def test_a_data_directory_of_another_version_is_refused_by_both_versions(daemon: DaemonProcess) -> None:
    with daemon:
        daemon.stop()
    (daemon.data / "VERSION").write_text("99\n")
    with pytest.raises(RuntimeError, match=r"99.*version 1"):
        daemon.start()
