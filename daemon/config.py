"""What a daemon is told at its start, checked, with the defaults and the reasons for them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click

_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}
_UNITS |= {f"{prefix}I": 1024**power for power, prefix in enumerate("KMGT", start=1)}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes in "1GiB", "500 MB", "1.5g" or "4096". Raises ValueError."""
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a size such as 512MiB, 1GiB or 20GB")
    return int(float(match[1]) * unit)


def format_size(n_bytes: int) -> str:
    """The shortest of the usual ways to say a number of bytes."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(max(n_bytes.bit_length() - 1, 0) // 10, len(units) - 1)
    return f"{n_bytes / 1024**power:.1f}".removesuffix(".0") + f" {units[power]}"


class SizeType(click.ParamType[int]):
    """A click parameter in bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def default_data_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """The user's state folder; the system's for the system service, which systemd gives $STATE_DIRECTORY."""
    if state := environ.get("STATE_DIRECTORY"):
        return Path(state.split(":")[0])
    if state := environ.get("XDG_STATE_HOME"):
        return Path(state) / "colibri"
    if home := environ.get("HOME"):
        return Path(home) / ".local/state/colibri"
    return Path("/var/lib/colibri")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that decides how a daemon runs. Sizes in bytes, times in seconds; 0 threads: the engine chooses."""

    model: Path
    socket: Path
    data_dir: Path
    context: int = 0  # tokens of one sequence; 0: as many as the model allows
    kv_format: Literal["f16", "f32"] = "f16"
    kv_ram_bytes: int = 1 << 30
    kv_disk_bytes: int = 20 << 30
    weights: Literal["map", "read"] = "map"
    static_table: Path | None = None
    routing: Literal["exact", "static"] = "exact"
    expert_ram_bytes: int = 0  # memory for experts; 0: as much as the system gives
    max_batch_size: int = 8
    max_step_rows: int = 512
    max_queue: int = 256
    prefill_threads: int = 0
    decode_threads: int = 0
    # How long running requests may go on after SIGTERM; systemd kills after 90.
    grace_s: float = 5.0
    # Unread output of one connection: some 80,000 tokens. Whoever reads slower than that is not reading.
    max_output_bytes: int = 8 << 20
    max_connections: int = 256
