"""Who takes part in a comparison: engines with their settings, the files they read, what they need.

Owns: the table of contestants, whether they are installed, model files in the cache, and who can be held in
memory together. Refuses: measuring (compare.py), loading an engine (worker.py).

Transformers may live under another interpreter: the environment variable TRANSFORMERS_PYTHON names it.
Colibri and numpy have to be importable there too, as its worker is one of the scripts beside this file.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import gguf_writer
import machine
import torch_model
from colibri.analysis import synthetic as colibri_files
from colibri.analysis.shapes import SHAPES
from colibri.cached import cache_directory
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
    private: dict[str, float] = field(default_factory=dict)  # by type: copies of its source in its own memory
    install: str = ""  # command that brings it
    default: bool = True

    def installed(self) -> bool:
        if self.engine == TRANSFORMERS:
            return elsewhere(interpreter(self)) is not None
        needed = (self.package,) + (("gguf",) if self.engine in GGUF_ENGINES else ())
        return all(importlib.util.find_spec(name) is not None for name in needed)


class Source(NamedTuple):
    """Weights of an entrant."""

    path: Path | None  # None: drawn in the worker
    n_bytes: int


GGUF_ENGINES = ("llama_cpp", "ik_llama_cpp")
TRANSFORMERS = "transformers_shape"
_LLAMA = ("llama_cpp", "llama_cpp", "llama_cpp_python")
_LLAMA_PIP = "pip install gguf && pip install --no-binary llama-cpp-python llama-cpp-python"
_IK = ("ik_llama_cpp", "ik_llama_cpp", "ik-llama-cpp-python")
_IK_PIP = "pip install gguf && pip install --no-binary ik-llama-cpp-python ik-llama-cpp-python"
_TRANSFORMERS = (TRANSFORMERS, "transformers", "transformers")
_TRANSFORMERS_PIP = "pip install torch transformers, or TRANSFORMERS_PYTHON (benchmarks/README.md)"


def _llama(name: str, flash: bool, repack: bool, default: bool = True) -> Entrant:
    # Repacked matrices are a copy; q8 has no interleaved layout for x86 there, and stays mapped.
    options = {"flash": flash, "repack": repack}
    return Entrant(name, *_LLAMA, options, {"q4": float(repack)}, install=_LLAMA_PIP, default=default)


def _ik(name: str, flash: bool, repack: bool, default: bool = True) -> Entrant:
    options = {"flash": flash, "repack": repack}
    private = dict.fromkeys(("q4", "q8"), float(repack))
    return Entrant(name, *_IK, options, private, install=_IK_PIP, default=default)


def _transformers(name: str, dtype: str, prompt_experts: str, experts: str) -> Entrant:
    options = {"dtype": dtype, "prompt_experts": prompt_experts, "experts": experts}
    private = dict.fromkeys(("q4", "q8"), 1.0)
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
F16_KV = Entrant(
    "colibri-f16-kv",  # a KV cache in halves, as that of the peers
    OURS.engine,
    OURS.package,
    OURS.distribution,
    {"kv_type": "f16"},
    install=OURS.install,
)
ENTRANTS = (
    OURS,
    RESIDENT,
    F16_KV,
    _llama("llama.cpp", flash=True, repack=True),
    _ik("ik_llama.cpp", flash=True, repack=False),
    _ik("ik_llama.cpp-rtr", flash=True, repack=True),
    # of the ways to compute experts, the fastest at prefill and the fastest at decode
    _transformers("transformers-bf16", "bfloat16", "grouped_mm", "eager"),
    _transformers("transformers-f32", "float32", "grouped_mm", "eager"),
    # settings that lost a trial, to repeat it elsewhere
    _llama("llama.cpp-noflash", flash=False, repack=True, default=False),
    _llama("llama.cpp-norepack", flash=True, repack=False, default=False),
    _ik("ik_llama.cpp-noflash", flash=False, repack=False, default=False),
    _transformers("transformers-bf16-eager", "bfloat16", "eager", "eager"),
    _transformers("transformers-bf16-grouped", "bfloat16", "grouped_mm", "grouped_mm"),
    _transformers("transformers-bf16-batched", "bfloat16", "grouped_mm", "batched_mm"),
    _transformers("transformers-f32-eager", "float32", "eager", "eager"),
    _transformers("transformers-f32-grouped", "float32", "grouped_mm", "grouped_mm"),
    _transformers("transformers-f32-batched", "float32", "grouped_mm", "batched_mm"),
)


def interpreter(entrant: Entrant) -> str:
    """Python that runs its worker."""
    other = os.environ.get("TRANSFORMERS_PYTHON") if entrant.engine == TRANSFORMERS else None
    return other or sys.executable


_ASK = """import importlib.metadata, importlib.util, json
needed = all(importlib.util.find_spec(name) for name in ("torch", "transformers", "numpy", "colibri"))
print(json.dumps(importlib.metadata.version("transformers") if needed else None))"""


@functools.cache
def elsewhere(python: str) -> str | None:
    """The version of Transformers under an interpreter, None if it or what its worker needs is not there."""
    try:
        found = subprocess.run([python, "-c", _ASK], capture_output=True, text=True)
    except OSError as error:
        raise SystemExit(f"lineup.py: TRANSFORMERS_PYTHON: expected a Python, found {error}") from error
    version: str | None = json.loads(found.stdout) if found.returncode == 0 else None
    return version


def source(entrant: Entrant, shape: str, type: str) -> Source:
    """What a contestant's weights come from; a file is written into the cache the first time."""
    if entrant.engine == TRANSFORMERS:
        return Source(None, torch_model.weight_bytes(SHAPES[shape], entrant.options["dtype"]))
    if entrant.engine in GGUF_ENGINES:
        path = _gguf(shape, type)
    else:
        path = colibri_files.cached(shape, weight_types(type), notify=_say)
    return Source(path, path.stat().st_size)


