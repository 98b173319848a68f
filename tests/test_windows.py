"""Where sliding windows stand: config.json of each family against what its class in Transformers does.

Owns: sliding_window, use_sliding_window, max_window_layers, layer_types. Refuses: what a window does
(test_mechanisms.py, test_parity.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import checkpoints
from colibri.convert import convert
from colibri.errors import ConversionError
from colibri.format import read_container

W = {"sliding_window": 128}
ON = W | {"use_sliding_window": True}
TYPES = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("family", "extra", "windows"),
    [
        ("mixtral", W, [128] * 4),
        ("mixtral", W | {"sliding_window": 512}, [0] * 4),  # as long as the context
        ("qwen3_moe", ON, [128] * 4),
        ("qwen3_moe", W | {"use_sliding_window": False}, [0] * 4),
        ("qwen2_moe", ON | {"max_window_layers": 2}, [128, 0, 0, 0]),
        ("qwen2_moe", ON, [128, 0, 128, 0]),
        ("qwen2_moe", ON | {"layer_types": TYPES}, [0, 128, 0, 128]),
        ("qwen3", ON, [0] * 4),
        ("qwen3", ON | {"max_window_layers": 3}, [0, 0, 0, 128]),
        ("qwen3", ON | {"layer_types": TYPES}, [0, 128, 0, 128]),
        ("qwen2", ON | {"max_window_layers": 1}, [0, 128, 128, 128]),
        ("qwen2", ON | {"layer_types": TYPES}, [0, 128, 0, 128]),
        ("mistral", W, [128] * 4),
        ("ministral", {"layer_types": TYPES}, [0, 128, 0, 128]),
        ("ministral", {"layer_types": None}, [128] * 4),
        ("dots1", W | {"max_window_layers": 2}, [0, 0, 128, 128]),
    ],
)
def test_windows_stand_where_the_class_places_them(
    tmp_path: Path, family: str, extra: dict[str, Any], windows: list[int]
) -> None:
    source = checkpoints.FAMILIES[family](tmp_path / "hf", n_layers=4, config_extra=extra)
    out = convert(source, tmp_path / "m.colibri").path
    assert read_container(out).config["window"] == windows


@pytest.mark.parametrize(
    ("family", "extra", "match"),
    [
        ("llama", W, "sliding_window = 128.*no sliding windows"),
        ("glm4_moe", {"layer_types": TYPES}, "layer_types.*only 'full_attention'"),
        ("qwen3", W | {"layer_types": TYPES}, "layer_types.*only 'full_attention'"),  # switched off
        ("mistral", W | {"layer_types": TYPES}, "layer_types.*in layers 0, 1, 2, 3"),
        ("qwen3_moe", ON | {"layer_types": TYPES}, "layer_types.*in layers 0, 1, 2, 3"),
        ("qwen3", ON | {"use_sliding_window": "yes"}, "use_sliding_window = 'yes'"),
    ],
)
def test_windows_that_contradict_the_class_are_refused(
    tmp_path: Path, family: str, extra: dict[str, Any], match: str
) -> None:
    source = checkpoints.FAMILIES[family](tmp_path / "hf", n_layers=4, config_extra=extra)
    with pytest.raises(ConversionError, match=match):
        convert(source, tmp_path / "m.colibri")
