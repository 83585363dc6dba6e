"""Make a Hugging Face checkpoint of a .colibri file: the weights as the file holds them, in float32.

    python tools/default_model_checkpoint.py models/default.colibri FOLDER

What the engine computes from the file, transformers computes from the folder, so it is the file's oracle; and training
can go on from it (tools/train_default_model.py --start).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from colibri.convert.families import FAMILIES
from colibri.convert.format import NO_LAYER, Format, Role, matrix_bytes
from colibri.convert.inspection import ModelFile
from colibri.convert.tiles import decode


def weights(file: ModelFile, family: str) -> dict[str, np.ndarray]:
    """Every tensor under the family's first name for it; the table of rotary frequencies is none of a checkpoint's."""
    names = next(one for one in FAMILIES if one.name == family)
    found = {}
    for entry in file.tensors:
        role, layer, fmt = Role(int(entry["role"])), int(entry["layer"]), Format(int(entry["format"]))
        if role is Role.INV_FREQ:
            continue
        rows, cols = int(entry["rows"]), int(entry["cols"])
        matrix = decode(file.read(int(entry["offset"]), int(entry["bytes"])), fmt, rows, cols)
        name = names.names[role][0].format(layer=None if layer == NO_LAYER else layer)
        found[name] = np.ascontiguousarray(matrix[0] if fmt is Format.VECTOR else matrix)
    way, fmt = next(way for way in names.experts if not way.fused), Format(file["expert_format"])
    for layer, expert, block in file.experts():
        begin = 0
        for template, (rows, cols) in zip((way.gate, way.up, way.down), file.architecture.expert_shapes(), strict=True):
            end = begin + matrix_bytes(fmt, rows, cols)
            found[template.format(layer=layer, expert=expert)] = decode(block[begin:end], fmt, rows, cols)
            begin = end
    return found


def write(model: Path, folder: Path) -> None:
    """The folder: weights, and configuration, tokenizer and template as the file carries them."""
    folder.mkdir(parents=True, exist_ok=True)
    with ModelFile(model) as file:
        document = file.json()
        save_file(weights(file, document["family"]), folder / "model.safetensors", {"format": "pt"})
    for name in ("config", "generation_config", "tokenizer_config"):
        (folder / f"{name}.json").write_text(json.dumps(document[name], indent=2) + "\n")
    (folder / "tokenizer.json").write_text(document["tokenizer"])
    (folder / "chat_template.jinja").write_text(document["chat_template"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    write(arguments.model, arguments.folder)


if __name__ == "__main__":
    main()
