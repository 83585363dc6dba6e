"""What transformers computes for a checkpoint: the live oracle, and the source of the committed vectors. Needs
torch.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM


def run(folder: Path, tokens: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """Logits [n, vocabulary] in float32, and chosen experts [n, n_layers, top_k], ascending, -1 in dense layers.

    The plain implementations are asked for: fused ones may sum in another order or another precision.
    """
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    chosen: dict[int, torch.Tensor] = {}

    def remember(layer: int) -> object:
        def hook(module: torch.nn.Module, inputs: object, outputs: tuple[torch.Tensor, ...]) -> None:
            chosen[layer] = outputs[2].sort(dim=-1).values

        return hook

    for number, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(remember(number))
    with torch.no_grad():
        logits = model(torch.tensor(tokens[None, :], dtype=torch.long)).logits[0].numpy()
    routing = np.full((len(tokens), len(model.model.layers), model.config.num_experts_per_tok), -1, np.int32)
    for number, experts in chosen.items():
        routing[:, number] = experts.numpy()
    return logits, routing
