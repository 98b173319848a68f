"""The `colibri` command, and python -m colibri: the same.

Owns: Ctrl-C while the command is still being imported."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from colibri.cli import main as command
    except KeyboardInterrupt:
        sys.exit(130)
    command()


if __name__ == "__main__":
    main()
