"""GGUF files to models: matrices keep their values, what is rounded is told with its error, `colibri run`
converts once.

Owns: types, the cache, the command line. Architectures, vocabularies and the container have files of their
own.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import checkpoints
import colibri
import gguf_files
from colibri import cached, quantize
from colibri.cache import resolve
from colibri.convert import convert, explain
from colibri.convert.gguf import blocks
from colibri.convert.gguf.blocks import HELD, Blocks
from colibri.convert.gguf.container import open_gguf
from colibri.errors import ArgumentError, ConversionError
from colibri.format import read_container, read_entry
from gguf_bytes import Tensor, gguf_bytes
from test_cli import Result, call
from test_gguf_blocks import SCALES, random_blocks

__all__ = ["call"]  # a fixture
HIDDEN, N_FF, N_EXPERTS = 256, 512, 3


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture in F32, wide enough for blocks of 256."""
    directory = tmp_path_factory.mktemp("gguf")
    source = checkpoints.mixtral(
        directory / "hf", hidden=HIDDEN, n_ff=N_FF, n_experts=N_EXPERTS, storage="f32", extra_rows=4
    )
    return gguf_files.write(source, directory / "plain.gguf")


def stored(plain: Path, out: Path, types: Mapping[str, str]) -> dict[str, npt.NDArray[np.float32]]:
    """`plain` with random numbers in other types, by pattern of the tensor's name; what they decode to."""
    found = open_gguf(plain)
    tensors, values = {}, {}
    data = plain.read_bytes()
    for seed, (name, tensor) in enumerate(found.tensors.items()):
        assert tensor.offset is not None
        raw = data[tensor.offset : tensor.offset + 4 * int(np.prod(tensor.shape))]
        dtype = next((dtype for pattern, dtype in types.items() if re.search(pattern, name)), "F32")
        if dtype in ("F16", "BF16"):
            numbers = np.frombuffer(raw, "<f4")
            half = numbers.astype("<f2") if dtype == "F16" else (numbers.view("<u4") >> 16).astype("<u2")
            raw = half.tobytes()
            wide = half.astype("<f4") if dtype == "F16" else (half.astype("<u4") << 16).view("<f4")
            values[name] = wide.reshape(tensor.shape)
        elif dtype != "F32":
            rows = int(np.prod(tensor.shape[:-1]))
            packed = small_blocks(dtype, rows, tensor.shape[-1], seed)
            raw = packed.tobytes()
            values[name] = blocks.widen(Blocks(packed.reshape(rows, -1), dtype)).reshape(tensor.shape)
        elif dtype in types.values():
            values[name] = np.frombuffer(raw, "<f4").reshape(tensor.shape)
        tensors[name] = Tensor(dtype, tensor.shape, raw)
    out.write_bytes(gguf_bytes(found.metadata, tensors))
    return values


def small_blocks(dtype: str, rows: int, cols: int, seed: int) -> npt.NDArray[np.uint8]:
    """Random codes with scales of a size that weights have."""
    data = random_blocks(dtype, rows, cols, seed)
    at = {"Q2_K": (80, 82), "Q5_K": (0, 2), "Q4_1": (0, 2), "Q5_1": (0, 2)} | SCALES
    for place in at.get(dtype, (0,)):
        rng = np.random.default_rng(seed + place)
        scales = rng.uniform(1e-4, 2e-3, data.shape[:2]).astype("<f2")
        data[..., place : place + 2] = scales[..., None].view(np.uint8)
    if dtype == "MXFP4":
        data[..., 0] = 118 + data[..., 0] % 4
    return data


def matrices(path: Path) -> dict[str, tuple[str, npt.NDArray[np.float32]]]:
    """Type and values of each, experts as name.0 (gate), .1 (up) and .2 (down)."""
    container = read_container(path)
    found = {}
    for entry in container.entries:
        if entry.kind in ("matrix", "expert"):
            data, at = read_entry(container, entry.name), 0
            for part, (rows, cols, type) in enumerate(entry.matrices):
                size = quantize.matrix_bytes(rows, cols, type)
                name = entry.name if entry.kind == "matrix" else f"{entry.name}.{part}"
                found[name] = type, quantize.unpack(data[at : at + size], rows, cols, type)
                at += size
    return found


