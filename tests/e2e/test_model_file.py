"""A model file that is replaced, removed, or changed in place while it is served: told, never a crash."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from colibri import native
from colibri.protocol import Token
from colibri.protocol import messages as wire
from colibri.protocol.errors import ModelLost
from support.daemon import GREEDY, DaemonProcess


@pytest.fixture
def daemon(tiny_model_path: Path, tmp_path: Path) -> DaemonProcess:
    return DaemonProcess(Path(shutil.copy(tiny_model_path, tmp_path / "m.colibri")), tmp_path)


@pytest.mark.parametrize("how", ["replaced", "removed"])
def test_a_file_that_is_replaced_or_removed_is_told_and_served_on(daemon: DaemonProcess, how: str) -> None:
    with daemon, daemon.connect() as client:
        before = client.chat("hello", max_tokens=8, sampling=GREEDY).ids
        assert client.ask(wire.Health()).result["model_file"] == "unchanged"
        if how == "replaced":
            other = daemon.folder / "other"
            other.write_bytes(b"another")
            os.replace(other, daemon.model)
        else:
            daemon.model.unlink()
        health = client.ask(wire.Health()).result
        assert health["status"] == "ok"
        assert health["model_file"].startswith(how)
        assert client.stats()["model_file"].startswith(how)
        assert client.chat("hello", max_tokens=8, sampling=GREEDY).ids == before


def test_a_file_that_is_cut_ends_requests_with_a_typed_error_and_not_the_daemon(daemon: DaemonProcess) -> None:
    with daemon, daemon.connect() as client:
        client.chat("hello", session="s", max_tokens=4, sampling=GREEDY)
        id = client.send(wire.Generate(prompt="Once", max_tokens=4000, sampling=GREEDY))
        client.wait_for(id, Token)
        os.truncate(daemon.model, 4096)
        with pytest.raises(ModelLost):
            _ = client.finish(id).result
        for request in (wire.Generate(prompt="x", session="s"), wire.Score(tokens=[5, 6])):
            with pytest.raises(ModelLost, match="4096"):
                _ = client.ask(request).result
        health = client.ask(wire.Health()).result
        assert health["status"] == "failing"
        assert "4096" in health["model_file"]
        assert client.ask(wire.SessionGet(name="s")).result.n_turns == 1  # what was said is still there to read
        assert daemon.stop() == 0


def test_a_file_that_is_written_to_is_not_used_any_more(daemon: DaemonProcess) -> None:
    with daemon, daemon.connect() as client:
        client.chat("hello", max_tokens=1)
        os.utime(daemon.model)
        with pytest.raises(ModelLost, match="written to"):
            _ = client.chat("hello", max_tokens=1).result


def test_a_page_that_is_gone_is_an_error_of_the_engine_from_then_on(tiny_model_path: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(tiny_model_path, tmp_path / "m.colibri"))
    with native.Model(path) as model, native.Context(model, n_pages=2, prefill_threads=2) as context:
        context.infer([5, 6, 7], 2)
        os.truncate(path, 4096)
        for _ in range(2):
            context.truncate(0)
            with pytest.raises(native.IOFailure, match=r"m\.colibri"):
                context.infer([5, 6, 7], 2)
        with pytest.raises(native.NativeError):
            model.verify()
        with native.Model(tiny_model_path) as other, native.Context(other, n_pages=2) as healthy:
            assert healthy.infer([5, 6, 7], 2)
