"""Errors are one line and an exit code, as docs/cli.md promises."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import colibri
from colibri.protocol.messages import Request
from support.ctl import Ctl
from support.fake_daemon import Connection, FakeDaemon, token

ONLINE = [
    ["generate", "a"],
    ["chat", "a"],
    ["score", "a"],
    ["tokenize", "a"],
    ["detokenize", "1"],
    ["status"],
    ["sessions", "list"],
    ["sessions", "show", "a"],
    ["sessions", "fork", "a", "b"],
    ["sessions", "truncate", "a", "1"],
    ["sessions", "delete", "a"],
]


@pytest.mark.parametrize("arguments", ONLINE, ids=" ".join)
def test_no_daemon_is_3_and_says_what_to_do(ctl: Ctl, tmp_path: Path, arguments: list[str]) -> None:
    path = str(tmp_path / "none")
    result = ctl(*arguments, "--socket", path)
    assert result.exit_code == 3
    assert result.stderr == (f"colibrictl: {path}: no daemon listens here (start it with: colibrid --model default)\n")
    assert result.stdout == ""


def test_an_error_of_the_daemon_is_1(ctl: Ctl, daemon: FakeDaemon) -> None:
    def fail(connection: Connection, id: int, request: Request) -> None:
        raise colibri.PromptTooLong("9000 tokens,\nand the context is 4096", where="prompt", hint="shorten it")

    daemon.script["generate"] = fail
    result = ctl("generate", "a")
    assert result.exit_code == 1
    assert result.stderr == "colibrictl: prompt: 9000 tokens, and the context is 4096 (shorten it)\n"


def test_an_error_as_json_is_the_only_output(ctl: Ctl, daemon: FakeDaemon) -> None:
    def fail(connection: Connection, id: int, request: Request) -> None:
        raise colibri.Overloaded("full", where="queue", retry_after_s=2)

    daemon.script["generate"] = fail
    result = ctl("generate", "a", "--json")
    assert (result.exit_code, result.stderr) == (1, "")
    assert json.loads(result.stdout) == {
        "error": {"type": "overloaded", "message": "full", "where": "queue", "retry_after_s": 2}
    }


def test_a_daemon_that_goes_away_is_3_after_the_text_that_came(ctl: Ctl, daemon: FakeDaemon) -> None:
    def die(connection: Connection, id: int, request: Request) -> None:
        connection.answer(id, token("so far"))
        connection.socket.close()

    daemon.script["generate"] = die
    result = ctl("generate", "a")
    assert (result.exit_code, result.stdout) == (3, "so far\n")
    assert result.stderr.startswith("colibrictl: the daemon")


WRONG_USAGE = [
    ["nonsense"],
    ["generate", "--nonsense"],
    ["generate", "a", "--top-p", "2"],
    ["generate", "a", "--max-tokens", "many"],
    ["detokenize", "x"],
    ["score", "a", "--tokens", "1"],
    ["sessions", "truncate", "a", "-1"],
]


@pytest.mark.parametrize("arguments", WRONG_USAGE, ids=" ".join)
def test_wrong_usage_is_2(ctl: Ctl, arguments: list[str]) -> None:
    result = ctl(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


@pytest.mark.parametrize("arguments", WRONG_USAGE, ids=" ".join)
def test_wrong_usage_as_json_is_the_only_output(ctl: Ctl, arguments: list[str]) -> None:
    result = ctl(*arguments, "--json")
    assert (result.exit_code, result.stderr) == (2, "")
    wire = json.loads(result.stdout)["error"]
    assert wire["type"] == "usage_error"
    assert wire["message"]
    assert wire["hint"] == f"{wire['where']} --help"


def test_json_behind_two_hyphens_is_text(ctl: Ctl, daemon: FakeDaemon) -> None:
    result = ctl("generate", "--nonsense", "--", "--json")
    assert result.exit_code == 2
    assert result.stdout == ""


@pytest.mark.parametrize(
    "error", [MemoryError("3 GiB"), OSError(errno.ENOMEM, "3 GiB")], ids=lambda error: type(error).__name__
)
def test_memory_that_is_not_given_is_told_with_a_remedy(
    ctl: Ctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("colibri.convert.inspect", fail)
    result = ctl("inspect", str(tmp_path / "m"))
    assert result.exit_code == 1
    assert "3 GiB (free memory, or raise the limit: ulimit -v" in result.stderr
    wire = json.loads(ctl("inspect", str(tmp_path / "m"), "--json").stdout)["error"]
    assert wire["type"] == "out_of_memory"
    assert "ulimit -v" in wire["hint"]


def test_ctrl_c_is_130_and_keeps_the_text_that_came(
    ctl: Ctl, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = colibri.Stream.__next__

    def interrupted(stream: colibri.Stream) -> Any:
        if stream.text:
            raise KeyboardInterrupt
        return pieces(stream)

    monkeypatch.setattr(colibri.Stream, "__next__", interrupted)
    result = ctl("generate", "a")
    assert result.exit_code == 130
    assert result.stdout == "You\n"


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_a_plain_installation_says_what_is_missing(tmp_path: Path, missing: str) -> None:
    """`rich` is imported where it is needed, so that the rest works without."""
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "sys.argv = ['colibrictl', 'score', 'a']\n"
        "from colibri.ctl.main import main; main()"
    )
    with FakeDaemon(tmp_path / "s") as daemon:
        env = os.environ | {"COLIBRI_SOCKET": daemon.path}
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert result.returncode == 4
    assert result.stderr == f"colibrictl: {missing} is not installed: pip install 'colibri-moe[daemon]'\n"


def test_a_converter_without_its_packages_says_what_is_missing(
    ctl: Ctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("colibri.convert")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("colibri.convert", raising=False)
    monkeypatch.setitem(sys.modules, "numpy", None)
    result = ctl("inspect", str(tmp_path / "m"))
    assert result.exit_code == 4
    assert result.stderr == "colibrictl: numpy is not installed: pip install 'colibri-moe[daemon]'\n"


def test_errors_of_the_converter_as_json_look_like_those_of_the_daemon(ctl: Ctl, tmp_path: Path) -> None:
    (tmp_path / "m.colibri").write_bytes(b"something else")
    path = str(tmp_path / "m.colibri")
    errors = [
        ctl("inspect", path, "--json"),
        ctl("convert", str(tmp_path), str(tmp_path / "out"), "--json"),
        ctl("status", "--socket", str(tmp_path / "none"), "--json"),
    ]
    wires = [json.loads(result.stdout)["error"] for result in errors]
    assert [wire["type"] for wire in wires] == ["model_file_error", "missing_file", "daemon_unavailable"]
    assert wires[0]["where"] == path
    for wire in wires:
        assert wire.keys() <= {"type", "message", "where", "hint"}
