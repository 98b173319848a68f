"""The `colibri` command. Results go to stdout, everything else to stderr.

Owns: the list of commands, and how a failure ends: one message on stderr and status 1; 2 for a wrong
argument; 130 after Ctrl-C; 143 and 129 after SIGTERM and SIGHUP, which clean up like Ctrl-C. Refuses: work of
its own; each command has a module, which imports the engine only when it runs."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from colibri.cli.batch import batch_requests
from colibri.cli.bench import bench_model
from colibri.cli.bits import propose_bits
from colibri.cli.cache import show_cache
from colibri.cli.convert import convert_checkpoint
from colibri.cli.evaluate import evaluate_model
from colibri.cli.inspect import inspect_model
from colibri.cli.microscope import report_trace
from colibri.cli.plan import plan_model
from colibri.cli.profile import profile_model
from colibri.cli.prune import prune_model
from colibri.cli.replay import replay_trace
from colibri.cli.report import for_command_line
from colibri.cli.run import run_model
from colibri.cli.serve import serve_models
from colibri.cli.trace import trace_model
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
app.command("serve")(serve_models)
app.command("batch")(batch_requests)
app.command("convert")(convert_checkpoint)
app.command("inspect")(inspect_model)
app.command("cache")(show_cache)
app.command("bench")(bench_model)
app.command("plan")(plan_model)
app.command("profile")(profile_model)
app.command("trace")(trace_model)
app.command("replay")(replay_trace)
app.command("report")(report_trace)
app.command("eval")(evaluate_model)
app.command("prune")(prune_model)
app.command("bits")(propose_bits)


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


@contextmanager
def _signals_end_politely() -> Iterator[None]:
    """SIGTERM and SIGHUP leave through every `with` and `finally`, as sys.exit does: temporary files and
    child processes end with the command. What is ignored (nohup) stays so."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, lambda caught, _frame: sys.exit(128 + caught))
    try:
        yield
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)


def _fail(error: ColibriError, words: Sequence[str]) -> None:
    print(f"colibri: {for_command_line(str(error), _options_of(words))}", file=sys.stderr)
    sys.exit(2 if isinstance(error, ArgumentError) else 1)


def _options_of(words: Sequence[str]) -> dict[str, str]:
    """The options of the command that runs, by the names of their parameters."""
    commands: dict[str, Any] = getattr(typer.main.get_command(app), "commands", {})
    command = next((commands[word] for word in words if word in commands), None)
    parameters = [] if command is None else command.params
    return {one.name: one.opts[0] for one in parameters if one.param_type_name == "option"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command; leaves with sys.exit."""
    _open_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that lacks a character shows a mark, not an error
            stream.reconfigure(errors="replace" if stream is sys.stdout else "backslashreplace")
    words = sys.argv[1:] if arguments is None else arguments
    try:
        with _signals_end_politely():
            app(arguments, prog_name="colibri")
    except ColibriError as error:
        _fail(error, words)
    except OSError as error:  # a file that no module of ours opened, such as a terminal that went away
        where = f"{error.filename}: " if error.filename else ""
        print(f"colibri: {where}{error.strerror or error}", file=sys.stderr)
        sys.exit(1)
    except (MemoryError, RuntimeError) as error:
        from colibri.memory import refusal

        told = refusal(error)
        if told is None:
            raise
        _fail(told, words)
    except KeyboardInterrupt:
        sys.exit(130)
