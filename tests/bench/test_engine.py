"""The measuring program on a tiny model: what it runs and counts. How long that takes is not judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from colibri.bench import engine
from colibri.bench.cost import cost_of
from colibri.bench.engine import Bench, Case, Measurement, Plan, Run
from colibri.bench.limits import Limits, Probe
from colibri.bench.models import make_model
from colibri.native import Model

LIMITS = Limits(1e9, 1e8, 1e7)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("tiny", folder=tmp_path_factory.mktemp("models"))


class FixedProbe(Probe):
    """Limits that do not move."""

    def __init__(self) -> None:
        super().__init__(1, 1 << 20)

    def limits(self, isa: str) -> Limits:
        return LIMITS


def test_every_case_of_the_plan_is_measured_as_often_as_asked(model_path: Path) -> None:
    plan = Plan(prefill=(40, 70), decode=(33,), batch=(2, 3), steps=3, repeats=2, rows=32)
    found = list(engine.measure(model_path, plan, isa=None, threads=1, probe=FixedProbe()))
    assert [(m.case, m.tokens) for m in found] == [
        (Case("prefill", 40), 40),
        (Case("prefill", 70), 70),
        (Case("decode", 33), 3),
        (Case("decode", 33, 2), 6),
        (Case("decode", 33, 3), 9),
    ]
    assert all(len(m.runs) == 2 for m in found)
    assert {run.limits for m in found for run in m.runs} == {LIMITS}


def test_a_prefill_run_is_held_to_the_bound_of_its_prompt(model_path: Path) -> None:
    plan = Plan(prefill=(40,), decode=(), batch=(), repeats=1)
    (found,) = engine.measure(model_path, plan, isa=None, threads=1, probe=FixedProbe())
    assert found.runs[0].bound_s == cost_of(model_path).prefill_s(LIMITS, 40)


def test_a_decode_step_of_one_sequence_reads_its_experts_and_its_context(model_path: Path) -> None:
    cost = cost_of(model_path)
    with Model(model_path) as model:
        bench = Bench(model, cost, isa=None, threads=1, n_tokens=80)
        bench.fill(70)
        _, n_bytes = bench.decode(70, 2)
        # f16 K and V of 2 heads of 16 in 2 layers; 2 experts in each of 2 layers
        expected = sum(cost.step_bytes([n], 4, 2 * 2 * 2 * 2 * 16) for n in (71, 72))
        bench.close()
    assert n_bytes == expected


def test_a_batch_reads_each_expert_that_any_of_it_is_routed_to_once(model_path: Path) -> None:
    cost = cost_of(model_path)
    with Model(model_path) as model:
        bench = Bench(model, cost, isa=None, threads=1, n_tokens=40, batch=8)
        bench.fill(32, 8)
        _, n_bytes = bench.decode(32, 1, 8)
        bench.close()
    n_experts = (n_bytes - cost.step_bytes([33] * 8, 0, 256)) / cost.expert_bytes
    assert n_experts == int(n_experts)
    assert 4 < n_experts <= 16


def test_the_scalar_build_is_given_what_it_can_do() -> None:
    plan = Plan().for_isa("scalar")
    assert (plan.prefill, plan.decode, plan.batch, plan.repeats) == ((32,), (512,), (), 1)
    assert Plan().for_isa("avx2") == Plan().for_isa(None) == Plan()


def test_a_measurement_is_the_median_of_its_runs() -> None:
    runs = tuple(Run(seconds, bound, LIMITS) for seconds, bound in ((1.0, 0.5), (2.0, 1.5), (4.0, 1.0)))
    measurement = Measurement("m", Case("prefill", 8), "avx2", 2, 8, runs)
    assert measurement.tokens_per_s == 4
    assert measurement.share == 0.5


def test_a_share_that_cannot_be_told_is_left_out() -> None:
    assert Measurement("m", Case("prefill", 8), "x", 2, 8, (Run(1.0, None, LIMITS),)).share is None


def test_the_command_prints_a_line_for_each_case_and_writes_json(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "Probe", lambda threads: FixedProbe())
    out = tmp_path / "figures.json"
    options = ["--prefill", "40", "--decode", "33", "--batch", "2", "--steps", "2", "--repeats", "1", "--threads", "1"]
    result = CliRunner().invoke(engine.main, [str(model_path), *options, "--json", str(out)])
    assert result.exit_code == 0, result.output
    assert [text.split("tokens/s")[0].split()[2:-1] for text in result.output.splitlines()] == [
        ["prefill", "40"],
        ["decode", "33"],
        ["decode", "33", "x", "2"],
    ]
    document = json.loads(out.read_text())
    assert document["machine"]["cores"] >= 1
    assert [m["case"]["kind"] for m in document["measurements"]] == ["prefill", "decode", "decode"]
    assert all(m["tokens_per_s"] > 0 for m in document["measurements"])


def test_a_list_of_lengths_that_is_none_is_refused(model_path: Path) -> None:
    result = CliRunner().invoke(engine.main, [str(model_path), "--prefill", "many"])
    assert result.exit_code == 2
    assert "not a list of numbers" in result.output
