"""What rounding costs: .colibri files of one model against a reference of it, over a fixed text.

    python -m colibri.bench.quality f32.colibri bf16.colibri q8.colibri     # the first is the reference
    python -m colibri.bench.quality --gates f32.colibri                     # against itself with its gates rounded

Both models read the same tokens (the reference's tokenizer, `quality_text.txt` unless told otherwise) and at every
position are asked for all logits and for the experts that they chose:

    top-1      share of positions where the likeliest next token is the same
    KL         Σ p ln(p / q) in nats, p the reference's distribution and q the other's; mean and largest over positions
    routing    share of (position, layer) pairs in which all of the chosen experts are the same
    perplexity of each model on the text; it says little about rounding, and much about whether the text suits the model

The reference keeps its KV in f32, and so do the others unless --kv-format says what else to try. Distributions are
computed in float64 from the engine's float32 logits.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from colibri.convert.format import (
    GROUP,
    HEADER,
    TENSOR_ENTRY,
    TILE_ROWS,
    Role,
    align,
    fingerprint,
    header_checksum,
)
from colibri.convert.tiles import quantize_q8
from colibri.native import PAGE_TOKENS, ROW_LOGITS, Batch, Context, Model, checksum

TEXT = Path(__file__).with_name("quality_text.txt")
CHUNK_ROWS = 64  # positions at a time: their logits in float64, twice, are what this program keeps in memory

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Routing = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Agreement:
    """How near a model is to the reference; the fields are described at the top of this file."""

    name: str
    n_tokens: int
    top1: float
    kl_mean: float
    kl_largest: float
    routing: float
    perplexity: float
    reference_perplexity: float


def log_softmax(logits: Floats) -> Doubles:
    """[n, vocabulary] → natural logarithms of the probabilities, in float64."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


def read_text(path: Path, tokenizer: str, most: int) -> list[int]:
    """The text's first tokens, without any that a template or the tokenizer's rules would add."""
    ids: list[int] = Tokenizer.from_str(tokenizer).encode(path.read_text(), add_special_tokens=False).ids
    return ids[:most]


def run(model: Model, tokens: Sequence[int], kv_format: str) -> Iterator[tuple[Floats, Routing]]:
    """Logits [n, vocabulary] and experts [n, n_layers, top_k] of the text, CHUNK_ROWS positions after another."""
    n_pages = -(-len(tokens) // PAGE_TOKENS)
    with closing(
        Context(model, n_pages=n_pages, kv_format=kv_format, max_rows=CHUNK_ROWS, max_logits=CHUNK_ROWS)
    ) as context:
        for begin in range(0, len(tokens), CHUNK_ROWS):
            rows = tokens[begin : begin + CHUNK_ROWS]
            n = len(rows)
            positions, pages = list(range(begin, begin + n)), list(range(n_pages))
            result = context.forward(
                Batch(list(rows), positions, [0] * n, [ROW_LOGITS] * n, [pages], want_routing=True)
            )
            if any(result.row_status):
                raise ArithmeticError(f"{model.path}: a value is not finite near position {begin}")
            assert result.routing is not None
            logits = np.stack([context.logits(i) for i in range(n)])
            yield logits, np.asarray(result.routing).reshape(n, model.info.n_layers, -1)


class Tally:
    """Sums of what Agreement reports, chunk by chunk."""

    def __init__(self) -> None:
        self.n = self.n_same_top = self.n_same_experts = self.n_choices = self.n_targets = 0
        self.kl = self.kl_largest = self.logprob = self.reference_logprob = 0.0

    def add(
        self, expected: tuple[Floats, Routing], actual: tuple[Floats, Routing], targets: npt.NDArray[np.int64]
    ) -> None:
        """One chunk of both models. targets: the tokens that follow, one fewer at the end of the text."""
        p, q = log_softmax(expected[0]), log_softmax(actual[0])
        kl = np.sum(np.exp(p) * (p - q), axis=1)
        self.n += len(kl)
        self.kl += float(kl.sum())
        self.kl_largest = max(self.kl_largest, float(kl.max()))
        self.n_same_top += int(np.sum(p.argmax(axis=1) == q.argmax(axis=1)))
        has_experts = expected[1][:, :, 0] >= 0  # not in dense layers
        same = (np.sort(expected[1], axis=2) == np.sort(actual[1], axis=2)).all(axis=2)
        self.n_same_experts += int(np.sum(same & has_experts))
        self.n_choices += int(np.sum(has_experts))
        rows = np.arange(len(targets))
        self.n_targets += len(targets)
        self.logprob += float(q[rows, targets].sum())
        self.reference_logprob += float(p[rows, targets].sum())

    def agreement(self, name: str) -> Agreement:
        n_targets = max(self.n_targets, 1)
        return Agreement(
            name=name,
            n_tokens=self.n,
            top1=self.n_same_top / self.n,
            kl_mean=self.kl / self.n,
            kl_largest=self.kl_largest,
            routing=self.n_same_experts / max(self.n_choices, 1),
            perplexity=float(np.exp(-self.logprob / n_targets)),
            reference_perplexity=float(np.exp(-self.reference_logprob / n_targets)),
        )


def compare(
    reference: Path, other: Path, tokens: Sequence[int], *, kv_format: str = "f32", name: str = ""
) -> Agreement:
    """Runs both models over the tokens. ValueError where they are not the same model's."""
    tally = Tally()
    with Model(reference) as one, Model(other) as two:
        shape = [(m.info.vocabulary, m.info.n_layers, m.info.n_experts, m.info.top_k) for m in (one, two)]
        if shape[0] != shape[1]:
            raise ValueError(f"{other} is not the model of {reference}: (vocabulary, layers, experts, top-k) differ")
        following = np.array(tokens[1:], np.int64)
        for expected, actual in zip(run(one, tokens, "f32"), run(two, tokens, kv_format), strict=True):
            targets = following[tally.n : tally.n + CHUNK_ROWS]
            tally.add(expected, actual, targets)
    return tally.agreement(name or other.name)


# ---- gates, rounded ----


def _q8(x: Floats) -> Floats:
    padded = np.pad(x, ((0, 0), (0, align(x.shape[1], GROUP) - x.shape[1])))
    integers, scales = quantize_q8(padded)
    return (integers * np.repeat(scales, GROUP, axis=1))[:, : x.shape[1]].astype(np.float32)


ROUNDED: dict[str, Callable[[Floats], Floats]] = {
    "f32": lambda x: x,
    "f16": lambda x: x.astype(np.float16).astype(np.float32),
    "bf16": lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32),
    "q8": _q8,
}


