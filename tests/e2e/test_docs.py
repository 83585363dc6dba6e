"""What README.md and docs/client.md tell a newcomer to type, run as printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.daemon import TIMEOUT_S, DaemonProcess

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
CLIENT_PAGE = (ROOT / "docs" / "client.md").read_text()


def shell_block(command: str) -> str:
    """The indented block of README.md that has this command in it."""
    blocks = re.findall(r"(?:^    .*\n)+", README, flags=re.MULTILINE)
    (block,) = [textwrap.dedent(block) for block in blocks if command in block]
    return block


def python_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)


def run(*command: str, folder: Path, socket: Path | None = None, stdin: str = "") -> str:
    """Runs what a newcomer would, in `folder`; its output. It must succeed, and say nothing of a traceback."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "XDG_STATE_HOME": str(folder), "COLIBRI_SOCKET": str(socket)}
    result = subprocess.run(
        command, cwd=folder, env=environment, input=stdin, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def default_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """On the model that README.md starts with."""
    assert "colibrid --model default\n" in shell_block("activate")
    with DaemonProcess(Path("default"), tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon


def test_the_readmes_shell_commands_run_as_printed(default_daemon: DaemonProcess, tmp_path: Path) -> None:
    block = shell_block("colibrictl chat --session")
    output = run("sh", "-ec", block, folder=tmp_path, socket=default_daemon.socket, stdin="Hi, my name is Ada.\n")
    reply, *_, session = output.splitlines()
    assert reply
    assert session.startswith("alice ")


def test_the_readmes_python_runs_as_printed_and_again(default_daemon: DaemonProcess, tmp_path: Path) -> None:
    (block,) = python_blocks(README)
    for _ in range(2):
        output = run(sys.executable, "-c", block, folder=tmp_path, socket=default_daemon.socket)
        assert int(output.splitlines()[-1]) > 0, "the second turn finds the first in the cache"


def test_the_readmes_conversion_runs_as_printed(tiny_qwen_checkpoint: Path, tmp_path: Path) -> None:
    convert = shell_block("colibrictl convert").splitlines()[0]
    (tmp_path / convert.split()[2]).symlink_to(tiny_qwen_checkpoint)
    run("sh", "-ec", convert, folder=tmp_path)
    assert (tmp_path / convert.split()[3]).stat().st_size > 0


@pytest.mark.parametrize("block", python_blocks(CLIENT_PAGE)[:2], ids=["sync", "async"])
def test_the_client_pages_first_examples_run_as_printed(
    default_daemon: DaemonProcess, tmp_path: Path, block: str
) -> None:
    assert run(sys.executable, "-c", block, folder=tmp_path, socket=default_daemon.socket)
