"""`colibri cache`: the conversions that are kept, and removing them.

Owns: the list as text and as JSON. Refuses: names that are not in the list. What is kept and how long is for
colibri.cached to say.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from colibri.cli.report import bytes_text, counted, note, print_tables
from colibri.errors import ArgumentError


def show_cache(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="With --remove: files of the list.", show_default=False),
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove these files.")] = False,
    clear: Annotated[bool, typer.Option("--clear", help="Remove all files of the list.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the models that were converted on the way and are kept, or remove some.

    They lie in $COLIBRI_CACHE (else ~/.cache/colibri) and take $COLIBRI_CACHE_LIMIT at most (else 100GiB):
    what has not been used for longest goes first.
    """
    from colibri import cached

    models = cached.kept_models()
    if bool(names) != remove or (remove and clear):
        raise ArgumentError("give --remove with the names of files, or --clear alone")
    if remove or clear:
        known = {one.path.name: one for one in models}
        absent = [name for name in names or () if name not in known]
        if absent:
            raise ArgumentError(
                f"{absent[0]} is not kept in {cached.cache_directory()}: colibri cache lists what is"
            )
        gone = cached.remove([known[name] for name in names] if names else models)
        note(f"removed {counted(len(gone), 'file')}, {bytes_text(sum(one.bytes for one in gone))}")
        models = [one for one in models if one not in gone]
        if not as_json:
            return
    total, limit = sum(one.bytes for one in models), cached.cache_limit()
    if as_json:
        listed = [{"name": one.path.name, "bytes": one.bytes, "used": one.used.isoformat()} for one in models]
        data = {
            "directory": str(cached.cache_directory()),
            "bytes": total,
            "limit_bytes": limit,
            "models": listed,
        }
        print(json.dumps(data, indent=1, ensure_ascii=False))
        return
    if models:
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        table.add_column("model")
        table.add_column("size", justify="right")
        table.add_column("last used", justify="right")
        for one in models:
            table.add_row(one.path.name, bytes_text(one.bytes), f"{one.used:%Y-%m-%d %H:%M}")
        print_tables(table)
    note(f"{cached.cache_directory()}: {bytes_text(total)} of {bytes_text(limit)}")
