"""Opens whatever a conversion can start from: a Hugging Face directory, a GGUF file, or a directory with one.

Owns: telling them apart, and making a checkpoint of a GGUF file. Refuses: what is neither.
"""

from __future__ import annotations

from pathlib import Path

from colibri.convert.checkpoint import Checkpoint, open_checkpoint
from colibri.convert.gguf.architectures import config_of, key_names
from colibri.convert.gguf.container import find_gguf, is_gguf, open_gguf
from colibri.convert.gguf.vocabulary import has_tokenizer, small_files
from colibri.paths import is_there, listed


def gguf_path(source: Path) -> Path | None:
    """The GGUF file that is meant: `source` itself, or the one in it where there are no safetensors, whose
    directory it would be. Repositories of GGUF files have a config.json too."""
    if is_there(source) and source.is_dir():
        names = listed(source)
        whole = is_there(source / "config.json") and any(".safetensors" in name for name in names)
        return None if whole else find_gguf(source)
    return source if source.suffix == ".gguf" or is_gguf(source) else None


def open_headers(source: Path) -> Checkpoint:
    """As open_source, but of a GGUF file only the tensors: enough to name its conversion."""
    file = gguf_path(source)
    if file is None:
        return open_checkpoint(source)
    gguf = open_gguf(file)
    return Checkpoint(gguf.path, {}, gguf.tensors, gguf.files, (), {}, gguf)


def open_source(source: Path) -> Checkpoint:
    """Reads headers; no tensor data."""
    file = gguf_path(source)
    if file is None or not file.exists():
        return open_checkpoint(source)
    gguf = open_gguf(file)
    notes: list[str] = []
    config = config_of(gguf, notes)
    files = {}
    if has_tokenizer(gguf.metadata):
        files = small_files(gguf.metadata, gguf.path, config["vocab_size"], notes)
    return Checkpoint(gguf.path, config, gguf.tensors, gguf.files, tuple(notes), files, gguf, key_names(gguf))
