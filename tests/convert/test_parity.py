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
    from support import transformers_oracle

    tokens = reference_cases.tokens()
    expected, experts = transformers_oracle.run(reference_cases.make_checkpoint(case, tmp_path), tokens)
    logits, routing = engine.run(converted[case.name], tokens)
    np.testing.assert_array_equal(routing, experts)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE * float(np.abs(expected).max()))


def test_normalised_routing_weights_follow_each_family_s_default() -> None:
    """Mixtral normalises whatever the key says; Qwen3-MoE only where it says true. And the key matters."""

    def logits(name: str) -> npt.NDArray[np.float32]:
        return Vectors.load(reference_cases.VECTORS / f"{name}.npz").logits[:, 0]

    np.testing.assert_array_equal(logits("mixtral-norm-topk-false"), logits("mixtral"))
    np.testing.assert_array_equal(logits("qwen3-moe-norm-topk-absent"), logits("qwen3-moe-norm-topk-false"))
    assert np.abs(logits("qwen3-moe-norm-topk-false") - logits("qwen3-moe")).max() > 0.1


def test_every_other_variation_changes_the_logits() -> None:
    """A variation that changes nothing would prove nothing."""
    names = [case.name for case in CASES if case.name not in ("mixtral-norm-topk-false", "qwen3-moe-norm-topk-absent")]
    first = {Vectors.load(reference_cases.VECTORS / f"{name}.npz").logits[:, 0].tobytes() for name in names}
    assert len(first) == len(names)
