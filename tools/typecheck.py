"""Runs mypy over the package as it is installed.

The folders of the repository are mapped to packages by meson (client/ is `colibri` itself), and mypy cannot follow an
editable install. So the mapping is read from the meson.build files and laid out as a tree of links.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def installed_sources() -> dict[str, Path]:
    """Path inside site-packages → source file, for every `py.install_sources` of the project."""
    sources: dict[str, Path] = {}
    build_files = [path for depth in ("*", "*/*") for path in sorted(ROOT.glob(f"{depth}/meson.build"))]
    for build_file in build_files:
        for call in re.findall(r"py\.install_sources\((.*?)\n\)", build_file.read_text(), re.DOTALL):
            subdir = re.search(r"subdir: '([^']+)'", call)
            if subdir is None:
                raise SystemExit(f"{build_file}: install_sources without subdir")
            for name in re.findall(r"'([^']+)'", call[: subdir.start()]):
                sources[f"{subdir[1]}/{Path(name).name}"] = build_file.parent / name
    return sources


def main() -> int:
    with tempfile.TemporaryDirectory() as tree:
        for target, source in installed_sources().items():
            link = Path(tree, target)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(source)
        env = os.environ | {"MYPYPATH": tree}
        command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "-p", "colibri"]
        return subprocess.run(command, env=env, cwd=tree, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
