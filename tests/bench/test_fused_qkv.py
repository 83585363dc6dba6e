"""Fused against apart, in turns."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from colibri.bench import fused_qkv


def test_a_ratio_above_one_says_that_fused_was_faster() -> None:
    assert fused_qkv.ratios(lambda: 3.0, lambda: 2.0, pairs=3) == [1.5] * 3


def test_the_order_changes_from_pair_to_pair() -> None:
    calls: list[str] = []

    def run(name: str) -> float:
        calls.append(name)
        return 1.0

    fused_qkv.ratios(lambda: run("apart"), lambda: run("fused"), pairs=2)
    assert calls == ["apart", "fused", "fused", "apart", "apart", "fused"]


def test_prefill_and_decode_of_each_shape_are_told(tmp_path: Path) -> None:
    options = ["--layers", "1", "--prompt", "32", "--steps", "1", "--pairs", "2", "--threads", "1"]
    options += ["--folder", str(tmp_path)]
    result = CliRunner().invoke(fused_qkv.main, ["tiny", *options], catch_exceptions=False)
    assert [line.split()[:2] for line in result.output.splitlines()] == [["tiny-1", "prefill"], ["tiny-1", "decode"]]