def round_gates(source: Path, out: Path, rounded: Callable[[Floats], Floats]) -> None:
    """A copy of a model whose gates hold rounded values, in the f32 tiles that gates have in every file."""
    raw = np.fromfile(source, np.uint8)
    header = raw[: HEADER.itemsize].view(HEADER)[0]
    start = int(header["tensor_table_offset"])
    table = raw[start : start + int(header["n_tensors"]) * TENSOR_ENTRY.itemsize].view(TENSOR_ENTRY)
    for entry in table[np.isin(table["role"], [Role.ROUTER, Role.SHARED_EXPERT_GATE])]:
        data = raw[int(entry["offset"]) : int(entry["offset"] + entry["bytes"])]
        tiles = data.view("<f4").reshape(-1, int(entry["cols"]), TILE_ROWS)
        rows = np.ascontiguousarray(tiles.transpose(0, 2, 1)).reshape(-1, int(entry["cols"]))
        tiles[:] = rounded(rows).reshape(len(tiles), TILE_ROWS, -1).transpose(0, 2, 1)
        table["checksum"][table["offset"] == entry["offset"]] = checksum(data.tobytes())
    start = int(header["expert_table_offset"])
    experts = raw[start : start + int(header["n_expert_blocks"]) * 8].tobytes()
    scalar = header.reshape(())
    scalar["fingerprint"] = np.frombuffer(fingerprint(scalar, table, experts), np.uint8)
    scalar["header_checksum"] = header_checksum(scalar, table, experts)
    raw.tofile(out)


def compare_gates(reference: Path, tokens: Sequence[int]) -> list[Agreement]:
    """The reference against itself with its gates in each format, and nothing else changed."""
    results = []
    with tempfile.TemporaryDirectory(dir=reference.parent, prefix="gates-") as folder:
        for name, rounded in ROUNDED.items():
            copy = Path(folder, "model.colibri")
            round_gates(reference, copy, rounded)
            results.append(compare(reference, copy, tokens, name=f"gates in {name}"))
    return results


# ---- the command ----


def table_of(results: Sequence[Agreement]) -> str:
    """Markdown, ready for the documentation."""
    lines = [
        "| model | top-1 | mean KL, nats | largest KL | routing | perplexity |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.name} | {r.top1:.2%} | {r.kl_mean:.2e} | {r.kl_largest:.2e} | {r.routing:.2%} | {r.perplexity:.4f} |"
        for r in results
    ]
    return "\n".join(lines)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m colibri.bench.quality", description="What rounding costs a model.")
    parser.add_argument("reference", type=Path, help="the .colibri file that the others are held against")
    parser.add_argument("others", type=Path, nargs="*", help="files of the same model in other formats")
    parser.add_argument("--gates", action="store_true", help="compare the reference with itself, its gates rounded")
    parser.add_argument("--text", type=Path, default=TEXT, help="what is read (default: quality_text.txt)")
    parser.add_argument("--tokens", type=int, default=1 << 20, help="at most so many tokens of it (default: all)")
    parser.add_argument("--kv-format", default="f32", choices=["f32", "f16"], help="of the others (default: f32)")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args(arguments)
    if not options.others and not options.gates:
        parser.error("give files to compare, or --gates")
    return options


def main(arguments: Sequence[str]) -> int:
    options = parse_arguments(arguments)
    with Model(options.reference) as model:
        most = min(options.tokens, model.info.max_positions)
        tokens = read_text(options.text, model.json["tokenizer"], most)
    results = [compare(options.reference, other, tokens, kv_format=options.kv_format) for other in options.others]
    if options.gates:
        results += compare_gates(options.reference, tokens)
    print(f"{options.reference.name}, {results[0].n_tokens} tokens, perplexity {results[0].reference_perplexity:.4f}\n")
    print(table_of(results))
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
