"""The `colibri` command. Results go to stdout, everything else to stderr.

Owns: the list of commands, and how a failure ends: one message on stderr and status 1; 2 for a wrong
argument; 130 after Ctrl-C. Refuses: work of its own; each command has a module, which imports the engine only
when it runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from colibri.cli.bench import bench_model
from colibri.cli.convert import convert_checkpoint
from colibri.cli.inspect import inspect_model
from colibri.cli.profile import profile_model
from colibri.cli.run import run_model
from colibri.errors import ArgumentError, ColibriError

app = typer.Typer(
    name="colibri",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Mixture-of-Experts inference for machines with little memory.",
)
app.command("run")(run_model)
app.command("convert")(convert_checkpoint)
app.command("inspect")(inspect_model)
app.command("bench")(bench_model)
app.command("profile")(profile_model)


def _print_version(wanted: bool) -> None:
    if wanted:
        from colibri import _native

        print(f"colibri {_native.version()}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and end."),
    ] = False,
) -> None:
    pass


def _open_streams() -> None:
    """A daemon may start us with closed streams, which Python shows as None: input is empty then, notes are
    dropped, and results that have nowhere to go are an error."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - lives as long as the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        print("colibri: standard output is closed; connect it, or send it to /dev/null", file=sys.stderr)
        sys.exit(1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command; leaves with sys.exit."""
    _open_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that lacks a character shows a mark, not an error
            stream.reconfigure(errors="replace" if stream is sys.stdout else "backslashreplace")
    try:
        app(arguments, prog_name="colibri")
    except ColibriError as error:
        print(f"colibri: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ArgumentError) else 1)
    except OSError as error:  # a file that no module of ours opened, such as a terminal that went away
        print(f"colibri: {error.strerror or error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
