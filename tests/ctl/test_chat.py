"""The interactive chat: with scripted input, and once in a real terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import colibri
from colibri.ctl.chat import Conversation, Repl
from colibri.protocol.messages import Cancel, Chat, Request
from support.fake_daemon import PATIENCE_S, Connection, FakeDaemon, holding, token

Talk = Callable[..., str]


@pytest.fixture
def client(daemon: FakeDaemon) -> Iterator[colibri.Client]:
    with colibri.connect(daemon.path) as client:
        yield client


@pytest.fixture
def talk(client: colibri.Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Talk:
    """Types lines (or raises what is no text) and gives all that was printed."""

    def run(*lines: str | type[BaseException], session: str | None = None, system: str | None = None) -> str:
        typed = iter(lines)

        def read(prompt: str) -> str:
            line = next(typed, EOFError)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", read)
        conversation = Conversation(client, client.session(session) if session else None, system)
        Repl(conversation, {}, stats=False).run()
        captured = capsys.readouterr()
        return captured.out + captured.err

    return run


def chats(daemon: FakeDaemon) -> list[list[str]]:
    """What each chat request said."""
    return [[m.content for m in request.messages] for request in daemon.received if isinstance(request, Chat)]


def test_a_conversation_that_is_not_kept_sends_all_that_was_said(talk: Talk, daemon: FakeDaemon) -> None:
    text = talk("hi", "yo", system="Be brief.")
    assert "a conversation that is not kept" in text
    assert chats(daemon) == [
        ["Be brief.", "hi"],
        ["Be brief.", "hi", "You said: Be brief.hi", "yo"],
    ]


def test_a_session_gets_only_what_is_new(talk: Talk, daemon: FakeDaemon) -> None:
    text = talk("hi", "yo", session="alice", system="Be brief.")
    assert chats(daemon) == [["Be brief.", "hi"], ["yo"]]
    assert "session 'alice': new" in text
    assert "You said: yo\n" in text
    assert text.endswith("kept: colibrictl chat --session alice goes on\n")


def test_resuming_is_told(talk: Talk, alice: str) -> None:
    assert talk(session=alice).startswith("session 'alice': resumed, 2 h old, 1 turn, 14 tokens\n")


def test_a_cut_off_reply_is_told(talk: Talk, alice: str, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = daemon._summary
    monkeypatch.setattr(daemon, "_summary", lambda name: summary(name) | {"state": "interrupted"})
    assert "the last reply was cut off" in talk(session=alice)


def test_ctrl_c_stops_the_reply_and_keeps_the_conversation(
    talk: Talk, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.script["chat"] = holding(["so", " far"])
    pieces = colibri.Stream.__next__

    def interrupted(stream: colibri.Stream) -> colibri.Piece:
        if stream.text == "so far":
            daemon.script.clear()
            monkeypatch.setattr(colibri.Stream, "__next__", pieces)
            raise KeyboardInterrupt
        return pieces(stream)

    monkeypatch.setattr(colibri.Stream, "__next__", interrupted)
    text = talk("hi", "yo", "/history")
    assert "so far\n[stopped]\n" in text
    assert len(daemon.wait_for(Cancel)) == 1
    assert chats(daemon)[1] == ["hi", "so far", "yo"]
    assert "assistant: so far" in text


def test_an_error_is_a_line_and_the_conversation_goes_on(talk: Talk, daemon: FakeDaemon) -> None:
    def fail(connection: Connection, id: int, request: Request) -> None:
        daemon.script.clear()
        raise colibri.Overloaded("the queue is full", where="queue")

    daemon.script["chat"] = fail
    assert "colibrictl: queue: the queue is full\n" in talk("hi", "yo")
    assert chats(daemon) == [["hi"], ["yo"]]


def test_a_lost_daemon_ends_the_conversation(talk: Talk, daemon: FakeDaemon) -> None:
    def die(connection: Connection, id: int, request: Request) -> None:
        connection.answer(id, token("so far"))
        connection.socket.close()

    daemon.script["chat"] = die
    with pytest.raises(colibri.ConnectionLost):
        talk("hi")


def test_commands_are_not_sent(talk: Talk, daemon: FakeDaemon) -> None:
    text = talk("/help", "/stats", "/nonsense", "hi", "/stats", "/quit", "never read", session="alice")
    assert chats(daemon) == [["hi"]]
    assert "/history  what was said" in text
    assert "no reply yet" in text
    assert "no command /nonsense; /help shows those there are" in text
    assert "session 'alice': 1 turn, 14 tokens" in text
    assert "2 prompt tokens (0 cached)" in text


def test_the_history_of_a_session_comes_from_the_daemon(talk: Talk, alice: str) -> None:
    assert "user: hi\nassistant: You said: hi\n" in talk("/history", session=alice)


def test_a_backslash_goes_on_and_ctrl_c_at_the_prompt_forgets(talk: Talk, daemon: FakeDaemon) -> None:
    talk("one\\", "two", "half\\", KeyboardInterrupt, "", "  ", "three")
    assert [messages[-1] for messages in chats(daemon)] == ["one\ntwo", "three"]


def test_in_a_terminal_ctrl_c_stops_and_ctrl_d_leaves(daemon: FakeDaemon, tmp_path: Path) -> None:
    daemon.script["chat"] = holding(["so far"])
    terminal, end = pty.openpty()
    command = [sys.executable, "-m", "colibri.ctl.main", "chat", "--session", "alice"]
    process = subprocess.Popen(
        command, stdin=end, stdout=end, stderr=end, start_new_session=True, preexec_fn=_take_terminal
    )
    os.close(end)
    screen = _Screen(terminal)
    screen.wait_for("> ")
    os.write(terminal, b"hi\n")
    screen.wait_for("so far")
    daemon.script.clear()
    os.write(terminal, b"\x03")
    screen.wait_for("[stopped]", "> ")
    os.write(terminal, b"yo\n")
    screen.wait_for("You said: yo", "> ")
    os.write(terminal, b"\x04")
    assert process.wait(PATIENCE_S) == 0
    os.close(terminal)
    history = tmp_path / "state" / "colibri" / "chat_history"
    assert history.read_text().splitlines()[-2:] == ["hi", "yo"]
    assert history.stat().st_mode & 0o777 == 0o600


def _take_terminal() -> None:
    """Makes the terminal the one that Ctrl-C comes from, and heeds it: a background job of a shell ignores it."""
    import fcntl
    import termios

    signal.signal(signal.SIGINT, signal.default_int_handler)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class _Screen:
    """What a terminal showed; texts are waited for in order."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self._text = ""

    def wait_for(self, *texts: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        for text in texts:
            while text not in self._text:
                ready, _, _ = select.select([self._terminal], [], [], max(0, deadline - time.monotonic()))
                assert ready, f"no {text!r} on the screen: {self._text!r}"
                self._text += os.read(self._terminal, 4096).decode()
            self._text = self._text.partition(text)[2]
