"""Hugging Face checkpoints to .colibri files, and a look into them."""

from .calibration import Calibration, calibrate
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
from .inspection import Inspection, LayerPlan, inspect

__all__ = [
    "Calibration",
    "CheckpointError",
    "ConfigError",
    "ConvertError",
    "DamagedFile",
    "Inspection",
    "LayerPlan",
    "MissingFile",
    "ModelFileError",
    "OutputError",
    "Progress",
    "Report",
    "TensorError",
    "UnsupportedModel",
    "calibrate",
    "convert",
    "inspect",
]
