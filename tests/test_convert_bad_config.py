"""Keys of config.json: what changes the mathematics is refused by name, what is neutral passes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import checkpoints
from colibri.convert import convert
from colibri.errors import ConversionError
from colibri.format import read_container


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    """A target; whatever happens, no temporary file may lie beside it afterwards."""
    directory = tmp_path / "out"
    directory.mkdir()
    yield directory / "m.colibri"
    assert [name for name in os.listdir(directory) if name.endswith(".part")] == []


def refused(source: Path, out: Path, match: str) -> str:
    with pytest.raises(ConversionError, match=match) as caught:
        convert(source, out)
    assert not out.exists()
    text = str(caught.value)
    assert len(text) < 900 and "Traceback" not in text
    return text


NOT_NEUTRAL: list[tuple[str, Any]] = [
    ("hidden_act", "gelu"),
    ("sliding_window", -1),
    ("sliding_window", "128"),
    ("quantization_config", {"quant_method": "gptq"}),
    ("pretraining_tp", 2),
    ("mlp_bias", True),
    ("qkv_bias", True),
    ("use_mrope", True),
    ("is_encoder_decoder", True),
    ("layer_types", ["full_attention", "sliding_attention"]),
    ("layer_types", ["full_attention", "chunked_attention"]),
    ("layer_types", ["full_attention"]),
    ("num_experts", 16),
    ("attn_logit_softcapping", 50.0),
    ("mystery_scale", 2),
    ("mystery_switch", False),
    ("auto_map", {"AutoModelForCausalLM": "modeling_x.X"}),
    ("architectures", ["MixtralForSequenceClassification"]),
    ("model_type", "gpt9"),
    ("num_attention_heads", "4"),
    ("num_hidden_layers", 0),
    ("num_hidden_layers", True),
    ("num_key_value_heads", 3),
    ("num_experts_per_tok", 5),
    ("tie_word_embeddings", "yes"),
    ("rms_norm_eps", None),
    ("vocab_size", 2**40),
    ("partial_rotary_factor", 0.5),
    ("rope_scaling", "linear"),
    ("rope_theta", -1),
]


@pytest.mark.parametrize(("key", "value"), NOT_NEUTRAL, ids=[f"{k}={v!r:.20}" for k, v in NOT_NEUTRAL])
def test_a_key_that_changes_the_mathematics_is_refused_by_name(
    tmp_path: Path, out: Path, key: str, value: Any
) -> None:
    source = checkpoints.mixtral(tmp_path / "hf", config_extra={key: value})
    text = refused(source, out, key)
    if key != "num_experts":  # there the message shows num_local_experts beside it
        assert f"{value!r:.50}" in text or f"{value:g}" in text


NEUTRAL: dict[str, Any] = {
    "hidden_act": "silu",
    "sliding_window": 512,
    "quantization_config": None,
    "pretraining_tp": 1,
    "mlp_bias": False,
    "layer_types": ["full_attention"] * 2,
    "num_experts": 4,
    "unknown_but_null": None,
    "unknown_but_empty": [],
    "attention_dropout": 0.1,
    "torch_dtype": "bfloat16",
    "output_router_logits": True,
    "auto_map": {"AutoTokenizer": "tokenization_x.X"},
    "architectures": None,
}


def test_neutral_and_harmless_keys_pass(tmp_path: Path, out: Path) -> None:
    assert convert(checkpoints.mixtral(tmp_path / "hf", config_extra=NEUTRAL), out).entries == 30


def test_a_qwen_window_that_is_switched_off_passes(tmp_path: Path, out: Path) -> None:
    for switch in ({"use_sliding_window": False}, {}):
        source = checkpoints.qwen3(
            tmp_path / "hf", config_extra={"sliding_window": 128} | switch,
            config_remove=[] if switch else ["use_sliding_window"],
        )  # fmt: skip
        assert convert(source, out).entries == 30
        assert not any(read_container(out).config["window"])


def test_all_unknown_keys_are_listed_together(tmp_path: Path, out: Path) -> None:
    source = checkpoints.llama(tmp_path / "hf", config_extra={"alpha_x": 1, "beta_x": "on"})
    text = refused(source, out, "not known for model_type 'llama'")
    assert "alpha_x = 1" in text and "beta_x = 'on'" in text


def test_an_unknown_model_type_lists_the_known(tmp_path: Path, out: Path) -> None:
    source = checkpoints.llama(tmp_path / "hf", config_extra={"model_type": "gpt9"})
    refused(
        source,
        out,
        "'gpt9' is not supported.*deepseek_v3, dots1, ernie4_5_moe, .*glm4_moe, gpt_oss, .*kimi_k2, "
        "lfm2, lfm2_moe, llama, .*ministral, mistral, mixtral, nllb-moe, olmoe.*, switch_transformers",
    )


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"type": "su", "factor": 4.0}},
        {"rope_scaling": {"rope_type": ["yarn"], "factor": 4.0}},
        {"rope_scaling": {"type": "yarn"}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_medium": 2}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": 1}},
        {"rope_scaling": {"rope_type": "dynamic"}},
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 7}},
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8}},
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [0.0] * 8, "long_factor": [2.0] * 8}},
        {"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "no-such", "rope_theta": 1e4}},
        {"rope_scaling": {"type": "linear", "rope_type": "default"}},
        {"rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24]}},
        {"rope_scaling": {"rope_type": "default", "factor": 2.0}},
        {"rope_scaling": {"type": "linear"}},
        {"rope_scaling": {"type": "linear", "factor": "4"}},
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 4.0,
                "high_freq_factor": 1.0,
            }
        },
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 1e6}},
    ],
    ids=lambda rope: json.dumps(rope)[:60],
)
def test_other_rope_settings_are_refused_by_name(tmp_path: Path, out: Path, rope: dict[str, Any]) -> None:
    """Case 8 (e): never ignored."""
    source = checkpoints.llama(tmp_path / "hf", rope=rope)
    text = refused(source, out, "(?i)rope")
    kinds = [value.get("rope_type", value.get("type")) for value in rope.values() if isinstance(value, dict)]
    if kinds[0] in ("su", "no-such"):
        assert repr(kinds[0]) in text and "default, linear, dynamic, proportional, longrope, llama3" in text


def test_an_impossible_head_dim_names_both_numbers(tmp_path: Path, out: Path) -> None:
    source = checkpoints.qwen3_moe(tmp_path / "hf", n_heads=6, n_kv_heads=3, config_extra={"head_dim": None})
    refused(source, out, "hidden_size 64 is not a multiple of num_attention_heads 6")


def test_partial_rotation_is_refused_wherever_it_is_asked_for(tmp_path: Path, out: Path) -> None:
    settings = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    source = checkpoints.llama(tmp_path / "hf", config_extra={"rope_parameters": settings})
    assert "whole head" in refused(source, out, "partial_rotary_factor")
