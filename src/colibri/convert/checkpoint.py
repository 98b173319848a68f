"""Opens a Hugging Face directory: which tensors its files hold, and their rows on demand.

Owns: tensor names without wrappers ("model.", "language_model."), reading by rows.
Refuses: damaged files, tensors that are neither f32, f16, bf16 nor FP8 with a scale. Which files there are
is for shards.py to say, what a name means for the families.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from colibri.convert import float8
from colibri.convert.gguf import blocks
from colibri.convert.gguf.blocks import Blocks
from colibri.convert.gguf.container import GgufFile
from colibri.convert.shards import read_json, refuse_files, unused_weight_files, weight_files
from colibri.convert.source_tensor import SourceTensor
from colibri.errors import ConversionError, ModelIOError

__all__ = [
    "Checkpoint",
    "Grid",
    "ReadRows",
    "Scaled",
    "SourceTensor",
    "View",
    "open_checkpoint",
    "read_json",
    "reading",
    "refuse_dtype",
    "unused_weight_files",
    "weight_files",
    "widen",
]

_DTYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_WRAPPERS = ("model.", "language_model.")
_OF_THE_WHOLE = ("model_type", "architectures", "tie_word_embeddings")  # beside text_config
_LARGEST_MAPPED = 128 << 20  # bytes read from a shard before it is mapped anew


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a conversion starts from: a Hugging Face directory, or a GGUF file that stands for one."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, SourceTensor]  # by name without wrappers
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()  # for the user
    small_files: Mapping[str, bytes] | None = None  # those of GGUF; None: they lie in the directory
    gguf: GgufFile | None = None
    key_names: Mapping[str, str] = field(default_factory=dict)  # what GGUF calls keys of `config`

    @property
    def config_path(self) -> Path:
        """What errors about keys name."""
        return self.place("config.json")

    def place(self, name: str) -> Path:
        """What errors call a file beside the weights. A GGUF file holds them all."""
        return self.path if self.gguf is not None else self.path / name

    def beside(self) -> Iterable[Path]:
        """Files that belong to the source."""
        return self.files if self.gguf is not None else self.path.iterdir()

    def small_file(self, name: str) -> bytes | None:
        """The bytes of a file beside the weights, None if there is none."""
        if self.small_files is not None:
            return self.small_files.get(name)
        try:
            return (self.path / name).read_bytes() if (self.path / name).is_file() else None
        except OSError as error:
            raise ModelIOError(f"Cannot read {self.path / name}: {error.strerror or error}.") from error

    def settings(self, name: str) -> dict[str, Any]:
        """The JSON object in such a file; empty if there is none."""
        if self.small_files is not None:
            found: dict[str, Any] = json.loads(self.small_files.get(name, b"{}"))
            return found
        return read_json(self.path / name) if (self.path / name).is_file() else {}


class Grid(NamedTuple):
    """Scales of an FP8 tensor: one for so many rows and columns as they are stored, less at the edges."""

    tensor: SourceTensor
    shape: tuple[int, int, int]  # experts, or 1 for all; scales down, scales across
    block: tuple[int, int]


class Scaled(NamedTuple):
    """Rows of an FP8 tensor; `widen` makes numbers of them."""

    codes: npt.NDArray[np.uint8]  # [n, cols]
    dtype: str
    grid: npt.NDArray[np.float32]
    rows: npt.NDArray[np.intp]  # of the grid, for each row
    cols: npt.NDArray[np.intp]


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
    columns: Sequence[int] = ()  # of a GGUF tensor: source column of each, if they are not neighbours
    flat: bool = False  # a vector: the numbers of a tensor of any shape
    scales: SourceTensor | None = None  # of an mxfp4 matrix, whose rows are [groups, 16] bytes
    affine: tuple[float, float] = (0.0, 1.0)  # a vector becomes (numbers + first) x second, rounded once
    log: bool = False  # a vector becomes log(-numbers), rounded once
    grid: Grid | None = None  # of an FP8 tensor

    def place(self, row: int, col: int) -> str:
        """What the number at [row, col] is called where it is stored."""
        if self.flat:
            at = self.order[col] if self.order else col
            index = tuple(int(one) for one in np.unravel_index(at, self.tensor.shape))
        else:
            row = self.order[row] if self.order else self.start + row
            index = (self.col + col, row) if self.transposed else (row, col)
            index = index if self.expert is None else (self.expert, *index)
        return f"{self.tensor.name}[{', '.join(map(str, index))}]"

    def bytes(self, rows: int) -> int:
        """Of so many rows in the file."""
        if self.scales is not None:
            return rows * self.cols * 17 // 32
        return stored_bytes(self.tensor, rows * self.cols)


ReadRows = Callable[[View, int, int], Any]


def stored_bytes(tensor: SourceTensor, count: int) -> int:
    """Bytes of so many elements of a tensor of a type that is read."""
    if tensor.offset is not None:
        return blocks.row_bytes(tensor.dtype, count)
    narrow = tensor.dtype in (*float8.WEIGHTS, *float8.EXPONENTS)
    return count * (4 if tensor.dtype == "F32" else 1 if narrow else 2)


def open_checkpoint(source: Path) -> Checkpoint:
    """Reads config.json and every shard's header; no tensor data."""
    refuse_files(source)
    config_path = source / "config.json"
    if not config_path.is_file():
        raise ConversionError(
            f"{source} has no config.json, so it is not a Hugging Face checkpoint, and no .gguf file. Give "
            "the directory that holds config.json and the .safetensors files, or a GGUF file."
        )
    config = _text_part(read_json(config_path), config_path)
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
    return Checkpoint(source, config, tensors, tuple(files), tuple(unused_weight_files(source)))


