"""docs/client.md and the code say the same."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import colibri
from colibri.aio.client import MAX_UNREAD

DOC = (Path(__file__).resolve().parents[2] / "docs" / "client.md").read_text()


@pytest.mark.parametrize("cls", [colibri.Client, colibri.Session, colibri.aio.Client])
def test_every_method_is_named(cls: type[object]) -> None:
    methods = {name for name in vars(cls) if not name.startswith("_") and callable(getattr(cls, name))}
    assert methods
    for name in methods:
        assert re.search(rf"\b{name}\b", DOC), name


def test_every_named_error_exists() -> None:
    named = set(re.findall(r"`([A-Z][A-Za-z]+)`", DOC)) - {"Session"}
    assert named
    assert all(issubclass(getattr(colibri, name), colibri.ColibriError) for name in named)


def test_every_example_is_python() -> None:
    examples = re.findall(r"^```python\n(.*?)^```", DOC, re.MULTILINE | re.DOTALL)
    assert len(examples) == 3
    for example in examples:
        compile(example, "docs/client.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_the_limit_of_unread_pieces_is_that_of_the_code() -> None:
    assert f"max_unread={MAX_UNREAD}" in DOC
