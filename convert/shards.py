"""The files that hold a model's experts where its own does not: written, put in place, cleared away, read.

A shard's name has the fingerprint in it, so the shards of a new conversion come to lie beside those of the former one,
and renaming the model's own file exchanges all at once. What no longer belongs to it is then removed. The lock on that
file's .partial covers its shards.
"""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from .errors import ModelFileError
from .format import EXPERT_ALIGN, HEADER, HEADER_BYTES, MAGIC, Bytes, Shard, header_checksum, make_shards
from .writer import AtomicFile

# Fields that a shard's header has in common with the model's, besides magic and fingerprint.
_COMMON_NUMBERS = (
    *("version", "header_bytes", "n_shards", "experts_per_shard"),
    *("expert_format", "expert_bytes", "expert_stride"),
)


class ShardWriter:
    """The shards of one conversion; `stack` removes what is not committed. None are made for n_shards = 1."""

    def __init__(self, out: Path, n_shards: int, n_experts: int, n_layers: int, stride: int, stack: ExitStack) -> None:
        self._n_layers, self._stride = n_layers, stride
        self.shards = make_shards(n_experts, n_shards)
        self._files: list[AtomicFile] = []
        self._of_expert = [shard for shard in self.shards for _ in range(shard.n_experts)]
        for shard in self.shards:
            path = out.with_name(f"{out.name}.{shard.number}-of-{n_shards}")
            self._files.append(stack.enter_context(AtomicFile(path, shard.file_bytes(n_layers, stride))))

    def write_block(self, layer: int, expert: int, data: Bytes) -> None:
        """`layer` counts those with experts only."""
        shard = self._of_expert[expert]
        self._files[shard.number - 1].write_at(shard.offset(layer, expert, self._stride), data)

    def seal(self, header: npt.NDArray[np.void], model: Path) -> None:
        """Writes the headers and gives every shard the name that it has beside `model`, still a partial file."""
        for shard, file in zip(self.shards, self._files, strict=True):
            file.sync()
            file.write_at(0, self._header(shard, header).tobytes())
            file.rename_partial(shard.path(model, header["fingerprint"].tobytes()))

    def _header(self, shard: Shard, whole: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
        header = np.zeros((), HEADER)
        for name in ("magic", "fingerprint", *_COMMON_NUMBERS):
            header[name] = whole[name]
        header["file_bytes"] = shard.file_bytes(self._n_layers, self._stride)
        header["expert_offset"], header["shard_index"] = EXPERT_ALIGN, shard.number
        header["header_checksum"] = header_checksum(header, np.zeros(0, np.void), b"")
        return header

    def commit(self, out: Path, fingerprint: bytes) -> list[Path]:
        """Makes the shards durable under their names beside `out`."""
        for shard, file in zip(self.shards, self._files, strict=True):
            file.path = shard.path(out, fingerprint)
            file.commit()
        return [file.path for file in self._files]


def total_bytes(n_shards: int, n_experts: int, n_layers: int, stride: int) -> int:
    """What all shards take."""
    return sum(shard.file_bytes(n_layers, stride) for shard in make_shards(n_experts, n_shards))


def remove_strays(out: Path) -> None:
    """Removes every shard under the name of `out` that does not belong to the file which has that name now."""
    kept = {path.name for path in _shards_of_file(out)}
    pattern = re.compile(re.escape(out.name) + r"\.((partial\.)?[0-9a-f]{8}-\d+-of-\d+|\d+-of-\d+\.partial)")
    for path in out.parent.iterdir():
        if pattern.fullmatch(path.name) and path.name not in kept:
            path.unlink(missing_ok=True)


def _shards_of_file(model: Path) -> list[Path]:
    """The names of a model's shards, by its header; none where there is no such file."""
    try:
        with model.open("rb") as file:
            raw = file.read(HEADER_BYTES)
    except OSError:
        return []
    if len(raw) < HEADER_BYTES or not raw.startswith(MAGIC):
        return []
    header = np.frombuffer(raw, HEADER)[0]
    shards = make_shards(int(header["n_experts"]), int(header["n_shards"]))
    return [shard.path(model, header["fingerprint"].tobytes()) for shard in shards]


class ShardFile:
    """An opened shard, checked against the header of its model. ModelFileError names the shard and what is wrong."""

    def __init__(self, shard: Shard, model: Path, header: npt.NDArray[np.void], n_layers: int) -> None:
        self.shard = shard
        self.path = shard.path(model, header["fingerprint"].tobytes())
        self.stride = int(header["expert_stride"])
        try:
            self.file: BinaryIO = self.path.open("rb")
        except FileNotFoundError:
            raise self._error("is missing", "the shards of a model lie beside it, under its name") from None
        except OSError as error:
            raise self._error(f"cannot be opened: {error.strerror}") from None
        try:
            self.size = os.fstat(self.file.fileno()).st_size
            self._check(header, shard.file_bytes(n_layers, self.stride))
        except BaseException:
            self.file.close()
            raise

    def _error(self, message: str, hint: str | None = None) -> ModelFileError:
        numbered = f"shard {self.shard.number} of {self.shard.n_shards}: {message}"
        return ModelFileError(numbered, where=str(self.path), hint=hint)

    def _check(self, model: npt.NDArray[np.void], expected_bytes: int) -> None:
        raw = os.pread(self.file.fileno(), HEADER_BYTES, 0)
        if not raw.startswith(MAGIC):
            raise self._error("is not a part of a .colibri file")
        if self.size != expected_bytes or len(raw) < HEADER_BYTES:
            what = "cut short" if self.size < expected_bytes else "too long"
            raise self._error(f"{what}: expected {expected_bytes} bytes, found {self.size}")
        header = np.frombuffer(raw, HEADER)[0]
        if header_checksum(np.asarray(header), np.zeros(0, np.void), b"") != header["header_checksum"]:
            raise self._error("its header is damaged: its checksum differs")
        if (header["fingerprint"] != model["fingerprint"]).any():
            raise self._error("is of another model: its fingerprint differs", "convert again, or bring the right one")
        expected = {name: int(model[name]) for name in _COMMON_NUMBERS}
        expected |= {"shard_index": self.shard.number, "file_bytes": expected_bytes, "expert_offset": EXPERT_ALIGN}
        for name, value in expected.items():
            if header[name] != value:
                raise self._error(f"{name} is {header[name]}, the model demands {value}")

    def offset(self, layer: int, expert: int) -> int:
        """Where a block lies. `layer` counts those with experts only."""
        return self.shard.offset(layer, expert, self.stride)
