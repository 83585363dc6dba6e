"""The engine as the parity tests ask it: one text, one batch, every row's logits, f32 KV."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from colibri.native import PAGE_TOKENS, ROW_LOGITS, Batch, Context, Model


def run(path: Path, tokens: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """All logits and the routing, computed by libcolibri in one batch."""
    n = len(tokens)
    n_pages = -(-n // PAGE_TOKENS)
    with Model(path) as model:
        context = Context(model, n_pages=n_pages, kv_format="f32", max_rows=n, max_logits=n)
        batch = Batch(
            tokens=tokens.tolist(),
            positions=list(range(n)),
            sequences=[0] * n,
            flags=[ROW_LOGITS] * n,
            targets=None,
            page_tables=[list(range(n_pages))],
            want_routing=True,
        )
        result = context.forward(batch)
        assert result.row_status == [0] * n
        logits = np.array([context.logits(i) for i in range(n)])
        routing = np.array(result.routing).reshape(n, model.info.n_layers, -1)
        context.close()
    return logits, routing
