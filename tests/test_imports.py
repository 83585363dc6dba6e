"""Who may import whom: the layering of the parts, read from the sources."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Part → its folder, and the parts that it may import besides itself.
FOLDERS = {
    "protocol": "protocol",
    "native": "native/python",
    "kvstore": "kvstore",
    "client": "client",
    "convert": "convert",
    "daemon": "daemon",
    "ctl": "ctl",
    "bench": "bench",
}
ALLOWED = {
    "protocol": set(),
    "native": set(),
    "kvstore": set(),
    "client": {"protocol"},
    "convert": {"native"},
    "daemon": {"protocol", "native", "kvstore"},
    "ctl": {"client", "protocol", "convert", "bench"},
    "bench": {"client", "native", "convert"},
}


def imports(part: str, path: Path) -> Iterator[str]:
    """Every module that a file imports, with relative names resolved."""
    package = ["colibri"] if part == "client" else ["colibri", part]
    package += path.relative_to(ROOT / FOLDERS[part]).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def part_of(module: str) -> str | None:
    """The part that a module belongs to; None if it is not ours."""
    names = module.split(".")
    if names[0] != "colibri":
        return None
    return names[1] if len(names) > 1 and names[1] in FOLDERS else "client"


@pytest.mark.parametrize("part", FOLDERS)
def test_a_part_imports_only_what_lies_below_it(part: str) -> None:
    for path in sorted((ROOT / FOLDERS[part]).rglob("*.py")):
        for module in imports(part, path):
            other = part_of(module)
            # `from colibri.native import x` names colibri.native; the bare package is every part's root.
            if other is None or module == "colibri":
                continue
            assert other == part or other in ALLOWED[part], f"{path.relative_to(ROOT)} imports {module}"


def test_what_decides_needs_neither_asyncio_nor_cffi() -> None:
    for path in (ROOT / "daemon").glob("*.py"):
        if path.name in ("scheduler.py", "pages.py"):
            modules = {module.split(".")[0] for module in imports("daemon", path)}
            assert not modules & {"asyncio", "cffi", "_cffi_backend", "uvloop"}, path.name


def test_the_protocol_does_no_input_or_output() -> None:
    for path in (ROOT / "protocol").glob("*.py"):
        assert not set(imports("protocol", path)) & {"socket", "select", "asyncio", "threading", "time"}, path.name


def test_the_client_needs_msgpack_alone() -> None:
    code = (
        "import sys; before = set(sys.modules); import colibri\n"
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = set(output.split())
    compiled = {name for name in loaded if name.startswith(("_cython", "cython"))}  # of msgpack itself
    assert loaded - sys.stdlib_module_names - compiled == {"colibri", "msgpack"}
    assert not loaded & {"asyncio", "multiprocessing", "importlib_metadata"}, "slow to import, and not needed"


def test_every_error_and_type_of_the_client_is_exported() -> None:
    import colibri
    from colibri.protocol import errors

    names = {
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert names <= set(colibri.__all__)
    assert sorted(colibri.__all__) == colibri.__all__
    assert all(hasattr(colibri, name) for name in colibri.__all__)
