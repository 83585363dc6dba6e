"""Comparing engines: what is asked of a peer, what is read from its output, and how rounds become figures."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import pytest

from colibri.bench import peers
from colibri.bench.cost import Cost, Products
from colibri.bench.engine import Case
from colibri.bench.limits import Limits
from colibri.bench.peers import COLIBRI, Command, Series, compare, lines, parse_llama_bench

CASES = [Case("prefill", 512), Case("decode", 64)]
LIMITS = Limits(1e9, 1e8, 1e7)
COST = Cost(trunk_bytes=1000, expert_bytes=10, row=Products(int8=1000), head=Products(), pair_flops=0)


def entry(n_prompt: int, n_gen: int, rate: float, **more: object) -> dict[str, object]:
    return {"n_prompt": n_prompt, "n_gen": n_gen, "avg_ts": rate, **more}


def test_a_command_is_asked_for_every_case() -> None:
    command = Command("ik", "bench -m {gguf} -t {threads} {cases}", Path("/m/a b.gguf"), 2)
    cases = [*CASES, Case("prefill", 1024)]
    assert command.arguments(cases, 16) == [
        *("bench", "-m", "/m/a b.gguf", "-t", "2"),
        *("-p", "512,1024", "-n", "0", "-gp", "64,16"),
    ]


def test_figures_are_found_by_what_was_run() -> None:
    text = "a line before\n" + json.dumps([entry(64, 16, 5.0), entry(512, 0, 100.0)], indent=1) + "\n"
    assert parse_llama_bench(text, CASES, 16) == [100.0, 5.0]


def test_a_depth_counts_as_the_context() -> None:
    text = json.dumps([entry(0, 16, 5.0, n_depth=64), entry(512, 0, 100.0, n_depth=0)], indent=1)
    assert parse_llama_bench(text, CASES, 16) == [100.0, 5.0]


@pytest.mark.parametrize("text", ["", "no json", json.dumps([entry(512, 0, 100.0)], indent=1)])
def test_output_without_the_figures_is_refused(text: str) -> None:
    with pytest.raises(click.ClickException):
        parse_llama_bench(text, CASES, 16)


def test_a_command_that_fails_is_told_with_its_last_words() -> None:
    command = Command("ik", f"{sys.executable} -c 'import sys; sys.exit(\"cannot open it\")' {{cases}}", Path("x"), 2)
    with pytest.raises(click.ClickException, match="ik ended with status 1: cannot open it"):
        command.run(CASES, 16)


class FakeEngine:
    """Gives prepared rates, one list for each time it is asked."""

    isa = "avx2"

    def __init__(self, name: str, rates: list[list[float]]) -> None:
        self.name = name
        self.step_bytes = {CASES[1]: 2000.0}
        self._rates = iter(rates)

    def run(self, cases: Sequence[Case], steps: int) -> list[float]:
        return next(self._rates)


class FakeProbe:
    def limits(self, isa: str) -> Limits:
        return LIMITS


@pytest.fixture
def found() -> list[Series]:
    ours = FakeEngine(COLIBRI, [[1.0, 1.0], [200.0, 20.0], [300.0, 40.0], [400.0, 30.0]])
    theirs = FakeEngine("peer", [[1.0, 1.0], [100.0, 20.0], [100.0, 10.0], [100.0, 10.0]])
    return compare("m", [ours, theirs], ours, COST, CASES, rounds=3, steps=16, probe=FakeProbe())  # type: ignore[arg-type]


def test_the_first_round_is_not_counted(found: list[Series]) -> None:
    assert [(series.engine, series.case.kind, series.rates) for series in found] == [
        (COLIBRI, "prefill", [200.0, 300.0, 400.0]),
        (COLIBRI, "decode", [20.0, 40.0, 30.0]),
        ("peer", "prefill", [100.0, 100.0, 100.0]),
        ("peer", "decode", [20.0, 10.0, 10.0]),
    ]


def test_ratios_are_taken_within_a_round(found: list[Series]) -> None:
    assert found[2].ratios(found[0]) == [2.0, 3.0, 4.0]
    assert found[3].ratios(found[1]) == [1.0, 4.0, 3.0]


def test_every_engine_is_held_to_the_same_bound(found: list[Series]) -> None:
    # 1000 products a token at 10^9 operations: 500,000 tokens/s; 2000 bytes a step at 10^7: 5,000.
    assert found[0].share == pytest.approx(300 / 500_000)
    assert found[2].share == pytest.approx(100 / 500_000)
    assert found[3].share == pytest.approx(10 / 5_000)


def test_a_peer_s_line_tells_the_median_ratio_and_its_spread(found: list[Series]) -> None:
    texts = list(lines(found))
    assert "times as fast" not in texts[0]
    assert "colibri is 3.00 times as fast (2.00 to 4.00)" in texts[2]


def test_a_peer_without_a_command_is_refused() -> None:
    with pytest.raises(click.BadParameter):
        next(peers._commands(["ik"], "tiny", "q8", 2))
