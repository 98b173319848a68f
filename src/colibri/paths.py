"""What the system says of paths that people give: an error names the path, as Python's own need not.

Owns: telling "nothing there" from "not to be seen". Refuses: opening anything.
"""

from __future__ import annotations

import os
from pathlib import Path

from colibri.errors import ModelIOError


def is_there(path: Path) -> bool:
    """Raises ModelIOError where the system does not say: no permission for a folder above it, too long."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise ModelIOError(f"Cannot read {path}: {error.strerror or error}.") from error
    except ValueError as error:  # a 0 in its name
        raise ModelIOError(f"Cannot read {str(path)!r}: {error}.") from error
    return True


def listed(directory: Path) -> list[str]:
    """Sorted names; none of a directory that is not there. Path.glob takes one that may not be read for
    empty."""
    try:
        return sorted(os.listdir(directory)) if is_there(directory) else []
    except ModelIOError:
        raise
    except OSError as error:
        raise ModelIOError(f"Cannot read {directory}: {error.strerror or error}.") from error
