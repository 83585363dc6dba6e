"""Fixtures that every part's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

# The same examples every time, and no time limit for one: the machine may be busy.
settings.register_profile("colibri", derandomize=True, deadline=None)
settings.load_profile("colibri")

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def tiny_checkpoint() -> Path:
    """A tiny random Mixtral checkpoint with a real tokenizer and a chat template. Read only."""
    return DATA / "tiny-mixtral"


@pytest.fixture(scope="session")
def tiny_qwen_checkpoint() -> Path:
    """A tiny random Qwen3-MoE checkpoint: a dense layer in the middle, tied embeddings. Read only."""
    return DATA / "tiny-qwen3-moe"


@pytest.fixture(scope="session")
def tiny_model_path(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Mixtral as .colibri in f32. Read only."""
    return _convert(tiny_checkpoint, tmp_path_factory, "f32")


@pytest.fixture(scope="session")
def tiny_q8_model_path(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Mixtral as .colibri in q8. Read only."""
    return _convert(tiny_checkpoint, tmp_path_factory, "q8")


@pytest.fixture(scope="session")
def tiny_qwen_model_path(tiny_qwen_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Qwen3-MoE as .colibri in f32. Read only."""
    return _convert(tiny_qwen_checkpoint, tmp_path_factory, "f32")


def _convert(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, quantize: str) -> Path:
    from colibri.convert import convert

    out = tmp_path_factory.mktemp("model") / f"{checkpoint.name}-{quantize}.colibri"
    convert(checkpoint, out, quantize=quantize)
    return out
