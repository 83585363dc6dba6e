"""The sampler against NumPy in float64: every parameter's distribution, alone and all together, and what it reports.

Seeds are fixed, so each verdict is the same every time: a bound is passed by a wide margin, or something is wrong.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from colibri import native
from colibri.native import Batch, Context, Model, Sampling
from support import reference_model

Floats = npt.NDArray[np.float64]

N_DRAWS = 6000
VOCABULARY = 300
# Enough of them to be drawn from a model whose logits are almost flat.
HISTORY = [7, 7, 9, 120, 120, 120, 44, 9]
MASK = np.packbits(np.arange(320) % 3 != 0, bitorder="little").view("<u4")


@pytest.fixture(scope="module")
def context(tiny_model_path: Path) -> Iterator[Context]:
    """With one held row of logits."""
    tokens = [5, 80, 200, 17, 33, 299, 4]
    n = len(tokens)
    with Model(tiny_model_path) as model, Context(model, n_pages=1, prefill_threads=1, decode_threads=1) as opened:
        flags = [native.ROW_NONE] * (n - 1) + [native.ROW_LOGITS]
        opened.forward(Batch(tokens, list(range(n)), [0] * n, flags, [[0]]))
        yield opened


def distribution(logits: Floats, s: Sampling) -> Floats:
    """Probabilities [vocabulary] that the sampler promises (native/src/sample.c), the plain way."""
    logits = logits.copy()
    generated = Counter(list(s.history)[s.n_prompt :])
    for token in set(s.history):
        logits[token] = (
            logits[token] / s.repetition_penalty if logits[token] > 0 else logits[token] * s.repetition_penalty
        )
        if token in generated:
            logits[token] -= s.presence_penalty + s.frequency_penalty * generated[token]
    for token, amount in s.bias.items():
        logits[token] += amount
    if s.allowed is not None:
        bits = np.unpackbits(np.asarray(s.allowed).view(np.uint8), bitorder="little")[: len(logits)]
        logits[bits == 0] = -np.inf
    order = np.argsort(-logits, kind="stable")
    if s.top_k:
        logits[order[s.top_k :]] = -np.inf
    weights = np.exp((logits - logits.max()) / s.temperature)
    before = np.cumsum(weights[order]) - weights[order]
    weights[order[(before >= s.top_p * weights.sum()) & (np.arange(len(order)) > 0)]] = 0
    weights[weights < s.min_p] = 0
    return weights / weights.sum()  # type: ignore[no-any-return]


PENALTIES = {"history": HISTORY, "n_prompt": 3}
CASES: dict[str, dict[str, Any]] = {
    "cold": {"temperature": 0.3},
    "as it is": {"temperature": 1.0},
    "hot": {"temperature": 4.0},
    "top-k": {"top_k": 11},
    "top-k over the vocabulary": {"top_k": 100_000},
    "top-p": {"top_p": 0.5},
    "a tiny top-p": {"top_p": 1e-6},
    "min-p": {"min_p": 0.3},
    "repetition": {"repetition_penalty": 1.8, **PENALTIES},
    "repetition below 1": {"repetition_penalty": 0.5, **PENALTIES},
    "presence": {"presence_penalty": -2.5, **PENALTIES},
    "frequency": {"frequency_penalty": -0.9, **PENALTIES},
    "bias": {"bias": {3: 3.0, 299: 2.0, 8: -1000.0}},
    "a ban": {"bias": {3: -np.inf}},
    "mask": {"allowed": MASK},
    "all at once": {
        "temperature": 1.4,
        "top_k": 80,
        "top_p": 0.8,
        "min_p": 0.05,
        "repetition_penalty": 1.3,
        "presence_penalty": -1.0,
        "frequency_penalty": -0.4,
        "bias": {5: 2.0},
        "allowed": MASK,
        **PENALTIES,
    },
}


@pytest.mark.parametrize("parameters", CASES.values(), ids=CASES)
def test_draws_follow_the_distribution_that_numpy_computes(context: Context, parameters: dict[str, Any]) -> None:
    sampling = Sampling(**{"temperature": 1.0, "seed": 20, **parameters})
    expected = distribution(context.logits(0).astype(np.float64), sampling)
    assert (expected != distribution(context.logits(0).astype(np.float64), Sampling(temperature=1.0))).any() or (
        parameters in (CASES["as it is"], CASES["top-k over the vocabulary"])
    )  # the case changes something
    draws = [context.sample(0, dataclasses.replace(sampling, position=i)).token for i in range(N_DRAWS)]
    counts = np.bincount(draws, minlength=VOCABULARY)
    assert counts[expected == 0].sum() == 0
    assert chi_square_z(counts, expected * N_DRAWS) < 4


def chi_square_z(counts: npt.NDArray[np.int64], expected: Floats) -> float:
    """Pearson's chi-square in standard deviations from its mean; rare tokens are pooled until five are expected."""
    common = expected >= 5
    pooled_counts = np.append(counts[common], counts[~common].sum())
    pooled = np.append(expected[common], expected[~common].sum())
    pooled_counts, pooled = pooled_counts[pooled > 0], pooled[pooled > 0]
    freedom = max(len(pooled) - 1, 1)
    chi_square = float(((pooled_counts - pooled) ** 2 / pooled).sum())
    return (chi_square - freedom) / float(np.sqrt(2 * freedom))


