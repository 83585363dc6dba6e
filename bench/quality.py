"""What rounding costs: .colibri files of one model against a reference of it, over a fixed text.

    python -m colibri.bench.quality f32.colibri bf16.colibri q8.colibri     # the first is the reference
    python -m colibri.bench.quality --gates f32.colibri                     # against itself with its gates rounded
    python -m colibri.bench.quality --static-table TABLE q8.colibri         # against itself, routed by a table
    python -m colibri.bench.quality --llama-cpp MODEL.gguf f32.colibri      # against llama.cpp's formats of the same

Both models read the same tokens (the reference's tokenizer, `quality_text.txt` unless told otherwise) and at every
position are asked for all logits and for the experts that they chose:

    top-1      share of positions where the likeliest next token is the same
    KL         Σ p ln(p / q) in nats, p the reference's distribution and q the other's; mean and largest over positions
    routing    share of (position, layer) pairs in which all of the chosen experts are the same
    perplexity of each model on the text; it says little about rounding, and much about whether the text suits the model

The reference keeps its KV in f32, and so do the others unless --kv-format says what else to try. Distributions are
computed in float64 from the engine's float32 logits. llama.cpp quantises the GGUF file itself, from whatever it holds;
it does not tell which experts it chose.
"""

from __future__ import annotations

import argparse
import ctypes
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
Chunk = tuple[Floats, Routing | None]


@dataclass(frozen=True)
class Agreement:
    """How near a model is to the reference; the fields are described at the top of this file."""

    name: str
    n_tokens: int
    top1: float
    kl_mean: float
    kl_largest: float
    routing: float | None  # None where it is not known
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


