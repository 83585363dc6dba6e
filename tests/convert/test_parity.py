"""Held against transformers: logits at every position of 200 tokens, and the chosen experts.

Daily against committed vectors (tools/make_reference_vectors.py); live, on all logits, with `-m oracle`. The file is
read twice: by a numpy float64 reader, which proves the converter alone, and by the engine in f32 with f32 KV.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from colibri.convert import convert
from support import engine, reference_cases, reference_model
from support.reference_cases import Case, Vectors

# Of the largest logit. f32 against f32 in another order of additions: 4e-7 was seen; an error of kind is 1e-2 and more.
TOLERANCE = 2e-5

CASES = reference_cases.all_cases()
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The .colibri file of each case, in f32."""
    folder = tmp_path_factory.mktemp("cases")
    files = {}
    for case in CASES:
        checkpoint = reference_cases.make_checkpoint(case, folder / case.name)
        files[case.name] = folder / f"{case.name}.colibri"
        convert(checkpoint, files[case.name], quantize="f32")
    return files


def assert_parity(vectors: Vectors, logits: npt.NDArray[np.floating], routing: npt.NDArray[np.int32]) -> None:
    wide = logits.astype(np.float64)
    top = wide.max(axis=1)
    logsumexp = top + np.log(np.exp(wide - top[:, None]).sum(axis=1))
    np.testing.assert_array_equal(routing, vectors.routing)
    allowed = TOLERANCE * vectors.largest
    np.testing.assert_allclose(wide[:, vectors.columns], vectors.logits, rtol=0, atol=allowed)
    np.testing.assert_allclose(logsumexp, vectors.logsumexp, rtol=0, atol=allowed)


@each_case
def test_the_file_decoded_by_numpy_gives_the_logits_of_transformers(case: Case, converted: dict[str, Path]) -> None:
    vectors = Vectors.load(reference_cases.VECTORS / f"{case.name}.npz")
    logits, routing = reference_model.forward(reference_model.load(converted[case.name]), vectors.tokens.tolist())
    assert_parity(vectors, logits, routing)


@each_case
def test_the_engine_gives_the_logits_of_transformers(case: Case, converted: dict[str, Path]) -> None:
    vectors = Vectors.load(reference_cases.VECTORS / f"{case.name}.npz")
    assert_parity(vectors, *engine.run(converted[case.name], vectors.tokens))


@pytest.mark.oracle
@each_case
def test_the_engine_gives_all_logits_of_transformers_live(
    case: Case, converted: dict[str, Path], tmp_path: Path
) -> None:
    pytest.importorskip("transformers", reason="the live oracle needs transformers and torch")
    tokens = reference_cases.tokens()
    expected, experts = case.run_oracle(reference_cases.make_checkpoint(case, tmp_path), tokens)
    logits, routing = engine.run(converted[case.name], tokens)
    np.testing.assert_array_equal(routing, experts)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE * float(np.abs(expected).max()))


def first_column(name: str) -> npt.NDArray[np.float32]:
    return Vectors.load(reference_cases.VECTORS / f"{name}.npz").logits[:, 0]


SAME = {
    "mixtral-norm-topk-false": "mixtral",
    "qwen3-moe-norm-topk-absent": "qwen3-moe-norm-topk-false",
    "qwen2-moe-norm-topk-absent": "qwen2-moe",
    "olmoe-norm-topk-absent": "olmoe",
    "deepseek-norm-topk-absent": "deepseek",
}


def test_normalised_routing_weights_follow_each_family_s_default() -> None:
    """Mixtral normalises whatever the key says; the others only where it says true."""
    for name, other in SAME.items():
        np.testing.assert_array_equal(first_column(name), first_column(other), err_msg=name)


def test_every_other_variation_changes_the_logits() -> None:
    """A variation that changes nothing would prove nothing."""
    names = [case.name for case in CASES if case.name not in SAME]
    for i, name in enumerate(names):
        for other in names[:i]:
            assert np.abs(first_column(name) - first_column(other)).max() > 0.01, f"{name} and {other}"
