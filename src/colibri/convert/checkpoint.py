"""Opens a Hugging Face directory: which files make it up, which tensors they hold, and their rows on demand.

Owns: shards and their index, tensor names without wrappers ("model.", "language_model."), reading by rows.
Refuses: pickle files, missing or damaged shards, paths that leave the directory, tensors that are not
f32, f16 or bf16. What a name means is the families'.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from colibri.errors import ConversionError, ModelIOError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_DTYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_WRAPPERS = ("model.", "language_model.")
_LARGEST_JSON = 256 << 20
_LARGEST_MAPPED = 128 << 20  # bytes read from a shard before it is mapped anew


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor of the checkpoint; `name` is the one in its file, `dtype` the one of safetensors (BF16, I32
    ...)."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def item_bytes(self) -> int:
        """Only for the dtypes that are read."""
        return 4 if self.dtype == "F32" else 2


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    config: dict[str, Any]
    tensors: dict[str, SourceTensor]  # by name without wrappers
    files: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class View:
    """A matrix [rows, cols] inside a tensor: the whole of it, or rows start ... of one expert's slice, or
    rows in another order, or columns col ... of a part that lies transposed."""

    tensor: SourceTensor
    rows: int
    cols: int
    expert: int | None = None
    start: int = 0
    transposed: bool = False  # the slice lies as [cols, rows]
    col: int = 0  # with transposed: the source row of column 0
    order: Sequence[int] = ()  # source row of each row, or place of each number, if they are not neighbours
    flat: bool = False  # a vector: the numbers of a tensor of any shape
    scales: SourceTensor | None = None  # of an mxfp4 matrix, whose rows are [groups, 16] bytes
    affine: tuple[float, float] = (0.0, 1.0)  # a vector becomes (numbers + first) x second, rounded once

    def bytes(self, rows: int) -> int:
        """Of so many rows in the file."""
        if self.scales is not None:
            return rows * self.cols * 17 // 32
        return rows * self.cols * self.tensor.item_bytes


ReadRows = Callable[[View, int, int], npt.NDArray[Any]]


def open_checkpoint(source: Path) -> Checkpoint:
    """Reads config.json and every shard's header; no tensor data."""
    _refuse_files(source)
    config_path = source / "config.json"
    if not config_path.is_file():
        raise ConversionError(
            f"{source} has no config.json, so it is not a Hugging Face checkpoint. Give the directory that "
            "holds config.json and the .safetensors files."
        )
    config = read_json(config_path)
    files = weight_files(source)
    tensors: dict[str, SourceTensor] = {}
    for file in files:
        for tensor in _read_header(file):
            short = _unwrapped(tensor.name)
            other = tensors.setdefault(short, tensor)
            if other is not tensor:
                raise ConversionError(
                    f"{source}: {other.name!r} in {other.file.name} and {tensor.name!r} in {file.name} are "
                    "the same tensor. Remove the file that does not belong to this checkpoint."
                )
    return Checkpoint(source, config, tensors, tuple(files))


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


@contextmanager
def reading() -> Iterator[ReadRows]:
    """A function that reads rows [first, last) of a view, in the dtype of the file; `widen` makes them
    float32. Rows of mxfp4 come as [rows, groups, 17] bytes, the scale last.

    Nothing but those rows is copied. Shards are mapped, one at a time and never for long: their pages
    belong to the system, but they would count as this process's memory.
    """
    import ml_dtypes  # noqa: F401  makes numpy know the name "bfloat16", which safetensors asks for

    current: tuple[Path, Any] | None = None
    mapped_bytes = 0

    def handle_of(file: Path, n_bytes: int) -> Any:
        nonlocal current, mapped_bytes
        if current is None or current[0] != file or mapped_bytes > _LARGEST_MAPPED:
            close()
            current, mapped_bytes = (file, _open(file).__enter__()), 0
        mapped_bytes += n_bytes
        return current[1]

    def close() -> None:
        nonlocal current
        if current is not None:
            current[1].__exit__(None, None, None)
            current = None

    def read(view: View, first: int, last: int) -> npt.NDArray[Any]:
        tensor = view.tensor
        picked = np.array(view.order[first:last], dtype=np.intp)
        rows = slice(view.start + first, view.start + last)
        if view.order and not view.flat:
            rows = slice(int(picked.min()), int(picked.max()) + 1)
        columns = slice(view.col, view.col + view.cols)
        index: Any = (columns, rows) if view.transposed else (rows,)
        if view.expert is not None:
            index = (view.expert, *index)
        handle = handle_of(tensor.file, view.bytes(last - first))
        try:
            if view.flat:
                numbers: npt.NDArray[Any] = handle.get_tensor(tensor.name).reshape(1, -1)
                return numbers[:, np.array(view.order)] if view.order else numbers
            data = handle.get_slice(tensor.name)[index]
            if view.scales is not None:
                scales = handle_of(view.scales.file, 0).get_slice(view.scales.name)[index]
                data = np.concatenate([data, scales[..., None]], axis=2)
        except (SafetensorError, OSError) as error:
            raise ConversionError(f"{tensor.name} in {tensor.file}: {error}") from error
        rows_first: npt.NDArray[Any] = data.T if view.transposed else data
        if view.order:
            rows_first = rows_first[picked - rows.start]
        return rows_first if view.scales is not None else rows_first.reshape(last - first, view.cols)

    try:
        yield read
    finally:
        close()


def widen(data: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """float32 from f32, f16 or bf16, exactly."""
    if data.dtype.name == "bfloat16":  # the upper half of a float32; faster than ml_dtypes' own cast
        bits = np.ascontiguousarray(data).view(np.uint16).astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    return data.astype(np.float32, copy=False)


def refuse_dtype(view: View) -> None:
    tensor = view.tensor
    if view.scales is not None:
        tensor = tensor if tensor.dtype != "U8" else view.scales
        if tensor.dtype != "U8":
            raise ConversionError(f"{tensor.name} in {tensor.file.name} is {tensor.dtype}; expected U8.")
    elif tensor.dtype not in _DTYPES:
        raise ConversionError(
            f"{tensor.name} in {tensor.file.name} is stored as {tensor.dtype}; expected F32, F16 or BF16. "
            "Quantised and integer checkpoints are not supported: convert the original one."
        )


def _refuse_files(source: Path) -> None:
    if source.is_dir():
        return
    if not source.exists():
        raise ConversionError(f"{source} does not exist. Give the directory of a Hugging Face checkpoint.")
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
    raise ConversionError(f"{source} has no .safetensors files. Is the download complete?")


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


def _open(file: Path) -> Any:
    try:
        return safe_open(str(file.absolute()), framework="numpy")
    except FileNotFoundError as error:
        raise ConversionError(f"{file} disappeared while it was being converted.") from error
    except (SafetensorError, OSError) as error:
        reason = str(error).strip().rstrip(".") or type(error).__name__
        raise ConversionError(
            f"{file} is not a valid safetensors file of {file.stat().st_size:,} bytes: {reason}. It looks "
            "damaged or incomplete; download it again."
        ) from error


def _read_header(file: Path) -> Iterator[SourceTensor]:
    with _open(file) as handle:
        for name in handle.keys():  # noqa: SIM118  a safe_open is not a mapping
            entry = handle.get_slice(name)
            yield SourceTensor(name, file, str(entry.get_dtype()), tuple(entry.get_shape()))


def _unwrapped(name: str) -> str:
    """The name without the wrappers that saved the same decoder inside a larger model."""
    while name.startswith(_WRAPPERS):
        name = name.split(".", 1)[1]
    return name
