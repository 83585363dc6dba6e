"""Experts in files of their own: the same model, and a shard that is missing, foreign or cut is refused by name."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from colibri.convert import ModelFileError, Progress, UnsupportedModel, convert, inspect
from colibri.convert.format import HEADER, HEADER_BYTES, header_checksum
from colibri.daemon.model_file import ModelFile
from colibri.native import ROW_LOGITS, Batch, Context, Model, NativeError

N_SHARDS = 3  # of 4 experts: one shard has two
PROMPT = [5, 17, 99, 3, 250, 42, 7]


def logits_of(path: Path) -> npt.NDArray[np.float32]:
    """[vocabulary] after the prompt."""
    n = len(PROMPT)
    with Model(path) as model, Context(model, n_pages=1) as context:
        context.forward(Batch(PROMPT, range(n), [0] * n, bytes([0] * (n - 1) + [ROW_LOGITS]), [[0]]))
        return np.array(context.logits(0))


@pytest.fixture
def whole(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    convert(tiny_checkpoint, tmp_path / "whole.colibri")
    return tmp_path / "whole.colibri"


@pytest.fixture
def sharded(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "sharded"
    folder.mkdir()
    convert(tiny_checkpoint, folder / "model.colibri", expert_shards=N_SHARDS)
    return folder / "model.colibri"


def shards_of(path: Path) -> list[Path]:
    return sorted(file for file in path.parent.iterdir() if file.name.startswith(path.name + "."))


def refused_by_both(path: Path, *words: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        inspect(path)
    with pytest.raises(NativeError) as refused:
        Model(path)
    for word in words:
        assert word in str(caught.value)
        assert word in str(refused.value)


def test_shards_make_the_same_model_bit_by_bit(whole: Path, sharded: Path) -> None:
    assert np.array_equal(logits_of(whole).view(np.uint32), logits_of(sharded).view(np.uint32))
    assert inspect(whole).fingerprint == inspect(sharded).fingerprint
    with Model(sharded) as model:
        model.verify()
        assert model.shards == shards_of(sharded)


def test_layers_without_experts_are_not_counted_in_shards(tiny_qwen_checkpoint: Path, tmp_path: Path) -> None:
    """One layer of this model is dense."""
    one, many = tmp_path / "one.colibri", tmp_path / "many.colibri"
    n_experts = inspect_experts(convert(tiny_qwen_checkpoint, one).out)
    convert(tiny_qwen_checkpoint, many, expert_shards=n_experts)
    assert len(shards_of(many)) == n_experts
    assert np.array_equal(logits_of(one).view(np.uint32), logits_of(many).view(np.uint32))


def inspect_experts(path: str) -> int:
    return int(inspect(path).architecture["n_experts"])


def test_inspect_counts_the_shards(whole: Path, sharded: Path) -> None:
    inspection = inspect(sharded, verify=True)
    assert inspection.shards == {file.name: file.stat().st_size for file in shards_of(sharded)}
    assert inspection.file_bytes == sum(file.stat().st_size for file in (sharded, *shards_of(sharded)))
    assert sum(inspection.bytes_by_kind.values()) == inspection.file_bytes
    assert inspection.bytes_by_kind["experts"] == inspect(whole).bytes_by_kind["experts"]


def test_the_report_and_the_progress_count_the_shards(tiny_checkpoint: Path, tmp_path: Path) -> None:
    seen: list[Progress] = []
    report = convert(tiny_checkpoint, tmp_path / "model.colibri", expert_shards=2, progress=seen.append)
    files = [tmp_path / "model.colibri", *shards_of(tmp_path / "model.colibri")]
    assert report.shards == [file.name for file in files[1:]]
    assert report.file_bytes == sum(file.stat().st_size for file in files) == seen[-1].done_bytes


@pytest.mark.parametrize("n_shards", [0, 5, -1])
def test_more_shards_than_experts_are_refused(tiny_checkpoint: Path, tmp_path: Path, n_shards: int) -> None:
    with pytest.raises(UnsupportedModel, match="expert-shard"):
        convert(tiny_checkpoint, tmp_path / "model.colibri", expert_shards=n_shards)
    assert list(tmp_path.iterdir()) == []


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def lengthen(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 1)


def forge(field: str, value: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        raw = bytearray(path.read_bytes())
        header = np.frombuffer(raw, HEADER, count=1)[0:1]
        header[field] = value
        header["header_checksum"] = header_checksum(header[0].copy(), np.zeros(0, np.void), b"")
        path.write_bytes(raw)

    return change


def damage_header(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES - 1)
        file.write(b"x")


@pytest.mark.parametrize(
    ("harm", "word"),
    [
        (Path.unlink, "missing"),
        (cut, "bytes"),
        (halve, "bytes"),
        (lengthen, "bytes"),
        (empty, ".colibri file"),
        (damage_header, "checksum"),
        (forge("fingerprint", 7), "fingerprint"),
        (forge("shard_index", 1), "shard_index"),
        (forge("n_shards", 2), "n_shards"),
        (forge("expert_offset", 0), "expert_offset"),
    ],
    ids=["missing", "cut", "halved", "too long", "empty", "damaged header", "foreign", "index", "count", "offset"],
)
def test_a_shard_that_is_not_right_is_refused_by_name(sharded: Path, harm: Callable[[Path], None], word: str) -> None:
    shard = shards_of(sharded)[1]
    harm(shard)
    refused_by_both(sharded, str(shard), "shard 2 of 3", word)


def test_a_shard_of_another_conversion_is_refused_by_fingerprint(
    tiny_checkpoint: Path, sharded: Path, tmp_path: Path
) -> None:
    convert(tiny_checkpoint, tmp_path / "other.colibri", quantize="bf16", expert_shards=N_SHARDS)
    mine, other = shards_of(sharded)[0], shards_of(tmp_path / "other.colibri")[0]
    shutil.copy(other, mine)
    with pytest.raises(NativeError, match="another model"):
        Model(sharded)


def test_a_shard_is_no_model(sharded: Path) -> None:
    refused_by_both(shards_of(sharded)[1], "shard 2 of 3")


def test_damage_in_a_shard_is_found_by_verify(sharded: Path) -> None:
    shard = shards_of(sharded)[2]
    with shard.open("r+b") as file:
        file.seek(65536 + 5)
        file.write(b"\xff\x00\xff")
    assert not inspect(sharded).verified
    with pytest.raises(ModelFileError, match="layer 0 expert"):
        inspect(sharded, verify=True)
    with Model(sharded) as model, pytest.raises(NativeError, match="damaged"):
        model.verify()


def test_a_new_conversion_takes_the_place_of_file_and_shards(tiny_checkpoint: Path, sharded: Path) -> None:
    convert(tiny_checkpoint, sharded, quantize="bf16", expert_shards=2)
    assert inspect(sharded, verify=True).quantization["format"] == "bf16"
    assert [file.name[-6:] for file in shards_of(sharded)] == ["1-of-2", "2-of-2"]
    convert(tiny_checkpoint, sharded)
    assert list(sharded.parent.iterdir()) == [sharded]


def test_a_conversion_that_fails_leaves_the_former_shards(tiny_checkpoint: Path, sharded: Path) -> None:
    def interrupt(step: Progress) -> None:
        if step.done_bytes > step.total_bytes // 2:
            raise KeyboardInterrupt

    before = {file: file.read_bytes() for file in sharded.parent.iterdir()}
    with pytest.raises(KeyboardInterrupt):
        convert(tiny_checkpoint, sharded, quantize="f32", expert_shards=2, progress=interrupt)
    assert {file: file.read_bytes() for file in sharded.parent.iterdir()} == before


# Converts argv[1] to argv[2] with two shards, and dies by SIGKILL when the argv[3]-th rename has been done.
KILLED_CONVERTER = """
import os, signal, sys
from colibri.convert import convert

