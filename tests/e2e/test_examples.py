"""The programs in examples/ against a real daemon; the one in C was written from docs/protocol.md alone."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import colibri
from support.daemon import TIMEOUT_S, DaemonProcess

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LAST_LINE = re.compile(r"\n\[(\w+), prompt (\d+), of it cached (\d+), new (\d+)\]\n\Z")


@pytest.fixture(scope="module")
def chat_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    program = tmp_path_factory.mktemp("examples") / "chat"
    flags = ["-std=c17", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    subprocess.run([*compiler.split(), *flags, "-o", str(program), str(EXAMPLES / "chat.c")], check=True)
    return program


def run(*command: object, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        list(map(str, command)), capture_output=True, timeout=TIMEOUT_S, env=os.environ | environment, check=False
    )


def test_a_client_in_c_has_a_conversation(chat_program: Path, daemon: DaemonProcess) -> None:
    first = run(chat_program, daemon.socket, "from-c", "Hello, für 🐦?")
    second = run(chat_program, daemon.socket, "from-c", "x" * 20_000)
    assert (first.returncode, first.stderr) == (0, b"")
    output = first.stdout.decode()
    shown = LAST_LINE.search(output)
    assert shown is not None, output
    with colibri.connect(str(daemon.socket)) as client:
        session = client.session("from-c", resume=True)
        info = session.info(include_tokens=True)
    question, reply = info.messages[:2]
    assert (question.role, question.content) == ("user", "Hello, für 🐦?")
    assert (reply.role, reply.content) == ("assistant", output[: shown.start()])
    assert len(info.tokens or []) == int(shown[2]) + int(shown[4])
    assert second.returncode == 1, "longer than the context"
    assert second.stderr.startswith(b"prompt_too_long: ")


def test_a_client_in_c_resumes(chat_program: Path, daemon: DaemonProcess) -> None:
    outputs = [run(chat_program, daemon.socket, "twice", "Hello").stdout.decode() for _ in range(2)]
    first, second = (LAST_LINE.search(output) for output in outputs)
    assert first is not None
    assert second is not None
    assert int(second[2]) > int(first[2]) + int(first[4]), "the first turn is part of the second's prompt"
    assert int(second[3]) > 0


def test_a_client_in_c_takes_whatever_it_is_sent_without_going_astray(chat_program: Path, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def answer() -> None:
            with listener.accept()[0] as peer:
                peer.sendall(b"\x00\x00\x00\x05\x83\xa2id\xff")
                while peer.recv(1 << 16):
                    pass

        thread = threading.Thread(target=answer)
        thread.start()
        result = run(chat_program, path, "a", "b")
        thread.join()
    assert (result.returncode, result.stderr) == (1, b"chat: a frame ends too early\n")


def test_the_example_in_python_asks_several_questions_at_once(daemon: DaemonProcess) -> None:
    questions = ["Who?", "What?", "When?"]
    result = run(sys.executable, EXAMPLES / "questions.py", *questions, COLIBRI_SOCKET=str(daemon.socket))
    assert (result.returncode, result.stderr) == (0, b"")
    lines = result.stdout.decode().splitlines()
    assert sorted(line for line in lines if line in questions) == sorted(questions)
    assert len(result.stdout) > sum(map(len, questions)) + 3 * len("\n    \n")


def test_the_example_in_python_says_when_there_is_no_daemon(tmp_path: Path) -> None:
    result = run(sys.executable, EXAMPLES / "questions.py", "Who?", COLIBRI_SOCKET=str(tmp_path / "none"))
    assert result.returncode == 1
    assert b"no daemon listens here" in result.stderr
