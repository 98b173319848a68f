"""Writes src/colibri/_ffi.py: the C declarations of include/colibri.h as cffi's ready-made Python module.

Usage: python tools/generate_ffi.py include/colibri.h OUTPUT.py        (called by CMake while the package is
built)

Owns: reading the text between "[declarations]" and "[end of declarations]" and the version above it.
Refuses: compiling anything: the out-of-line ABI mode needs no C compiler, and parsing here, once, instead of
at every import keeps `import colibri` short. A test compares the result's layouts with the compiler's
(tests/test_native.py)."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from pathlib import Path

from cffi import FFI

BEGIN = re.compile(r"/\* \[declarations\].*?\*/", re.DOTALL)
END = re.compile(r"/\* \[end of declarations\] \*/")
VERSION = re.compile(r'^#define COLIBRI_VERSION "([^"\\]+)"$', re.MULTILINE)


def declarations(header: str) -> str:
    """The part of the header that cffi parses: plain declarations without a preprocessor line."""
    begin, end = BEGIN.search(header), END.search(header)
    if begin is None or end is None or end.start() < begin.end():
        raise SystemExit(
            "generate_ffi.py: expected the comments '[declarations] ...' and '[end of declarations]', in "
            "this order, in the header; found them not. Put them around the plain declarations of "
            "include/colibri.h."
        )
    return header[begin.end() : end.start()]


def version(header: str) -> str:
    """COLIBRI_VERSION of the header."""
    match = VERSION.search(header)
    if match is None:
        raise SystemExit(
            'generate_ffi.py: expected a line #define COLIBRI_VERSION "x.y.z" in the header, found none'
        )
    return match.group(1)


def generate(header: str, output: Path) -> None:
    """Writes the module under a temporary name and renames it, so that no import ever sees a half file."""
    ffi = FFI()
    ffi.set_source("colibri._ffi", None)
    ffi.cdef(declarations(header))
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f"{output.name}.{os.getpid()}.part")
    try:
        with contextlib.redirect_stdout(
            io.StringIO()
        ):  # cffi announces the temporary name, which helps nobody
            ffi.emit_python_code(str(partial))
        with partial.open("a", encoding="utf-8") as file:
            file.write("\n# COLIBRI_VERSION of the header that these declarations come from\n")
            file.write(f"version = {version(header)!r}\n")
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)


def main(arguments: list[str]) -> None:
    if len(arguments) != 2:
        raise SystemExit("usage: generate_ffi.py HEADER OUTPUT")
    header, output = Path(arguments[0]), Path(arguments[1])
    generate(header.read_text(encoding="utf-8"), output)


if __name__ == "__main__":
    main(sys.argv[1:])
