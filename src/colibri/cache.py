"""What a model argument stands for: a `.colibri` file, a checkpoint directory converted once, or the
bundled demo.

Owns: the cache of converted models ($COLIBRI_CACHE, else ~/.cache/colibri) and the names of its files.
Refuses: everything else, saying what was looked for. Converting is convert's; nothing is ever downloaded.

Processes that convert at once do so one after the other, so that the cache never takes more than its limit;
who waited for the same file uses it. The rename into place is atomic.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

from colibri.cached import alone, cache_directory, cache_limit, make_room, mark_used
from colibri.entries import weight_types
from colibri.errors import ArgumentError, ConversionError, ModelIOError
from colibri.format import Progress, is_container, read_container
from colibri.paths import is_there

DEMO = "demo"
_DEMO_FILE = "demo.colibri"
Room = Callable[[int], None]  # makes room for a file of so many bytes


def resolve(
    model: str | os.PathLike[str],
    type: str | None = None,
    progress: Progress | None = None,
    notify: Callable[[str], object] | None = None,
    *,
    experts: str | None = None,
    dense: str | None = None,
    output: str | None = None,
    requantize: bool = False,
) -> Path:
    """The `.colibri` file of `model`: "demo", such a file, or a Hugging Face directory or GGUF file, which is
    converted the first time, to types and with requantize as convert() takes them. `notify` gets a sentence
    when a conversion starts, and its notes; `progress` follows it.
    """
    name = os.fspath(model)
    if not name:
        raise ConversionError(
            f'MODEL is empty. Give a .colibri file, a Hugging Face directory, a GGUF file, or "{DEMO}".'
        )
    path = Path(name)
    converts = name != DEMO and is_source(path)
    given = {"type": type, "experts": experts, "dense": dense, "output": output}
    for key, value in {**given, "requantize": requantize or None}.items():
        if value is not None and not converts:
            raise ArgumentError(
                f"{key}={value!r} has no effect: {name} is neither a Hugging Face directory nor a GGUF file, "
                "so nothing is converted"
            )
    if name == DEMO:
        return _demo()
    if is_container(path):
        return path
    if converts:
        from colibri.convert.source import open_headers  # heavy: only where something may be converted
        from colibri.convert.types import chosen_types

        weight_types(type, experts=experts, dense=dense, output=output)  # wrong ones are told first
        headers = open_headers(path)
        types = str(chosen_types(headers, type, experts, dense, output))
        types += ", requantized" if requantize else ""
        told = notify or (lambda text: None)

        def converting(room: Room) -> None:
            from colibri.convert import convert

            # As given, not as in types: convert() refuses what has no effect.
            report = convert(
                path,
                target,
                type,
                experts=experts,
                dense=dense,
                output=output,
                requantize=requantize,
                progress=progress,
                planned=room,
            )
            for remark in [*report.notes, *report.error_notes()]:
                told(f"note: {remark}")

        target = cache_directory() / cached_name(headers.path, headers.files, types)
        return made_once(target, f"Converting {path} once ({types})", converting, told)
    if not is_there(path):
        raise ConversionError(
            f"No model {name!r}: neither a .colibri file nor a Hugging Face directory nor a GGUF file has "
            "this path. "
            f'The bundled model is called "{DEMO}".'
        )
    if not path.is_file():
        raise ModelIOError(
            f"{path} is not a regular file but a pipe or a device. Give a file or a directory."
        )
    if not os.access(path, os.R_OK):
        raise ModelIOError(f"Cannot read {path}: no permission.")
    raise ConversionError(
        f"{path} is not a .colibri file. Give a .colibri file, a Hugging Face directory (config.json and "
        f'.safetensors), a GGUF file, or "{DEMO}".'
    )


def is_source(path: Path) -> bool:
    """Whether a conversion can start from it, as far as its name and first bytes tell."""
    if is_container(path):
        return False
    from colibri.convert.source import gguf_path  # heavy: only where something has to be converted

    return is_there(path) and (path.is_dir() or (path.is_file() and gguf_path(path) is not None))


def _demo() -> Path:
    path = Path(str(resources.files("colibri").joinpath(_DEMO_FILE)))
    if not path.is_file():
        raise ModelIOError(
            f"The bundled model {path} is missing from this installation. Install colibri again, or give "
            "the path of another model."
        )
    return path


def made_once(
    target: Path, what: str, make: Callable[[Room], object], notify: Callable[[str], object]
) -> Path:
    """`target`, a file of the cache: the one that is there, or what `make` writes, which calls its argument
    with the size before it does. `what` is said then."""
    if _is_sound(target):
        return target
    with _making(target.parent, notify) as room:
        if _is_sound(target):  # another process made it meanwhile
            return target
        if target.exists():
            notify(f"The cached {target} is damaged; making it again.")
            target.unlink()
        notify(f"{what}, to be kept as {target}")
        make(room)
    return target


def _is_sound(target: Path) -> bool:
    """Headers are cheap to check; a damaged one (a full disk, a failing one) is simply made anew."""
    if not is_container(target):
        return False
    try:
        read_container(target)
    except Exception:
        return False
    mark_used(target)
    return True


@contextmanager
def _making(directory: Path, notify: Callable[[str], object]) -> Iterator[Room]:
    """The cache exists while something is written into it, by nobody else; what fails there says how to
    choose another. Gives a function that makes room for so many bytes."""

    def room(size: int) -> None:
        for model in make_room(size):
            used = f"{model.used:%Y-%m-%d}"
            notify(f"removed {model.path}, unused since {used}: the cache was full (colibri cache)")

    cache_limit()  # a wrong one is told before the work
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with alone(directory, lambda: notify(f"Waiting: another process writes into {directory}.")):
            yield room
    except OSError as error:
        if isinstance(error, ModelIOError) and str(directory) not in str(error):
            raise  # the source's fault
        reason = str(error) if isinstance(error, ModelIOError) else f"{error.strerror or error}."
        raise ModelIOError(
            f"Cannot write into the cache {directory}: {reason} Set COLIBRI_CACHE to another directory."
        ) from error


def cached_name(source: Path, weights: Sequence[Path], types: str) -> str:
    """Name, types and a key over everything that decides the bytes: the fingerprint, the files' times, the
    converter.

    Times are part of the key because the fingerprint reads only both ends of a weight file. A file is called
    what it was given as: downloads are often links to files named after their content.
    """
    from colibri.convert import CONVERTER_VERSION
    from colibri.convert.embedded import fingerprint

    digest = hashlib.sha256(f"{CONVERTER_VERSION}\0{types}\0{fingerprint(source, weights)}".encode())
    for file in weights:
        digest.update(f"\0{file.name}\0{file.stat().st_mtime_ns}".encode())
    shown = source.resolve() if source.is_dir() else source
    name = re.sub(r"[^\w.-]+", "_", shown.name)[:80].lstrip("-.")
    return f"{name}-{types.replace(', ', '-').replace(' ', '_')}-{digest.hexdigest()[:16]}.colibri"
