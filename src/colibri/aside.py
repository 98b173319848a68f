"""Small files that are there whole or not at all: written beside their place, then renamed.

Owns: that, and the check that it can be done. Refuses: deciding what may be replaced.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from colibri.errors import ModelIOError


def check_place(file: Path) -> Path:
    """Where a link leads. Raises ModelIOError unless a file can be written there."""
    real = Path(os.path.realpath(file))
    if not real.parent.is_dir() or not os.access(real.parent, os.W_OK):
        raise ModelIOError(f"Cannot write {file}: {real.parent} is no directory that can be written to.")
    if real.exists() and not real.is_file():
        raise ModelIOError(f"Cannot write {file}: it is there and not a regular file.")
    return real


def write_whole(file: Path, text: str | bytes) -> None:
    """Replaces what was there."""
    real = check_place(file)
    aside = real.with_name(f".colibri-{secrets.token_hex(8)}{real.suffix}")
    try:
        try:
            aside.write_bytes(text.encode() if isinstance(text, str) else text)
            os.replace(aside, real)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        raise ModelIOError(f"Cannot write {file}: {error.strerror or error}.") from error
