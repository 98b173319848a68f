"""Who takes part in a comparison: engines with their settings, the files they read, what they need.

Owns: the table of contestants, whether they are installed, model files in the cache, and who can be held in
memory together. Refuses: measuring (compare.py), loading an engine (worker.py).
"""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf_writer
import machine
from colibri.analysis import synthetic as colibri_files
from colibri.analysis.shapes import SHAPES
from colibri.cache import cache_directory
from colibri.entries import weight_types

SHARE_OF_MEMORY = 0.85  # that weights may take, mapped and copied, of all contestants held at once


@dataclass(frozen=True, eq=False)
class Entrant:
    """An engine with a setting."""

    name: str
    engine: str  # worker.py's name of it
    package: str  # that has to be there
    distribution: str  # whose version counts
    options: dict[str, Any] = field(default_factory=dict)
    private: dict[str, float] = field(default_factory=dict)  # by type: copies of its file in its own memory
    install: str = ""  # command that brings it
    default: bool = True

    def installed(self) -> bool:
        needed = (self.package,) + (("gguf",) if self.engine in GGUF_ENGINES else ())
        return all(importlib.util.find_spec(name) is not None for name in needed)


GGUF_ENGINES = ("llama_cpp", "ik_llama_cpp")
_LLAMA = ("llama_cpp", "llama_cpp", "llama_cpp_python")
_LLAMA_PIP = "pip install gguf && pip install --no-binary llama-cpp-python llama-cpp-python"
_IK = ("ik_llama_cpp", "ik_llama_cpp", "ik-llama-cpp-python")
_IK_PIP = "pip install gguf && pip install --no-binary ik-llama-cpp-python ik-llama-cpp-python"
_TRANSFORMERS = ("transformers", "transformers", "transformers")
_TRANSFORMERS_PIP = "pip install torch transformers"


def _llama(name: str, flash: bool, repack: bool, default: bool = True) -> Entrant:
    # Repacked matrices are a copy; q8 has no interleaved layout for x86 there, and stays mapped.
    options = {"flash": flash, "repack": repack}
    return Entrant(name, *_LLAMA, options, {"q4": float(repack)}, install=_LLAMA_PIP, default=default)


def _ik(name: str, flash: bool, repack: bool, default: bool = True) -> Entrant:
    options = {"flash": flash, "repack": repack}
    private = dict.fromkeys(("q4", "q8"), float(repack))
    return Entrant(name, *_IK, options, private, install=_IK_PIP, default=default)


def _transformers(name: str, dtype: str, experts: str, copies: float) -> Entrant:
    options = {"dtype": dtype, "experts": experts}
    private = dict.fromkeys(("q4", "q8"), copies)
    return Entrant(name, *_TRANSFORMERS, options, private, install=_TRANSFORMERS_PIP, default=False)


OURS = Entrant("colibri", "colibri", "colibri", "colibri-moe", install="pip install .")
RESIDENT = Entrant(
    "colibri-resident",  # the file copied into huge pages
    OURS.engine,
    OURS.package,
    OURS.distribution,
    {"residency": "resident"},
    dict.fromkeys(("q4", "q8"), 1.0),
    OURS.install,
)
ENTRANTS = (
    OURS,
    RESIDENT,
    _llama("llama.cpp", flash=True, repack=True),
    _ik("ik_llama.cpp", flash=True, repack=False),
    _ik("ik_llama.cpp-rtr", flash=True, repack=True),
    # of the settings that decode.py tries, the fastest at decode and the fastest at prefill
    _transformers("transformers-bf16", "bfloat16", "eager", 1.0),
    _transformers("transformers-f32", "float32", "grouped_mm", 2.0),
    # settings that lost a trial, to repeat it elsewhere
    _llama("llama.cpp-noflash", flash=False, repack=True, default=False),
    _llama("llama.cpp-norepack", flash=True, repack=False, default=False),
    _ik("ik_llama.cpp-noflash", flash=False, repack=False, default=False),
)


def model_file(entrant: Entrant, shape: str, type: str) -> Path:
    """The file or directory that a contestant reads, written into the cache the first time."""
    if entrant.engine == "colibri":
        return colibri_files.cached(shape, weight_types(type), notify=_say)
    if entrant.engine in GGUF_ENGINES:
        return _gguf(shape, type)
    return _checkpoint(shape)


def _gguf(name: str, type: str) -> Path:
    text = f"{SHAPES[name]}\0{Path(gguf_writer.__file__).read_text('utf-8')}"
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    path = cache_directory() / f"synthetic-{name}-{gguf_writer.QUANTISED[type]}-{key}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _say(f"Writing {name} ({gguf_writer.QUANTISED[type]}, random weights) once; kept as {path}")
        gguf_writer.write(name, SHAPES[name], type, path)
    return path


def _checkpoint(name: str) -> Path:
    import synthetic

    path = cache_directory() / f"synthetic-{name}-checkpoint"
    if not (path / "tokenizer.json").exists():  # written last
        _say(f"Writing {name} (bf16 checkpoint, random weights) once; kept as {path}")
        synthetic.write_checkpoint(SHAPES[name], path, 0)
    return path


def arguments(entrant: Entrant, file: Path, threads: int, prompt: int, decode: int) -> dict[str, Any]:
    """What worker.py needs to open it."""
    common = entrant.options | {"model": str(file), "threads": threads}
    if entrant.engine == "transformers":
        return common
    common["context"] = prompt + decode
    return common | ({"prompt": prompt} if entrant.engine in GGUF_ENGINES else {})


def file_bytes(path: Path) -> int:
    """Of a file, or of all files in a directory."""
    return sum(p.stat().st_size for p in path.iterdir()) if path.is_dir() else path.stat().st_size


def groups(
    files: list[tuple[Entrant, Path]], type: str, total: int | None
) -> tuple[list[list[Entrant]], list[Entrant]]:
    """All at once if their weights fit in memory; otherwise those that only map their file first, and then
    each that copies it, beside ours. Also those that do not fit even so."""
    limit = float("inf") if total is None else SHARE_OF_MEMORY * total
    if _bytes(files, type) <= limit:
        return [[entrant for entrant, _ in files]], []
    ours = [pair for pair in files if pair[0] is OURS]
    mapped = [pair for pair in files if not pair[0].private.get(type)]
    alone = [[*ours, pair] for pair in files if pair[0].private.get(type)]
    tried = ([mapped] if len(mapped) > len(ours) else []) + alone
    made = [[entrant for entrant, _ in group] for group in tried if _bytes(group, type) <= limit]
    held = {entrant.name for group in made for entrant in group}
    return made, [entrant for entrant, _ in files if entrant.name not in held]


def _bytes(files: list[tuple[Entrant, Path]], type: str) -> float:
    """Each mapped file once, and every copy. Whoever copies reads its file once: the system may drop it."""
    mapped = {path: file_bytes(path) for entrant, path in files if not entrant.private.get(type)}
    copied = sum(entrant.private.get(type, 0.0) * file_bytes(path) for entrant, path in files)
    return sum(mapped.values()) + copied


def version(entrant: Entrant) -> str:
    return machine.version(entrant.distribution)


def _say(text: str) -> None:
    print(text, flush=True)
