"""convert(): what goes in comes out."""

from __future__ import annotations

from pathlib import Path

import pytest

from colibri.convert import convert


@pytest.mark.parametrize("quantize", ["f32", "bf16", "f16", "q8"])
def test_the_same_checkpoint_gives_the_same_bytes(tiny_checkpoint: Path, tmp_path: Path, quantize: str) -> None:
    first, second = tmp_path / "a.colibri", tmp_path / "b.colibri"
    convert(tiny_checkpoint, first, quantize=quantize)
    convert(tiny_checkpoint, second, quantize=quantize)
    assert first.read_bytes() == second.read_bytes()
