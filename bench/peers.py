"""colibri and other engines on the same tensors, in turns.

    python -m colibri.bench.peers qwen olmoe --mainline \\
        --peer-cmd 'ik=llama-bench -m {gguf} -t {threads} -rtr 1 -r 1 -o json {cases}'

In a round every engine runs every case once; the probes of the limits stand between the engines. What is reported is
the median over the rounds of tokens/s, of the share of the bound at that moment, and of the ratio within a round.

A peer is llama.cpp as PyPI's llama-cpp-python brings it (colibri.bench.mainline), or a command that takes llama-bench's
options and prints its JSON: {gguf}, {threads} and {cases} are filled in, the last as `-p 512 -n 0 -gp 512,32`.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import click

from colibri.native import Model

from .cost import Cost, cost_of
from .engine import Bench, Case, numbers
from .limits import Limits, Probe
from .models import SHAPES, make_model
from .report import to_dict, write_json

COLIBRI = "colibri"
# A GGUF type of as many bits as our format.
GGUF_TYPES = {"q8": "q8_0", "q4": "q4_0", "f16": "f16"}


class Engine(Protocol):
    """Runs all cases once and gives tokens per second of each."""

    name: str

    def run(self, cases: Sequence[Case], steps: int) -> list[float]: ...


class Colibri:
    """The engine in this process, with a context for each case."""

    name = COLIBRI

    def __init__(self, model: Model, cost: Cost, cases: Sequence[Case], steps: int, threads: int) -> None:
        self._benches = {
            case: Bench(model, cost, isa=None, threads=threads, n_tokens=case.context + steps) for case in cases
        }
        for case, bench in self._benches.items():
            if case.kind == "decode":
                bench.fill(case.context)
        self.isa = next(iter(self._benches.values())).context.isa
        self.step_bytes: dict[Case, float] = {}

    def run(self, cases: Sequence[Case], steps: int) -> list[float]:
        rates = []
        for case in cases:
            bench = self._benches[case]
            if case.kind == "prefill":
                rates.append(case.context / bench.prefill(case.context))
            else:
                seconds, n_bytes = bench.decode(case.context, steps)
                self.step_bytes[case] = n_bytes / steps
                rates.append(steps / seconds)
        return rates

    def close(self) -> None:
        for bench in self._benches.values():
            bench.close()


class Mainline:
    """llama.cpp in a process that stays."""

    name = "mainline"

    def __init__(self, gguf: Path, threads: int, context: int, options: Sequence[str] = ()) -> None:
        command = [sys.executable, "-m", "colibri.bench.mainline", str(gguf), "--threads", str(threads)]
        self._process = subprocess.Popen(
            [*command, "--context", str(context), *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        if not text:
            raise click.ClickException(f"llama.cpp ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(text)
        return answer

    def run(self, cases: Sequence[Case], steps: int) -> list[float]:
        assert self._process.stdin is not None
        rates = []
        for case in cases:
            request = {"kind": case.kind, "context": case.context, "steps": steps}
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            tokens = case.context if case.kind == "prefill" else steps
            rates.append(tokens / self._answer()["seconds"])
        return rates

    def close(self) -> None:
        self._process.communicate()  # closes its input, at which it ends


@dataclass
class Command:
    """A command with llama-bench's options."""

    name: str
    template: str
    gguf: Path
    threads: int

    def arguments(self, cases: Sequence[Case], steps: int) -> list[str]:
        """The command for these cases."""
        prompts = ",".join(str(case.context) for case in cases if case.kind == "prefill") or "0"
        behind = [f"-gp {case.context},{steps}" for case in cases if case.kind == "decode"]
        options = " ".join([f"-p {prompts} -n 0", *behind])
        filled = self.template.replace("{gguf}", shlex.quote(str(self.gguf))).replace("{threads}", str(self.threads))
        return shlex.split(filled.replace("{cases}", options))

    def run(self, cases: Sequence[Case], steps: int) -> list[float]:
        command = self.arguments(cases, steps)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise click.ClickException(f"{self.name} ended with status {done.returncode}: {done.stderr[-300:].strip()}")
        return parse_llama_bench(done.stdout, cases, steps)


def parse_llama_bench(text: str, cases: Sequence[Case], steps: int) -> list[float]:
    """Tokens per second of each case in the JSON that llama-bench prints. ClickException where one is missing."""
    try:
        # Some versions print lines of their own around it.
        entries = json.loads(text[text.index("[\n") : text.rindex("]") + 1])
    except ValueError as error:
        raise click.ClickException(f"no JSON in the output of llama-bench: {error}") from None
    rates = {(int(e["n_prompt"]) + int(e.get("n_depth", 0)), int(e["n_gen"])): float(e["avg_ts"]) for e in entries}
    try:
        return [rates[case.context, 0 if case.kind == "prefill" else steps] for case in cases]
    except KeyError as error:
        raise click.ClickException(f"llama-bench did not run {error}") from None


@dataclass
class Series:
    """What one engine did in one case, a figure for each round."""

    model: str
    engine: str
    case: Case
    rates: list[float] = field(default_factory=list)  # tokens/s
    shares: list[float | None] = field(default_factory=list)  # of the bound
    limits: list[Limits] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return median(self.rates)

    @property
    def share(self) -> float | None:
        known = [share for share in self.shares if share is not None]
        return median(known) if known else None

    def ratios(self, ours: Series) -> list[float]:
        """How many times as fast ours was, round by round."""
        return [our / their for our, their in zip(ours.rates, self.rates, strict=True)]