def test_the_measure_notices_a_small_error(context: Context) -> None:
    """A temperature that is off by a tenth is seen with these many draws: the test above can fail."""
    logits = context.logits(0).astype(np.float64)
    sampling = Sampling(temperature=0.3, seed=20)
    draws = [context.sample(0, dataclasses.replace(sampling, position=i)).token for i in range(N_DRAWS)]
    wrong = distribution(logits, Sampling(temperature=0.33))
    assert chi_square_z(np.bincount(draws, minlength=VOCABULARY), wrong * N_DRAWS) > 8


@pytest.mark.parametrize("parameters", CASES.values(), ids=CASES)
def test_log_probabilities_are_the_model_s_own_whatever_the_sampling(
    context: Context, parameters: dict[str, Any]
) -> None:
    logits = context.logits(0).astype(np.float64)
    logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    sampled = context.sample(0, Sampling(**{"temperature": 1.0, "seed": 3, "n_top_logprobs": 20, **parameters}))
    assert sampled.logprob == pytest.approx(logprobs[sampled.token], abs=1e-5)
    assert [token for token, _ in sampled.top] == np.argsort(-logits, kind="stable")[:20].tolist()
    np.testing.assert_allclose([logprob for _, logprob in sampled.top], np.sort(logprobs)[::-1][:20], atol=1e-5)


def test_greedy_is_the_limit_of_cold(context: Context) -> None:
    logits = context.logits(0).astype(np.float64)
    for parameters in CASES.values():
        greedy = Sampling(**{**parameters, "temperature": 0.0})
        cold = Sampling(**{**parameters, "temperature": 1e-3})
        assert context.sample(0, greedy).token == int(np.argmax(distribution(logits, cold)))


def test_seeds_and_positions_draw_apart(context: Context) -> None:
    draws = {
        (seed, position): context.sample(0, Sampling(temperature=4.0, seed=seed, position=position)).token
        for seed in (0, 1, 1 << 32, 1 << 63, (1 << 64) - 1)
        for position in range(40)
    }
    by_seed = [tuple(draws[seed, position] for position in range(40)) for seed, _ in list(draws)[::40]]
    assert len(set(by_seed)) == 5
    assert all(len(set(line)) > 20 for line in by_seed)


# The choice of experts


def routing_of(model: Model, tokens: list[int], temperature: float) -> npt.NDArray[np.int32]:
    """Experts [n, n_layers, top_k] of the tokens computed one by one, a draw after each."""
    rows = []
    with Context(model, n_pages=-(-len(tokens) // native.PAGE_TOKENS), prefill_threads=1, decode_threads=1) as context:
        for i, token in enumerate(tokens):
            pages = [list(range(i // native.PAGE_TOKENS + 1))]
            result = context.forward(Batch([token], [i], [0], [native.ROW_LOGITS], pages, want_routing=True))
            context.sample(0, Sampling(temperature=temperature, seed=1, position=i))
            rows.append(result.routing)
    return np.concatenate(rows)  # type: ignore[arg-type]


def test_the_choice_of_experts_does_not_depend_on_temperature(tiny_model_path: Path) -> None:
    tokens = [3 + 37 * i % 290 for i in range(40)]
    with Model(tiny_model_path) as model:
        greedy = routing_of(model, tokens, 0.0)
        assert len(np.unique(greedy)) > 2
        for temperature in (0.7, 100.0):
            np.testing.assert_array_equal(routing_of(model, tokens, temperature), greedy)


@pytest.mark.parametrize("fixture", ["tiny_model_path", "tiny_qwen_model_path"])
def test_experts_are_those_of_float64_wherever_no_two_are_tied(
    fixture: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    path: Path = request.getfixturevalue(fixture)
    tokens = np.random.default_rng(4).integers(3, VOCABULARY, 400)
    gaps: dict[int, Floats] = {}
    experts = reference_model.experts

    def watched(model: reference_model.ReferenceModel, layer: int, x: Floats) -> Any:
        falling = -np.sort(-reference_model.apply(model.tensors[layer, "router"], x), axis=1)
        top_k = model.header["top_k"]
        gaps[layer] = falling[:, top_k - 1] - falling[:, top_k]
        return experts(model, layer, x)

    monkeypatch.setattr(reference_model, "experts", watched)
    _, expected = reference_model.forward(reference_model.load(path), tokens.tolist())
    from support import engine

    _, chosen = engine.run(path, tokens.astype(np.int32))
    for layer, gap in gaps.items():
        clear = gap > 1e-5  # an f32 router logit of magnitude 1 is good to 1e-6
        assert clear.mean() > 0.99
        np.testing.assert_array_equal(chosen[clear, layer], expected[clear, layer])
