"""`colibri convert --explain`: nothing of a checkpoint goes unmentioned, and what is said is true.

Owns: that keys, fields, tensors and entries are all accounted for, in every family; defaults; text and JSON.
Refuses: conversion itself (test_convert.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import checkpoints
from colibri.cli.explain import as_text
from colibri.convert import Explanation, convert, explain
from colibri.errors import ConversionError
from colibri.format import read_container
from fp8_checkpoints import to_fp8
from test_cli import Result, call  # noqa: F401  a fixture


def fields_of(found: Explanation) -> dict[str, set[str]]:
    return {row.key: set(row.fields) for row in found.keys + found.defaults}


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_everything_is_accounted_for(family: str, tmp_path: Path) -> None:
    source = checkpoints.FAMILIES[family](tmp_path / "hf")
    before = sorted(os.listdir(source))
    found = explain(source, "q8")
    assert [row.key for row in found.keys] == list(checkpoints.read_config(source))
    assert all(row.fields or row.why for row in found.keys + found.defaults)
    assert sorted(row.name for row in found.tensors) == sorted(checkpoints.read_tensors(source))
    assert all(bool(row.slots) != bool(row.why) for row in found.tensors)
    assert sorted(os.listdir(source)) == before and os.listdir(tmp_path) == ["hf"]
    json.loads(json.dumps(found.data()))

    container = read_container(convert(source, tmp_path / "m.colibri", "q8").path)
    slots = {slot.split()[0] for row in found.tensors for slot in row.slots}
    assert slots | set(found.made) == {entry.name for entry in container.entries}
    assert found.bytes == sum(entry.bytes for entry in container.entries if entry.kind != "blob")
    # every field that is set has an origin
    decided = set().union(*fields_of(found).values()) | set(found.other_fields)
    schema_default = (0, 1.0, [0] * container.config["n_layers"])
    unnamed = {name for name, value in container.config.items() if value not in schema_default} - decided
    assert not unnamed


def test_what_depends_on_a_key_is_what_is_said(tmp_path: Path) -> None:
    found = fields_of(explain(checkpoints.qwen3_moe(tmp_path / "q", n_layers=4, mlp_only_layers=[0])))
    expected: dict[str, set[str]] = {
        "hidden_size": {"n_embd"},
        "num_hidden_layers": {"n_layers"},
        "num_attention_heads": {"n_heads"},
        "num_key_value_heads": {"n_kv_heads"},
        "head_dim": {"head_dim", "rope_dim", "attn_scale", "rope_inv_freq"},
        "max_position_embeddings": {"context_length"},
        "rms_norm_eps": {"norm_eps"},
        "tie_word_embeddings": {"tied_output"},
        "intermediate_size": {"n_ff"},
        "moe_intermediate_size": {"n_ff_expert"},
        "num_experts": {"n_experts"},
        "num_experts_per_tok": {"n_experts_used"},
        "norm_topk_prob": {"router_norm"},
        "attention_bias": {"attn_qkv_bias", "attn_out_bias"},
        "vocab_size": {"n_vocab"},
        "rope_theta": {"rope_inv_freq"},
        "use_sliding_window": {"window"},
        "dtype": set(),
        "hidden_act": set(),
    }
    assert {key: found[key] for key in expected} == expected
    found = fields_of(explain(checkpoints.gpt_oss(tmp_path / "g")))
    assert found["rope_scaling"] == {"rope_inv_freq", "rope_scale"}
    assert found["layer_types"] == found["sliding_window"] == {"window"}
    assert found["experts_per_token"] == found["num_experts_per_tok"] == {"n_experts_used"}
    found = fields_of(explain(checkpoints.deepseek_v3(tmp_path / "d", groups=(4, 2))))
    assert found["rope_interleave"] == {
        "order of rows in layers.{N}.attn_q",
        "order of rows in layers.{N}.attn_kv_latent",
    }
    assert "n_groups_used" in found["topk_group"] and "n_expert_groups" in found["n_group"]
    assert found["num_nextn_predict_layers"] == {"layers left out"}


def test_settings_by_kind_of_layer_and_sources_of_single_layers(tmp_path: Path) -> None:
    found = fields_of(explain(checkpoints.FAMILIES["gemma4_text"](tmp_path / "g")))
    assert found["rope_parameters"] == {"rope_inv_freq"}
    assert found["attention_k_eq_v"] == {"own_kv_heads", "source of layers.2.attn_v"}
    assert found["global_head_dim"] == {"own_head_dim", "rope_dim", "rope_inv_freq"}


def test_reasons(tmp_path: Path) -> None:
    extra = {"pretraining_tp": 1, "attention_dropout": 0.5, "unknown_but_null": None}
    source = checkpoints.glm4_moe(tmp_path / "hf", config_extra=extra, tied=True, lm_head=True)
    embedding = "model.embed_tokens.weight"
    beyond = {
        "lm_head.weight": checkpoints.read_tensors(source)[embedding],
        "model.layers.2.eh_proj.weight": np.ones((4, 4), np.float32),
        "mtp.fc.weight": np.ones((4, 4), np.float32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
    }
    checkpoints.edit_tensors(source, beyond | {embedding: beyond["lm_head.weight"]})
    found = explain(source, context=100)
    why = {row.key: row.why for row in found.keys}
    assert why["pretraining_tp"] == "harmless: without effect at this value"
    assert why["attention_dropout"] == "harmless: training only"
    assert why["unknown_but_null"] == "harmless: empty"
    assert why["hidden_act"] == "checked: 'silu' or 'swish'"
    left_out = {row.name: row.why for row in found.tensors if not row.slots}
    assert left_out.keys() == beyond.keys()
    assert "tied to the embedding" in left_out["lm_head.weight"]
    assert "in layer 2, behind the model's last one" in left_out["model.layers.2.eh_proj.weight"]
    assert "further on" in left_out["mtp.fc.weight"]
    assert found.other_fields["n_vocab_used"] == "300, from the tokenizer"


def test_defaults_that_config_json_leaves_out(tmp_path: Path) -> None:
    """They are those of the report of a conversion, with what they decide."""
    gone = ["rms_norm_eps", "norm_topk_prob", "rope_theta", "decoder_sparse_step", "attention_bias"]
    source = checkpoints.qwen3_moe(tmp_path / "hf", config_remove=gone[:2] + gone[3:], rope={})
    found = explain(source)
    defaults = {row.key: row.value for row in found.defaults}
    assert defaults == convert(source, tmp_path / "m.colibri").defaults_used
    assert defaults.items() >= {"rms_norm_eps": 1e-6, "norm_topk_prob": False, "rope_theta": 1e4}.items()
    assert set(defaults) == set(gone) and "norm_topk_prob" not in [row.key for row in found.keys]
    assert fields_of(found)["norm_topk_prob"] == {"router_norm"}


def test_fp8_scales_and_mxfp4_are_told(tmp_path: Path) -> None:
    source = checkpoints.qwen3_moe(tmp_path / "hf", storage="f32")
    settings = {"quant_method": "fp8", "weight_block_size": [32, 40]}
    found = explain(to_fp8(source, tmp_path / "fp8", (32, 40), settings=settings))
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    slots = {row.name: row.slots for row in found.tensors}
    assert slots[name] == ["layers.1.experts.3 up (q8)"] and slots[name + "_scale_inv"] == [
        f"scales of {name}"
    ]
    assert found.keys[-1].why == "FP8 weights have one scale for each block of 32 x 40"
    found = explain(checkpoints.gpt_oss(tmp_path / "oss", mxfp4=True))
    assert next(row.why for row in found.keys if row.key == "quantization_config") == (
        "experts are stored as mxfp4"
    )
    text = "\n".join(as_text(found))
    assert "{0-1}.mlp.experts.gate_up_proj_blocks  U8 4 x 192 x 2 x 16" in text
    assert "-> layers.*.experts.* gate, up (mxfp4)" in text
    assert "-> scales of model.layers.*.mlp.experts.gate_up_proj_blocks" in text


def test_what_convert_refuses_is_refused(tmp_path: Path) -> None:
    source = checkpoints.llama(tmp_path / "hf", config_extra={"alpha_x": 1})
    with pytest.raises(ConversionError, match="alpha_x = 1"):
        explain(source)


def test_text_and_json_on_the_command_line(call: Callable[..., Result], tmp_path: Path) -> None:  # noqa: F811
    source = checkpoints.mixtral(tmp_path / "hf", config_remove=["rms_norm_eps"])
    found = call("convert", "--explain", source, tmp_path / "m.colibri")
    assert found.status == 0 and found.err == "" and not (tmp_path / "m.colibri").exists()
    lines = [" ".join(line.split()) for line in found.out.splitlines()]
    assert "hidden_act = 'silu' checked: 'silu' or 'swish'" in lines
    assert "num_local_experts = 4 -> n_experts 4" in lines
    assert "rms_norm_eps = 1e-05 -> norm_eps 1e-05" in lines
    assert lines.index("config.json") < lines.index("tensors") < lines.index("made here")
    at = "model.layers.{0-1}.block_sparse_moe.experts.{0-3}.w1.weight"
    assert f"{at} BF16 96 x 64 -> layers.*.experts.* gate (q8)" in lines
    data: dict[str, Any] = json.loads(call("convert", "--explain", "--json", source).out)
    assert data == explain(source).data()
    for wrong in (["--json", source, "m.colibri"], [source]):
        assert call("convert", *wrong).status == 2
    told = call("convert", source, tmp_path / "m.colibri")
    assert "note: config.json leaves out 1 key, class defaults hold: rms_norm_eps 1e-05" in told.err
