#!/usr/bin/env python3
"""Compares the names that the two libraries define with those that colibri.h declares.

check_exports.py NM HEADER SHARED STATIC
"""

import re
import subprocess
import sys
from pathlib import Path


def defined(nm: str, *options_and_file: str) -> set[str]:
    command = [nm, "--defined-only", *options_and_file]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    # A line of a symbol is: value, type, name.
    return {fields[2] for line in listing.splitlines() if len(fields := line.split()) == 3}


def main(nm: str, header: str, shared: str, static: str) -> int:
    text = Path(header).read_text(encoding="utf-8")
    declared = set(re.findall(r"^COLIBRI_API [^(]*?(colibri_\w+)\(", text, re.MULTILINE))
    exported = defined(nm, "--dynamic", shared)
    foreign = {name for name in defined(nm, "--extern-only", static) if not name.startswith("colibri_")}
    for what, names in (
        ("declared in colibri.h and not exported", declared - exported),
        ("exported and not declared in colibri.h", exported - declared),
        ("without the prefix colibri_ in the static library", foreign),
    ):
        if names:
            print(f"{what}: {', '.join(sorted(names))}")
    return int(not declared or exported != declared or bool(foreign))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
