"""GGUF files to models: matrices keep their values, what is rounded is told with its error.

Owns: types, and what is told. The cache, architectures, vocabularies and the container have files of their
own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import checkpoints
import colibri
import gguf_files
from colibri import quantize
from colibri.convert import convert, explain
from colibri.convert.gguf import blocks
from colibri.convert.gguf.blocks import HELD, Blocks
from colibri.convert.gguf.container import open_gguf
from colibri.errors import ArgumentError, ConversionError
from colibri.format import read_container, read_entry
from gguf_bytes import Tensor, gguf_bytes
from test_cli import Result, call
from test_convert import peak_of
from test_gguf_blocks import SCALES, random_blocks

__all__ = ["call"]  # a fixture
HIDDEN, N_FF, N_EXPERTS = 256, 512, 3
# Below 4 bits, or not linear.
RARE = ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"]
RARE += ["TQ1_0", "TQ2_0", "NVFP4"]


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
    if dtype in RARE:  # whose scales lie anywhere
        rng, width = np.random.default_rng(seed), blocks.sizes()[dtype][1]
        drawn = rng.integers(0, 256, (2000, width), np.uint8)
        largest = np.abs(blocks.widen(Blocks(drawn, dtype))).max(axis=1)
        fitting = drawn[(largest > 1e-2) & (largest < 1)]
        return np.take(fitting, rng.integers(0, len(fitting), (rows, cols // blocks.sizes()[dtype][0])), 0)
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
    ("dtype", "type"),
    [("Q4_1", "q4"), ("Q5_1", "q6"), ("Q5_K", "q6"), ("Q2_K", "q4"), *((rare, "q4") for rare in RARE)],
)
def test_what_is_rounded_is_told_with_its_error(
    tmp_path: Path, plain: Path, dtype: str, type: str, call: Callable[..., Result]
) -> None:
    values = stored(plain, tmp_path / "a.gguf", {"_exps": dtype})
    options = ["--requantize"] if dtype in RARE else []
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


def test_a_type_that_nothing_decodes_is_refused_by_name(
    tmp_path: Path, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(plain, tmp_path / "a.gguf", {"_exps": "IQ4_XS"})
    monkeypatch.setattr(blocks, "decodable", lambda: frozenset(HELD))
    with pytest.raises(
        ConversionError, match="exps.weight in a.gguf is stored as IQ4_XS; expected a type of"
    ):
        convert(tmp_path / "a.gguf", tmp_path / "a.colibri", requantize=True)


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


@pytest.mark.parametrize("asked", [None, "q8"])
@pytest.mark.parametrize("dtype", ["F32", "Q4_K"])
def test_memory_stays_far_below_one_tensor(tmp_path: Path, dtype: str, asked: str | None) -> None:
    """An embedding of 32 MiB as float32, moved or rounded; numpy is traced."""
    options: dict[str, Any] = {"n_layers": 1, "hidden": 256, "tied": True, "vocab": 300}
    source = checkpoints.llama(tmp_path / "hf", storage="f32", extra_rows=32_000, **options)
    large = gguf_files.write(source, tmp_path / "large.gguf")
    stored(large, tmp_path / "a.gguf", {"token_embd": dtype})
    peak = peak_of(lambda: convert(tmp_path / "a.gguf", tmp_path / "a.colibri", asked))
    assert peak < 20 << 20, f"{peak >> 20} MiB"


def test_the_account_names_the_keys_of_the_file(plain: Path, call: Callable[..., Result]) -> None:
    told = call("convert", "--explain", plain).out
    assert f"llama.embedding_length = {HIDDEN}" in told and f"llama.expert_count = {N_EXPERTS}" in told
    assert "config.json\n" not in told and "config.json leaves out" not in told
    rows = {row.key: row.gguf_key for row in explain(plain).keys}
    assert rows["hidden_size"] == "llama.embedding_length" and rows["tie_word_embeddings"] == ""


@pytest.mark.parametrize(("experts", "dense"), [(None, None), (None, "q8"), ("q6", "bf16")])
def test_experts_of_any_mixture_are_streamed_with_the_same_bits(
    tmp_path: Path, plain: Path, monkeypatch: pytest.MonkeyPatch, experts: str | None, dense: str | None
) -> None:
    """gate, up and down in three types of GGUF, as files of llama-quantize have them."""
    monkeypatch.setenv("COLIBRI_CACHE", str(tmp_path / "cache"))
    kinds = {"gate_exps": "Q4_1", "up_exps": "Q5_K", "down_exps": "Q2_K", r"attn_[qkv]\.": "Q5_1"}
    stored(plain, tmp_path / "a.gguf", kinds)
    logits = []
    for residency, slots in (("mapped", None), ("streamed", 1), ("streamed", 3)):
        with colibri.load(
            tmp_path / "a.gguf", residency=residency, expert_slots=slots, experts=experts, dense=dense
        ) as model:
            logits.append(model.logits([1, 5, 9, 7, 3]))
    assert np.isfinite(logits[0]).all() and all(np.array_equal(logits[0], one) for one in logits[1:])
