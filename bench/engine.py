"""Tokens per second of the engine, in this process, beside what the machine could do at that moment.

    python -m colibri.bench.engine qwen olmoe --prefill 512,4096 --decode 512,8192 --batch 2,4,8
    python -m colibri.bench.engine model.colibri --isa all

A model is a file, or a shape of colibri.bench.models. Every figure is the median of several runs, each between two
probes of the limits. Prompts are random tokens. A context to decode after is filled with copies of one computed page:
what is in it does not matter for speed, and computing 32,768 tokens would take minutes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Literal

import click
import numpy as np

from colibri.native import PAGE_TOKENS, ROW_LOGITS, ROW_NONE, Batch, Context, Model, Unsupported, isa_names

from .cost import Cost, cost_of
from .limits import Limits, Probe
from .models import SHAPES, make_model
from .report import line, to_dict, write_json

# The scalar build is the specification, not fast: 512 tokens would take minutes.
SCALAR_PROMPT = 32


@dataclass(frozen=True)
class Case:
    """What a run does. `context`: tokens of the prompt for prefill, else tokens of each sequence before the first that
    is decoded; `batch`: sequences in a step.
    """

    kind: Literal["prefill", "decode"]
    context: int
    batch: int = 1


@dataclass(frozen=True)
class Run:
    """One timed run. `bound_s`: the time that the limits allow, None where they are not known."""

    seconds: float
    bound_s: float | None
    limits: Limits

    @property
    def share(self) -> float | None:
        return None if self.bound_s is None else self.bound_s / self.seconds


@dataclass(frozen=True)
class Measurement:
    """Runs of one case. `tokens`: of one run, all sequences together."""

    model: str
    case: Case
    isa: str
    threads: int
    tokens: int
    runs: tuple[Run, ...]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / median(run.seconds for run in self.runs)

    @property
    def share(self) -> float | None:
        """Median share of the bound."""
        shares = [run.share for run in self.runs if run.share is not None]
        return median(shares) if shares else None


class Bench:
    """A model, opened with a context for one instruction set and a number of threads."""

    def __init__(
        self, model: Model, cost: Cost, *, isa: str | None, threads: int, n_tokens: int, batch: int = 1, rows: int = 512
    ) -> None:
        """n_tokens: the most that one of `batch` sequences will hold."""
        self.pages_each = -(-n_tokens // PAGE_TOKENS)
        self.model, self.cost, self.rows, self.threads = model, cost, rows, threads
        self.context = Context(
            model,
            n_pages=self.pages_each * batch,
            max_rows=max(rows, batch),
            max_logits=batch,
            max_context=n_tokens,
            prefill_threads=threads,
            decode_threads=threads,
            isa=isa,
        )
        self._random = np.random.default_rng(0)

    def _tokens(self, n: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return self._random.integers(self.model.info.vocabulary, size=n, dtype=np.int32)

    def _pages(self, sequence: int, n_tokens: int) -> range:
        first = sequence * self.pages_each
        return range(first, first + -(-n_tokens // PAGE_TOKENS))

    def prefill(self, n_tokens: int) -> float:
        """Seconds for a prompt of n_tokens, in steps of `rows`, with the logits of its last token."""
        tokens = self._tokens(n_tokens)
        begin = time.perf_counter()
        for start in range(0, n_tokens, self.rows):
            stop = min(start + self.rows, n_tokens)
            flags = bytearray(stop - start)
            flags[-1] = ROW_LOGITS if stop == n_tokens else ROW_NONE
            self.context.forward(
                Batch(
                    tokens=tokens[start:stop],
                    positions=np.arange(start, stop, dtype=np.int32),
                    sequences=np.zeros(stop - start, np.int32),
                    flags=flags,
                    page_tables=[self._pages(0, stop)],
                )
            )
        return time.perf_counter() - begin

    def fill(self, n_tokens: int, batch: int = 1) -> None:
        """Gives each of the sequences a context of n_tokens, made of copies of one page."""
        self.prefill(PAGE_TOKENS)
        data, checksum = self.context.kv_save(0)
        for sequence in range(batch):
            for number, page in enumerate(self._pages(sequence, n_tokens)):
                valid = min(PAGE_TOKENS, n_tokens - number * PAGE_TOKENS)
                self.context.kv_load(page, valid, data, checksum)

    def decode(self, context: int, n_steps: int, batch: int = 1) -> tuple[float, float]:
        """Seconds for n_steps of `batch` sequences behind a filled context, and the bytes that they had to read."""
        tokens = self._tokens(n_steps * batch).reshape(n_steps, batch)
        token_bytes = self.context.page_bytes / PAGE_TOKENS
        seconds, n_bytes = 0.0, 0.0
        for step in range(n_steps):
            position = context + step
            begin = time.perf_counter()
            result = self.context.forward(
                Batch(
                    tokens=tokens[step],
                    positions=np.full(batch, position, np.int32),
                    sequences=np.arange(batch, dtype=np.int32),
                    flags=bytes([ROW_LOGITS] * batch),
                    page_tables=[self._pages(sequence, position + 1) for sequence in range(batch)],
                    want_routing=True,
                )
            )
            seconds += time.perf_counter() - begin
            assert result.routing is not None
            n_experts = sum(len(np.unique(layer[layer >= 0])) for layer in result.routing.swapaxes(0, 1))
            n_bytes += self.cost.step_bytes([position + 1] * batch, n_experts, token_bytes)
        return seconds, n_bytes

    def close(self) -> None:
        self.context.close()


@dataclass(frozen=True)
class Plan:
    """What to measure: prompts, contexts to decode after, and numbers of sequences at the first of those contexts."""

    prefill: tuple[int, ...] = (512, 4096, 8192)
    decode: tuple[int, ...] = (512, 8192, 32768)
    batch: tuple[int, ...] = (2, 4, 8)
    steps: int = 32
    repeats: int = 3
    rows: int = 512

    def for_isa(self, isa: str | None) -> Plan:
        """The whole plan, or what the scalar build does in a minute."""
        if isa != "scalar":
            return self
        prompts = (SCALAR_PROMPT,) if self.prefill else ()
        return replace(self, prefill=prompts, decode=self.decode[:1], batch=(), steps=min(self.steps, 4), repeats=1)

    def cases(self) -> Iterator[Case]:
        yield from (Case("prefill", n) for n in self.prefill)
        yield from (Case("decode", n) for n in self.decode)
        yield from (Case("decode", self.decode[0], batch) for batch in self.batch if self.decode)


def _runs(bench: Bench, case: Case, plan: Plan, probe: Probe) -> Iterator[Run]:
    """Timed runs, each between two probes, after one that is not timed and brings weights and pages into memory."""
    if case.kind == "prefill":
        bench.prefill(min(case.context, plan.rows))
    else:
        bench.fill(case.context, case.batch)
        bench.decode(case.context, 2, case.batch)
    before = probe.limits(bench.context.isa)
    for _ in range(plan.repeats):
        if case.kind == "prefill":
            seconds, n_bytes = bench.prefill(case.context), None
        else:
            seconds, n_bytes = bench.decode(case.context, plan.steps, case.batch)
        after = probe.limits(bench.context.isa)
        limits, before = before.between(after), after
        if n_bytes is None:
            yield Run(seconds, bench.cost.prefill_s(limits, case.context), limits)
        else:
            yield Run(seconds, n_bytes / limits.read_bytes, limits)


def measure(path: Path, plan: Plan, *, isa: str | None, threads: int, probe: Probe) -> Iterator[Measurement]:
    """Every case of the plan, as it is done. Raises ModelFileError and NativeError."""
    plan, cost = plan.for_isa(isa), cost_of(path)
    with Model(path) as model:
        for case in plan.cases():
            n_tokens = case.context + (plan.steps if case.kind == "decode" else 0)
            bench = Bench(model, cost, isa=isa, threads=threads, n_tokens=n_tokens, batch=case.batch, rows=plan.rows)
            try:
                runs = tuple(_runs(bench, case, plan, probe))
            finally:
                bench.close()
            tokens = case.context if case.kind == "prefill" else case.batch * plan.steps
            yield Measurement(path.stem, case, bench.context.isa, threads, tokens, runs)


def numbers(text: str) -> tuple[int, ...]:
    """ "512,4096" → (512, 4096); "" → ()."""
    try:
        return tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of numbers") from None


@click.command()
@click.argument("models", nargs=-1, required=True)
@click.option("--prefill", default="512,4096,8192", show_default=True, help="Lengths of prompts.")
@click.option("--decode", default="512,8192,32768", show_default=True, help="Contexts to decode after.")
@click.option("--batch", default="2,4,8", show_default=True, help="Sequences decoded at once after the first context.")
@click.option("--isa", help="An instruction set, or all. [default: the best]")
@click.option("--threads", default=2, show_default=True)
@click.option("--rows", default=512, show_default=True, help="Tokens of a prompt in one step.")
@click.option("--steps", default=32, show_default=True, help="Steps of a decode run.")
@click.option("--repeats", default=3, show_default=True, help="Timed runs of each case.")
@click.option("--quantize", default="q8", show_default=True, help="Format of the models that are made.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the figures here as well.")
def main(
    models: tuple[str, ...],
    prefill: str,
    decode: str,
    batch: str,
    isa: str | None,
    threads: int,
    rows: int,
    steps: int,
    repeats: int,
    quantize: str,
    json_path: Path | None,
) -> None:
    """Measure MODELS: files, or the names of shapes."""
    plan = Plan(numbers(prefill), numbers(decode), numbers(batch), steps, repeats, rows)
    isas = isa_names() if isa == "all" else [isa]
    probe, found = Probe(threads), []
    for path in [make_model(name, quantize) if name in SHAPES else Path(name) for name in models]:
        for each in isas:
            try:
                for measurement in measure(path, plan, isa=each, threads=threads, probe=probe):
                    found.append(measurement)
                    click.echo(line(measurement))
            except Unsupported as error:
                click.echo(f"{path.stem}: {each} skipped, {error}")
    if json_path is not None:
        write_json(json_path, [to_dict(each) for each in found])


if __name__ == "__main__":
    main()
