"""Weight types that differ between experts, dense matrices and output: files, cache and what is told of them.
The command line's side is in test_cli.py, load()'s in test_engine.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import checkpoints
from colibri import cache, inspection
from colibri.convert import convert
from colibri.entries import weight_types
from colibri.errors import ArgumentError
from colibri.format import read_container, read_entry

PARTS = ("experts", "dense", "output")


def tensors(path: Path) -> dict[str, bytes]:
    container = read_container(path)
    return {e.name: read_entry(container, e.name) for e in container.entries if e.kind != "blob"}


def test_a_choice_as_text() -> None:
    assert str(weight_types("q8")) == str(weight_types(experts="q8", dense="q8", output="q8")) == "q8"
    assert str(weight_types()) == "q8"
    assert str(weight_types("q8", experts="q4")) == "q4 experts, q8 dense, q8 output"
    for part in PARTS:
        with pytest.raises(ArgumentError, match="'q3' is not known.*f32, bf16, q8, q6, q4"):
            weight_types("q8", **{part: "q3"})


def test_each_kind_of_matrix_has_its_type(tmp_path: Path) -> None:
    source = checkpoints.qwen2_moe(tmp_path / "hf")
    report = convert(source, tmp_path / "m.colibri", "bf16", experts="q4", output="q8")
    assert report.type == "q4 experts, bf16 dense, q8 output"
    described = inspection.describe(report.path)
    assert described.source["type"] == report.type
    for entry in described.entries:
        if entry.kind == "expert":
            assert entry.types == ("q4",) * 3
        elif entry.kind == "matrix":
            head, router = entry.name in ("embedding", "output"), entry.name.endswith(".router")
            assert entry.types == ("q8" if head else "f32" if router else "bf16",), entry.name
    assert set(described.types) == {"q4", "bf16", "q8", "f32"}
    assert inspection.verify(report.path).damaged == []
    whole = tensors(convert(source, tmp_path / "q4.colibri", "q4").path)
    for name, data in tensors(report.path).items():
        if ".experts." in name:
            assert data == whole[name], name


def test_a_mix_of_one_type_is_that_type(tmp_path: Path) -> None:
    source = checkpoints.qwen2_moe(tmp_path / "hf")
    same = convert(source, tmp_path / "s.colibri", experts="q8", dense="q8", output="q8")
    assert same.type == "q8" and same.path.read_bytes() == convert(source, tmp_path / "8").path.read_bytes()


def test_a_wrong_type_leaves_nothing(tmp_path: Path) -> None:
    source = checkpoints.llama(tmp_path / "hf")
    for part in PARTS:
        with pytest.raises(ArgumentError, match="'q3' is not known"):
            convert(source, tmp_path / "n.colibri", **{part: "q3"})  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == ["hf"]


def test_every_mix_has_its_own_file_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLIBRI_CACHE", str(tmp_path / "cache"))
    source = checkpoints.mixtral(tmp_path / "hf")
    plain = cache.resolve(source, "q8")
    assert cache.resolve(source, experts="q8", dense="q8", output="q8") == plain  # the same choice
    found = {cache.resolve(source, "q8", **{part: "f32"}) for part in PARTS}  # type: ignore[arg-type]
    assert len(found | {plain}) == 4 == len(os.listdir(tmp_path / "cache"))
    with pytest.raises(ArgumentError, match="'q7' is not known"):
        cache.resolve(source, output="q7")


def test_a_type_without_effect_is_refused(tmp_path: Path) -> None:
    """All three parts have types of their own, or the model has no such part: nothing is written."""
    dense, moe = checkpoints.llama(tmp_path / "dense"), checkpoints.mixtral(tmp_path / "moe")
    parts: dict[str, str] = dict.fromkeys(PARTS, "q4")
    with pytest.raises(ArgumentError, match="type='f32' has no effect"):
        convert(moe, tmp_path / "n.colibri", "f32", **parts)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="experts='q4' has no effect: .* has no experts"):
        convert(dense, tmp_path / "n.colibri", experts="q4")
    assert sorted(os.listdir(tmp_path)) == ["dense", "moe"]
    mixed = convert(dense, tmp_path / "mixed.colibri", dense="q4")
    assert mixed.type == inspection.describe(mixed.path).source["type"] == "q4 dense, q8 output"
    assert convert(dense, tmp_path / "plain.colibri", "q4").type == "q4"
