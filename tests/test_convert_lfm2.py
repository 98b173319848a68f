"""Conversion of LFM2: how a convolution's projections are cut, which spellings there are, what is refused.

Owns: rows and taps of each entry, widths and layers that old files say in their own way, files whose fields
do not fit together. Refuses: numbers of whole models (test_parity.py), states (test_states.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import checkpoints
from checkpoints import lfm2, lfm2_moe
from colibri import _native as native
from colibri.convert import convert, explain
from colibri.convert.families import lfm2_moe as family
from colibri.convert.keys import Keys
from colibri.errors import ConversionError, ModelFileError
from colibri.format import read_container
from test_convert_delta import CONFIG, load, write

CONV, FULL = "conv", "full_attention"


def test_projections_are_cut_by_what_they_are_for(tmp_path: Path) -> None:
    source = lfm2_moe(tmp_path / "hf", storage="f32", taps=4)
    path = convert(source, tmp_path / "m.colibri", "f32").path
    tensors, at = checkpoints.read_tensors(source), "model.layers.1.conv."
    parts = np.split(tensors[at + "in_proj.weight"], 3)
    for name, rows in zip(("beta", "gate", "qkv"), parts, strict=True):
        assert np.array_equal(load(path, f"layers.1.delta_{name}"), rows)
    assert np.array_equal(
        load(path, "layers.1.delta_conv").reshape(4, -1), tensors[at + "conv.weight"][:, 0].T
    )
    assert np.array_equal(load(path, "layers.1.delta_out"), tensors[at + "out_proj.weight"])
    assert np.array_equal(load(path, "output_norm"), tensors["model.embedding_norm.weight"])
    bias = tensors["model.layers.1.feed_forward.expert_bias"]
    assert np.array_equal(load(path, "layers.1.router_bias"), bias)


def test_all_projections_have_the_type_that_is_asked_for(tmp_path: Path) -> None:
    path = convert(lfm2_moe(tmp_path / "hf"), tmp_path / "m.colibri", "q4").path
    types = {e.name.split(".")[-1]: e.types for e in read_container(path).entries if "layers.0" in e.name}
    names = ("delta_qkv", "delta_gate", "delta_beta", "delta_out")
    assert {types[name] for name in names} == {("q4",)} and types["delta_conv"] == ("f32",)
    assert "delta_decay" not in types and "delta_value_norm" not in types


# Keys of released files: of one with experts, and of an old dense one.
WITH_EXPERTS: dict[str, Any] = {
    "architectures": ["Lfm2MoeForCausalLM"], "bos_token_id": 1, "conv_L_cache": 3, "conv_bias": False,
    "dtype": "bfloat16", "eos_token_id": 7, "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 7168,
    "layer_types": [FULL if n in (2, 6, 10, 14, 18, 21) else CONV for n in range(24)],
    "max_position_embeddings": 128000, "model_type": "lfm2_moe", "moe_intermediate_size": 1792,
    "norm_eps": 1e-05, "norm_topk_prob": True, "num_attention_heads": 32, "num_dense_layers": 2,
    "num_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
    "pad_token_id": 0, "rope_theta": 1000000.0, "routed_scaling_factor": 1.0, "use_cache": True,
    "transformers_version": "4.56.0", "use_expert_bias": True, "vocab_size": 65536,
}  # fmt: skip
DENSE: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True, "block_dim": 2048,
    "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0,
    "block_multiple_of": 256, "block_norm_eps": 1e-05, "block_out_init_scale": 1.0, "block_use_swiglu": True,
    "block_use_xavier_init": True, "bos_token_id": 1, "conv_L_cache": 3, "conv_bias": False, "conv_dim": 2048,
    "conv_dim_out": 2048, "conv_use_xavier_init": True, "eos_token_id": 7,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048, "initializer_range": 0.02,
    "max_position_embeddings": 128000, "model_type": "lfm2", "norm_eps": 1e-05, "num_attention_heads": 32,
    "num_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pad_token_id": 0,
    "rope_theta": 1000000.0, "torch_dtype": "bfloat16", "use_cache": True, "use_pos_enc": True,
    "vocab_size": 65536,
}  # fmt: skip


def fields(config: dict[str, Any]) -> dict[str, Any]:
    keys = Keys(config, Path("config.json"))
    decoder = family.read_config(keys)
    keys.finish()
    return decoder.config


def test_released_files_are_read() -> None:
    moe, dense = fields(WITH_EXPERTS), fields(DENSE)
    assert [n for n, kind in enumerate(moe["mixer"]) if not kind] == [2, 6, 10, 14, 18, 21]
    assert moe["n_experts"] == [0, 0] + [32] * 22 and (moe["n_ff"], moe["n_ff_expert"]) == (7168, 1792)
    assert [n for n, kind in enumerate(dense["mixer"]) if not kind] == DENSE["full_attn_idxs"]
    assert dense["n_ff"] == 8192 and "router_score" not in dense
    for one in (moe, dense):
        assert (one["delta_heads"], one["delta_key_heads"], one["conv_width"]) == (2048, 32, 3)
        assert (one["tied_output"], one["head_dim"], one["rope_dim"]) == (1, 64, 64)


@pytest.mark.parametrize(
    ("changes", "width"),
    [
        ({"block_auto_adjust_ff_dim": False}, 12288),
        ({"block_ffn_dim_multiplier": None}, 8192),
        ({"block_ff_dim": 10000}, 6912),  # 6666, up to a multiple of 256
        ({"block_ff_dim": 10000, "block_ffn_dim_multiplier": None}, 6666),
        ({"block_ff_dim": 10000, "block_ffn_dim_multiplier": 1.3, "block_multiple_of": 10}, 8670),
        ({"intermediate_size": 300}, 8192),  # the other key wins
    ],
)
def test_widths_of_dense_models(changes: dict[str, Any], width: int) -> None:
    assert fields(DENSE | changes)["n_ff"] == width


def test_without_layer_types_all_dense_layers_attend(tmp_path: Path) -> None:
    source = lfm2(tmp_path / "hf", full=(0, 1, 2), config_remove=["layer_types"])
    config = read_container(convert(source, tmp_path / "m.colibri").path).config
    assert (config["mixer"], config["delta_heads"], config["conv_width"]) == ([0] * 3, 0, 0)


def test_tie_embedding_wins(tmp_path: Path) -> None:
    extra = {"tie_embedding": False, "tie_word_embeddings": True}
    source = lfm2_moe(tmp_path / "hf", tied=False, config_extra=extra)
    assert read_container(convert(source, tmp_path / "m.colibri").path).config["tied_output"] == 0


def test_defaults_of_the_class(tmp_path: Path) -> None:
    gone = ["conv_L_cache", "conv_bias", "norm_topk_prob", "use_expert_bias", "norm_eps"]
    found = explain(lfm2_moe(tmp_path / "hf", config_remove=gone))
    assert {row.key: row.value for row in found.defaults} == {
        "conv_L_cache": 3, "conv_bias": False, "norm_topk_prob": True, "use_expert_bias": True,
        "norm_eps": 1e-5, "hidden_act": "silu",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"conv_bias": True}, "conv_bias = True"),
        ({"layer_types": None}, "layer_types = None"),
        ({"layer_types": [CONV] * 3}, "layer_types"),
        ({"layer_types": [CONV, CONV, "sliding_attention", CONV]}, "layer_types"),
        ({"full_attn_idxs": [1]}, "full_attn_idxs"),
        ({"full_attn_idxs": [9]}, "full_attn_idxs"),
        ({"full_attn_idxs": "all"}, "full_attn_idxs"),
        ({"conv_L_cache": 4}, "conv.conv.weight"),
        ({"conv_L_cache": 17}, "conv_width"),
        ({"conv_dim": 32}, "hidden_size = 64; expected the same as conv_dim = 32"),
        ({"num_heads": 8}, "num_attention_heads"),
        ({"block_norm_eps": 1e-6}, "norm_eps"),
        ({"use_pos_enc": False}, "use_pos_enc"),
        ({"sliding_window": 20}, "sliding_window"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps"),
        ({"block_ff_dim": 96}, "block_ff_dim"),  # of the dense family
        ({"use_expert_bias": False}, "expert_bias"),  # a tensor that then has no use
        ({"conv_dilation": 2}, "conv_dilation"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_by_name(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    source = lfm2_moe(tmp_path / "hf", config_extra=changes)
    with pytest.raises(ConversionError, match=named):
        convert(source, tmp_path / "m.colibri")


@pytest.mark.parametrize("name", ["conv.conv.weight", "conv.in_proj.weight", "operator_norm.weight"])
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    source = lfm2_moe(tmp_path / "hf")
    checkpoints.edit_tensors(source, {}, remove=[f"model.layers.1.{name}"])
    with pytest.raises(ConversionError, match=f"layers.1.{name}"):
        convert(source, tmp_path / "m.colibri")


ALONE = {"delta_heads": 6, "delta_key_heads": 2, "delta_key_dim": 0, "delta_value_dim": 1}


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"delta_value_dim": 2}, "delta_value_dim is above 1 but delta_key_dim is 0"),
        ({"delta_key_heads": 4}, "not a multiple of delta_key_heads"),
        ({"conv_width": 0}, "mixer 1 goes with"),
    ],
)
def test_files_whose_fields_do_not_fit_are_refused(
    changes: dict[str, Any], fault: str, tmp_path: Path
) -> None:
    native.close_model(native.open_model(write(tmp_path / "good.colibri", CONFIG | ALONE)))
    with pytest.raises(ModelFileError, match=fault):
        native.open_model(write(tmp_path / "m.colibri", CONFIG | ALONE | changes))
