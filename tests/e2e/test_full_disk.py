"""A volume that really is full: what is said, what goes on, and what comes back by itself when there is space."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from colibri.protocol import messages as wire
from colibri.protocol.errors import StorageFull
from support.daemon import GREEDY, DaemonProcess, WireClient, chat

pytestmark = pytest.mark.slow


@pytest.fixture
def small_volume(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own below `tmp_path`, where this user may mount one."""
    folder = tmp_path / "data"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=48m,mode=0700", "colibri-test", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a small volume takes root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Takes every byte that is left."""
    path = folder / "somebody else's"
    with path.open("wb", buffering=0) as file:
        for n_bytes in (1 << 20, 1 << 12):
            try:
                while True:
                    file.write(bytes(n_bytes))
            except OSError:
                continue
    return path


def talk_until_refused(client: WireClient, session: str, folder: Path) -> int:
    """Turns that were saved before the disk took no more; the reserve is taken away, too, as soon as it is given."""
    for n in range(10_000):
        reply = client.ask(chat(f"{n}", session=session, max_tokens=2, sampling=GREEDY))
        try:
            _ = reply.result
        except StorageFull:
            return n
        fill(folder).rename(folder / f"filler {n}")
    raise AssertionError("the disk never refused")


def test_a_full_disk_is_told_by_health_and_lived_through(
    tiny_model_path: Path, tmp_path: Path, small_volume: Path
) -> None:
    with DaemonProcess(tiny_model_path, tmp_path) as daemon, daemon.connect() as client:
        _ = client.chat("Hello", session="alice", max_tokens=4, sampling=GREEDY).result
        health = client.ask(wire.Health()).result
        assert health["status"] == "degraded"  # 48 MiB are less than KV pages leave free
        assert [problem.split(":")[0] for problem in health["problems"]] == ["KV pages are not kept on disk"]
        n_saved = talk_until_refused(client, "bob", small_volume)
        health = client.ask(wire.Health()).result
        assert health["status"] == "degraded"
        assert [problem.split(":")[0] for problem in health["problems"]] == [
            "sessions cannot be saved",
            "KV pages are not kept on disk",
        ]
        for filler in [*small_volume.glob("filler*"), *small_volume.glob("somebody*")]:
            os.unlink(filler)
        _ = client.chat("There again", session="bob", max_tokens=2, sampling=GREEDY).result
        health = client.ask(wire.Health()).result
        assert [problem.split(":")[0] for problem in health["problems"]] == ["KV pages are not kept on disk"]
        assert client.ask(wire.SessionGet(name="bob")).result.n_turns >= n_saved + 1
        daemon.stop()
