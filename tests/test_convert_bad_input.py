"""Checkpoints and outputs that must be refused: a clear error that names the culprit, at once, nothing left
behind."""

from __future__ import annotations

import json
import os
import pickle
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import checkpoints
from colibri.convert import convert, pipeline
from colibri.errors import ArgumentError, ColibriError, ConversionError, ModelIOError
from colibri.format import is_container


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    """A target; whatever happens, no temporary file may lie beside it afterwards."""
    directory = tmp_path / "out"
    directory.mkdir()
    yield directory / "m.colibri"
    assert [name for name in os.listdir(directory) if name.endswith(".part")] == []


def refused(source: Path, out: Path, match: str, error: type[ColibriError] = ConversionError) -> str:
    with pytest.raises(error, match=match) as caught:
        convert(source, out)
    assert not out.exists()
    text = str(caught.value)
    assert len(text) < 900 and "Traceback" not in text
    return text


# --- case 1: missing parts


def test_a_missing_shard_is_named_with_a_tensor(tmp_path: Path, out: Path) -> None:
    source = checkpoints.mixtral(tmp_path / "hf", shards=3)
    (source / "model-00002-of-00003.safetensors").unlink()
    text = refused(source, out, r"lacks 1 of its 3 weight files: model-00002-of-00003\.safetensors")
    weight_map = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    example = text.split("it holds '")[1].split("'")[0]
    assert weight_map[example] == "model-00002-of-00003.safetensors"


def test_a_missing_shard_without_an_index_is_named(tmp_path: Path, out: Path) -> None:
    source = checkpoints.mixtral(tmp_path / "hf", shards=3)
    (source / "model.safetensors.index.json").unlink()
    assert convert(source, out).entries == 30  # numbered shards need no index
    out.unlink()
    (source / "model-00003-of-00003.safetensors").unlink()
    refused(source, out, "lacks 1 of its 3 weight files: model-00003")


def test_a_shard_that_does_not_hold_what_the_index_says(tmp_path: Path, out: Path) -> None:
    source = checkpoints.mixtral(tmp_path / "hf", shards=2)
    (source / "model-00002-of-00002.safetensors").write_bytes(
        (source / "model-00001-of-00002.safetensors").read_bytes()
    )
    refused(source, out, "are the same tensor")


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/x.safetensors", "x.bin"])
def test_an_index_cannot_leave_its_directory(tmp_path: Path, out: Path, name: str) -> None:
    source = checkpoints.mixtral(tmp_path / "hf", shards=2)
    index = source / "model.safetensors.index.json"
    checkpoints.edit_json(index, {"weight_map": {"a": name}})
    refused(source, out, "not a .safetensors file of its directory")


def test_stale_and_unclear_sets_of_files(tmp_path: Path, out: Path) -> None:
    source = checkpoints.mixtral(tmp_path / "hf", shards=2)
    (source / "model.safetensors").write_bytes(b"")
    refused(source, out, "both model.safetensors and")
    for name in ("model.safetensors", "model.safetensors.index.json"):
        (source / name).unlink()
    for i, file in enumerate(sorted(source.glob("*.safetensors"))):
        file.rename(source / f"part{i}.safetensors")
    refused(source, out, "several .safetensors files .*part0.*but no model.safetensors.index.json")
    for file in source.glob("*.safetensors"):
        file.unlink()
    refused(source, out, "has no .safetensors files")


def test_missing_and_unknown_tensors_are_listed(tmp_path: Path, out: Path) -> None:
    source = checkpoints.qwen3_moe(tmp_path / "hf")
    lost = ["model.layers.1.self_attn.q_norm.weight", "model.layers.0.mlp.experts.3.up_proj.weight"]
    stray = {"model.layers.0.self_attn.sinks": np.zeros(4, np.float32), "visual.w": np.zeros(4, np.float32)}
    checkpoints.edit_tensors(source, stray, remove=lost)
    text = refused(source, out, "2 tensors are absent.*2 tensors are not part of the model")
    names = ["layers.1.self_attn.q_norm.weight", "layers.0.mlp.experts.3.up_proj.weight", *stray]
    assert all(name in text for name in names)


def test_a_missing_head_says_what_tying_needs(tmp_path: Path, out: Path) -> None:
    source = checkpoints.qwen3_moe(tmp_path / "hf", lm_head=False)
    refused(source, out, "lm_head.weight.*tie_word_embeddings: true")
    only_head = checkpoints.qwen3_moe(tmp_path / "hf2")
    checkpoints.edit_tensors(only_head, {}, remove=["model.embed_tokens.weight"])
    refused(only_head, out, "1 tensor is absent: embed_tokens.weight")


# --- pickles and other files


