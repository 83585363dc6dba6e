"""calibrate: from a text to a table, and what it says of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from colibri.convert import ModelFileError, OutputError, calibrate
from colibri.native import Context, Model

TEXT = "the cat sat on the mat and the dog sat on the log, " * 30


def test_a_table_is_learned_and_judged_on_what_it_did_not_see(tiny_q8_model_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.table"
    told: list[tuple[int, int]] = []
    report = calibrate(tiny_q8_model_path, TEXT, out, progress=lambda done, total: told.append((done, total)))
    assert report.n_tokens > 8 * report.n_held_out > 0
    assert 0 < report.hit_rate_by_frequency <= report.hit_rate <= 1, "the text repeats itself"
    assert told[-1] == (report.n_tokens + report.n_held_out,) * 2
    assert out.stat().st_size == report.table_bytes
    with Model(tiny_q8_model_path) as model, Context(model, n_pages=1, static_table=out) as context:
        assert context.table_checksum


def test_the_same_text_gives_the_same_table(tiny_q8_model_path: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        calibrate(tiny_q8_model_path, TEXT, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_what_cannot_be_is_refused_in_words(tiny_q8_model_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="too short"):
        calibrate(tiny_q8_model_path, "a", tmp_path / "t")
    with pytest.raises(ModelFileError, match="nowhere"):
        calibrate(tmp_path / "nowhere", TEXT, tmp_path / "t")
    with pytest.raises(OutputError, match="missing"):
        calibrate(tiny_q8_model_path, TEXT, tmp_path / "missing" / "t")
