"""The probes give figures where there are instructions for them; how large they are is the machine's affair."""

from __future__ import annotations

import math

from colibri.bench.limits import Limits, Probe

SMALL = 8 << 20


def test_reads_are_measured_for_every_number_of_threads() -> None:
    for threads in (1, 3):
        assert 0 < Probe(threads, SMALL).limits("scalar").read_bytes < math.inf


def test_an_instruction_set_without_a_unit_of_its_own_has_no_arithmetic_limit() -> None:
    limits = Probe(1, SMALL).limits("scalar")
    assert (limits.int8_ops, limits.f32_flops) == (None, None)


def test_limits_between_two_probes_are_their_means() -> None:
    assert Limits(1.0, 2.0, 3.0).between(Limits(3.0, 4.0, 5.0)) == Limits(2.0, 3.0, 4.0)
    assert Limits(None, 2.0, 3.0).between(Limits(3.0, 4.0, 5.0)).int8_ops is None
