"""Odd values of any key of any family: the model converts and can be loaded, or the error names the key.

Owns: that no such value ends in another error than ours, or in one about fields of our file alone.
Refuses: which values are right (the tests of the families), other files of a checkpoint
(test_convert_bad_input.py).
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

import checkpoints
import encoder_checkpoints
from colibri.convert import convert
from colibri.convert.checkpoint import open_checkpoint, reading
from colibri.convert.prepare import Request, prepare
from colibri.errors import ConversionError

FAMILIES = checkpoints.FAMILIES | {
    "switch_transformers": encoder_checkpoints.switch_transformers,
    "nllb_moe": encoder_checkpoints.nllb_moe,
}
ABSENT = object()
ODD: list[Any] = [-1, 0, 1, 3, 100, 2**31 - 1, 2**40, 0.5, 1e-9, 1e29, 1e40, "x", [], [1], {"a": 1}, True]
ODD += [False, None, ABSENT]
A_KEY = 4  # of these, drawn by its name


def refusal(source: Path) -> str:
    """What is told; empty where the checkpoint would be converted."""
    try:
        with reading() as read:
            prepare(open_checkpoint(source), Request("f32", require_tokenizer=False), read)
    except ConversionError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("family", FAMILIES)
def test_odd_values_are_refused_by_the_name_of_their_key(family: str, tmp_path: Path) -> None:
    source = FAMILIES[family](tmp_path / "hf", tokenizer=False)
    config = checkpoints.read_config(source)
    refused = 0
    for key in config:
        for value in random.Random(key).sample(ODD, A_KEY):
            changed = config | {key: value}
            if value is ABSENT:
                del changed[key]
            (source / "config.json").write_text(json.dumps(changed))
            text = refusal(source)
            refused += bool(text)
            # a tensor that does not fit is told by its own name and shape
            told = not text or key in text or " tensor" in text or "config.json makes" in text
            assert told and len(text) < 1200, (key, value, text)
    assert refused > len(config)


@pytest.mark.parametrize(
    ("family", "values", "field"),
    [
        ("granitemoe", {"embedding_multiplier": 0.1}, "embed_scale"),
        ("granitemoe", {"attention_multiplier": 1e9}, "attn_scale"),
        ("mixtral", {"rms_norm_eps": 2}, "norm_eps"),
        ("deepseek_v3", {"kv_lora_rank": 1020}, "kv_latent_dim"),
        ("gpt_oss", {"swiglu_limit": 1e9}, "ffn_limit"),
        ("glm4_moe", {"routed_scaling_factor": 1e9}, "router_scale"),
    ],
)
def test_what_the_engine_refuses_is_told_with_the_key_and_its_value(
    family: str, values: dict[str, Any], field: str, tmp_path: Path
) -> None:
    """Bounds of a field and how fields fit together: the engine is asked, before anything is written."""
    source = checkpoints.FAMILIES[family](tmp_path / "hf", config_extra=values)
    ((key, value),) = values.items()
    with pytest.raises(ConversionError, match=f"config.json: .*{key} = {value!r}.* would make") as caught:
        convert(source, tmp_path / "m.colibri")
    assert field in str(caught.value) and "convert the model again" not in str(caught.value)
    assert not (tmp_path / "m.colibri").exists()
