"""How figures are shown: lines on the terminal, JSON with what is needed to judge them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import Measurement
    from .limits import Limits
    from .peers import Series


def machine() -> dict[str, Any]:
    """What the figures were measured on, and when."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "colibri": metadata.version("colibri-moe"),
        "compiler": _first_line("gcc", "--version"),
    }


def _processor() -> str:
    for text in Path("/proc/cpuinfo").read_text().splitlines():
        if text.startswith("model name"):
            return text.partition(":")[2].strip()
    return platform.machine()


def _first_line(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def to_dict(measurement: Measurement | Series) -> dict[str, Any]:
    """A measurement with what is derived from it."""
    return asdict(measurement) | {"tokens_per_s": measurement.tokens_per_s, "share": measurement.share}


def write_json(path: Path, measurements: Sequence[dict[str, Any]]) -> None:
    document = {"machine": machine(), "measurements": measurements}
    path.write_text(json.dumps(document, indent=1) + "\n")


def line(measurement: Measurement) -> str:
    """One measurement: what, tokens/s with its spread, share of the bound, and the limits of the moment."""
    m = measurement
    rates = sorted(m.tokens / run.seconds for run in m.runs)
    share = "share ?" if m.share is None else f"{100 * m.share:3.0f}% of bound"
    what = f"{m.case.kind} {m.case.context}" + (f" x {m.case.batch}" if m.case.batch > 1 else "")
    return (
        f"{m.model:<14} {m.isa:<10} {what:<16} {m.tokens_per_s:8.1f} tokens/s ({rates[0]:.1f} to {rates[-1]:.1f})  "
        f"{share}  | {_limits_text([run.limits for run in m.runs])}"
    )


def _limits_text(limits: Sequence[Limits]) -> str:
    def of(values: Iterable[float | None], unit: str) -> str:
        known = [value for value in values if value is not None]
        return f"{median(known) * 1e-9:.0f} {unit}" if known else f"? {unit}"

    return (
        f"int8 {of((x.int8_ops for x in limits), 'GOP/s')}, f32 {of((x.f32_flops for x in limits), 'GFLOP/s')}, "
        f"reads {of((x.read_bytes for x in limits), 'GB/s')}"
    )
