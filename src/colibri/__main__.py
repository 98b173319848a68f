"""python -m colibri: the same as the `colibri` command."""

from __future__ import annotations

from colibri.cli import main

if __name__ == "__main__":
    main()
