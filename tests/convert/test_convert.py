"""convert() as a whole: the same bytes again, progress, and a file that is whole or not there."""

from __future__ import annotations

import fcntl
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.numpy import load_file, save_file

from colibri.convert import ModelFileError, OutputError, Progress, TensorError, UnsupportedModel, convert, inspect
from colibri.native import FormatError, Model, Unsupported

# Converts argv[1] to argv[2], and dies by SIGKILL once the given share of the bytes is written.
KILLED_CONVERTER = """
import os, signal, sys
from colibri.convert import convert

def progress(p):
    if p.done_bytes >= float(sys.argv[3]) * p.total_bytes:
        os.kill(os.getpid(), signal.SIGKILL)

convert(sys.argv[1], sys.argv[2], progress=progress)
"""


@pytest.mark.parametrize("quantize", ["f32", "bf16", "f16", "q8", "q4"])
def test_the_same_checkpoint_gives_the_same_bytes(tiny_checkpoint: Path, tmp_path: Path, quantize: str) -> None:
    first, second = tmp_path / "a.colibri", tmp_path / "b.colibri"
    convert(tiny_checkpoint, first, quantize=quantize)
    convert(tiny_checkpoint, second, quantize=quantize)
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("quantize", ["f32", "bf16", "f16", "q8", "q4"])
def test_the_engine_opens_and_verifies_what_was_written(tiny_checkpoint: Path, tmp_path: Path, quantize: str) -> None:
    report = convert(tiny_checkpoint, tmp_path / "model.colibri", quantize=quantize)
    with Model(tmp_path / "model.colibri") as model:
        model.verify()
        assert model.info.fingerprint.hex() == report.fingerprint
        assert model.info.file_bytes == report.file_bytes == (tmp_path / "model.colibri").stat().st_size


def test_progress_rises_to_the_size_of_the_file(tiny_checkpoint: Path, tmp_path: Path) -> None:
    seen: list[Progress] = []
    report = convert(tiny_checkpoint, tmp_path / "model.colibri", progress=seen.append)
    done = [step.done_bytes for step in seen]
    assert done == sorted(done)
    assert done[-1] == report.file_bytes
    assert {step.total_bytes for step in seen} == {report.file_bytes}


def test_the_report_tells_what_quantising_cost(tiny_checkpoint: Path, tmp_path: Path) -> None:
    exact = convert(tiny_checkpoint, tmp_path / "a.colibri", quantize="bf16").rounding
    rounded = convert(tiny_checkpoint, tmp_path / "b.colibri", quantize="q8").rounding
    assert all(figures["relative_rms"] == 0 for figures in exact.values())
    assert 1e-3 < rounded["expert_up"]["relative_rms"] < 1e-2
    assert rounded["router"]["relative_rms"] == 0
    with Model(tmp_path / "b.colibri") as model:
        assert model.json["quantization"] == {"format": "q8", "errors": rounded}


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 1.0])
def test_a_converter_that_is_killed_leaves_nothing_that_can_be_served(
    tiny_checkpoint: Path, tmp_path: Path, share: float
) -> None:
    out = tmp_path / "model.colibri"
    killed = subprocess.run([sys.executable, "-c", KILLED_CONVERTER, tiny_checkpoint, out, str(share)], check=False)
    assert killed.returncode == -signal.SIGKILL
    if share < 1:
        assert not out.exists()
        [left] = tmp_path.iterdir()
        with pytest.raises(FormatError):
            Model(left)
        with pytest.raises(ModelFileError):
            inspect(left)
    convert(tiny_checkpoint, out)
    assert inspect(out, verify=True).verified
    assert list(tmp_path.iterdir()) == [out]


def test_a_full_disk_is_told_and_leaves_nothing(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(OutputError, match="1000 are free"):
        convert(tiny_checkpoint, tmp_path / "model.colibri")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    convert(tiny_checkpoint, tmp_path / "model.colibri")


def test_a_write_that_fails_is_told_and_leaves_nothing(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """A limit on file size stands for a disk that fills up in the middle: the system refuses the write."""
    script = "import sys; from colibri.convert import convert; convert(sys.argv[1], sys.argv[2])"

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    failed = subprocess.run(
        [sys.executable, "-c", script, tiny_checkpoint, tmp_path / "model.colibri"],
        check=False,
        preexec_fn=limit,
        capture_output=True,
        text=True,
    )
    assert "OutputError" in failed.stderr
    assert "no room" in failed.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_conversion_that_fails_leaves_the_former_file(tiny_checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.colibri"
    convert(tiny_checkpoint, out)
    before = out.read_bytes()

    def interrupt(step: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(tiny_checkpoint, out, quantize="f32", progress=interrupt)
    assert out.read_bytes() == before
    assert list(tmp_path.iterdir()) == [out]


def test_two_converters_do_not_write_one_file(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with (tmp_path / "model.colibri.partial").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(OutputError, match="another converter"):
            convert(tiny_checkpoint, tmp_path / "model.colibri")
    convert(tiny_checkpoint, tmp_path / "model.colibri")


def test_a_target_that_cannot_be_written_is_named(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="nowhere"):
        convert(tiny_checkpoint, tmp_path / "nowhere" / "model.colibri")
    with pytest.raises(OutputError, match="is a folder"):
        convert(tiny_checkpoint, tmp_path)


def test_a_matrix_larger_than_a_band_is_encoded_as_one(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(tiny_checkpoint, tmp_path / "whole.colibri")
    monkeypatch.setattr("colibri.convert.converter.BAND_BYTES", 1)
    convert(tiny_checkpoint, tmp_path / "banded.colibri")
    with Model(tmp_path / "whole.colibri") as whole, Model(tmp_path / "banded.colibri") as banded:
        assert whole.info.fingerprint == banded.info.fingerprint


def test_a_model_beyond_the_engine_s_limits_gets_no_file(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> Model:
        raise Unsupported("n_kv_heads: more than 64 heads share one")

    monkeypatch.setattr("colibri.convert.converter.Model", refuse)
    with pytest.raises(UnsupportedModel, match="more than 64 heads"):
        convert(tiny_checkpoint, tmp_path / "model.colibri")
    assert list(tmp_path.iterdir()) == []


def test_weights_too_large_for_f16_are_refused_by_tensor(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint, tmp_path / "copy"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.o_proj.weight"][0, 0] = 1e30
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(TensorError, match=r"layers\.0\.self_attn\.o_proj"):
        convert(folder, tmp_path / "model.colibri", quantize="f16")
    assert not (tmp_path / "model.colibri").exists()
