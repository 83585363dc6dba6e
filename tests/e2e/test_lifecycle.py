"""Start and stop: who may have a socket and a data directory, what a signal does, what cannot be started."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from colibri.protocol import Token
from colibri.protocol import messages as wire
from colibri.protocol.errors import ConnectionLost, ShuttingDown
from support.daemon import GREEDY, TIMEOUT_S, DaemonProcess, WireClient, chat


def long_reply(**fields: object) -> wire.Generate:
    return wire.Generate(prompt="Once", max_tokens=3500, sampling=GREEDY, **fields)  # type: ignore[arg-type]


# Who may start


def test_a_second_daemon_on_a_live_socket_is_refused_and_the_first_lives(tiny_model_path: Path, tmp_path: Path) -> None:
    with DaemonProcess(tiny_model_path, tmp_path) as first:
        with pytest.raises(RuntimeError, match=r"c\.sock"):
            DaemonProcess(tiny_model_path, tmp_path, "--data-dir", str(tmp_path / "other")).start()
        with first.connect() as client:
            assert client.ask(wire.Health()).result["status"] == "ok"


def test_a_second_daemon_on_a_live_data_directory_is_refused_by_pid(tiny_model_path: Path, tmp_path: Path) -> None:
    with DaemonProcess(tiny_model_path, tmp_path) as first:
        with pytest.raises(RuntimeError, match=f"process {first.pid}"):
            DaemonProcess(tiny_model_path, tmp_path, "--socket", str(tmp_path / "other.sock")).start()
        assert not (tmp_path / "other.sock").exists()


def test_a_stale_socket_is_replaced_and_only_ours_is_removed(tiny_model_path: Path, tmp_path: Path) -> None:
    daemon = DaemonProcess(tiny_model_path, tmp_path).start()
    daemon.kill()
    assert daemon.socket.exists()
    with daemon:
        daemon.connect().close()
        assert daemon.stop() == 0
    assert not daemon.socket.exists()


def test_the_socket_is_private_under_an_open_umask(tiny_model_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "deep"
    with DaemonProcess(tiny_model_path, folder, umask=0) as daemon:
        assert stat.S_IMODE(daemon.socket.lstat().st_mode) == 0o600
        assert stat.S_IMODE(daemon.data.stat().st_mode) == 0o700
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


# What cannot be started


@pytest.mark.parametrize("cut", ["one byte", "half"])
def test_a_model_file_that_is_cut_is_refused_with_both_sizes(tiny_model_path: Path, tmp_path: Path, cut: str) -> None:
    data = tiny_model_path.read_bytes()
    broken = tmp_path / "broken.colibri"
    broken.write_bytes(data[: len(data) // 2 if cut == "half" else -1])
    with pytest.raises(RuntimeError, match=str(len(data))) as caught:
        DaemonProcess(broken, tmp_path).start()
    assert str(broken.stat().st_size) in str(caught.value)
    assert "exit code 1" in str(caught.value)
    assert not (tmp_path / "c.sock").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--kv-ram", "1KiB"], "two KV pages take"),
        (["--kv-ram", "much"], "is not a size"),
        (["--context", "100000"], "more than the 4096 of the model"),
        (["--http", "localhost:80"], "--http"),
        (["--expert-ram", "1KiB"], "--expert-ram: 1024 hold 0 experts of .* give at least"),
        (["--kv-ram", "9000TiB"], "--kv-ram 9000 TiB is too large"),
    ],
)
def test_an_option_that_cannot_be_is_refused_in_words(
    tiny_model_path: Path, tmp_path: Path, options: list[str], words: str
) -> None:
    with pytest.raises(RuntimeError, match=words) as caught:
        DaemonProcess(tiny_model_path, tmp_path, *options).start()
    assert "Traceback" not in str(caught.value)


def test_a_limit_of_address_space_is_told_with_a_remedy(tiny_model_path: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "colibri.daemon.main", "--model", str(tiny_model_path), "--kv-ram", "64GiB"]
    command += ["--socket", str(tmp_path / "c.sock"), "--data-dir", str(tmp_path / "data")]
    limited = ["sh", "-c", 'ulimit -v 8388608; exec "$@"', "sh", *command]  # 8 GiB
    result = subprocess.run(limited, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert result.returncode == 1
    assert "bytes for the context" in result.stderr
    assert "lower --kv-ram, or raise the limit: ulimit -v" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder that this user cannot write to."""
    folder = tmp_path / "read only"
    folder.mkdir(mode=0o500)
    if os.geteuid() != 0:
        yield folder
        return
    command = ["mount", "-t", "tmpfs", "-o", "ro", "colibri-test", str(folder)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("root writes anywhere, and may mount nothing here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("option", ["--data-dir", "--socket"])
def test_a_folder_that_cannot_be_written_is_said_in_one_sentence(
    tiny_model_path: Path, tmp_path: Path, read_only: Path, option: str
) -> None:
    path = read_only if option == "--data-dir" else read_only / "c.sock"
    with pytest.raises(RuntimeError, match=r"Read-only file system|Permission denied") as caught:
        DaemonProcess(tiny_model_path, tmp_path, option, str(path)).start()
    assert str(path) in str(caught.value)
    assert "exit code 1" in str(caught.value)
    assert "Traceback" not in str(caught.value)


# Stopping


def test_sigterm_stops_an_idle_daemon_with_code_0(tiny_model_path: Path, tmp_path: Path) -> None:
    with DaemonProcess(tiny_model_path, tmp_path) as daemon:
        client = daemon.connect()
        assert daemon.stop() == 0
        with pytest.raises((ShuttingDown, ConnectionLost)):
            _ = client.ask(wire.Health()).result


def test_sigterm_lets_a_short_request_finish(tiny_model_path: Path, tmp_path: Path) -> None:
    with DaemonProcess(tiny_model_path, tmp_path) as daemon, daemon.connect() as client:
        id = client.send(chat("Hello", session="a", max_tokens=300))
        client.wait_for(id, Token)
        daemon.signal(signal.SIGTERM)
        assert client.finish(id).result.usage.completion_tokens == 300
        assert daemon.wait() == 0


def test_a_request_after_sigterm_is_refused(tiny_model_path: Path, tmp_path: Path) -> None:
    with DaemonProcess(tiny_model_path, tmp_path) as daemon, daemon.connect() as client:
        running = client.send(long_reply())
        client.wait_for(running, Token)
        daemon.signal(signal.SIGINT)
        refused = None
        while not isinstance(refused, ShuttingDown):  # until the signal has arrived
            try:
                _ = client.ask(wire.Health()).result
            except ShuttingDown as error:
                refused = error
        client.ask(wire.Cancel(target=running))
        assert client.finish(running).result.finish_reason == "cancelled"
        assert daemon.wait() == 0


def test_a_long_request_is_cut_off_by_sigterm_and_saved(tiny_model_path: Path, tmp_path: Path) -> None:
    with DaemonProcess(tiny_model_path, tmp_path, "--grace", "0") as daemon, daemon.connect() as client:
        id = client.send(long_reply(session="cut"))
        client.wait_for(id, Token)
        daemon.signal(signal.SIGTERM)
        reply = client.finish(id)
        with pytest.raises(ShuttingDown):
            _ = reply.result
        assert daemon.wait() == 0
    with daemon, daemon.connect() as client:
        stored = client.ask(wire.SessionGet(name="cut", include_tokens=True)).result
        assert stored.tokens[len(stored.tokens) - len(reply.ids) :] == reply.ids
        assert stored.state == "idle"


def test_a_second_signal_ends_the_daemon_at_once(tiny_model_path: Path, tmp_path: Path) -> None:
    with DaemonProcess(tiny_model_path, tmp_path, "--grace", "1000") as daemon, daemon.connect() as client:
        client.wait_for(client.send(long_reply()), Token)
        client.wait_for(client.send(long_reply()), Token)
        daemon.signal(signal.SIGTERM)
        _until_refused(client)
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 128 + signal.SIGTERM


def _until_refused(client: WireClient) -> None:
    try:
        while True:
            _ = client.ask(wire.Health()).result
    except ShuttingDown:
        return


def test_what_is_on_disk_belongs_to_us_alone(tiny_model_path: Path, tmp_path: Path) -> None:
    with DaemonProcess(tiny_model_path, tmp_path, umask=0) as daemon:
        with daemon.connect() as client:
            client.chat("secret", session="s", max_tokens=40)
        daemon.stop()
    # The folder is closed; what is in it need not be.
    assert stat.S_IMODE(daemon.data.stat().st_mode) & 0o077 == 0
    assert daemon.data.stat().st_uid == os.geteuid()
