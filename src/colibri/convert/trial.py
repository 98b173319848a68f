"""Opens what a conversion will write, before it writes a byte of it: the head of the file by the engine, its
texts by what loads them.

Owns: that whatever is converted can be loaded. Refuses: nothing by rules of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from colibri import _native as native
from colibri.config import Config
from colibri.errors import ColibriError, ConversionError
from colibri.layout import Layout, head_bytes
from colibri.model_facts import text_rules


def open_head(layout: Layout) -> None:
    """Raises what the engine says about header, config and directory. The data are a hole in a file that
    lies in memory: they take none."""
    try:
        file = os.memfd_create("colibri-trial", os.MFD_CLOEXEC)
    except OSError:  # a system without such files: the engine says it when the model is loaded
        return
    with os.fdopen(file, "wb") as head:
        try:
            head.truncate(layout.bytes)
        except OSError:  # larger than files may be (ulimit -f): told where the real one is written
            return
        head.write(head_bytes(layout, layout.entries))
        head.flush()
        native.close_model(native.open_model(Path(f"/proc/self/fd/{file}")))


def read_texts(tokenizer: Path, blobs: Mapping[str, bytes], config: Config) -> None:
    """`tokenizer`: the file of the checkpoint that is it, or that it was made from."""
    try:
        text_rules(blobs, config, str(tokenizer))
    except ColibriError as error:
        raise ConversionError(
            f"{str(error).rstrip('.')}. So the model could be converted, but never loaded. Give a "
            "tokenizer.json that the package `tokenizers` reads and that has such a decoder, for example the "
            "one that save_pretrained() of Transformers' AutoTokenizer writes."
        ) from error