class Trap:
    """Unpickling this would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return (open, (self.path, "w"))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_and_never_run(tmp_path: Path, out: Path, name: str) -> None:
    source = checkpoints.mixtral(tmp_path / "hf")
    (source / "model.safetensors").unlink()
    (source / name).write_bytes(pickle.dumps(Trap(tmp_path / "trapped")))
    refused(source, out, f"pickle files .{name}.*save_pretrained")
    refused(source / name, out, "pickle files")
    assert not (tmp_path / "trapped").exists()


def test_files_and_absent_paths(tmp_path: Path, out: Path) -> None:
    source = checkpoints.mixtral(tmp_path / "hf")
    refused(source / "model.safetensors", out, "give its directory")
    refused(tmp_path / "absent", out, "does not exist")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", out, "has no config.json")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": ', "[" * 100_000, "\ufeff{}", '"x"'])
def test_a_broken_config_json(tmp_path: Path, out: Path, text: str) -> None:
    source = checkpoints.mixtral(tmp_path / "hf")
    (source / "config.json").write_text(text, "utf-8")
    refused(source, out, "config.json")


# --- case 14: hostile safetensors


def header(entries: dict[str, Any]) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


def spans(first: list[int], second: list[int]) -> bytes:
    one = {"dtype": "F32", "shape": [2], "data_offsets": first}
    return header({"a": one, "b": one | {"data_offsets": second}}) + bytes(16)


HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "half a length": b"\x10\0\0",
    "huge header length": struct.pack("<Q", 2**63) + b"{}",
    "header longer than the file": struct.pack("<Q", 10_000) + b"{}",
    "header is no JSON": struct.pack("<Q", 4) + b"{{{{",
    "header is a list": struct.pack("<Q", 2) + b"[]",
    "overlapping": spans([0, 8], [4, 12]),
    "gap": spans([0, 8], [9, 17]),
    "outside": spans([0, 8], [8, 16])[:-4],
    "far outside": spans([0, 8], [2**60, 2**60 + 8]),
    "reversed": spans([8, 0], [0, 8]),
    "too small for its shape": header({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}})
    + bytes(8),
    "product wraps 64 bits": header(
        {"a": {"dtype": "F32", "shape": [2**32, 2**32, 4], "data_offsets": [0, 0]}}
    ),
    "unknown dtype": header({"a": {"dtype": "Q99", "shape": [2], "data_offsets": [0, 8]}}) + bytes(8),
    "negative shape": header({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}) + bytes(8),
    "a zip": b"PK\3\4" + bytes(100),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_safetensors_end_at_once(tmp_path: Path, out: Path, name: str) -> None:
    source = checkpoints.mixtral(tmp_path / "hf")
    (source / "model.safetensors").write_bytes(HOSTILE[name])
    started = time.monotonic()
    refused(source, out, "model.safetensors is not a valid safetensors file")
    assert time.monotonic() - started < 2


@pytest.mark.parametrize("keep", [0.99, 0.5, 0.02])
def test_a_truncated_shard(tmp_path: Path, out: Path, keep: float) -> None:
    source = checkpoints.mixtral(tmp_path / "hf", shards=2)
    shard = source / "model-00002-of-00002.safetensors"
    os.truncate(shard, int(shard.stat().st_size * keep))
    refused(source, out, "model-00002-of-00002.safetensors is not a valid .*damaged or incomplete")


def test_a_zero_dimension_is_a_wrong_shape(tmp_path: Path, out: Path) -> None:
    source = checkpoints.mixtral(tmp_path / "hf")
    checkpoints.edit_tensors(source, {"model.norm.weight": np.zeros((0,), np.float32)})
    refused(source, out, r"model.norm.weight.*shape \[0\].*\[64\]")


# --- dtypes, shapes, values


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.uint8, ml_dtypes.float8_e8m0fnu])
def test_other_dtypes_are_refused_by_name(tmp_path: Path, out: Path, dtype: Any) -> None:
    source = checkpoints.mixtral(tmp_path / "hf")
    name = "model.layers.1.self_attn.k_proj.weight"
    checkpoints.edit_tensors(source, {name: np.ones((32, 64), np.float32).astype(dtype)})
    refused(source, out, f"{name} in model.safetensors is stored as (F64|I32|U8|F8_E8M0)")


@pytest.mark.parametrize("shape", [(32, 65), (64, 32), (32, 64, 1), (2048,)])
def test_wrong_shapes_name_both(tmp_path: Path, out: Path, shape: tuple[int, ...]) -> None:
    source = checkpoints.mixtral(tmp_path / "hf")
    name = "model.layers.1.self_attn.k_proj.weight"
    checkpoints.edit_tensors(source, {name: np.ones(shape, np.float32)})
    text = refused(source, out, name)
    assert str(list(shape)) in text and "[32, 64]" in text and "layers.1.attn_k" in text


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("model.layers.1.block_sparse_moe.experts.2.w2.weight", (63, 95)),
        ("model.layers.0.block_sparse_moe.gate.weight", (3, 0)),
        ("model.norm.weight", (7,)),
        ("model.embed_tokens.weight", (299, 1)),
    ],
)
def test_non_finite_weights_name_tensor_and_place(
    tmp_path: Path, out: Path, bad: float, name: str, index: tuple[int, ...]
) -> None:
    source = checkpoints.mixtral(tmp_path / "hf", storage="f32")
    values = checkpoints.read_tensors(source)[name]
    values[index] = bad
    checkpoints.edit_tensors(source, {name: values})
    place = ", ".join(map(str, index))
    refused(source, out, rf"{name}\[{place}\] is -?(nan|inf)".replace(".", r"\."))


@pytest.mark.parametrize(
    ("family", "part"),
    [
        ("qwen3_next", "in_proj_qkvz"),  # rows in another order
        ("qwen3_next", "conv1d"),  # numbers in another order
        ("deepseek_v3", "kv_a_proj"),
        ("deepseek_v3", "kv_b_proj"),  # a part of it lies transposed
        ("llama4_text", "experts.gate_up_proj"),
        ("granitemoe", "input_linear"),
        ("gpt_oss", "gate_up_proj_bias"),
        ("gpt_oss", "experts.down_proj"),
    ],
)
def test_the_place_is_that_of_the_file(tmp_path: Path, out: Path, family: str, part: str) -> None:
    """Also where rows are sorted, turned or cut out."""
    source = checkpoints.FAMILIES[family](tmp_path / "hf", storage="f32")
    tensors = checkpoints.read_tensors(source)
    name = next(name for name in tensors if part in name)
    values, rng = tensors[name], np.random.default_rng(1)
    for _ in range(4):
        index = tuple(int(rng.integers(size)) for size in values.shape)
        wrong = values.copy()
        wrong[index] = np.nan
        checkpoints.edit_tensors(source, {name: wrong})
        place = ", ".join(map(str, index))
        refused(source, out, rf"{name}\[{place}\] is nan".replace(".", r"\."))


# --- case 12: ambiguous experts


@pytest.mark.parametrize("layout", ["stacked", "stacked_transposed"])
@pytest.mark.parametrize(("hidden", "n_ff", "name"), [(64, 32, "gate_up_proj"), (64, 64, "down_proj")])
def test_stacked_experts_that_shape_cannot_tell_are_refused_by_name(
    tmp_path: Path, out: Path, layout: str, hidden: int, n_ff: int, name: str
) -> None:
    source = checkpoints.qwen3_moe(tmp_path / "hf", hidden=hidden, n_ff_expert=n_ff, experts=layout)
    refused(source, out, f"model.layers.0.mlp.experts.{name}.*cannot tell whether it is transposed")
    single = checkpoints.qwen3_moe(tmp_path / "single", hidden=hidden, n_ff_expert=n_ff)
    assert convert(single, out).entries == 42
    out.unlink()


def test_other_numbers_of_experts_are_refused(tmp_path: Path, out: Path) -> None:
    for layout in checkpoints.EXPERT_LAYOUTS:
        source = checkpoints.qwen3_moe(tmp_path / layout, experts=layout)
        checkpoints.edit_json(source / "config.json", {"num_experts": 4})
        refused(source, out, "router|mlp.gate|gate_up_proj|switch_mlp|not part of the model")


def test_two_spellings_at_once_are_refused(tmp_path: Path, out: Path) -> None:
    source = checkpoints.qwen3_moe(tmp_path / "hf")
    other = checkpoints.read_tensors(checkpoints.qwen3_moe(tmp_path / "other", experts="stacked"))
    checkpoints.edit_tensors(source, {name: value for name, value in other.items() if ".experts." in name})
    refused(source, out, "48 tensors are not part of the model")
    prefixed = checkpoints.qwen3_moe(tmp_path / "prefixed")
    checkpoints.edit_tensors(prefixed, {"language_model.model.norm.weight": np.ones(64, np.float32)})
    refused(prefixed, out, "are the same tensor")


# --- case 10: tokenizers


def test_a_tokenizer_larger_than_the_embedding_names_both_sizes(tmp_path: Path, out: Path) -> None:
    source = checkpoints.mixtral(tmp_path / "hf", vocab=290)
    (source / "tokenizer.json").write_text(checkpoints.tokenizer_json(300))
    refused(source, out, "300 token ids.*embedding has 290 rows")


@pytest.mark.parametrize("file", ["added_tokens.json", "tokenizer_config.json"])
def test_added_tokens_beyond_the_embedding(tmp_path: Path, out: Path, file: str) -> None:
    source = checkpoints.mixtral(tmp_path / "hf", extra_rows=20)
    inside = (
        {"<more>": 319}
        if file == "added_tokens.json"
        else {"added_tokens_decoder": {"319": {"content": "<more>"}}}
    )
    beyond = (
        {"<far>": 320}
        if file == "added_tokens.json"
        else {"added_tokens_decoder": {"320": {"content": "<far>"}}}
    )
    checkpoints.edit_json(source / file, inside)
    assert any("<more>" in note for note in convert(source, out).notes)
    out.unlink()
    checkpoints.edit_json(source / file, beyond)
    refused(source, out, "321 token ids .*'<far>'.*320 rows")


def test_added_tokens_that_are_none(tmp_path: Path, out: Path) -> None:
    """Beside a tokenizer.json they decide nothing, so they are left out."""
    source = checkpoints.mixtral(tmp_path / "hf")
    checkpoints.edit_json(source / "added_tokens.json", {"<a>": "x", "<b>": None, "<c>": [1]})
    decoder = {key: {"content": key} for key in ("\u00b2", "x", "-1", "9" * 5000)}
    checkpoints.edit_json(source / "tokenizer_config.json", {"added_tokens_decoder": decoder})
    assert convert(source, out).path == out


def test_a_missing_or_broken_tokenizer(tmp_path: Path, out: Path) -> None:
    source = checkpoints.mixtral(tmp_path / "hf")
    (source / "tokenizer.json").write_text("{}")
    refused(source, out, "no vocabulary")
    (source / "tokenizer.json").unlink()
    refused(source, out, "needs a tokenizer: tokenizer.json, tokenizer.model.* it has none")
    (source / "vocab.json").write_text("{}")
    refused(source, out, "only vocab.json.*AutoTokenizer")


# --- outputs


def test_an_unknown_type(tmp_path: Path, out: Path) -> None:
    with pytest.raises(ArgumentError, match="'q5'.*f32, bf16, q8"):
        convert(checkpoints.mixtral(tmp_path / "hf"), out, "q5")


def test_outputs_that_would_destroy_something(tmp_path: Path) -> None:
    source = checkpoints.mixtral(tmp_path / "hf")
    weights = (source / "model.safetensors").read_bytes()
    (tmp_path / "link").symlink_to(source / "model.safetensors")
    (tmp_path / "note.txt").write_text("mine")
    for target, text in [
        (source, "is a directory"),
        (source / "model.safetensors", "file of the source checkpoint"),
        (tmp_path / "link", "file of the source checkpoint"),
        (tmp_path / "note.txt", "not a .colibri file"),
    ]:
        with pytest.raises(ConversionError, match=text):
            convert(source, target)
    assert (source / "model.safetensors").read_bytes() == weights
    assert (tmp_path / "note.txt").read_text() == "mine"


def test_an_output_may_be_protected(tmp_path: Path) -> None:
    source, out = checkpoints.mixtral(tmp_path / "hf"), tmp_path / "m.colibri"
    before = convert(source, out).path.read_bytes()
    with pytest.raises(ConversionError, match="exists already"):
        convert(source, out, "f32", overwrite=False)
    assert out.read_bytes() == before


def test_outputs_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = checkpoints.mixtral(tmp_path / "hf")
    with pytest.raises(ModelIOError, match="does not exist"):
        convert(source, tmp_path / "absent" / "m.colibri")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ModelIOError, match="no permission"):
        convert(source, tmp_path / "m.colibri")


# --- interrupts


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("exists", [False, True])
def test_an_interrupt_leaves_nothing_and_keeps_the_old(
    tmp_path: Path, out: Path, error: type[BaseException], exists: bool
) -> None:
    source = checkpoints.mixtral(tmp_path / "hf")
    before = convert(source, out, "f32").path.read_bytes() if exists else b""

    def interrupt(done: int, total: int, name: str) -> None:
        assert not is_container(out) or exists
        if done > total // 2:
            raise error

    with pytest.raises(error):
        convert(source, out, progress=interrupt)
    assert os.listdir(out.parent) == (["m.colibri"] if exists else [])
    assert not exists or out.read_bytes() == before


def test_an_error_while_packing_leaves_nothing(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> memoryview:
        raise MemoryError

    monkeypatch.setattr(pipeline, "pack", fail)
    with pytest.raises(MemoryError):
        convert(checkpoints.mixtral(tmp_path / "hf"), out)
    assert os.listdir(out.parent) == []
