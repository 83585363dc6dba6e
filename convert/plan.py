"""Which part of which source tensor becomes which part of the file, decided before a byte is written.

Here every name, shape and type is checked: what is missing, what is left over, what has another shape than the
configuration demands. After that only the values themselves (NaN, infinity) and the disk can make a conversion fail.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .architecture import Architecture, tensor_specs
from .checkpoint import WeightSource
from .errors import TensorError
from .families import ExpertNames, Family
from .format import ArchFlag, Format, Role, TensorSpec

_NAMES_SHOWN = 5  # of a list of tensors in a message; the rest is counted


@dataclass(frozen=True)
class Part:
    """A matrix inside a source tensor: rows [first_row, first_row + rows) of element `index` of a stack, or of the
    tensor itself.
    """

    name: str
    rows: int
    cols: int
    index: tuple[int, ...] = ()
    first_row: int = 0
    vector: bool = False  # stored with one dimension


@dataclass(frozen=True)
class Plan:
    """`tensors` in the order of the table, with the parts whose rows one after the other they are made of; none for the
    computed inverse frequencies. `experts`: for each MoE layer
    and expert gate, up and down, in the order of the blocks.
    """

    family: Family
    architecture: Architecture
    tensors: list[tuple[TensorSpec, tuple[Part, ...]]]
    experts: list[tuple[Part, Part, Part]]
    expert_format: Format
    notes: list[str]


def make_plan(checkpoint: WeightSource, family: Family, architecture: Architecture, weights: Format) -> Plan:
    """Matches a checkpoint with its description; TensorError where they differ."""
    notes: list[str] = []
    architecture = _settle_head(checkpoint, family, architecture, notes)
    finder = _Finder(checkpoint)
    tensors = [(spec, _find_tensor(finder, family, architecture, spec)) for spec in tensor_specs(architecture, weights)]
    experts = [part for layer in architecture.moe_layers for part in _find_experts(finder, family, architecture, layer)]
    _account_for_all(finder, family, architecture, notes)
    return Plan(family, architecture, tensors, experts, weights, notes)


class _Finder:
    """Looks tensors up by candidate names and remembers which were used."""

    def __init__(self, checkpoint: WeightSource) -> None:
        self.checkpoint = checkpoint
        self.used: set[str] = set()
        self.missing: list[str] = []

    def pick(self, candidates: Sequence[str]) -> str | None:
        """The candidate that is there; none is noted as missing."""
        for name in candidates:
            if name in self.checkpoint.tensors:
                self.used.add(name)
                self.checkpoint.check_dtype(name)
                return name
        self.missing.append(candidates[0])
        return None

    def demand_shape(self, name: str, shape: tuple[int, ...]) -> None:
        actual = self.checkpoint.tensors[name].shape
        if actual != shape:
            raise TensorError(f"has shape {list(actual)}; the configuration demands {list(shape)}", where=name)


# What is fused of several tensors of a checkpoint.
_FUSED = {
    Role.QKV: (Role.Q, Role.K, Role.V),
    Role.QKV_BIAS: (Role.Q_BIAS, Role.K_BIAS, Role.V_BIAS),
}


def _find_tensor(finder: _Finder, family: Family, architecture: Architecture, spec: TensorSpec) -> tuple[Part, ...]:
    if spec.role is Role.INV_FREQ:
        return ()
    if spec.role not in _FUSED:
        return _find_one(finder, family, spec)
    separate = replace(architecture, flags=architecture.flags & ~ArchFlag.QKV_FUSED).layer_shapes(spec.layer)
    parts: tuple[Part, ...] = ()
    for role in _FUSED[spec.role]:
        parts += _find_one(finder, family, TensorSpec(role, spec.layer, spec.format, *separate[role]))
    return parts


def _find_one(finder: _Finder, family: Family, spec: TensorSpec) -> tuple[Part, ...]:
    """The part, or nothing where it is missing, which is noted."""
    name = finder.pick([template.format(layer=spec.layer) for template in family.names[spec.role]])
    if name is None:
        return ()
    vector = spec.format is Format.VECTOR
    finder.demand_shape(name, (spec.cols,) if vector else (spec.rows, spec.cols))
    return (Part(name, spec.rows, spec.cols, vector=vector),)


def _find_experts(
    finder: _Finder, family: Family, architecture: Architecture, layer: int
) -> list[tuple[Part, Part, Part]]:
    """Parts of every expert of a layer, from the first way of naming them of which anything is there."""
    names = next((ways for ways in family.experts if _is_present(finder.checkpoint, ways, layer)), family.experts[0])
    if names.fused:
        return _fused_experts(finder, names, architecture, layer)
    found = []
    for expert in range(architecture.n_experts):
        parts = []
        for template, shape in zip((names.gate, names.up, names.down), architecture.expert_shapes(), strict=True):
            name = finder.pick([template.format(layer=layer, expert=expert)])
            if name is not None:
                finder.demand_shape(name, shape)
                parts.append(Part(name, *shape))
        if len(parts) == 3:
            found.append((parts[0], parts[1], parts[2]))
    return found


def _is_present(checkpoint: WeightSource, names: ExpertNames, layer: int) -> bool:
    templates = (names.gate_up, names.down) if names.fused else (names.gate, names.up, names.down)
    return any(template.format(layer=layer, expert=0) in checkpoint.tensors for template in templates)


def _fused_experts(
    finder: _Finder, names: ExpertNames, architecture: Architecture, layer: int
) -> list[tuple[Part, Part, Part]]:
    n_experts, width, hidden = architecture.n_experts, architecture.expert_width, architecture.hidden
    gate_up = finder.pick([names.gate_up.format(layer=layer)])
    down = finder.pick([names.down.format(layer=layer)])
    if gate_up is None or down is None:
        return []
    finder.demand_shape(gate_up, (n_experts, 2 * width, hidden))
    finder.demand_shape(down, (n_experts, hidden, width))
    return [
        (
            Part(gate_up, width, hidden, index=(expert,)),
            Part(gate_up, width, hidden, index=(expert,), first_row=width),
            Part(down, hidden, width, index=(expert,)),
        )
        for expert in range(n_experts)
    ]


def _account_for_all(finder: _Finder, family: Family, architecture: Architecture, notes: list[str]) -> None:
    """Nothing missing, nothing left over."""
    if finder.missing:
        raise TensorError(f"missing from the checkpoint{_and_more(finder.missing)}", where=finder.missing[0])
    left = sorted(set(finder.checkpoint.tensors) - finder.used)
    ignored = [name for name in left if any(re.fullmatch(pattern, name) for pattern in family.ignored)]
    if ArchFlag.TIED in architecture.flags:
        ignored += [name for name in left if name in family.names[Role.HEAD]]
    if ignored:
        notes.append(f"not needed, left out: {ignored[0]}{_and_more(ignored)}")
    unknown = [name for name in left if name not in ignored]
    if unknown:
        raise TensorError(
            f"is in the checkpoint but has no place in a {family.name} model{_and_more(unknown)}",
            where=unknown[0],
            hint="the configuration does not describe these weights, or the model has a feature that colibri lacks",
        )


def _and_more(names: list[str]) -> str:
    if len(names) == 1:
        return ""
    shown = ", ".join(names[1:_NAMES_SHOWN])
    rest = len(names) - _NAMES_SHOWN
    return f", and so {'are' if len(names) > 2 else 'is'} {shown}" + (f" and {rest} more" if rest > 0 else "")


def _settle_head(
    checkpoint: WeightSource, family: Family, architecture: Architecture, notes: list[str]
) -> Architecture:
    """Rule for tied embeddings with a head in the checkpoint: an equal head is dropped; one that differs is kept, with
    a warning.

    That is what transformers does. Not tied and no head is an error, found like any missing tensor.
    """
    head = next((name for name in family.names[Role.HEAD] if name in checkpoint.tensors), None)
    if ArchFlag.TIED not in architecture.flags or head is None:
        return architecture
    embedding = family.names[Role.EMBEDDING][0]
    if embedding in checkpoint.tensors and _equal(checkpoint, head, embedding):
        return architecture
    notes.append(f"warning: tie_word_embeddings is true, but {head} differs from {embedding}; both are kept, untied")
    return replace(architecture, flags=architecture.flags & ~ArchFlag.TIED)


def _equal(checkpoint: WeightSource, one: str, other: str, band_rows: int = 1024) -> bool:
    shape = checkpoint.tensors[one].shape
    if shape != checkpoint.tensors[other].shape or len(shape) != 2:
        return False
    rows = slice(0, shape[0])
    pairs = zip(checkpoint.bands(one, rows, band_rows), checkpoint.bands(other, rows, band_rows), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)