def share_of(case: Case, rate: float, limits: Limits, cost: Cost, step_bytes: float | None) -> float | None:
    """Tokens/s over what the limits allow. Decoding: every engine is held to the bytes that ours reads."""
    if case.kind == "prefill":
        bound_s = cost.prefill_s(limits, case.context)
        return None if bound_s is None else rate * bound_s / case.context
    return None if step_bytes is None else rate * step_bytes / limits.read_bytes


def compare(
    name: str,
    engines: Sequence[Engine],
    ours: Colibri,
    cost: Cost,
    cases: Sequence[Case],
    *,
    rounds: int,
    steps: int,
    probe: Probe,
) -> list[Series]:
    """Rounds in which each engine runs each case. A first round, not counted, brings models into memory."""
    found = {engine.name: [Series(name, engine.name, case) for case in cases] for engine in engines}
    for engine in engines:
        engine.run(cases, steps)
    before = probe.limits(ours.isa)
    for _ in range(rounds):
        for engine in engines:
            rates = engine.run(cases, steps)
            after = probe.limits(ours.isa)
            limits, before = before.between(after), after
            for series, rate in zip(found[engine.name], rates, strict=True):
                series.rates.append(rate)
                series.limits.append(limits)
                series.shares.append(share_of(series.case, rate, limits, cost, ours.step_bytes.get(series.case)))
    return [series for each in found.values() for series in each]


def lines(found: Sequence[Series]) -> Iterator[str]:
    """One line for each case and engine; a peer's has how many times as fast colibri is."""
    ours = {series.case: series for series in found if series.engine == COLIBRI}
    for series in found:
        share = "" if series.share is None else f"{100 * series.share:3.0f}% of bound"
        what = f"{series.case.kind} {series.case.context}"
        text = (
            f"{series.model:<14} {what:<14} {series.engine:<12} {series.tokens_per_s:8.1f} tokens/s "
            f"({min(series.rates):.1f} to {max(series.rates):.1f})  {share}"
        )
        if series.engine != COLIBRI:
            ratios = series.ratios(ours[series.case])
            text += f"  colibri is {median(ratios):.2f} times as fast ({min(ratios):.2f} to {max(ratios):.2f})"
        yield text


def _gguf(name: str, quantize: str, arch: str | None) -> Path:
    from .gguf_model import make_gguf  # needs the extra `bench`

    return make_gguf(name, GGUF_TYPES[quantize], arch=arch)


def _commands(texts: Sequence[str], name: str, quantize: str, threads: int) -> Iterator[Command]:
    """NAME=TEMPLATE; {gguf-qwen3moe} in place of {gguf} gives a file for a reader that has no OLMoE."""
    for text in texts:
        peer, _, template = text.partition("=")
        if not template:
            raise click.BadParameter(f"{text!r} is not NAME=COMMAND")
        arch = "qwen3moe" if name == "olmoe" and "{gguf-qwen3moe}" in template else None
        gguf = _gguf(name, quantize, arch)
        yield Command(peer, template.replace("{gguf-qwen3moe}", "{gguf}"), gguf, threads)


@click.command()
@click.argument("shapes", nargs=-1, required=True, type=click.Choice(list(SHAPES)))
@click.option("--prefill", default="512", show_default=True, help="Lengths of prompts.")
@click.option("--decode", default="512", show_default=True, help="Contexts to decode after.")
@click.option("--rounds", default=9, show_default=True)
@click.option("--steps", default=32, show_default=True, help="Tokens of a decode run.")
@click.option("--threads", default=2, show_default=True)
@click.option("--quantize", default="q8", show_default=True, type=click.Choice(list(GGUF_TYPES)))
@click.option("--mainline", is_flag=True, help="Run llama.cpp through llama-cpp-python.")
@click.option("--mainline-option", multiple=True, help="For colibri.bench.mainline, such as --no-repack.")
@click.option("--peer-cmd", multiple=True, metavar="NAME=COMMAND", help="Another engine; see the top of this file.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the figures here as well.")
def main(
    shapes: tuple[str, ...],
    prefill: str,
    decode: str,
    rounds: int,
    steps: int,
    threads: int,
    quantize: str,
    mainline: bool,
    mainline_option: tuple[str, ...],
    peer_cmd: tuple[str, ...],
    json_path: Path | None,
) -> None:
    """Compare engines on SHAPES."""
    cases = [*(Case("prefill", n) for n in numbers(prefill)), *(Case("decode", n) for n in numbers(decode))]
    longest = max(case.context for case in cases) + steps
    probe, found = Probe(threads), []
    for name in shapes:
        path = make_model(name, quantize)
        cost = cost_of(path)
        with ExitStack() as stack:
            ours = Colibri(stack.enter_context(Model(path)), cost, cases, steps, threads)
            stack.callback(ours.close)
            engines: list[Engine] = [ours, *_commands(peer_cmd, name, quantize, threads)]
            if mainline:
                peer = Mainline(_gguf(name, quantize, None), threads, longest, mainline_option)
                stack.callback(peer.close)
                engines.append(peer)
            series = compare(name, engines, ours, cost, cases, rounds=rounds, steps=steps, probe=probe)
        found += series
        for text in lines(series):
            click.echo(text)
    if json_path is not None:
        write_json(json_path, [to_dict(each) for each in found])


if __name__ == "__main__":
    main()