rename, n_renames = os.replace, 0

def count(*names):
    global n_renames
    rename(*names)
    n_renames += 1
    if n_renames == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)

os.replace = count
convert(sys.argv[1], sys.argv[2], quantize="f32", expert_shards=2)
"""


@pytest.mark.parametrize("n_renames", [1, 2, 3, 4, 5])
def test_a_converter_that_dies_among_its_renames_leaves_a_whole_model(
    tiny_checkpoint: Path, sharded: Path, n_renames: int
) -> None:
    """Two shards are renamed twice, the file itself once: until then the former model is there, then the new one."""
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_CONVERTER, tiny_checkpoint, sharded, str(n_renames)], check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert inspect(sharded, verify=True).quantization["format"] == ("f32" if n_renames == 5 else "q8")
    convert(tiny_checkpoint, sharded, quantize="bf16", expert_shards=2)
    assert inspect(sharded, verify=True).quantization["format"] == "bf16"
    assert len(list(sharded.parent.iterdir())) == 3  # what the other one left is gone


def test_a_shard_that_is_written_to_is_told_while_it_is_served(sharded: Path) -> None:
    with Model(sharded) as model:
        file = ModelFile(sharded, model.shards)
    assert not file.is_lost
    cut(shards_of(sharded)[0])
    assert file.is_lost
