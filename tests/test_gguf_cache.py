"""GGUF files that are run: converted once into the cache, which keeps its limit and is shown and emptied by
`colibri cache`.

Owns: the cache as it is used by commands and from Python. Refuses: what a conversion makes
(test_gguf_convert.py), names of its files (test_cache.py).
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import checkpoints
import colibri
from colibri import memory
from colibri.cache import resolve
from colibri.convert import convert
from colibri.convert.gguf.container import open_gguf
from colibri.errors import ArgumentError, ConversionError
from gguf_bytes import Tensor, gguf_bytes
from test_cli import Result, call
from test_gguf_convert import plain, stored

__all__ = ["call", "plain"]  # fixtures


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
    assert call("run", tmp_path / "0a1b2c", "Once", "--max-tokens", 2).status == 0  # by its first bytes
    assert call("cache", "--clear").status == 0
    told = call("run", tmp_path / "model.gguf", "Once", "--max-tokens", 2)
    assert told.status == 0 and re.search(r"note: errors of what was rounded .* experts \d", told.err)
    assert os.listdir(tmp_path / "cache")[0].startswith("model.gguf-as_stored-")


def test_run_and_plan_requantize_as_convert_does(
    tmp_path: Path, plain: Path, call: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLIBRI_CACHE", str(tmp_path / "cache"))
    stored(plain, tmp_path / "a.gguf", {"_exps": "IQ4_XS"})
    words = ("run", tmp_path / "a.gguf", "Once", "--max-tokens", 4)
    refused = call(*words)
    assert refused.status == 1 and "IQ4_XS, which would be rounded a second time" in refused.err
    assert " --requantize (colibri convert --requantize) does that" in refused.err
    assert os.listdir(tmp_path / "cache") == []
    without = call("inspect", tmp_path / "a.gguf")  # which has no such option
    assert without.status == 1 and "(colibri convert --requantize) does that" in without.err
    first = call(*words, "--requantize")
    assert first.status == 0 and "once (as stored, requantized), to be kept as" in first.err
    assert "matrices in IQ4_XS, 18 of them, are stored as q4, which rounds them" in first.err
    second = call(*words, "--requantize")
    assert (second.status, second.out) == (0, first.out) and "Converting" not in second.err
    with colibri.load(tmp_path / "a.gguf", requantize=True) as model:
        assert model.path.name in os.listdir(tmp_path / "cache")
        assert model.path.name.startswith("a.gguf-as_stored-requantized-")
    planned = call("plan", tmp_path / "a.gguf", "--no-measure", "--json", "--requantize")
    assert planned.status == 0 and "Converting" not in planned.err
    assert json.loads(planned.out)["path"] == str(model.path)
    assert colibri.plan(tmp_path / "a.gguf", requantize=True, measure=False).path == model.path
    whole = convert(tmp_path / "a.gguf", tmp_path / "whole.colibri", requantize=True)
    assert whole.path.read_bytes() == model.path.read_bytes()
    for unasked in (words, ("plan", tmp_path / "a.gguf", "--no-measure")):
        assert call(*unasked).status == 1  # it is not taken out of the cache
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
    with pytest.raises(ArgumentError, match="requantize.* has no effect"):
        colibri.plan(model, requantize=True)
    for command in (("run", model, "Once"), ("bench", model), ("plan", model)):
        told = call(*command, "--requantize")
        assert told.status == 2 and "requantize has no effect" in told.err, told.err
    told = call("bench", "--synthetic", "mixtral-tiny", "--requantize")
    assert told.status == 2 and "--requantize has no effect" in told.err
    assert not (tmp_path / "cache").exists() or os.listdir(tmp_path / "cache") == []


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
    monkeypatch.setattr("colibri.format._PIECE", 4096)  # a small file grows while it is written
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
    assert memory.bytes_of("X", text) == found


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 XB", "1e999", "nan", "1GiBs", "0x10"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ArgumentError, match="X: expected a size such as 20GiB"):
        memory.bytes_of("X", text)
