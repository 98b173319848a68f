"""Finds and loads libcolibri.

Owns: where it lies, and that it and its declarations (_ffi.py, made by the build) are of one version.
Refuses: calling it, but for its version (_native.py).
"""

from __future__ import annotations

import functools
import importlib
import importlib.resources
from typing import Any

from colibri.errors import ColibriError

LIBRARY = "libcolibri.so"
_BUILD = "Build it with `pip install .` (or `pip install -e .`) in the repository's root."


@functools.cache
def load() -> tuple[Any, Any]:
    """(ffi, library). Importing _ffi first lets an editable install rebuild itself."""
    try:
        module = importlib.import_module("colibri._ffi")
    except ImportError as error:
        raise ColibriError(
            f"colibri/_ffi.py, made when the package is built, cannot be imported: {error}. {_BUILD}"
        ) from error
    path = importlib.resources.files("colibri") / LIBRARY
    if not path.is_file():
        raise ColibriError(f"the engine library is missing: expected {path}. {_BUILD}")
    try:
        library = module.ffi.dlopen(str(path))
        found = module.ffi.string(library.colibri_version()).decode()
    except (OSError, AttributeError) as error:
        raise ColibriError(f"the engine library {path} cannot be loaded: {error}. {_BUILD}") from error
    if found != module.version:
        raise ColibriError(
            f"the engine library {path} is version {found}, but colibri/_ffi.py declares version "
            f"{module.version}: they come from different builds. {_BUILD}"
        )
    return module.ffi, library


def declared_version() -> str:
    """COLIBRI_VERSION of the header that the declarations were made from."""
    return str(importlib.import_module("colibri._ffi").version)


def config_schema() -> list[dict[str, Any]]:
    """[{"name", "type": "int" or "float", "per_layer", "min", "max", "default" (absent: required), "doc"}]"""
    from colibri import _ffi

    return list(_ffi.config_fields)
