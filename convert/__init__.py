"""Hugging Face checkpoints to .colibri files, and a look into them."""

from .converter import Progress, Report, convert
from .errors import (
    CheckpointError,
    ConfigError,
    ConvertError,
    DamagedFile,
    MissingFile,
    ModelFileError,
    OutputError,
    TensorError,
    UnsupportedModel,
)

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ConvertError",
    "DamagedFile",
    "MissingFile",
    "ModelFileError",
    "OutputError",
    "Progress",
    "Report",
    "TensorError",
    "UnsupportedModel",
    "convert",
]
