"""The data directory: one process at a time, one version."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from colibri.kvstore import DataDir, StoreLocked, StoreVersionError

HOLDER = """
import sys
from colibri.kvstore import DataDir
data = DataDir(sys.argv[1])
print("open", flush=True)
sys.stdin.read()
"""


def test_a_new_directory_is_private_and_opens_again(tmp_path: Path) -> None:
    for _ in range(2):
        with DataDir(tmp_path / "deep" / "data") as data:
            assert data.truth.heads(None, 1) == []
            assert data.pages.stats()["pages"] == 0
            assert data.path.stat().st_mode & 0o777 == 0o700


def test_a_second_opening_is_refused_with_the_holders_pid(tmp_path: Path) -> None:
    with DataDir(tmp_path), pytest.raises(StoreLocked, match=f"process {os.getpid()}"):
        DataDir(tmp_path)


def test_a_second_process_is_refused_and_kill_9_frees_the_lock(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        with pytest.raises(StoreLocked, match=f"process {holder.pid}"):
            DataDir(tmp_path)
        holder.kill()
    DataDir(tmp_path).close()


def test_another_layout_version_is_refused_by_both_versions_and_touched_in_nothing(tmp_path: Path) -> None:
    DataDir(tmp_path).close()
    (tmp_path / "VERSION").write_text("2\n")
    before = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "truth").iterdir()}
    with pytest.raises(StoreVersionError, match=r"version '2'.* version 1"):
        DataDir(tmp_path)
    assert {file.name: file.stat().st_mtime_ns for file in (tmp_path / "truth").iterdir()} == before
    (tmp_path / "VERSION").write_text("1\n")
    DataDir(tmp_path).close()
