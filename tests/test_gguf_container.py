"""The header of GGUF files: what a file says arrives, and what it claims beyond itself is refused at once.

Cases 14, 15 and 16 of the public bug reports in their GGUF form. Owns: the container; what metadata and
tensors mean is tested with architectures and vocabularies.
"""

from __future__ import annotations

import io
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri.convert.gguf.container import find_gguf, is_gguf, open_gguf, read_header
from colibri.convert.source import gguf_path
from colibri.errors import ColibriError, ConversionError, ModelIOError
from gguf_bytes import Tensor, Wrong, gguf_bytes, text, value

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "a.u8": ("u8", 255),
    "a.i8": ("i8", -3),
    "a.u16": ("u16", 65535),
    "a.i16": ("i16", -300),
    "a.u32": 4294967295,
    "a.i64": -5,
    "a.u64": ("u64", 2**63),
    "a.f32": 0.5,
    "a.f64": ("f64", 1e300),
    "a.yes": True,
    "a.text": "müde 模型",
    "a.texts": ["<s>", "", "é"],
    "a.ints": [1, -2, 3],
    "a.floats": [0.5, -1.0],
    "a.none": np.zeros(0, np.int32),
}
TENSORS = {
    "token_embd.weight": Tensor("F32", (4, 32), np.arange(128, dtype="<f4").tobytes()),
    "blk.0.ffn_gate_exps.weight": Tensor("Q8_0", (2, 3, 64), bytes(range(204)) * 2),
    "output_norm.weight": Tensor("F32", (32,), bytes(128)),
}


def written(path: Path, *args: Any) -> Path:
    path.write_bytes(gguf_bytes(*args))
    return path


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [None, 8, 64, 4096])
def test_what_a_file_says_arrives(tmp_path: Path, version: int, alignment: int | None) -> None:
    metadata = METADATA | ({} if alignment is None else {"general.alignment": alignment})
    path = written(tmp_path / "a.gguf", metadata, TENSORS, Wrong(version=version))
    found = open_gguf(path)
    assert found.files == (path,) and found.path == path and is_gguf(path)
    for key, wanted in metadata.items():
        wanted = wanted[1] if isinstance(wanted, tuple) else wanted
        got = found.metadata[key]
        assert (got.tolist() if isinstance(got, np.ndarray) else got) == (
            wanted.tolist() if isinstance(wanted, np.ndarray) else wanted
        ), key
    assert list(found.tensors) == list(TENSORS)
    data = path.read_bytes()
    for name, tensor in TENSORS.items():
        place = found.tensors[name]
        assert (place.dtype, place.shape, place.file) == (tensor.type, tensor.shape, path)
        assert place.offset is not None and place.offset % (alignment or 32) == 0
        assert data[place.offset : place.offset + len(tensor.data)] == tensor.data


def test_the_gguf_package_reads_the_same(tmp_path: Path) -> None:
    import gguf

    path = written(tmp_path / "a.gguf", METADATA, TENSORS)
    reader, found = gguf.GGUFReader(path), open_gguf(path)
    for tensor in reader.tensors:
        place = found.tensors[tensor.name]
        assert place.offset == tensor.data_offset
        assert place.shape == tuple(int(n) for n in reversed(tensor.shape))
        assert place.dtype == tensor.tensor_type.name
    keys = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert keys.keys() == found.metadata.keys()
    for name, field in keys.items():
        if name != "a.none":
            got = found.metadata[name]
            assert (got.tolist() if isinstance(got, np.ndarray) else got) == field.contents(), name


# ------------------------------------------------------------------ case 14: hostile or broken files

