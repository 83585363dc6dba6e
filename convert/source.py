"""Where a checkpoint is: a folder, or a model id that the local Hugging Face cache has. Nothing is fetched."""

from __future__ import annotations

import os
import re
from pathlib import Path

from .errors import MissingFile


def cache_folder() -> Path:
    """The cache as huggingface_hub finds it."""
    if "HF_HUB_CACHE" in os.environ:
        return Path(os.environ["HF_HUB_CACHE"])
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    return Path(home).expanduser() / "hub"


def resolve_source(source: str | Path) -> Path:
    """The folder of a checkpoint; MissingFile where there is none."""
    path = Path(source)
    if path.is_dir():
        return path
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)):
        model = cache_folder() / ("models--" + str(source).replace("/", "--"))
        reference = model / "refs" / "main"
        if reference.is_file():
            snapshot = model / "snapshots" / reference.read_text().strip()
            if snapshot.is_dir():
                return snapshot
    raise MissingFile(
        "no such folder, and no such model in the local Hugging Face cache",
        where=str(source),
        hint="colibri does not download; get the model with `hf download` first",
    )
