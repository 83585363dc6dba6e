"""The tree and the build files agree."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PARTS = ["protocol", "client", "kvstore", "convert", "daemon", "ctl", "bench", "native/python"]


def installed_files() -> set[Path]:
    """What meson installs, as the type checker's reader of the build files sees it."""
    spec = importlib.util.spec_from_file_location("typecheck", ROOT / "tools" / "typecheck.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return set(module.installed_sources().values())


@pytest.mark.parametrize("part", PARTS)
def test_every_python_file_of_a_part_is_installed(part: str) -> None:
    present = set((ROOT / part).rglob("*.py")) - {ROOT / "native/python/generate_binding.py"}
    assert present == {path for path in installed_files() if path.suffix == ".py" and path.is_relative_to(ROOT / part)}


def test_no_folder_shadows_the_installed_package() -> None:
    assert not (ROOT / "colibri").exists(), "Python run in the root would import it instead of the installed package"
