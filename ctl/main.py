"""Entry point: works in a plain installation too, where it says what is missing."""

from __future__ import annotations

import sys

EXIT_NOT_INSTALLED = 4


def main() -> None:
    try:
        from .cli import cli

        cli(prog_name="colibrictl")
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in ("click", "rich"):
            raise
        print(f"colibrictl: {package} is not installed: pip install 'colibri-moe[daemon]'", file=sys.stderr)
        raise SystemExit(EXIT_NOT_INSTALLED) from None


if __name__ == "__main__":
    main()
