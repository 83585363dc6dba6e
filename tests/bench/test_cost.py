"""The bounds, against figures worked out by hand from the tiny shape: 2 layers, hidden 64, 4 heads and 2 KV heads of
16, 8 experts of width 32 of which 2 are chosen, a shared one of width 64, vocabulary 320.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from colibri.bench.cost import Cost, Products, cost_of
from colibri.bench.limits import Limits
from colibri.bench.models import make_model

# Products of one row: q and o 64 x 64, k and v 32 x 64; three matrices of each chosen expert and of the shared one.
ATTENTION = 2 * 64 * 64 + 2 * 32 * 64
EXPERTS = 2 * 3 * 32 * 64
SHARED = 3 * 64 * 64
ROW = 2 * (ATTENTION + EXPERTS + SHARED)
HEAD = 320 * 64


def q8_bytes(rows: int, cols: int) -> int:
    """A byte a weight and two for each 32 of them; 16 rows make a tile of a multiple of 64 bytes."""
    tile = 16 * cols + 16 * 2 * cols // 32
    return rows // 16 * -(-tile // 64) * 64


@pytest.fixture(scope="module")
def cost(tmp_path_factory: pytest.TempPathFactory) -> Cost:
    return cost_of(make_model("tiny", folder=tmp_path_factory.mktemp("models")))


def test_products_of_a_row_are_those_of_its_matrices_without_gates(cost: Cost) -> None:
    assert cost.row == Products(int8=ROW)
    assert cost.head == Products(int8=HEAD)


def test_weights_that_are_not_quantised_count_as_f32(tmp_path: Path) -> None:
    cost = cost_of(make_model("tiny", "bf16", folder=tmp_path))
    assert (cost.row, cost.head) == (Products(f32=ROW), Products(f32=HEAD))


def test_a_step_reads_everything_but_the_embedding_and_the_experts_not_chosen(cost: Cost) -> None:
    assert cost.expert_bytes == 2 * q8_bytes(32, 64) + q8_bytes(64, 32)
    matrices = 2 * q8_bytes(64, 64) + 2 * q8_bytes(32, 64) + 3 * q8_bytes(64, 64)
    gates = 4 * (16 * 64 + 16 * 64)  # router of 8 rows and gate of one, each padded to a tile
    vectors = 4 * (2 * 64 + 64 + 2 * 32)  # two norms; biases of q, k and v
    model = q8_bytes(320, 64) + 4 * (64 + 8)  # head, final norm, inverse frequencies
    assert cost.trunk_bytes == 2 * (matrices + gates + vectors) + model


def test_each_expert_is_read_once_a_step_and_each_sequence_has_its_own_kv() -> None:
    cost = Cost(trunk_bytes=1000, expert_bytes=10, row=Products(), head=Products(), pair_flops=0)
    assert cost.step_bytes([5, 7], 3, 2.5) == 1000 + 3 * 10 + 12 * 2.5


def test_prefill_takes_products_over_int8_and_attention_over_f32() -> None:
    cost = Cost(trunk_bytes=0, expert_bytes=0, row=Products(int8=100, f32=10), head=Products(int8=50), pair_flops=8)
    limits = Limits(int8_ops=1000.0, f32_flops=100.0, read_bytes=1.0)
    # 4 tokens see 1 + 2 + 3 + 4 positions; the head runs for the last alone.
    assert cost.prefill_s(limits, 4) == pytest.approx(2 * (4 * 100 + 50) / 1000 + (2 * 4 * 10 + 10 * 8) / 100)


def test_attention_is_two_products_for_each_dimension_of_each_head(cost: Cost) -> None:
    assert cost.pair_flops == 2 * 2 * 4 * 16 * 2


def test_without_a_limit_there_is_no_bound(cost: Cost) -> None:
    assert cost.prefill_s(Limits(None, 1.0, 1.0), 8) is None
    assert cost.prefill_s(Limits(1.0, None, 1.0), 8) is None
