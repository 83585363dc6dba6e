"""What bench/quality.py reports, held against the same figures from whole logits in plain numpy."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from colibri.bench import quality
from colibri.bench.gguf_model import write_gguf
from colibri.bench.models import RandomWeights, write_checkpoint
from colibri.convert import convert
from colibri.native import Model
from support import engine, reference_cases, reference_model
from support.tiny_olmoe import TINY_OLMOE

N_TOKENS = 100  # more than a chunk, and no whole number of them


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return [int(token) for token in np.resize(reference_cases.tokens(), N_TOKENS)]


def softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits.astype(np.float64) - logits.max())
    return e / e.sum()


def test_the_figures_are_those_of_whole_logits(
    tiny_model_path: Path, tiny_q8_model_path: Path, tokens: list[int]
) -> None:
    found = quality.compare(tiny_model_path, tiny_q8_model_path, tokens)
    expected, expected_routing = engine.run(tiny_model_path, np.array(tokens, np.int32))
    actual, actual_routing = engine.run(tiny_q8_model_path, np.array(tokens, np.int32))
    pairs = [(softmax(a), softmax(b)) for a, b in zip(expected, actual, strict=True)]
    kl = [float(np.sum(p * np.log(p / q))) for p, q in pairs]
    assert found.n_tokens == N_TOKENS
    assert found.kl_mean == pytest.approx(np.mean(kl), rel=1e-9)
    assert found.kl_largest == pytest.approx(np.max(kl), rel=1e-9)
    assert found.kl_mean > 1e-5
    assert found.top1 == np.mean([p.argmax() == q.argmax() for p, q in pairs])
    same = [
        set(a) == set(b)
        for rows in zip(expected_routing, actual_routing, strict=True)
        for a, b in zip(*rows, strict=True)
    ]
    assert found.routing == np.mean(same)
    logprobs = [np.log(q[token]) for (_, q), token in zip(pairs, tokens[1:], strict=False)]
    assert found.perplexity == pytest.approx(np.exp(-np.mean(logprobs)), rel=1e-9)


def test_a_model_agrees_with_itself(tiny_qwen_model_path: Path, tokens: list[int]) -> None:
    """Dense layers, which choose nothing, are not counted as agreement or its lack."""
    found = quality.compare(tiny_qwen_model_path, tiny_qwen_model_path, tokens)
    assert (found.top1, found.kl_mean, found.kl_largest, found.routing) == (1.0, 0.0, 0.0, 1.0)
    assert found.perplexity == found.reference_perplexity


def test_another_model_is_refused(tiny_model_path: Path, tiny_qwen_model_path: Path, tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="is not the model of"):
        quality.compare(tiny_model_path, tiny_qwen_model_path, tokens)


@pytest.mark.parametrize("fmt", ["f32", "f16", "bf16", "q8"])
def test_only_gates_are_rounded(fmt: str, tiny_qwen_model_path: Path, tmp_path: Path) -> None:
    quality.round_gates(tiny_qwen_model_path, tmp_path / "rounded.colibri", quality.ROUNDED[fmt])
    with Model(tmp_path / "rounded.colibri") as model:
        model.verify()
    before = reference_model.load(tiny_qwen_model_path)
    after = reference_model.load(tmp_path / "rounded.colibri")
    for key, matrix in before.tensors.items():
        if key[1] != "router":
            np.testing.assert_array_equal(after.tensors[key].weights, matrix.weights)
            continue
        stored = after.tensors[key].weights
        if fmt == "q8":
            groups = np.abs(np.pad(matrix.weights, ((0, 0), (0, -matrix.weights.shape[1] % 32)))).reshape(8, -1, 32)
            half_step = np.repeat(groups.max(axis=2) / 127 * (1 + 2**-7) / 2, 32, axis=1)[:, : stored.shape[1]]
            assert (np.abs(stored - matrix.weights) <= half_step).all()
            assert (stored != matrix.weights).any()
        else:
            dtype = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}[fmt]
            np.testing.assert_array_equal(stored, matrix.weights.astype(np.float32).astype(dtype).astype(np.float64))
    for block, experts in before.experts.items():
        for one, other in zip(experts, after.experts[block], strict=True):
            np.testing.assert_array_equal(one.weights, other.weights)


def test_the_command_prints_a_table_and_writes_json(
    tiny_model_path: Path, tiny_q8_model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "figures.json"
    arguments = [str(tiny_model_path), str(tiny_q8_model_path), "--gates", "--tokens", "40", "--json", str(out)]
    assert quality.main(arguments) == 0
    figures = json.loads(out.read_text())
    names = [tiny_q8_model_path.name, *(f"gates in {fmt}" for fmt in quality.ROUNDED)]
    assert [row["name"] for row in figures] == names
    assert all(row["n_tokens"] == 40 for row in figures)
    printed = capsys.readouterr().out
    assert all(f"| {name} |" in printed for name in names)


@pytest.mark.parametrize("name", ["quality_text.txt", "quality_default_model.txt"])
def test_the_texts_are_long_enough(name: str, tiny_model_path: Path) -> None:
    text = quality.TEXT.with_name(name).read_text()
    assert len(text.split()) > 900
    with Model(tiny_model_path) as model:
        assert len(quality.read_text(quality.TEXT.with_name(name), model.json["tokenizer"], 1000)) == 1000


def test_llama_cpp_gives_the_logits_of_the_same_model_and_its_formats_cost_something(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="the extra `bench` is not installed")
    write_checkpoint(tmp_path / "tiny", TINY_OLMOE)
    weights = RandomWeights(tmp_path / "tiny")
    write_gguf(tmp_path / "x.gguf", weights, "olmoe", "f16")
    convert(tmp_path / "tiny", tmp_path / "x.colibri", quantize="f16", open_weights=RandomWeights)
    found = quality.compare_llama_cpp(tmp_path / "x.colibri", tmp_path / "x.gguf", list(range(70)))
    by_name = dict(zip(quality.LLAMA_CPP_TYPES, found, strict=True))
    assert by_name["F32"].kl_mean < 1e-5
    assert by_name["F32"].kl_mean < by_name["Q8_0"].kl_mean < by_name["pure Q4_0"].kl_mean
    assert all(agreement.n_tokens == 70 and agreement.routing is None for agreement in found)
