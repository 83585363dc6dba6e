"""Writes the cffi extension's C source from the declarations of colibri.h.

python generate_binding.py colibri.h _binding.c
"""

import pathlib
import re
import sys

from cffi import FFI


def declarations(header: str) -> str:
    """The text between the cffi markers, without the words that only a C compiler understands."""
    body = header.split("/* cffi: begin */")[1].split("/* cffi: end */")[0]
    return re.sub(r"\bCOLIBRI_(API|RESTRICT)\b", "", body)


def main(header_path: str, output_path: str) -> None:
    ffi = FFI()
    ffi.cdef(declarations(pathlib.Path(header_path).read_text()))
    ffi.set_source("colibri.native._binding", '#include "colibri.h"', py_limited_api=True)
    ffi.emit_c_code(output_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
