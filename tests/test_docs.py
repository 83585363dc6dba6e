"""What the documentation says is tested is tested."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DEFINED = {
    name
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
}
DOCS = [path for path in sorted((ROOT / "docs").glob("*.md")) if "`test_" in path.read_text()]


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_every_test_that_a_page_names_exists(path: Path) -> None:
    named = set(re.findall(r"`(test_\w+)`", path.read_text()))
    assert sorted(named - DEFINED) == []