def run(model: Model, tokens: Sequence[int], kv_format: str, static_table: Path | None = None) -> Iterator[Chunk]:
    """Logits [n, vocabulary] and experts [n, n_layers, top_k] of the text, CHUNK_ROWS positions after another."""
    n_pages = -(-len(tokens) // PAGE_TOKENS)
    routing = "static" if static_table else "exact"
    with closing(
        Context(
            model,
            n_pages=n_pages,
            kv_format=kv_format,
            max_rows=CHUNK_ROWS,
            max_logits=CHUNK_ROWS,
            static_table=static_table,
            routing=routing,
        )
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

    def add(self, expected: Chunk, actual: Chunk, targets: npt.NDArray[np.int64]) -> None:
        """One chunk of both models. targets: the tokens that follow, one fewer at the end of the text."""
        p, q = log_softmax(expected[0]), log_softmax(actual[0])
        kl = np.sum(np.exp(p) * (p - q), axis=1)
        self.n += len(kl)
        self.kl += float(kl.sum())
        self.kl_largest = max(self.kl_largest, float(kl.max()))
        self.n_same_top += int(np.sum(p.argmax(axis=1) == q.argmax(axis=1)))
        if expected[1] is not None and actual[1] is not None:
            has_experts = expected[1][:, :, 0] >= 0  # not in dense layers
            same = (np.sort(expected[1], axis=2) == np.sort(actual[1], axis=2)).all(axis=2)
            self.n_same_experts += int(np.sum(same & has_experts))
            self.n_choices += int(np.sum(has_experts))
        rows = np.arange(len(targets))
        self.n_targets += len(targets)
        self.logprob += float(q[rows, targets].sum())
        self.reference_logprob += float(p[rows, targets].sum())

    def add_all(self, expected: Iterator[Chunk], actual: Iterator[Chunk], tokens: Sequence[int]) -> None:
        following = np.array(tokens[1:], np.int64)
        for one, other in zip(expected, actual, strict=True):
            self.add(one, other, following[self.n : self.n + CHUNK_ROWS])

    def agreement(self, name: str) -> Agreement:
        n_targets = max(self.n_targets, 1)
        return Agreement(
            name=name,
            n_tokens=self.n,
            top1=self.n_same_top / self.n,
            kl_mean=self.kl / self.n,
            kl_largest=self.kl_largest,
            routing=self.n_same_experts / self.n_choices if self.n_choices else None,
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
        tally.add_all(run(one, tokens, "f32"), run(two, tokens, kv_format), tokens)
    return tally.agreement(name or other.name)


def compare_static(reference: Path, table: Path, tokens: Sequence[int]) -> Agreement:
    """The reference against itself, its experts chosen by a static table."""
    tally = Tally()
    with Model(reference) as model:
        tally.add_all(run(model, tokens, "f32"), run(model, tokens, "f32", table), tokens)
    return tally.agreement(f"routed by {table.name}")


# ---- llama.cpp ----

# What it does of itself, and ("pure") the format for every matrix: it gives more bits to an embedding that is the head.
LLAMA_CPP_TYPES = {"F32": (0, True), "Q8_0": (7, False), "Q4_0": (2, False), "pure Q4_0": (2, True)}


def run_llama_cpp(path: Path, tokens: Sequence[int]) -> Iterator[Chunk]:
    """What run() gives, of a GGUF file, with KV in f32."""
    import llama_cpp

    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = align(len(tokens), 256)
    params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
    context = model and llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise ValueError(f"{path}: llama.cpp cannot open it")
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    try:
        for begin in range(0, len(tokens), CHUNK_ROWS):
            rows = tokens[begin : begin + CHUNK_ROWS]
            batch = llama_cpp.llama_batch_init(len(rows), 0, 1)
            batch.n_tokens = len(rows)
            for i, token in enumerate(rows):
                batch.token[i], batch.pos[i], batch.logits[i] = token, begin + i, 1
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            status = llama_cpp.llama_decode(context, batch)
            llama_cpp.llama_batch_free(batch)
            if status != 0:
                raise ArithmeticError(f"{path}: llama_decode gave {status} at position {begin}")
            logits = llama_cpp.llama_get_logits(context)
            yield np.ctypeslib.as_array(logits, (len(rows), vocabulary)).copy(), None
    finally:
        llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)


def compare_llama_cpp(reference: Path, source: Path, tokens: Sequence[int]) -> list[Agreement]:
    """The reference against a GGUF file of the same model, quantised anew by llama.cpp to each of LLAMA_CPP_TYPES."""
    import llama_cpp

    results = []
    with Model(reference) as model, tempfile.TemporaryDirectory(dir=reference.parent, prefix="gguf-") as folder:
        for name, (file_type, pure) in LLAMA_CPP_TYPES.items():
            params = llama_cpp.llama_model_quantize_default_params()
            params.ftype, params.pure, params.allow_requantize = file_type, pure, True
            out = Path(folder, "model.gguf")
            status = llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(params))
            if status != 0:
                raise ValueError(f"{source}: llama.cpp cannot quantise it to {name}")
            tally = Tally()
            tally.add_all(run(model, tokens, "f32"), run_llama_cpp(out, tokens), tokens)
            results.append(tally.agreement(f"llama.cpp {name}, {out.stat().st_size >> 20} MiB"))
    return results


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
        f"| {r.name} | {r.top1:.2%} | {r.kl_mean:.2e} | {r.kl_largest:.2e} "
        f"| {'' if r.routing is None else f'{r.routing:.2%}'} | {r.perplexity:.4f} |"
        for r in results
    ]
    return "\n".join(lines)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m colibri.bench.quality", description="What rounding costs a model.")
    parser.add_argument("reference", type=Path, help="the .colibri file that the others are held against")
    parser.add_argument("others", type=Path, nargs="*", help="files of the same model in other formats")
    parser.add_argument("--gates", action="store_true", help="compare the reference with itself, its gates rounded")
    parser.add_argument("--static-table", type=Path, help="compare the reference with itself, routed by this table")
    parser.add_argument("--llama-cpp", type=Path, metavar="GGUF", help="compare with llama.cpp's formats of this file")
    parser.add_argument("--text", type=Path, default=TEXT, help="what is read (default: quality_text.txt)")
    parser.add_argument("--tokens", type=int, default=1 << 20, help="at most so many tokens of it (default: all)")
    parser.add_argument("--kv-format", default="f32", choices=["f32", "f16"], help="of the others (default: f32)")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args(arguments)
    if not (options.others or options.gates or options.llama_cpp or options.static_table):
        parser.error("give files to compare, --gates, --static-table, or --llama-cpp")
    return options


def main(arguments: Sequence[str]) -> int:
    options = parse_arguments(arguments)
    with Model(options.reference) as model:
        most = min(options.tokens, model.info.max_positions)
        tokens = read_text(options.text, model.json["tokenizer"], most)
    results = [compare(options.reference, other, tokens, kv_format=options.kv_format) for other in options.others]
    if options.gates:
        results += compare_gates(options.reference, tokens)
    if options.static_table:
        results.append(compare_static(options.reference, options.static_table, tokens))
    if options.llama_cpp:
        results += compare_llama_cpp(options.reference, options.llama_cpp, tokens)
    print(f"{options.reference.name}, {results[0].n_tokens} tokens, perplexity {results[0].reference_perplexity:.4f}\n")
    print(table_of(results))
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
