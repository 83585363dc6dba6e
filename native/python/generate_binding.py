"""Writes a cffi extension's C source from the declarations of a header.

python generate_binding.py colibri.native._binding colibri.h _binding.c
"""

import pathlib
import re
import sys

from cffi import FFI


def declarations(header: str) -> str:
    """The text between the cffi markers, without the words that only a C compiler understands."""
    body = header.split("/* cffi: begin */")[1].split("/* cffi: end */")[0]
    return re.sub(r"\bCOLIBRI_(API|RESTRICT)\b", "", body)


def main(module: str, header_path: str, output_path: str) -> None:
    ffi = FFI()
    header = pathlib.Path(header_path)
    ffi.cdef(declarations(header.read_text()))
    ffi.set_source(module, f'#include "{header.name}"', py_limited_api=True)
    ffi.emit_c_code(output_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