def _text_part(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """The keys of the language model where config.json wraps it in a larger one. What stands beside them
    counts where they are silent, and says which model it is and whether its head is tied: the head is the
    larger model's, whose class does not look into text_config for that (Transformers 5.24)."""
    text = config.get("text_config")
    if text is None:
        return config
    if not isinstance(text, dict):
        raise ConversionError(f"{path}: text_config = {text!r:.120}; expected an object. Download it again.")
    outer = {name: value for name, value in config.items() if name != "text_config"}
    named = {name: outer[name] for name in _OF_THE_WHOLE if name in outer}
    return outer | {name: value for name, value in text.items() if value is not None} | named


@contextmanager
def reading() -> Iterator[ReadRows]:
    """A function that reads rows [first, last) of a view, in the dtype of the file; `widen` makes them
    float32. Rows of mxfp4 come as [rows, groups, 17] bytes, the scale last.

    Nothing but those rows is copied. Shards are mapped, one at a time and never for long: their pages
    belong to the system, but they would count as this process's memory.
    """
    import ml_dtypes  # noqa: F401  makes numpy know the name "bfloat16", which safetensors asks for

    current: tuple[Path, Any] | None = None
    places: tuple[Path, dict[str, Any]] | None = None  # where the tensors of a file with FP8 lie
    grid: tuple[str, npt.NDArray[np.float32]] | None = None
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

    def bytes_of(tensor: SourceTensor) -> npt.NDArray[np.uint8]:
        nonlocal places
        try:
            if places is None or places[0] != tensor.file:
                handle_of(tensor.file, 0)  # checks the header
                places = (tensor.file, float8.header(tensor.file))
            return float8.stored_bytes(tensor.file, places[1][tensor.name])
        except (OSError, ValueError, KeyError) as error:
            raise ConversionError(f"{tensor.file} changed while it was being converted: {error}") from error

    def grid_of(scale: Grid, expert: int | None) -> npt.NDArray[np.float32]:
        nonlocal grid
        if grid is None or grid[0] != scale.tensor.name:
            if scale.tensor.dtype in float8.EXPONENTS:
                numbers = float8.values("F8_E8M0")[bytes_of(scale.tensor)]
            else:
                numbers = widen(handle_of(scale.tensor.file, 0).get_tensor(scale.tensor.name))
            if not np.isfinite(numbers).all():
                raise ConversionError(
                    f"{scale.tensor.name} in {scale.tensor.file.name} has a scale that is not finite. The "
                    "checkpoint is damaged; download it again."
                )
            grid = scale.tensor.name, numbers.reshape(scale.shape)
        found: npt.NDArray[np.float32] = grid[1][expert if expert and scale.shape[0] > 1 else 0]
        return found

    def part(tensor: SourceTensor, index: Any, n_bytes: int) -> npt.NDArray[Any]:
        if tensor.dtype in float8.WEIGHTS:
            return np.array(bytes_of(tensor)[index])
        found: npt.NDArray[Any] = handle_of(tensor.file, n_bytes).get_slice(tensor.name)[index]
        return found

    def read(view: View, first: int, last: int) -> Any:
        tensor = view.tensor
        if tensor.offset is not None:
            return _ggml_rows(view, first, last)
        picked = np.array(view.order[first:last], dtype=np.intp)
        rows = slice(view.start + first, view.start + last)
        if view.order and not view.flat:
            rows = slice(int(picked.min()), int(picked.max()) + 1)
        columns = slice(view.col, view.col + view.cols)
        index: Any = (columns, rows) if view.transposed else (rows,)
        if view.expert is not None:
            index = (view.expert, *index)
        try:
            if view.flat:
                handle = handle_of(tensor.file, view.bytes(last - first))
                numbers: npt.NDArray[Any] = handle.get_tensor(tensor.name).reshape(1, -1)
                return numbers[:, np.array(view.order)] if view.order else numbers
            data = part(tensor, index, view.bytes(last - first))
            if view.scales is not None:
                data = np.concatenate([data, part(view.scales, index, 0)[..., None]], axis=2)
        except (SafetensorError, OSError) as error:
            raise ConversionError(f"{tensor.name} in {tensor.file}: {error}") from error
        rows_first: npt.NDArray[Any] = data.T if view.transposed else data
        if view.order:
            rows_first = rows_first[picked - rows.start]
        if view.scales is not None:
            return rows_first
        rows_first = rows_first.reshape(last - first, view.cols)
        if view.grid is None:
            return rows_first
        scales, (down, across) = grid_of(view.grid, view.expert), view.grid.block
        if view.transposed:
            scales, down, across = scales.T, across, down
        of_rows = picked if view.order else np.arange(rows.start, rows.stop)
        of_cols = np.arange(view.cols) + (view.col if view.transposed else 0)
        return Scaled(rows_first, tensor.dtype, scales, of_rows // down, of_cols // across)

    try:
        yield read
    finally:
        close()


def _ggml_rows(view: View, first: int, last: int) -> Any:
    """Rows of a view of a GGUF file: plain numbers, or Blocks."""
    tensor = view.tensor
    if view.flat:
        shape = (1, math.prod(tensor.shape))
        row = blocks.read_rows(tensor, shape, 0, slice(0, 1))
        return row[:, np.array(view.order)] if view.order else row
    if view.transposed:
        lines = blocks.read_rows(
            tensor, tensor.shape, view.expert or 0, slice(view.col, view.col + view.cols)
        )
        return widen(lines)[:, view.start + first : view.start + last].T
    picked = np.array(view.order[first:last], np.intp) if view.order else view.start + np.arange(first, last)
    rows = slice(int(picked.min()), int(picked.max()) + 1)
    lines = blocks.read_rows(tensor, tensor.shape, view.expert or 0, rows)
    if view.order:
        at = picked - rows.start
        lines = lines._replace(data=lines.data[at]) if isinstance(lines, Blocks) else lines[at]
    return blocks.with_columns(lines, view.columns) if view.columns else lines


def widen(data: npt.NDArray[Any] | Scaled | Blocks) -> npt.NDArray[np.float32]:
    """float32 from f32, f16 or bf16, exactly; from FP8, the product with its scale, rounded once; from
    blocks of ggml, as ggml decodes them."""
    if isinstance(data, Blocks):
        return blocks.widen(data)
    if isinstance(data, Scaled):
        numbers = np.take(float8.values(data.dtype), data.codes)
        numbers *= np.take(data.grid[data.rows], data.cols, axis=1)
        return numbers
    if data.dtype.name == "bfloat16":  # the upper half of a float32; faster than ml_dtypes' own cast
        bits = np.ascontiguousarray(data).view(np.uint16).astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    return data.astype(np.float32, copy=False)


def refuse_dtype(view: View) -> None:
    tensor = view.tensor
    if tensor.offset is not None:
        if tensor.dtype not in (blocks.PLAIN if view.flat else blocks.decodable()):
            wanted = " or ".join(blocks.PLAIN) if view.flat else "a type of weights"
            raise ConversionError(
                f"{tensor.name} in {tensor.file.name} is stored as {tensor.dtype}; expected {wanted}. Get a "
                "conversion of this model in another type."
            )
    elif view.scales is not None:
        tensor = tensor if tensor.dtype != "U8" else view.scales
        if tensor.dtype != "U8":
            raise ConversionError(f"{tensor.name} in {tensor.file.name} is {tensor.dtype}; expected U8.")
    elif tensor.dtype not in _DTYPES and (view.grid is None or view.flat):
        raise ConversionError(
            f"{tensor.name} in {tensor.file.name} is stored as {tensor.dtype}; expected F32, F16 or BF16, or "
            f"a matrix in FP8 ({', '.join(float8.WEIGHTS)}) with scales. Other quantised and integer "
            "checkpoints are not supported: convert the original one."
        )


def _open(file: Path) -> Any:
    try:
        return safe_open(str(file.absolute()), framework="numpy")
    except FileNotFoundError as error:
        raise ConversionError(f"{file} disappeared while it was being converted.") from error
    except (SafetensorError, OSError) as error:
        reason = str(error).strip().rstrip(".") or type(error).__name__
        step = "It looks damaged or incomplete; download it again."
        if "unknown variant" in reason:
            step = "The package `safetensors` does not know this dtype: install a newer one."
        raise ConversionError(
            f"{file} is not a valid safetensors file of {file.stat().st_size:,} bytes: {reason}. {step}"
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
