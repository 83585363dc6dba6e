"""What several tests of the engine share."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.models import make_sparse_model


@pytest.fixture(scope="session", params=[1, 3], ids=["one file", "shards"])
def sparse_model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SPARSE, its experts in the file or in three beside it. Read only."""
    return make_sparse_model(tmp_path_factory.mktemp("sparse"), shards=request.param)
