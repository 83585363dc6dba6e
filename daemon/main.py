"""Entry point of colibrid: works in a plain installation too, where it says what is missing."""

from __future__ import annotations

import sys

EXIT_NOT_INSTALLED = 4


def main() -> None:
    """Runs the command."""
    try:
        from colibri.daemon.cli import colibrid
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package == "colibri":
            raise
        print(f"colibrid: {package} is not installed: pip install 'colibri-moe[daemon]'", file=sys.stderr)
        raise SystemExit(EXIT_NOT_INSTALLED) from None
    colibrid(prog_name="colibrid")


if __name__ == "__main__":
    main()
