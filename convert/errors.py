"""What can be wrong with a checkpoint or a model file, by kind.

    ConvertError
    ├── CheckpointError          the source
    │   ├── MissingFile          a file that the checkpoint needs, or that its index names, is not there
    │   ├── DamagedFile          a file is cut short or contradicts itself; says expected and actual size
    │   ├── TensorError          a tensor is missing, left over, of the wrong shape or type, or not finite
    │   ├── ConfigError          config.json lacks a value or has one that cannot be
    │   └── UnsupportedModel     a family, or a feature of one, that colibri does not run
    ├── ModelFileError           a .colibri file that is cut, damaged or of an unknown version
    └── OutputError              the file cannot be written: disk full, no permission, another converter at work

`where` names the file, configuration key or tensor; `hint` says what to do.
"""

from __future__ import annotations

import re


class ConvertError(Exception):
    """Base of all errors of the converter and of inspect."""

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint

    def to_wire(self) -> dict[str, str]:
        """As the daemon's errors are told: {"type": "missing_file", "message", "where"?, "hint"?}."""
        kind = re.sub(r"(?<!^)(?=[A-Z])", "_", type(self).__name__).lower()
        fields = {"type": kind, "message": self.message, "where": self.where, "hint": self.hint}
        return {name: value for name, value in fields.items() if value is not None}

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        return f"{text} ({self.hint})" if self.hint else text


class CheckpointError(ConvertError):
    """Something about the source; nothing was written."""


class MissingFile(CheckpointError):
    """A file that the checkpoint needs is not there."""


class DamagedFile(CheckpointError):
    """A file is cut short or contradicts itself."""


class TensorError(CheckpointError):
    """A tensor is missing, left over, of the wrong shape or type, or not finite."""


class ConfigError(CheckpointError):
    """A configuration key is missing or has an impossible value."""


class UnsupportedModel(CheckpointError):
    """A family or feature that colibri does not run."""


class ModelFileError(ConvertError):
    """A .colibri file that is cut, damaged or of an unknown version."""


class OutputError(ConvertError):
    """The result cannot be written."""
