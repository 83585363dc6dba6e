"""Random models for tests, larger than tests/data's: enough pages that bytes read say something."""

from __future__ import annotations

from colibri.bench.models import SHAPES, Shape

# 64 experts of 432 KB, of which 2 of 16 are used in a layer.
SPARSE = Shape(
    "sparse",
    4,
    {
        **SHAPES["olmoe"].config,
        "hidden_size": 256,
        "vocab_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "intermediate_size": 512,
    },
)
