"""What a model argument stands for, and the cache of converted checkpoints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import checkpoints
from colibri import cache, cached
from colibri.convert import convert
from colibri.convert.shards import weight_files
from colibri.errors import ColibriError, ConversionError, ModelIOError
from colibri.format import read_container
from fixtures.variants import LONGROPE


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLIBRI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def name_of(source: Path, types: str) -> str:
    return cache.cached_name(source, weight_files(source), types)


def test_a_colibri_file_stands_for_itself(tmp_path: Path, directory: Path) -> None:
    path = convert(checkpoints.llama(tmp_path / "hf"), tmp_path / "any name").path
    assert cache.resolve(str(path)) == path
    assert cache.resolve(path) == path
    assert not directory.exists()


def test_a_directory_is_converted_once_and_says_so(tmp_path: Path, directory: Path) -> None:
    source = checkpoints.llama(tmp_path / "my model")
    said: list[str] = []
    steps: list[int] = []
    first = cache.resolve(source, notify=said.append, progress=lambda done, total, name: steps.append(done))
    assert first.parent == directory and first.name.startswith("my_model-q8-")
    assert len(said) == 1 and "Converting" in said[0] and str(first) in said[0] and steps
    stamp = first.stat().st_mtime_ns
    assert cache.resolve(source, notify=said.append) == first
    assert len(said) == 1 and first.stat().st_mtime_ns == stamp
    assert os.listdir(directory) == [first.name]


def test_notes_of_the_conversion_are_said(tmp_path: Path, directory: Path) -> None:
    source = checkpoints.llama(tmp_path / "hf", rope=LONGROPE, head_dim=32)
    said: list[str] = []
    cache.resolve(source, notify=said.append)
    assert len(said) == 2 and said[1].startswith("note: RoPE of type 'longrope'")


def test_type_converter_and_source_are_parts_of_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoints.llama(tmp_path / "hf")
    names = [name_of(source, "q8"), name_of(source, "f32")]
    monkeypatch.setattr("colibri.convert.CONVERTER_VERSION", "other")
    names.append(name_of(source, "q8"))
    monkeypatch.undo()
    os.utime(source / "model.safetensors", ns=(1, 1))
    names.append(name_of(source, "q8"))
    checkpoints.edit_json(source / "generation_config.json", {"eos_token_id": [2, 3]})
    names.append(name_of(source, "q8"))
    checkpoints.edit_json(source / "config.json", {"rms_norm_eps": 1e-4})
    names.append(name_of(source, "q8"))
    assert len(set(names)) == len(names)


def test_a_copy_of_a_checkpoint_elsewhere_is_the_same(tmp_path: Path) -> None:
    first, second = checkpoints.llama(tmp_path / "a" / "hf"), checkpoints.llama(tmp_path / "b" / "hf")
    os.utime(second / "model.safetensors", ns=(7, 7))
    os.utime(first / "model.safetensors", ns=(7, 7))
    assert name_of(first, "q8") == name_of(second, "q8")


def test_a_damaged_cached_file_is_made_anew(tmp_path: Path) -> None:
    source = checkpoints.llama(tmp_path / "hf")
    path = cache.resolve(source)
    good = path.read_bytes()
    os.truncate(path, 5000)
    said: list[str] = []
    assert cache.resolve(source, notify=said.append) == path
    assert "damaged" in said[0]
    assert path.read_bytes() == good


def test_a_failed_conversion_leaves_the_cache_empty(tmp_path: Path, directory: Path) -> None:
    source = checkpoints.llama(tmp_path / "hf", config_extra={"hidden_act": "gelu"})
    with pytest.raises(ConversionError, match="gelu"):
        cache.resolve(source)
    assert os.listdir(directory) == []


def test_what_is_neither_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=r"neither a \.colibri file nor .*\"demo\""):
        cache.resolve(str(tmp_path / "absent"))
    (tmp_path / "x.weights").write_bytes(b"GGML")
    with pytest.raises(ConversionError, match=r"x\.weights is not a \.colibri file"):
        cache.resolve(tmp_path / "x.weights")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ColibriError, match="safetensors|config.json"):
        cache.resolve(tmp_path / "empty")


def test_demo_is_the_bundled_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("colibri.cache.resources.files", lambda package: tmp_path)
    with pytest.raises(ModelIOError, match=r"demo\.colibri is missing"):
        cache.resolve("demo")
    (tmp_path / "demo.colibri").write_bytes(b"x")
    assert cache.resolve("demo") == tmp_path / "demo.colibri"


def test_a_cache_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COLIBRI_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelIOError, match="COLIBRI_CACHE"):
        cache.resolve(checkpoints.llama(tmp_path / "hf"))


def test_the_default_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLIBRI_CACHE")
    assert cached.cache_directory() == Path.home() / ".cache" / "colibri"


def test_processes_may_convert_the_same_checkpoint_at_once(tmp_path: Path, directory: Path) -> None:
    source = checkpoints.llama(tmp_path / "hf", shards=2)
    code = "import sys; from colibri.cache import resolve; print(resolve(sys.argv[1]))"
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(source)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    paths = {process.communicate(timeout=60)[0].strip() for process in running}
    assert [process.returncode for process in running] == [0] * 3
    assert len(paths) == 1 and os.listdir(directory) == [Path(paths.pop()).name]
    assert read_container(next(directory.iterdir())).config["n_layers"] == 2
