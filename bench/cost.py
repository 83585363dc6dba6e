"""What a model costs: bytes that must be read and operations that must be done, from the tables of its file.

Two bounds follow. Prefill is bound by arithmetic: integer products over the int8 limit, plus attention and whatever
weights are not quantised over the f32 limit. Decoding is bound by reads: every matrix but the embedding once a step,
each expert that is routed to once a step, and every sequence's K and V. Gates, norms and the softmax are left out of
the operations (less than a hundredth), so that a bound is never easier than it should be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from colibri.convert.architecture import GATES
from colibri.convert.format import Format, Role
from colibri.convert.inspection import ModelFile

from .limits import Limits

_INTEGER = frozenset({Format.Q8, Format.Q4})


@dataclass(frozen=True)
class Products:
    """Multiplications with an addition, by the arithmetic that they are done in."""

    int8: int = 0
    f32: int = 0

    def __add__(self, other: Products) -> Products:
        return Products(self.int8 + other.int8, self.f32 + other.f32)

    def times(self, n: int) -> Products:
        return Products(self.int8 * n, self.f32 * n)


@dataclass(frozen=True)
class Cost:
    """`trunk_bytes`: what a step reads whatever it is routed to. `row`: products of one row in all layers; `head`: of
    one row of logits. `pair_flops`: attention between one row and one position, in all layers.
    """

    trunk_bytes: int
    expert_bytes: int
    row: Products
    head: Products
    pair_flops: int

    def prefill_s(self, limits: Limits, n_tokens: int) -> float | None:
        """Seconds that n_tokens from an empty context take at the limits; None where a limit is not known."""
        if limits.int8_ops is None or limits.f32_flops is None:
            return None
        products = self.row.times(n_tokens) + self.head
        attention = self.pair_flops * n_tokens * (n_tokens + 1) / 2
        return 2 * products.int8 / limits.int8_ops + (2 * products.f32 + attention) / limits.f32_flops

    def step_bytes(self, contexts: Sequence[int], n_experts: int, kv_token_bytes: float) -> float:
        """Bytes that a decode step reads: contexts are the positions that each sequence attends to, its new token
        included; n_experts the expert blocks that any of them is routed to, summed over the layers.
        """
        return self.trunk_bytes + n_experts * self.expert_bytes + sum(contexts) * kv_token_bytes


def _products(fmt: Format, rows: int, cols: int) -> Products:
    return Products(int8=rows * cols) if fmt in _INTEGER else Products(f32=rows * cols)


def cost_of(path: Path) -> Cost:
    """Reads the tables of a model file. Raises ModelFileError."""
    with ModelFile(path) as file:
        shape = file.architecture
        roles = {Role(int(entry["role"])) for entry in file.tensors}
        head_role = Role.HEAD if Role.HEAD in roles else Role.EMBEDDING
        trunk_bytes, row, head = 0, Products(), Products()
        for entry in file.tensors:
            role, fmt = Role(int(entry["role"])), Format(int(entry["format"]))
            if role is Role.EMBEDDING and role is not head_role:
                continue  # a row of it is read for each token
            trunk_bytes += int(entry["bytes"])
            if fmt is Format.VECTOR or role in GATES:
                continue
            products = _products(fmt, int(entry["rows"]), int(entry["cols"]))
            if role is head_role:
                head += products
            else:
                row += products
        expert_format = Format(file["expert_format"])
        for rows, cols in shape.expert_shapes():
            row += _products(expert_format, rows, cols).times(shape.top_k * len(shape.moe_layers))
        # A score and a weighted sum: two products for each dimension of each head.
        pair_flops = 4 * shape.n_heads * shape.head_dim * shape.n_layers
        return Cost(trunk_bytes, file["expert_bytes"], row, head, pair_flops)
