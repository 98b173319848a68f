"""Which files make up a Hugging Face directory, and its JSON files.

Owns: shards and their index. Refuses: pickle files, missing shards, paths that leave the directory, stale or
ambiguous files. What is in a shard is for checkpoint.py to say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from colibri.errors import ConversionError, ModelIOError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_LARGEST_JSON = 256 << 20


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the checkpoint."""
    try:
        if path.stat().st_size > _LARGEST_JSON:
            raise ConversionError(f"{path} is larger than {_LARGEST_JSON >> 20} MiB; that is no {path.name}.")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelIOError(f"Cannot read {path}: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise ConversionError(f"{path} is not valid JSON ({error}). Download it again.") from error
    if not isinstance(value, dict):
        raise ConversionError(
            f"{path} holds a {type(value).__name__}, expected an object. Download it again."
        )
    return value


def refuse_files(source: Path) -> None:
    if source.is_dir():
        return
    if not source.exists():
        raise ConversionError(
            f"{source} does not exist. Give the directory of a Hugging Face checkpoint, or a GGUF file."
        )
    if source.suffix in PICKLES:
        raise ConversionError(_pickle_text(source.parent, [source.name]))
    hint = "give its directory" if source.suffix == ".safetensors" else "only such directories are supported"
    raise ConversionError(f"{source} is a file; expected a Hugging Face directory with config.json: {hint}.")


def _pickle_text(directory: Path, names: list[str]) -> str:
    return (
        f"{directory} has its weights in pickle files ({', '.join(names[:3])}), which can run code when "
        "they are loaded, so they are never opened. If you trust them, rewrite them once with "
        "Transformers: AutoModelForCausalLM.from_pretrained(DIRECTORY).save_pretrained(NEW) writes "
        "safetensors."
    )


def weight_files(source: Path) -> list[Path]:
    """The safetensors files that make up the model, all of them present."""
    index, single = source / INDEX, source / SINGLE
    present = sorted(file.name for file in source.iterdir() if file.name.endswith(".safetensors"))
    if index.is_file():
        names = _index_files(index)
        if single.is_file() and SINGLE not in names:
            raise ConversionError(
                f"{source} has both {SINGLE} and {INDEX}, which names other files. Remove the one that is "
                "stale."
            )
        return [source / name for name in names]
    if single.is_file():
        return [single]
    numbered = [match for name in present if (match := _SHARD.fullmatch(name))]
    if numbered:
        stem, total = numbered[0][1], int(numbered[0][3])
        wanted = [f"{stem}-{i:05d}-of-{total:05d}.safetensors" for i in range(1, min(total, 99999) + 1)]
        _refuse_missing(source, wanted, {})
        return [source / name for name in wanted]
    if len(present) == 1:
        return [source / present[0]]
    if present:
        raise ConversionError(
            f"{source} has several .safetensors files ({', '.join(present[:5])}) but no {INDEX} that says "
            "which of them make up the model. Download the index too."
        )
    pickles = sorted(file.name for file in source.iterdir() if file.suffix in PICKLES)
    if pickles:
        raise ConversionError(_pickle_text(source, pickles))
    raise ConversionError(f"{source} has no .safetensors files and no .gguf file. Is the download complete?")


def unused_weight_files(source: Path) -> list[str]:
    """A note if there are safetensors files beside those that make up the model."""
    used = {file.name for file in weight_files(source)}
    others = sorted(file.name for file in source.glob("*.safetensors") if file.name not in used)
    return [f"not part of the model and left out: {', '.join(others[:5])}"] if others else []


def _index_files(index: Path) -> list[str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ConversionError(f"{index} has no weight_map from tensor names to files. Download it again.")
    names = sorted(set(weight_map.values()))
    for name in names:
        parts = PurePosixPath(name)
        if parts.is_absolute() or ".." in parts.parts or not name.endswith(".safetensors"):
            raise ConversionError(
                f"{index} names {name!r}, which is not a .safetensors file of its directory."
            )
    _refuse_missing(index.parent, names, weight_map)
    return names


def _refuse_missing(source: Path, names: list[str], weight_map: Mapping[str, str]) -> None:
    missing = [name for name in names if not (source / name).is_file()]
    if not missing:
        return
    example = next((tensor for tensor, file in weight_map.items() if file == missing[0]), None)
    holds = f" (it holds {example!r} among others)" if example else ""
    more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
    raise ConversionError(
        f"{source} lacks {len(missing)} of its {len(names)} weight files: "
        f"{', '.join(missing[:5])}{more}{holds}. Download them into the same directory and convert again."
    )