NAME = "output_norm.weight"
HOSTILE: dict[str, tuple[bytes, str]] = {
    "another magic": (gguf_bytes({}, {}, Wrong(magic=b"GGML")), "begins with b'GGML'"),
    "version 1": (gguf_bytes({}, {}, Wrong(version=1)), "of version 1"),
    "version 9": (gguf_bytes({}, {}, Wrong(version=9)), "of version 9"),
    "big-endian": (gguf_bytes({}, {}, Wrong(version=3 << 24)), "big-endian, version 3"),
    "too many tensors": (gguf_bytes({}, {}, Wrong(n_tensors=2**60)), "more than it can hold"),
    "too many keys": (gguf_bytes({}, {}, Wrong(n_keys=2**63)), "more than it can hold"),
    "one key too many": (gguf_bytes(METADATA, {}, Wrong(n_keys=len(METADATA) + 1)), "is empty"),
    "a dimension 0": (gguf_bytes({}, TENSORS, Wrong(dims={NAME: (0,)})), "shape \\[0\\]"),
    "a million dimensions": (
        gguf_bytes({}, TENSORS, Wrong(n_dims={NAME: 1_000_000})),
        "1,000,000 dimensions",
    ),
    "no dimensions": (gguf_bytes({}, TENSORS, Wrong(n_dims={NAME: 0})), "0 dimensions"),
    "a product that wraps": (gguf_bytes({}, TENSORS, Wrong(dims={NAME: (2**32, 2**32)})), "2\\^48 elements"),
    "a huge dimension": (gguf_bytes({}, TENSORS, Wrong(dims={NAME: (2**63,)})), "2\\^48 elements"),
    "a row that is no block": (gguf_bytes({}, TENSORS, Wrong(types={NAME: 12})), "blocks of Q4_K hold 256"),
    "an unknown type": (gguf_bytes({}, TENSORS, Wrong(types={NAME: 4})), "ggml type 4"),
    "a type of a fork": (gguf_bytes({}, TENSORS, Wrong(types={NAME: 139})), "ggml type 139"),
    "an odd offset": (gguf_bytes({}, TENSORS, Wrong(offsets={NAME: 7})), "not a multiple of 32"),
    "an offset outside": (gguf_bytes({}, TENSORS, Wrong(offsets={NAME: 2**62})), "beyond the end"),
    "an overlap": (gguf_bytes({}, TENSORS, Wrong(offsets={NAME: 32})), "overlaps"),
    "alignment 0": (gguf_bytes({"general.alignment": 0}), "general.alignment is 0"),
    "alignment 24": (gguf_bytes({"general.alignment": 24}), "power of two"),
    "alignment 2^30": (gguf_bytes({"general.alignment": 2**30}), "power of two"),
    "alignment as text": (gguf_bytes({"general.alignment": "32"}), "power of two"),
    "a key twice": (
        gguf_bytes({"a": 1}, {}, Wrong(n_keys=2)).rstrip(b"\0")
        + b"\0\0\0"
        + text("a")
        + value(2)
        + bytes(64),
        "occurs twice",
    ),
    "text of 2^60 bytes": (
        gguf_bytes({}, {}, Wrong(n_keys=1)).rstrip(b"\0")[:16]
        + b"\x01"
        + bytes(7)
        + text("k", 2**60)
        + bytes(64),
        "claims",
    ),
    "array of 2^60 texts": (
        gguf_bytes({}, {}, Wrong(n_keys=1))[:24]
        + text("k")
        + b"\x09\0\0\0\x08\0\0\0"
        + (2**60).to_bytes(8, "little")
        + bytes(64),
        "claims",
    ),
    "array of 2^62 numbers": (
        gguf_bytes({}, {}, Wrong(n_keys=1))[:24]
        + text("k")
        + b"\x09\0\0\0\x0a\0\0\0"
        + (2**62).to_bytes(8, "little")
        + bytes(64),
        "claims",
    ),
    "arrays in arrays in arrays": (
        gguf_bytes({}, {}, Wrong(n_keys=1))[:24]
        + text("k")
        + (b"\x09\0\0\0" * 2 + b"\x01" + bytes(7)) * 3
        + bytes(64),
        "does not exist",
    ),
    "a value type 99": (
        gguf_bytes({}, {}, Wrong(n_keys=1))[:24] + text("k") + b"\x63\0\0\0" + bytes(64),
        "does not exist",
    ),
    "text that is not UTF-8": (gguf_bytes({"k": b"\xff\xfe"}), "not UTF-8"),
    "nothing": (b"", "beyond the file's end"),
    "the magic alone": (b"GGUF", "beyond the file's end"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_at_once(tmp_path: Path, name: str) -> None:
    data, why = HOSTILE[name]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(data)
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    with pytest.raises(ConversionError, match=why) as raised:
        open_gguf(path)
    assert time.perf_counter() - started < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10  # KiB
    assert str(path) in str(raised.value)


# ------------------------------------------------------------------ case 15: truncated files


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    data = gguf_bytes(METADATA, TENSORS)
    path = tmp_path / "cut.gguf"
    for end in (*range(0, len(data) - 1, 7), len(data) - 1):
        path.write_bytes(data[:end])
        with pytest.raises(ConversionError, match="beyond|ended|more than (it|the file) can hold"):
            open_gguf(path)
    path.write_bytes(data)
    assert len(open_gguf(path).tensors) == 3


def test_a_file_that_cannot_be_opened_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelIOError, match="absent.gguf"):
        open_gguf(tmp_path / "absent.gguf")


# ------------------------------------------------------------------ case 16: parts of a split, awkward paths


def split(directory: Path, changes: dict[str, int] | None = None) -> list[Path]:
    """Three parts; `changes`: of the metadata of the last one."""
    stem, count = "m", 3
    directory.mkdir(exist_ok=True, parents=True)
    names = list(TENSORS)
    files = []
    for part in range(count):
        keys = {"split.no": part, "split.count": count, "split.tensors.count": len(names)}
        keys |= METADATA if part == 0 else {}
        keys |= changes or {} if part == count - 1 else {}
        file = directory / f"{stem}-{part + 1:05d}-of-{count:05d}.gguf"
        files.append(written(file, keys, {names[part]: TENSORS[names[part]]}))
    return files


@pytest.mark.parametrize("folder", ["plain", "müde 模型 x", "-dash", "a b/c"])
def test_any_part_or_the_folder_stands_for_all(tmp_path: Path, folder: str) -> None:
    files = split(tmp_path / folder)
    for given in (*files, find_gguf(tmp_path / folder)):
        assert given is not None
        found = open_gguf(given)
        assert found.files == tuple(files) and found.path == files[0]
        assert list(found.tensors) == list(TENSORS)
        assert found.metadata["a.text"] == METADATA["a.text"]


def test_a_link_to_a_folder_is_as_good(tmp_path: Path) -> None:
    split(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert len(open_gguf(tmp_path / "link" / "m-00002-of-00003.gguf").tensors) == 3


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    files = split(tmp_path)
    files[1].unlink()
    with pytest.raises(ConversionError, match="lacks 1 of the 3 parts of this model: m-00002-of-00003.gguf"):
        open_gguf(files[0])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"split.count": 4}, r"split.count and split.no are \(4, 2\), expected \(3, 2\)"),
        ({"split.no": 1}, r"split.count and split.no are \(3, 1\)"),
    ],
)
def test_a_part_of_another_split_is_named(tmp_path: Path, changes: dict[str, int], why: str) -> None:
    files = split(tmp_path, changes)
    with pytest.raises(ConversionError, match=f"{files[2].name} does not belong.*{why}"):
        open_gguf(files[0])