def _gguf(name: str, type: str) -> Path:
    text = f"{SHAPES[name]}\0{Path(gguf_writer.__file__).read_text('utf-8')}"
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    path = cache_directory() / f"synthetic-{name}-{gguf_writer.QUANTISED[type]}-{key}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _say(f"Writing {name} ({gguf_writer.QUANTISED[type]}, random weights) once; kept as {path}")
        gguf_writer.write(name, SHAPES[name], type, path)
    return path


def arguments(
    entrant: Entrant, made: Source, shape: str, threads: int, prompt: int, decode: int
) -> dict[str, Any]:
    """What worker.py needs to open it."""
    common = entrant.options | {"threads": threads, "context": prompt + decode}
    if made.path is None:
        return common | {"shape": shape}
    common["model"] = str(made.path)
    return common | ({"prompt": prompt} if entrant.engine in GGUF_ENGINES else {})


Pair = tuple[Entrant, Source]


def groups(pairs: list[Pair], type: str, total: int | None) -> tuple[list[list[Entrant]], list[Pair]]:
    """Those that only map their file are the first group. Each that has its weights in memory of its own
    joins the first group that it fits into, or else a new one beside ours. Also those that do not fit even
    so."""
    limit = float("inf") if total is None else SHARE_OF_MEMORY * total
    ours = [pair for pair in pairs if pair[0] is OURS]
    mapped = [pair for pair in pairs if not pair[0].private.get(type)]
    made = [mapped] if bytes_held(mapped, type) <= limit else []
    for pair in (pair for pair in pairs if pair[0].private.get(type)):
        room = next((group for group in made if bytes_held([*group, pair], type) <= limit), None)
        if room is not None:
            room.append(pair)
        elif bytes_held([*ours, pair], type) <= limit:
            made.append([*ours, pair])
    held = {entrant.name for group in made for entrant, _ in group}
    left_out = [pair for pair in pairs if pair[0].name not in held]
    if made and made[0] == ours and len(made) > 1:  # ours runs beside the others
        del made[0]
    return [sorted((entrant for entrant, _ in group), key=ENTRANTS.index) for group in made], left_out


def bytes_held(pairs: list[Pair], type: str) -> float:
    """Each mapped file once, and every copy. Whoever copies reads its file once: the system may drop it."""
    mapped = {made.path: made.n_bytes for entrant, made in pairs if not entrant.private.get(type)}
    copied = sum(entrant.private.get(type, 0.0) * made.n_bytes for entrant, made in pairs)
    return sum(mapped.values()) + copied


def version(entrant: Entrant) -> str:
    if entrant.engine == TRANSFORMERS:
        return elsewhere(interpreter(entrant)) or "-"
    return machine.version(entrant.distribution)


def _say(text: str) -> None:
    print(text, flush=True)
