"""Writes src/colibri/_ffi.py: the C declarations of include/colibri.h as cffi's ready-made Python module, and
the field list of core/config.h.

Usage: python tools/generate_ffi.py include/colibri.h core/config.h OUTPUT.py        (CMake calls it)

Owns: reading the text between "[declarations]" and "[end of declarations]", the version above it, and the
lines of CONFIG_FIELDS.
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
FIELDS = re.compile(r"#define CONFIG_FIELDS\(.*?\n(?=\n)", re.DOTALL)
FIELD = re.compile(r'^ +(INT|LAYER|FLOAT)\((\w+), (\S+), (\S+), (\S+), "(.*)"\)', re.MULTILINE)


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


def config_fields(header: str) -> list[dict[str, object]]:
    """name, type, per_layer, min, max, default (absent: required) and doc of each config field, in order."""
    found = FIELDS.search(header)
    fields: list[dict[str, object]] = []
    for kind, name, least, most, default, doc in FIELD.findall(found[0]) if found else []:
        number = float if kind == "FLOAT" else int
        field: dict[str, object] = {"name": name, "type": number.__name__, "per_layer": kind == "LAYER"}
        field |= {"min": number(least), "max": number(most), "doc": doc}
        fields.append(field if default == "REQUIRED" else field | {"default": number(default)})
    if not found or len(fields) != len(found[0].splitlines()) - 1:
        raise SystemExit(
            "generate_ffi.py: expected #define CONFIG_FIELDS(...) with a line INT, LAYER or FLOAT(name, min, "
            f"max, default, doc) for each field and an empty line behind, found {len(fields)} such lines"
        )
    return fields


def generate(header: str, config: str, output: Path) -> None:
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
            file.write(f"# fields of core/config.h\nconfig_fields = {config_fields(config)!r}\n")
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)


def main(arguments: list[str]) -> None:
    if len(arguments) != 3:
        raise SystemExit("usage: generate_ffi.py include/colibri.h core/config.h OUTPUT")
    header, config = (Path(argument).read_text(encoding="utf-8") for argument in arguments[:2])
    generate(header, config, Path(arguments[2]))


if __name__ == "__main__":
    main(sys.argv[1:])
