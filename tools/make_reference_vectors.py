"""Makes tests/data/reference_vectors: what transformers (for DeepSeek-MoE
our own numpy) computes for every case of tests/data/reference_cases.json.

In float32, at every position of 200 tokens: some columns of the logits, the log-sum-exp of all, and the chosen experts.
The files are committed, so that the daily tests need neither torch nor transformers. `pytest -m oracle` does the
comparison live and on all columns.

    python tools/make_reference_vectors.py [CASE...]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support import reference_cases as cases


def make(case: cases.Case) -> cases.Vectors:
    tokens = cases.tokens()
    with tempfile.TemporaryDirectory() as folder:
        logits, routing = case.run_oracle(cases.make_checkpoint(case, Path(folder)), tokens)
    wide = logits.astype(np.float64)
    top = wide.max(axis=1)
    columns = np.linspace(0, logits.shape[1] - 1, case.columns).astype(np.int32)
    return cases.Vectors(
        tokens=tokens,
        columns=columns,
        logits=logits[:, columns].astype(np.float32),
        logsumexp=top + np.log(np.exp(wide - top[:, None]).sum(axis=1)),
        largest=float(np.abs(logits).max()),
        routing=routing,
    )


def main() -> None:
    cases.VECTORS.mkdir(exist_ok=True)
    names = sys.argv[1:]
    for case in cases.all_cases():
        if names and case.name not in names:
            continue
        path = cases.VECTORS / f"{case.name}.npz"
        make(case).save(path)
        print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
