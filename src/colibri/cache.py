"""What a model argument stands for: a `.colibri` file, a checkpoint directory converted once, or the
bundled demo.

Owns: the cache of converted models ($COLIBRI_CACHE, else ~/.cache/colibri) and the names of its files.
Refuses: everything else, saying what was looked for. Converting is convert's; nothing is ever downloaded.

Processes may convert the same checkpoint at once: each writes its own temporary file, and the rename is
atomic.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

from colibri.cached import cache_directory, cache_limit, make_room, mark_used
from colibri.entries import weight_types
from colibri.errors import ArgumentError, ConversionError, ModelIOError
from colibri.format import Progress, is_container, read_container

DEMO = "demo"
_DEMO_FILE = "demo.colibri"


def resolve(
    model: str | os.PathLike[str],
    type: str | None = None,
    progress: Progress | None = None,
    notify: Callable[[str], object] | None = None,
    *,
    experts: str | None = None,
    dense: str | None = None,
    output: str | None = None,
) -> Path:
    """The `.colibri` file of `model`: "demo", such a file, or a Hugging Face directory or GGUF file, which is
    converted the first time, to types as convert() takes them. `notify` gets a sentence when a conversion
    starts, and its notes; `progress` follows it.
    """
    name = os.fspath(model)
    if not name:
        raise ConversionError(
            f'MODEL is empty. Give a .colibri file, a Hugging Face directory, a GGUF file, or "{DEMO}".'
        )
    path = Path(name)
    converts = name != DEMO and is_source(path)
    for key, value in (("type", type), ("experts", experts), ("dense", dense), ("output", output)):
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
        told = notify or (lambda text: None)

        def converting(target: Path) -> Path:
            from colibri.convert import convert

            # As given, not as in types: convert() refuses what has no effect.
            report = convert(
                path, target, type, experts=experts, dense=dense, output=output, progress=progress
            )
            for remark in [*report.notes, *report.error_notes()]:
                told(f"note: {remark}")
            return report.path

        target = cache_directory() / cached_name(headers.path, headers.files, types)
        return _converted(path, types, target, converting, told)
    if not path.exists():
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

    return path.is_dir() or (path.is_file() and gguf_path(path) is not None)


def _demo() -> Path:
    path = Path(str(resources.files("colibri").joinpath(_DEMO_FILE)))
    if not path.is_file():
        raise ModelIOError(
            f"The bundled model {path} is missing from this installation. Install colibri again, or give "
            "the path of another model."
        )
    return path


def _converted(
    source: Path, types: str, target: Path, convert: Callable[[Path], Path], notify: Callable[[str], object]
) -> Path:
    if is_container(target):
        # Headers are cheap to check; a damaged one (a full disk, a failing one) is simply made anew.
        try:
            read_container(target)
            mark_used(target)
            return target
        except Exception:
            notify(f"The cached {target} is damaged; converting again.")
    cache_limit()  # a wrong one is told before the work
    with making(target.parent):
        notify(f"Converting {source} once ({types}), to be kept as {target}")
        made = convert(target)
    for model in make_room(made):
        notify(
            f"removed {model.path}, unused since {model.used:%Y-%m-%d}: the cache was full (colibri cache)"
        )
    return made


@contextmanager
def making(directory: Path) -> Iterator[None]:
    """The cache exists while something is written into it; what fails there says how to choose another."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        yield
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
