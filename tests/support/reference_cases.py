"""The cases of tests/data/reference_cases.json: a tiny checkpoint, with changes to its configuration and without some
tensors.

Used by the tests and by tools/make_reference_vectors.py, so that both speak of the same models.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - safetensors finds the dtype bfloat16 by name once this is imported
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

DATA = Path(__file__).parent.parent / "data"
VECTORS = DATA / "reference_vectors"
N_TOKENS = 200
VOCABULARY = 300


@dataclass(frozen=True)
class Case:
    """`config`: keys to set, null to remove. `drop`: tensors to leave out. `biases`: give q, k, v and o random ones.
    `columns`: how many logits of each row the vectors keep."""

    name: str
    checkpoint: str
    config: dict[str, Any] = field(default_factory=dict)
    drop: tuple[str, ...] = ()
    biases: bool = False
    columns: int = 25

    def run_oracle(self, folder: Path, tokens: npt.NDArray[np.int32]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
        """Logits and chosen experts of the case's checkpoint, by transformers, or by numpy where that has no class."""
        if self.checkpoint == "tiny-deepseek":
            from . import deepseek_reference

            return deepseek_reference.run(folder, tokens)
        from . import transformers_oracle

        return transformers_oracle.run(folder, tokens)


@dataclass(frozen=True)
class Vectors:
    """What the oracle computed: logits [n_tokens, n_columns] of some columns, log-sum-exp [n_tokens] of all, the
    largest logit, and chosen experts [n_tokens, n_layers, top_k], ascending, -1 in dense layers.
    """

    tokens: npt.NDArray[np.int32]
    columns: npt.NDArray[np.int32]
    logits: npt.NDArray[np.float32]
    logsumexp: npt.NDArray[np.float64]
    largest: float
    routing: npt.NDArray[np.int32]

    def save(self, path: Path) -> None:
        np.savez_compressed(
            path,
            tokens=self.tokens.astype(np.int16),
            columns=self.columns.astype(np.int16),
            logits=self.logits,
            logsumexp=self.logsumexp,
            largest=np.float32(self.largest),
            routing=self.routing.astype(np.int8),
        )

    @staticmethod
    def load(path: Path) -> Vectors:
        with np.load(path) as file:
            return Vectors(
                tokens=file["tokens"].astype(np.int32),
                columns=file["columns"].astype(np.int32),
                logits=file["logits"],
                logsumexp=file["logsumexp"],
                largest=float(file["largest"]),
                routing=file["routing"].astype(np.int32),
            )


def all_cases() -> list[Case]:
    document = json.loads((DATA / "reference_cases.json").read_text())
    return [Case(name, **{**fields, "drop": tuple(fields.get("drop", ()))}) for name, fields in document.items()]


def tokens() -> npt.NDArray[np.int32]:
    """One text for all cases, so that they differ by their models alone: ids spread over the vocabulary, some
    repeated.
    """
    return np.random.default_rng(1).integers(0, VOCABULARY, N_TOKENS).astype(np.int32)


def make_checkpoint(case: Case, folder: Path) -> Path:
    """Writes the case's checkpoint into `folder`."""
    source = DATA / case.checkpoint
    shutil.copytree(source, folder, dirs_exist_ok=True)
    config = json.loads((source / "config.json").read_text()) | case.config
    config = {key: value for key, value in config.items() if case.config.get(key, value) is not None}
    (folder / "config.json").write_text(json.dumps(config))
    if case.drop or case.biases:
        tensors = {k: v for k, v in load_file(source / "model.safetensors").items() if k not in case.drop}
        if case.biases:
            tensors |= _random_biases(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _random_biases(tensors: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """One bias for each attention projection, of the size of its output."""
    random = np.random.default_rng(2)
    names = sorted(name for name in tensors if name.endswith("_proj.weight") and "self_attn" in name)
    return {
        name.replace("weight", "bias"): random.standard_normal(len(tensors[name])).astype(tensors[name].dtype)
        for name in names
    }
