"""llama.cpp as llama-cpp-python brings it, in a process of its own: keeps a model open and runs cases when asked.

    python -m colibri.bench.mainline MODEL.gguf --threads 2 --context 8704

A line of JSON on standard input, {"kind": "prefill" | "decode", "context": n, "steps": n}, is answered by a line with
the seconds it took. Settings are those of llama-bench: steps of 512 rows, f16 KV, random tokens, logits of the last
one. A context that is there already is used again, so that a long one is computed once.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path

import click
import llama_cpp
import numpy as np

BATCH = 2048
ROWS = 512


class Mainline:
    """A model with one sequence, of which the first `length` positions are computed."""

    def __init__(self, path: Path, threads: int, context: int, repack: bool = True) -> None:
        llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.use_extra_bufts = repack
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        if self._model is None:
            raise click.ClickException(f"{path}: llama.cpp cannot open it")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = context, BATCH, ROWS
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if self._context is None:
            raise click.ClickException(f"{path}: llama.cpp cannot make a context of {context}")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._random = np.random.default_rng(0)
        self.length = 0

    def _decode(self, n_tokens: int) -> None:
        """Computes n_tokens behind what is there."""
        tokens = self._random.integers(self._vocabulary, size=n_tokens).tolist()
        array = (llama_cpp.llama_token * n_tokens)(*tokens)
        status = llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(array, n_tokens))
        if status != 0:
            raise click.ClickException(f"llama_decode gave {status} at position {self.length}")
        self.length += n_tokens

    def _cut(self, n_tokens: int) -> None:
        llama_cpp.llama_memory_seq_rm(self._memory, 0, n_tokens, -1)
        self.length = n_tokens

    def prefill(self, n_tokens: int) -> float:
        """Seconds for a prompt from an empty context."""
        self._cut(0)
        begin = time.perf_counter()
        for start in range(0, n_tokens, BATCH):
            self._decode(min(BATCH, n_tokens - start))
        llama_cpp.llama_synchronize(self._context)
        return time.perf_counter() - begin

    def decode(self, context: int, steps: int) -> float:
        """Seconds for `steps` tokens behind `context` others."""
        if self.length < context:
            self.prefill(context)
        self._cut(context)
        begin = time.perf_counter()
        for _ in range(steps):
            self._decode(1)
            llama_cpp.llama_synchronize(self._context)
        return time.perf_counter() - begin


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _silent(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    """Drops what llama.cpp has to say."""


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--threads", default=2, show_default=True)
@click.option("--context", default=8704, show_default=True)
@click.option("--no-repack", is_flag=True, help="Leave weights as in the file: its AMX code fails on some machines.")
def main(model: Path, threads: int, context: int, no_repack: bool) -> None:
    """Answer cases from standard input."""
    engine = Mainline(model, threads, context, not no_repack)
    click.echo(json.dumps({"ready": True}))
    for text in sys.stdin:
        case = json.loads(text)
        if case["kind"] == "prefill":
            seconds = engine.prefill(case["context"])
        else:
            seconds = engine.decode(case["context"], case["steps"])
        click.echo(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main()
