"""What fusing q, k and v into one matrix does to speed: the same model fused and apart, in turns.

    python -m colibri.bench.fused_qkv qwen olmoe

Each pair runs both, in an order that changes from pair to pair; a ratio above 1 says that fused was faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from statistics import quantiles

import click

from colibri.native import Model

from .cost import cost_of
from .engine import Bench
from .models import SHAPES, make_model


def ratios(apart: Callable[[], float], fused: Callable[[], float], pairs: int) -> list[float]:
    """Time apart over time fused of each pair; a first one is not counted, as it brings weights into memory."""
    found = []
    for pair in range(pairs + 1):
        if pair % 2:
            fused_s, apart_s = fused(), apart()
        else:
            apart_s, fused_s = apart(), fused()
        found.append(apart_s / fused_s)
    return found[1:]


def compare(
    apart: Path, fused: Path, *, prompt: int, steps: int, pairs: int, threads: int
) -> Iterator[tuple[str, list[float]]]:
    """Ratios of prefill, and of decode behind a prompt as long, of two files of one model."""
    with ExitStack() as stack:
        benches = [stack.enter_context(_open(path, prompt, steps, threads)) for path in (apart, fused)]
        prefill = [partial(bench.prefill, prompt) for bench in benches]
        yield "prefill", ratios(prefill[0], prefill[1], pairs)
        decode = [partial(_decode_s, bench, prompt, steps) for bench in benches]
        yield "decode", ratios(decode[0], decode[1], pairs)


@contextmanager
def _open(path: Path, prompt: int, steps: int, threads: int) -> Iterator[Bench]:
    with Model(path) as model:
        bench = Bench(model, cost_of(path), isa=None, threads=threads, n_tokens=prompt + steps, rows=prompt)
        with closing(bench):
            bench.fill(prompt)
            yield bench


def _decode_s(bench: Bench, prompt: int, steps: int) -> float:
    return bench.decode(prompt, steps)[0]


@click.command()
@click.argument("names", nargs=-1, required=True, type=click.Choice(list(SHAPES)))
@click.option("--layers", default=4, show_default=True, type=click.IntRange(min=1))
@click.option("--prompt", default=512, show_default=True, help="Tokens of the prompt, and before the first decoded.")
@click.option("--steps", default=32, show_default=True, help="Steps of a decode run.")
@click.option("--pairs", default=15, show_default=True, type=click.IntRange(min=2))
@click.option("--threads", default=2, show_default=True)
@click.option("--folder", type=click.Path(path_type=Path), help="[default: $COLIBRI_BENCH_DIR]")
def main(
    names: tuple[str, ...], layers: int, prompt: int, steps: int, pairs: int, threads: int, folder: Path | None
) -> None:
    """Time apart over time fused of models of the given shapes in q8: median (quartiles)."""
    for name in names:
        apart, fused = (make_model(name, n_layers=layers, fused=each, folder=folder) for each in (False, True))
        for what, found in compare(apart, fused, prompt=prompt, steps=steps, pairs=pairs, threads=threads):
            low, middle, high = quantiles(found, n=4)
            click.echo(f"{name}-{layers}  {what:<7}  {middle:.3f} ({low:.3f}, {high:.3f})  {pairs} pairs")


if __name__ == "__main__":
    main()
