"""The choice of experts: ties and near-ties in any company, and why gates are not quantised."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - safetensors finds the dtype bfloat16 by name once this is imported
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from colibri.convert import convert
from colibri.convert.format import Format
from colibri.convert.tiles import QuantizationError, encode
from colibri.native import ROW_LOGITS, Batch, Context, Model, Unsupported, isa_names
from support import reference_model

N_EXPERTS, TOP_K, HIDDEN = 8, 3, 48  # of the tiny Qwen3-MoE


def with_router(checkpoint: Path, folder: Path, router: npt.NDArray[np.float32]) -> Path:
    """The tiny Qwen3-MoE in f32 with this router in every layer that has one."""
    copy = Path(shutil.copytree(checkpoint, folder / "checkpoint"))
    tensors: dict[str, Any] = load_file(copy / "model.safetensors")
    tensors |= {name: router for name in tensors if name.endswith("mlp.gate.weight")}
    save_file(tensors, copy / "model.safetensors")
    convert(copy, folder / "model.colibri", quantize="f32")
    return folder / "model.colibri"


def first_row(model: Model, n_rows: int, isa: str) -> tuple[npt.NDArray[np.int32], bytes]:
    """Experts and logits of token 7 at position 0, in the company of n_rows - 1 other sequences."""
    with Context(model, n_pages=n_rows, max_rows=64, max_logits=1, isa=isa) as context:
        tokens = [7, *(11 + i for i in range(n_rows - 1))]
        flags = [ROW_LOGITS] + [0] * (n_rows - 1)
        pages = [[i] for i in range(n_rows)]
        batch = Batch(tokens, [0] * n_rows, list(range(n_rows)), flags, pages, want_routing=True)
        result = context.forward(batch)
        assert result.row_status == [0] * n_rows
        assert result.routing is not None
        return np.array(result.routing).reshape(n_rows, -1)[0], context.logits(0).tobytes()


def test_near_ties_are_decided_alike_in_any_company(tiny_qwen_checkpoint: Path, tmp_path: Path) -> None:
    """Every pair of router rows differs by one unit in the last place of one weight: logits as close as they come."""
    row = np.random.default_rng(5).standard_normal(HIDDEN).astype(np.float32)
    router = np.repeat(row[None, :], N_EXPERTS, axis=0)
    for expert in range(N_EXPERTS):
        router[expert, 5 * expert] = np.nextafter(router[expert, 5 * expert], np.float32(9), dtype=np.float32)
    with Model(with_router(tiny_qwen_checkpoint, tmp_path, router)) as model:
        usable = [isa for isa in isa_names() if is_usable(model, isa)]
        alone = first_row(model, 1, "scalar")
        for isa in usable:
            for n_rows in (1, 8, 33):
                experts, logits = first_row(model, n_rows, isa)
                np.testing.assert_array_equal(experts, alone[0], err_msg=f"{isa}, {n_rows} rows")
                assert logits == alone[1], f"{isa}, {n_rows} rows"


def is_usable(model: Model, isa: str) -> bool:
    try:
        Context(model, n_pages=1, isa=isa).close()
    except Unsupported:
        return False
    return True


def test_equal_logits_go_to_the_lower_numbers(tiny_qwen_checkpoint: Path, tmp_path: Path) -> None:
    row = np.random.default_rng(5).standard_normal(HIDDEN).astype(np.float32)
    path = with_router(tiny_qwen_checkpoint, tmp_path, np.repeat(row[None, :], N_EXPERTS, axis=0))
    with Model(path) as model:
        experts, _ = first_row(model, 33, "scalar")
    np.testing.assert_array_equal(experts.reshape(-1, TOP_K), [[0, 1, 2], [-1, -1, -1], [0, 1, 2]])


def chosen(router: npt.NDArray[Any], x: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
    return np.sort(np.argsort(-(x @ router.T), axis=1, kind="stable")[:, :8], axis=1)


def routing_agreement(fmt: Format) -> float:
    """Share of tokens that go to the same 8 of 64 experts as with the router left as it was: random normal router and
    activations, 1024 wide; q8 rounds the activations, too, as every q8 product does.
    """
    random = np.random.default_rng(11)
    router = random.standard_normal((64, 1024), np.float32) / 32
    x = random.standard_normal((2000, 1024), np.float32)
    raw = encode(router, fmt, QuantizationError()).tobytes()
    stored = reference_model.decode_matrix(raw, fmt.name.lower(), *router.shape)
    seen = reference_model.quantize_activations(x.astype(np.float64)) if fmt is Format.Q8 else x
    same = chosen(stored, seen.astype(np.float64)) == chosen(router.astype(np.float64), x.astype(np.float64))
    return float(same.all(axis=1).mean())


@pytest.mark.parametrize(
    ("fmt", "low", "high"),
    [(Format.F32, 1.0, 1.0), (Format.F16, 0.99, 1.0), (Format.BF16, 0.95, 0.995), (Format.Q8, 0.9, 0.97)],
)
def test_a_rounded_gate_sends_tokens_elsewhere(fmt: Format, low: float, high: float) -> None:
    """Why gates stay in f32 (docs/numerics.md has the figures)."""
    agreement = routing_agreement(fmt)
    print(f"gate in {fmt.name.lower()}: {agreement:.1%} of tokens keep their experts")
    assert low <= agreement <= high