def same_bits(one: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> bool:
    """But for the sign of a zero, which the gguf package drops in MXFP4."""
    zero = np.float32(0)
    return np.array_equal((one + zero).view(np.uint32), (other + zero).view(np.uint32))


@pytest.mark.parametrize("dtype", sorted(HELD))
def test_values_stay_bit_by_bit(tmp_path: Path, plain: Path, dtype: str) -> None:
    types = {r"_exps|attn_(k|v|output)\.|token_embd|^output\.": dtype}
    values = stored(plain, tmp_path / "a.gguf", types)
    report = convert(tmp_path / "a.gguf", tmp_path / "a.colibri")
    assert report.errors == {} and report.type == "as stored"
    found = matrices(report.path)
    kept = {name: value for name, value in values.items() if "norm" not in name and "gate_inp" not in name}
    assert len(kept) > 10
    for name, wanted in kept.items():
        block = re.fullmatch(r"blk\.(\d)\.ffn_(gate|up|down)_exps\.weight", name)
        if block:
            part = ("gate", "up", "down").index(block[2])
            for expert in range(N_EXPERTS):
                type, got = found[f"layers.{block[1]}.experts.{expert}.{part}"]
                assert type == HELD[dtype] and same_bits(got, wanted[expert]), name
        elif not re.search("attn_[qk]", name):  # whose rows are in another order
            entry = name.removesuffix(".weight").replace("blk.", "layers.").replace("token_embd", "embedding")
            type, got = found[entry.replace("attn_output", "attn_out")]
            assert type == HELD[dtype] and same_bits(got, wanted), name
    assert found["layers.0.router"][0] == "f32"


def test_rows_that_lie_permuted_are_not_rounded(tmp_path: Path, plain: Path) -> None:
    """q and k of the llama architecture."""
    stored(plain, tmp_path / "q.gguf", {r"attn_q\.": "Q4_K", r"attn_k\.": "Q6_K"})
    convert(tmp_path / "q.gguf", tmp_path / "q.colibri")
    convert(tmp_path / "q.gguf", tmp_path / "f.colibri", "f32")
    kept, wide = matrices(tmp_path / "q.colibri"), matrices(tmp_path / "f.colibri")
    for name, type in (("layers.0.attn_q", "q4"), ("layers.1.attn_k", "q6")):
        assert kept[name][0] == type and wide[name][0] == "f32"
        assert same_bits(kept[name][1], wide[name][1])


def test_each_matrix_keeps_its_own_type(tmp_path: Path, plain: Path) -> None:
    """A mixture as llama.cpp makes them, also inside an expert."""
    types = {
        r"0\.ffn_down_exps": "Q6_K",
        "_exps": "Q4_K",
        r"attn_v\.": "Q8_0",
        "token_embd": "Q6_K",
    }
    stored(plain, tmp_path / "a.gguf", types)
    report = convert(tmp_path / "a.gguf", tmp_path / "a.colibri")
    entries = {entry.name: entry.types for entry in read_container(report.path).entries}
    assert entries["layers.0.experts.1"] == ("q4", "q4", "q6")
    assert entries["layers.1.experts.1"] == ("q4", "q4", "q4")
    assert entries["layers.0.attn_v"] == ("q8",) and entries["embedding"] == ("q6",)
    assert entries["output"] == ("f32",)
    with colibri.load(report.path, context=32) as model:
        assert np.isfinite(model.logits([1, 2, 3])).all()
    told = explain(tmp_path / "a.gguf")
    slots = {row.name: row.slots for row in told.tensors}
    assert slots["blk.0.ffn_down_exps.weight"][0] == "layers.0.experts.0 down (q6)"
    assert slots["blk.0.ffn_up_exps.weight"][0] == "layers.0.experts.0 up (q4)"


@pytest.mark.parametrize(
    ("dtype", "type"), [("Q4_1", "q6"), ("Q5_1", "q6"), ("Q5_K", "q6"), ("Q2_K", "q4"), ("IQ4_XS", "q4")]
)
def test_what_is_rounded_is_told_with_its_error(
    tmp_path: Path, plain: Path, dtype: str, type: str, call: Callable[..., Result]
) -> None:
    values = stored(plain, tmp_path / "a.gguf", {"_exps": dtype})
    options = ["--requantize"] if dtype.startswith("IQ") else []
    out = tmp_path / "a.colibri"
    result = call("convert", tmp_path / "a.gguf", out, *options)
    assert result.status == 0, result.err
    assert f"matrices in {dtype}, 18 of them, are stored as {type}, which rounds them" in result.err
    report = convert(tmp_path / "a.gguf", out, requantize=bool(options))
    found = matrices(out)
    errors = squares = 0.0
    for name, wanted in values.items():
        layer, part = re.findall(r"blk\.(\d)\.ffn_(\w+)_exps", name)[0]
        for expert in range(N_EXPERTS):
            got = found[f"layers.{layer}.experts.{expert}.{('gate', 'up', 'down').index(part)}"]
            assert got[0] == type
            errors += float(np.square(got[1] - wanted[expert], dtype=np.float64).sum())
            squares += float(np.square(wanted[expert], dtype=np.float64).sum())
    assert set(report.errors) == {"experts"}
    assert report.errors["experts"] == pytest.approx((errors / squares) ** 0.5, rel=1e-4)
    assert report.errors["experts"] < {"q6": 0.04, "q4": 0.12}[type]
    assert f"experts {100 * report.errors['experts']:.3g} %" in result.err


def test_blocks_that_have_to_be_taken_apart_are_not_called_whole(tmp_path: Path) -> None:
    """attn_kv_b of old files: keys lie transposed in it, values do not."""
    source = checkpoints.deepseek_v2(tmp_path / "hf", storage="f32")
    old = gguf_files.write(source, tmp_path / "old.gguf", absorbed=False)
    stored(old, tmp_path / "a.gguf", {"attn_kv_b": "Q8_0"})
    report = convert(tmp_path / "a.gguf", tmp_path / "a.colibri")
    told = [note for note in report.notes if note.startswith("matrices in Q8_0")]
    assert len(told) == 2 and {note.rsplit("which ")[-1] for note in told} == {
        "holds them without loss",
        "rounds them",
    }
    assert 0 < report.errors["attention"] < 0.02


def test_types_that_are_asked_for(tmp_path: Path, plain: Path) -> None:
    stored(plain, tmp_path / "a.gguf", {"_exps": "Q8_0", r"attn_[qkv]\.": "Q4_K"})
    report = convert(tmp_path / "a.gguf", tmp_path / "a.colibri", experts="q4")
    found = {entry.name: entry.types for entry in read_container(report.path).entries}
    assert found["layers.0.experts.0"] == ("q4",) * 3 and found["layers.0.attn_v"] == ("q4",)
    assert (
        set(report.errors) == {"experts"} and report.type == "q4 experts, as stored dense, as stored output"
    )
    report = convert(tmp_path / "a.gguf", tmp_path / "a.colibri", "q8")
    found = {entry.name: entry.types for entry in read_container(report.path).entries}
    assert {types for name, types in found.items() if "attn_q" in name} == {("q8",)}
    assert set(report.errors) == {"attention"}  # the experts were Q8_0 already


def test_mxfp4_stays_unless_experts_are_asked_for(tmp_path: Path, plain: Path) -> None:
    stored(plain, tmp_path / "a.gguf", {"_exps": "MXFP4"})
    for asked, experts, type in (("q8", None, "mxfp4"), (None, "q8", "q8"), (None, "mxfp4", "mxfp4")):
        report = convert(tmp_path / "a.gguf", tmp_path / "a.colibri", asked, experts=experts)
        found = {entry.name: entry.types for entry in read_container(report.path).entries}
        assert found["layers.0.experts.0"] == (type,) * 3
    with pytest.raises(ConversionError, match="only where the checkpoint stores them so"):
        convert(plain, tmp_path / "a.colibri", experts="mxfp4")


def test_a_second_rounding_of_few_bits_wants_consent(tmp_path: Path, plain: Path) -> None:
    stored(plain, tmp_path / "a.gguf", {"_exps": "IQ4_XS"})
    for type in (None, "q8"):
        with pytest.raises(
            ConversionError, match="IQ4_XS, which would be rounded a second time.*--requantize"
        ):
            convert(tmp_path / "a.gguf", tmp_path / "a.colibri", type)
    assert convert(tmp_path / "a.gguf", tmp_path / "a.colibri", "f32").errors == {}
    with pytest.raises(ArgumentError, match="requantize has no effect"):
        convert(plain, tmp_path / "a.colibri", requantize=True)
    assert os.listdir(tmp_path).count("a.colibri") == 1


@pytest.mark.parametrize("pattern", ["output_norm", "ffn_gate_inp"])
def test_vectors_and_routers_in_other_types(tmp_path: Path, plain: Path, pattern: str) -> None:
    values = stored(plain, tmp_path / "a.gguf", {pattern: "F16"})
    report = convert(tmp_path / "a.gguf", tmp_path / "a.colibri")
    assert report.entries and values
    stored(plain, tmp_path / "b.gguf", {pattern: "Q8_0"})
    if pattern == "output_norm":
        with pytest.raises(ConversionError, match="output_norm.weight .* Q8_0; expected F32 or F16 or BF16"):
            convert(tmp_path / "b.gguf", tmp_path / "b.colibri")
    else:  # exactly, in f32
        convert(tmp_path / "b.gguf", tmp_path / "b.colibri")
        assert matrices(tmp_path / "b.colibri")["layers.0.router"][0] == "f32"


def test_a_damaged_block_is_told_by_its_place(tmp_path: Path, plain: Path) -> None:
    stored(plain, tmp_path / "a.gguf", {"0.ffn_up_exps": "Q8_0"})
    data = bytearray((tmp_path / "a.gguf").read_bytes())
    tensor = open_gguf(tmp_path / "a.gguf").tensors["blk.0.ffn_up_exps.weight"]
    width = HIDDEN // 32 * 34
    assert tensor.offset is not None
    at = tensor.offset + (N_FF + 7) * width  # row 7 of expert 1
    data[at : at + 2] = b"\x00\x7c"
    (tmp_path / "a.gguf").write_bytes(data)
    with pytest.raises(ConversionError, match=r"ffn_up_exps.weight\[1, 7, 0\]: its row in Q8_0 has a"):
        convert(tmp_path / "a.gguf", tmp_path / "a.colibri")
    assert os.listdir(tmp_path) == ["a.gguf"]


# ------------------------------------------------------------------ the command line and the cache


def test_run_converts_once_says_so_and_reuses_it(
    tmp_path: Path, plain: Path, call: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLIBRI_CACHE", str(tmp_path / "cache"))
    first = call("run", plain, "Once", "--max-tokens", 4)
    assert first.status == 0 and f"Converting {plain} once (as stored), to be kept as" in first.err
    monkeypatch.setattr("colibri.convert.pipeline.convert", None)  # not again
    second = call("run", plain, "Once", "--max-tokens", 4)
    assert (second.status, second.out) == (0, first.out) and "Converting" not in second.err
    with colibri.load(plain) as model:  # one mechanism for the command line and Python
        assert model.path.parent == tmp_path / "cache"
    listed = call("cache")
    assert listed.status == 0 and model.path.name in listed.out and str(tmp_path / "cache") in listed.err
    data = json.loads(call("cache", "--json").out)
    assert [one["name"] for one in data["models"]] == [model.path.name]
    assert data["bytes"] == model.path.stat().st_size and data["limit_bytes"] == 100 << 30
    assert call("cache", "--remove", "other").status == 2
    assert call("cache", model.path.name).status == 2
    removed = call("cache", "--remove", model.path.name)
    assert removed.status == 0 and "removed 1 file" in removed.err and os.listdir(tmp_path / "cache") == []
    assert call("cache", "--clear").status == 0


def test_a_wrong_limit_of_the_cache_is_told_before_the_work(
    tmp_path: Path, plain: Path, call: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLIBRI_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLIBRI_CACHE_LIMIT", "abc")
    told = call("run", plain, "Once")
    assert told.status == 2 and "COLIBRI_CACHE_LIMIT" in told.err
    assert not (tmp_path / "cache").exists()


def test_run_tells_errors_and_a_link_keeps_its_name(
    tmp_path: Path, plain: Path, call: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Downloads are often links to files that are named after their content."""
    monkeypatch.setenv("COLIBRI_CACHE", str(tmp_path / "cache"))
    stored(plain, tmp_path / "0a1b2c", {r"ffn_\w+_exps": "Q4_1"})
    (tmp_path / "model.gguf").symlink_to(tmp_path / "0a1b2c")
    told = call("run", tmp_path / "model.gguf", "Once", "--max-tokens", 2)
    assert told.status == 0 and re.search(r"note: errors of what was rounded .* experts \d", told.err)
    assert os.listdir(tmp_path / "cache")[0].startswith("model.gguf-as_stored-")


def test_run_requantizes_as_convert_does(
    tmp_path: Path, plain: Path, call: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLIBRI_CACHE", str(tmp_path / "cache"))
    stored(plain, tmp_path / "a.gguf", {"_exps": "IQ4_XS"})
    words = ("run", tmp_path / "a.gguf", "Once", "--max-tokens", 4)
    refused = call(*words)
    assert refused.status == 1 and "IQ4_XS, which would be rounded a second time" in refused.err
    assert "--requantize" in refused.err and os.listdir(tmp_path / "cache") == []
    first = call(*words, "--requantize")
    assert first.status == 0 and "once (as stored, requantized), to be kept as" in first.err
    assert "matrices in IQ4_XS, 18 of them, are stored as q4, which rounds them" in first.err
    second = call(*words, "--requantize")
    assert (second.status, second.out) == (0, first.out) and "Converting" not in second.err
    with colibri.load(tmp_path / "a.gguf", requantize=True) as model:
        assert model.path.name in os.listdir(tmp_path / "cache")
        assert model.path.name.startswith("a.gguf-as_stored-requantized-")
    whole = convert(tmp_path / "a.gguf", tmp_path / "whole.colibri", requantize=True)
    assert whole.path.read_bytes() == model.path.read_bytes()
    assert call(*words).status == 1  # unasked it is not taken out of the cache
    assert len(os.listdir(tmp_path / "cache")) == 1


@pytest.mark.parametrize("source", ["plain", "directory", "demo", "file"])
def test_requantize_without_effect_is_an_error(
    tmp_path: Path, plain: Path, call: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setenv("COLIBRI_CACHE", str(tmp_path / "cache"))
    model: Path | str = plain if source == "plain" else "demo" if source == "demo" else tmp_path / source
    if source == "directory":
        checkpoints.llama(tmp_path / source)
    if source == "file":
        convert(plain, tmp_path / source)
    with pytest.raises(ArgumentError, match="requantize.* has no effect"):
        colibri.load(model, requantize=True)
    for command in (("run", model, "Once"), ("bench", model)):
        told = call(*command, "--requantize")
        assert told.status == 2 and "requantize has no effect" in told.err, told.err
    told = call("bench", "--synthetic", "mixtral-tiny", "--requantize")
    assert told.status == 2 and "--requantize has no effect" in told.err
    assert not (tmp_path / "cache").exists() or os.listdir(tmp_path / "cache") == []


def test_the_account_names_the_keys_of_the_file(plain: Path, call: Callable[..., Result]) -> None:
    told = call("convert", "--explain", plain).out
    assert f"llama.embedding_length = {HIDDEN}" in told and f"llama.expert_count = {N_EXPERTS}" in told
    assert "config.json\n" not in told and "config.json leaves out" not in told
    rows = {row.key: row.gguf_key for row in explain(plain).keys}
    assert rows["hidden_size"] == "llama.embedding_length" and rows["tie_word_embeddings"] == ""


def test_a_folder_and_any_part_share_one_conversion(
    tmp_path: Path, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLIBRI_CACHE", str(tmp_path / "cache"))
    found = open_gguf(plain)
    folder = tmp_path / "müde 模型 x"
    folder.mkdir()
    data, names = plain.read_bytes(), list(found.tensors)
    for part in range(3):
        tensors = {}
        for name in names[part::3]:
            tensor = found.tensors[name]
            assert tensor.offset is not None
            size = 4 * int(np.prod(tensor.shape))
            tensors[name] = Tensor("F32", tensor.shape, data[tensor.offset : tensor.offset + size])
        keys = found.metadata if part == 0 else {}
        keys |= {"split.no": part, "split.count": 3, "split.tensors.count": len(names)}
        (folder / f"m-{part + 1:05d}-of-00003.gguf").write_bytes(gguf_bytes(keys, tensors))
    paths = set()
    for given in (folder, *sorted(folder.iterdir())):
        with colibri.load(given, context=16) as model:
            paths.add(model.path)
            logits = model.logits([1, 5, 9])
    assert len(paths) == 1
    with colibri.load(plain, context=16) as model:
        assert model.logits([1, 5, 9]).tobytes() == logits.tobytes()
    (folder / "m-00002-of-00003.gguf").unlink()
    with pytest.raises(ConversionError, match="lacks 1 of the 3 parts"):
        colibri.load(folder)


def test_the_cache_keeps_its_limit(tmp_path: Path, plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every moment: room is made before a file is begun."""
    monkeypatch.setenv("COLIBRI_CACHE", str(tmp_path / "cache"))
    told: list[str] = []
    taken: list[int] = []

    def look(_done: int, _total: int, _name: str) -> None:
        taken.append(sum(path.stat().st_size for path in (tmp_path / "cache").iterdir()))

    paths = [resolve(plain, type, notify=told.append) for type in ("q8", "q6")]
    resolve(plain, "q8")  # used again: now the other one goes first
    sizes = [path.stat().st_size for path in paths]
    limit = sizes[0] + sizes[1]
    monkeypatch.setenv("COLIBRI_CACHE_LIMIT", str(limit))
    third = resolve(plain, "q4", notify=told.append, progress=look)
    assert sorted(os.listdir(tmp_path / "cache")) == sorted([paths[0].name, third.name])
    removed = [text for text in told if text.startswith("removed")]
    assert len(removed) == 1 and removed[0].startswith(f"removed {paths[1]}, unused since 20")
    assert max(taken) <= limit and taken[-1] > sizes[0]


def test_a_file_larger_than_the_limit_is_an_error_before_the_work(
    tmp_path: Path, plain: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[..., Result]
) -> None:
    monkeypatch.setenv("COLIBRI_CACHE", str(tmp_path / "cache"))
    small, size = resolve(plain, "q4"), convert(plain, tmp_path / "a.colibri", "bf16").bytes
    monkeypatch.setenv("COLIBRI_CACHE_LIMIT", str(size - 1))
    with pytest.raises(ArgumentError, match=f"may take {size - 1:,} bytes, .* takes {size:,}; raise"):
        resolve(plain, "bf16", progress=lambda *_: pytest.fail("something was written"))
    assert os.listdir(tmp_path / "cache") == [small.name]  # nothing went for nothing
    told = call("run", plain, "Once", "--type", "bf16")
    assert told.status == 2 and "COLIBRI_CACHE_LIMIT" in told.err
    monkeypatch.setenv("COLIBRI_CACHE_LIMIT", str(size))
    fits = resolve(plain, "bf16")
    assert os.listdir(tmp_path / "cache") == [fits.name]
    monkeypatch.setenv("COLIBRI_CACHE_LIMIT", "1KiB")
    told = call("bench", "--synthetic", "mixtral-tiny")
    assert told.status == 2 and "COLIBRI_CACHE_LIMIT: the cache may take 1,024 bytes" in told.err
    assert len(os.listdir(tmp_path / "cache")) == 1


@pytest.mark.parametrize("kind", [KeyboardInterrupt, OSError, SystemExit])
def test_an_interrupted_conversion_leaves_nothing_in_the_cache(
    tmp_path: Path, plain: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    monkeypatch.setenv("COLIBRI_CACHE", str(tmp_path / "cache"))

    def stop(done: int, _total: int, _name: str) -> None:
        assert done and len(os.listdir(tmp_path / "cache")) == 1
        raise kind

    with pytest.raises(kind):
        resolve(plain, progress=stop)
    assert os.listdir(tmp_path / "cache") == []
    assert resolve(plain).is_file()  # and no lock


@pytest.mark.parametrize("same", [True, False])
def test_one_at_a_time_writes_into_the_cache(
    tmp_path: Path, plain: Path, monkeypatch: pytest.MonkeyPatch, same: bool
) -> None:
    """Who waits says so, and uses the file if it has been made meanwhile."""
    monkeypatch.setenv("COLIBRI_CACHE", str(tmp_path / "cache"))
    begun, waits = threading.Event(), threading.Event()
    told: list[str] = []

    def hold(_done: int, _total: int, _name: str) -> None:
        begun.set()
        assert waits.wait(60)

    def notify(text: str) -> None:
        told.append(text)
        waits.set()

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(resolve, plain, "q8", hold)
        assert begun.wait(60)
        second = resolve(plain, "q8" if same else "q4", notify=notify)
    assert told[0] == f"Waiting: another process writes into {tmp_path / 'cache'}."
    assert (second == first.result()) == same == (len(told) == 1)
    assert len(os.listdir(tmp_path / "cache")) == (1 if same else 2)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("1", 1),
        ("2K", 2048),
        ("2KiB", 2048),
        ("3MB", 3_000_000),
        ("1.5GiB", 3 << 29),
        (" 20 g ", 20 << 30),
        ("1e3", 1000),
    ],
)
def test_sizes(text: str, found: int) -> None:
    assert cached.bytes_of("X", text) == found


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 XB", "1e999", "nan", "1GiBs", "0x10"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ArgumentError, match="X: expected a size such as 20GiB"):
        cached.bytes_of("X", text)