def test_parts_of_two_models_are_named(tmp_path: Path) -> None:
    files = split(tmp_path)
    keys = {"split.no": 2, "split.count": 3, "split.tensors.count": 3}
    written(files[2], keys, {"token_embd.weight": TENSORS["token_embd.weight"]})
    with pytest.raises(
        ConversionError, match=f"{files[2].name} does not belong.*token_embd.weight is also in"
    ):
        open_gguf(files[0])
    written(files[2], keys, {})
    with pytest.raises(ConversionError, match="3 parts hold 2 tensors, but split.tensors.count is 3"):
        open_gguf(files[0])


def test_a_part_with_another_name_is_refused(tmp_path: Path) -> None:
    files = split(tmp_path)
    files[0].rename(tmp_path / "first.gguf")
    with pytest.raises(ConversionError, match="00001-of-00003.gguf"):
        open_gguf(tmp_path / "first.gguf")


def test_a_folder_with_two_models_names_both(tmp_path: Path) -> None:
    split(tmp_path)
    written(tmp_path / "other.gguf", METADATA, TENSORS)
    with pytest.raises(ConversionError, match="2 models in GGUF .m-00001-of-00003.gguf, other.gguf."):
        find_gguf(tmp_path)
    for name in "abcd":
        written(tmp_path / f"{name}.gguf", METADATA, TENSORS)
    with pytest.raises(ConversionError, match="6 models in GGUF .a.gguf, .* and 1 more."):
        find_gguf(tmp_path)


@pytest.mark.parametrize("name", ["split.count", "split.no", "split.tensors.count"])
@pytest.mark.parametrize("wrong", [[1, 2], ["a"], 1.5, "x"])
def test_numbers_of_a_split_that_are_none(tmp_path: Path, name: str, wrong: Any) -> None:
    """An array may stand wherever one number is expected."""
    files = split(tmp_path, {name: wrong} if name != "split.tensors.count" else None)
    if name == "split.tensors.count":
        first = next(iter(TENSORS))
        keys = METADATA | {"split.no": 0, "split.count": 3, name: wrong}
        written(files[0], keys, {first: TENSORS[first]})
    with pytest.raises(ConversionError, match="belongs? to"):
        open_gguf(files[0])


@pytest.mark.parametrize(
    "beside", ["mmproj-m.gguf", "m-mmproj-F16.gguf", "imatrix_m.gguf", "m.imatrix.gguf", "._model.gguf"]
)
def test_what_lies_beside_a_model_is_no_second_one(tmp_path: Path, beside: str) -> None:
    model = written(tmp_path / "model.gguf", METADATA, TENSORS)
    (tmp_path / beside).write_bytes(model.read_bytes())
    assert find_gguf(tmp_path) == model


def test_a_folder_of_a_config_and_a_gguf_file_is_that_file(tmp_path: Path) -> None:
    """Repositories of GGUF files have a config.json; with safetensors beside it, those are meant."""
    model = written(tmp_path / "model.gguf", METADATA, TENSORS)
    (tmp_path / "config.json").write_text("{}")
    assert gguf_path(tmp_path) == model
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert gguf_path(tmp_path) is None


def test_every_error_is_one_of_ours() -> None:
    """Each byte of a small file replaced, in turn, by the values that matter most."""
    data = bytearray(gguf_bytes({"general.alignment": 32, "a": [1, 2], "b": ["x"], "c": "y"}, TENSORS))
    header = len(data) - sum(len(tensor.data) for tensor in TENSORS.values())
    refused = 0
    for at in range(4, header):
        for new in (0, 1, 0x7F, 0x80, 0xFF):
            changed = bytes(data[:at]) + bytes([new]) + bytes(data[at + 1 :])
            try:
                read_header(io.BytesIO(changed), Path("changed.gguf"))
            except ColibriError as error:
                refused += 1
                assert "changed.gguf" in str(error)
    assert refused > header
