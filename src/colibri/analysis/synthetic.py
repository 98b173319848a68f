"""Writes random models of named shapes straight as `.colibri` files into the cache, once for each choice.

Owns: value ranges, the cached file's name, and how weights are made quickly: for each kind of matrix a pool
of packed panels of Gaussian weights, from which every matrix draws its panels. Panels are therefore valid in
any weight type and have its real rounding, and a file costs little more than writing it. Rows repeat over
the model; the work does not depend on that.
Refuses: meaning. Values keep activations and logits in the range of a trained model, the text is noise.

The same shape, types and seed give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri.analysis.shapes import END_OF_TEXT, SHAPES, Shape, config_json, tokenizer_json
from colibri.cache import made_once
from colibri.cached import cache_directory
from colibri.convert.keys import Keys
from colibri.convert.registry import family_of
from colibri.entries import Entry, WeightTypes
from colibri.errors import ArgumentError
from colibri.format import Progress, Writer
from colibri.quantize import PANEL_ROWS, pack, panel_bytes

WRITER_VERSION = "1"  # raise it when the same choice gives other bytes
_POOL_PANELS = 128
_BLOCK_BYTES = 4 << 20  # written at a time
_Panels = npt.NDArray[np.uint8]  # [panels, panel_bytes]
_Pool = Callable[[str, int, str], _Panels]  # (part of the model, cols, weight type)


def cached(
    name: str,
    types: WeightTypes,
    *,
    seed: int = 0,
    progress: Progress | None = None,
    notify: Callable[[str], object] | None = None,
) -> Path:
    """The file of a shape in the cache, written the first time. Removing it is safe."""
    shape = shape_of(name)
    text = f"{WRITER_VERSION}\0{shape}\0{types}\0{seed}"
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    directory = cache_directory()
    chosen = str(types).replace(", ", "-").replace(" ", "_")
    target = directory / f"synthetic-{name}-{chosen}-{key}.colibri"

    def writing(room: Callable[[int], None]) -> None:
        write(name, target, types, seed=seed, progress=progress, planned=room)

    told = notify or (lambda text: None)
    return made_once(target, f"Writing {name} ({types}, random weights) once", writing, told)


def write(
    name: str,
    out: Path,
    types: WeightTypes,
    *,
    shape: Shape | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    planned: Callable[[int], object] | None = None,
) -> int:
    """Writes one model; bytes of the file. shape: None is the one that has this name. progress(done bytes,
    total bytes, entry name); planned(bytes) before anything is written."""
    shape = shape_of(name) if shape is None else shape
    keys = Keys(config_json(shape), Path(name) / "config.json")
    decoder = family_of(keys).read_config(keys)
    config = decoder.config | {"n_vocab_used": shape.n_vocab}
    pool = _pools(shape, seed)
    writer = Writer(out, config, types, _blobs(name, shape, types, seed))
    if planned is not None:
        planned(writer.bytes)
    with writer:
        total, done = sum(entry.bytes for entry in writer.tensors), 0
        for entry in writer.tensors:
            if entry.name == "rope_inv_freq":
                writer.write(entry.name, [decoder.inv_freq.astype("<f4").tobytes()])
            else:
                writer.write(entry.name, _data(entry, pool, seed))
            done += entry.bytes
            if progress is not None:
                progress(done, total, entry.name)
    return writer.bytes


def shape_of(name: str) -> Shape:
    """The shape of that name."""
    if name not in SHAPES:
        raise ArgumentError(f"synthetic: expected one of {', '.join(SHAPES)}, found {name!r}")
    return SHAPES[name]


def _generator(seed: int, *words: str) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32("\0".join(words).encode())])


def _gain(part: str, n_layers: int, cols: int) -> float:
    """Matrices keep the size of what they read; those that add to the residual stream are smaller, so that it
    keeps its size over the layers; the output head is larger, so that logits (deviation 3) single out few
    tokens, as trained models' do."""
    if part in ("attn_out", "down"):
        return 1 / math.sqrt(2 * n_layers)
    return 3.0 if part == "output" else math.sqrt(cols) if part == "embedding" else 1.0


def _pools(shape: Shape, seed: int) -> _Pool:
    """A function that makes the pool of a kind of matrix once."""
    made: dict[tuple[str, int, str], _Panels] = {}

    def pool(part: str, cols: int, type: str) -> _Panels:
        key = (part, cols, type)
        if key not in made:
            noise = _generator(seed, "pool", part, str(cols)).standard_normal(
                (_POOL_PANELS * PANEL_ROWS, cols), dtype=np.float32
            )
            noise *= np.float32(_gain(part, shape.n_layers, cols) / cols**0.5)
            made[key] = np.frombuffer(pack(noise, type), np.uint8).reshape(-1, panel_bytes(cols, type))
        return made[key]

    return pool


def _data(entry: Entry, pool: _Pool, seed: int) -> Iterator[bytes | memoryview]:
    """The bytes of an entry, block after block."""
    random = _generator(seed, entry.name)
    if entry.kind == "vector":
        noise = random.standard_normal(entry.cols, dtype=np.float32)
        yield (1 + np.float32(0.1) * noise).astype("<f4").tobytes()
        return
    part = entry.name.rsplit(".", 1)[-1]
    parts = ("gate", "up", "down") if entry.kind == "expert" else (part,)
    for part, (rows, cols, type) in zip(parts, entry.matrices, strict=True):
        if part == "router":  # small, and what decides the routing: every row its own values
            noise = random.standard_normal((rows, cols), dtype=np.float32) / np.float32(cols**0.5)
            yield pack(noise, type)
            continue
        panels = pool(part, cols, type)
        chosen = random.integers(0, len(panels), rows // PANEL_ROWS)
        step = max(1, _BLOCK_BYTES // panels.shape[1])
        for first in range(0, len(chosen), step):
            yield panels[chosen[first : first + step]].reshape(-1).data


def _blobs(name: str, shape: Shape, types: WeightTypes, seed: int) -> dict[str, bytes]:
    generation: dict[str, Any] = {
        "bos_id": None,
        "eos_ids": [0],
        "add_bos": False,
        "defaults": {},
        "special_tokens": {"eos_token": END_OF_TEXT},
    }
    source = {
        "name": f"synthetic {name}",
        "sha256": hashlib.sha256(f"{WRITER_VERSION}\0{shape}\0{seed}".encode()).hexdigest(),
        "converter": f"synthetic {WRITER_VERSION}",
        "model_type": shape.family,
        "type": str(types),
    }
    return {
        "tokenizer.json": tokenizer_json(shape.n_vocab).encode(),
        "generation.json": json.dumps(generation).encode(),
        "source.json": json.dumps(source).encode(),
    }
