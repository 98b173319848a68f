"""Conversion of gated delta networks: how projections are cut, which spellings there are, what is refused.

Owns: the rows that each entry takes from its source, a model wrapped in a larger one, files whose fields do
not fit together. Refuses: numbers of whole models (test_parity.py), states (test_states.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import checkpoints
import colibri
from checkpoint_delta import qwen3_5_moe, qwen3_next
from colibri import _native as native
from colibri import inspection
from colibri.convert import convert
from colibri.errors import ConversionError, ModelFileError
from colibri.format import Writer, read_container, read_entry
from colibri.quantize import unpack

# Two key heads of 16, each read by two heads of 24.
KEY, VALUE, KEY_HEADS, GROUP = 16, 24, 2, 2


def load(path: Path, name: str) -> Any:
    container = read_container(path)
    entry = next(e for e in container.entries if e.name == name)
    data = read_entry(container, name)
    if entry.kind == "vector":
        return np.frombuffer(data, "<f4")
    return unpack(data, entry.rows, entry.cols, entry.types[0])


def entries(path: Path) -> list[tuple[str, bytes]]:
    container = read_container(path)
    return [(e.name, read_entry(container, e.name)) for e in container.entries if e.kind != "blob"]


def test_projections_are_cut_by_key_head(tmp_path: Path) -> None:
    source = qwen3_next(tmp_path / "hf", storage="f32")
    path = convert(source, tmp_path / "m.colibri", "f32").path
    tensors, at = checkpoints.read_tensors(source), "model.layers.1.linear_attn."
    parts = tensors[at + "in_proj_qkvz.weight"].reshape(KEY_HEADS, 2 * KEY + 2 * GROUP * VALUE, -1)
    q, k, v, z = np.split(parts, [KEY, 2 * KEY, 2 * KEY + GROUP * VALUE], axis=1)
    wanted = np.concatenate([one.reshape(-1, parts.shape[-1]) for one in (q, k, v)])
    assert np.array_equal(load(path, "layers.1.delta_qkv"), wanted)
    assert np.array_equal(load(path, "layers.1.delta_gate"), z.reshape(-1, parts.shape[-1]))
    gates = tensors[at + "in_proj_ba.weight"].reshape(KEY_HEADS, 2, GROUP, -1)
    for part, name in enumerate(("beta", "decay")):
        assert np.array_equal(load(path, f"layers.1.delta_{name}"), gates[:, part].reshape(4, -1))
    taps = load(path, "layers.1.delta_conv").reshape(4, -1)
    assert np.array_equal(taps, tensors[at + "conv1d.weight"][:, 0].T)
    for name, stored in (("log_rate", "A_log"), ("decay_bias", "dt_bias"), ("value_norm", "norm.weight")):
        assert np.array_equal(load(path, f"layers.1.delta_{name}"), tensors[at + stored])
    queries = tensors["model.layers.3.self_attn.q_proj.weight"].reshape(4, 2, 16, -1)
    for part, name in enumerate(("q", "gate")):
        assert np.array_equal(load(path, f"layers.3.attn_{name}"), queries[:, part].reshape(64, -1))
    for name, stored in (("attn_norm", "input_layernorm"), ("attn_q_norm", "self_attn.q_norm")):
        weight = tensors[f"model.layers.3.{stored}.weight"]
        assert np.array_equal(load(path, f"layers.3.{name}"), weight + np.float32(1))


@pytest.mark.parametrize("maker", [qwen3_next, qwen3_5_moe])
def test_fields(maker: Any, tmp_path: Path) -> None:
    config = read_container(convert(maker(tmp_path / "hf"), tmp_path / "m.colibri").path).config
    expected = {
        "head_dim": 16, "rope_dim": 4, "attn_scale": 0.25, "qk_norm": 1, "attn_gate": 1, "attn_qkv_bias": 0,
        "mixer": [1, 1, 1, 0], "delta_heads": 4, "delta_key_heads": 2, "delta_key_dim": 16,
        "delta_value_dim": 24, "conv_width": 4, "router_norm": 1, "n_experts": [8] * 4, "n_ff": 0,
        "n_ff_shared": 40, "shared_gate": 1, "window": [0] * 4, "context_length": 512,
    }  # fmt: skip
    assert {name: config[name] for name in expected} == expected


def test_gates_stay_f32_and_states_are_counted_as_attention(tmp_path: Path) -> None:
    path = convert(qwen3_next(tmp_path / "hf"), tmp_path / "m.colibri", "q4").path
    types = {e.name.split(".")[-1]: e.types for e in read_container(path).entries if "layers.0" in e.name}
    assert types["delta_beta"] == types["delta_decay"] == types["delta_conv"] == ("f32",)
    assert types["delta_qkv"] == types["delta_gate"] == types["delta_out"] == ("q4",)
    described = inspection.describe(path)
    of_layers = [e.bytes for e in described.entries if "delta_" in e.name and not e.name.endswith("_norm")]
    assert described.bytes_by_class["attention"] > sum(of_layers) > 0


def wrapped(source: Path, target: Path, extra: dict[str, Any]) -> Path:
    """The checkpoint as the language model of a larger one, as it is released: text_config, prefixes, a
    vision tower and a layer for further tokens beside it, experts in one tensor."""
    qwen3_5_moe(target, prefix="", experts="stacked")
    config = checkpoints.read_config(source)
    config["model_type"] = "qwen3_5_moe_text"
    config["mtp_num_hidden_layers"] = 1
    tensors = checkpoints.read_tensors(target)
    moved = {
        (name if name == "lm_head.weight" else name.replace("model.", "model.language_model.", 1)): value
        for name, value in tensors.items()
    }
    moved |= {
        "model.visual.blocks.0.attn.qkv.weight": np.ones((6, 2), np.float32),
        "mtp.layers.0.input_layernorm.weight": np.ones(64, np.float32),
    }
    moved = {name: value.astype(ml_dtypes.bfloat16) for name, value in moved.items()}
    checkpoints.edit_tensors(target, moved, remove=[name for name in tensors if name not in moved])
    outer = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": config,
        "vision_config": {"model_type": "qwen3_5_moe_vision", "depth": 1},
        "image_token_id": 290,
        "tie_word_embeddings": False,
    }
    checkpoints.edit_json(
        target / "config.json", outer | extra, remove=[key for key in config if key not in outer]
    )
    return target


def test_a_wrapped_language_model_is_the_same_file(tmp_path: Path) -> None:
    bare = qwen3_5_moe(tmp_path / "bare")
    whole = wrapped(bare, tmp_path / "whole", {})
    reports = [convert(source, tmp_path / f"{source.name}.colibri", "f32") for source in (bare, whole)]
    assert entries(reports[0].path) == entries(reports[1].path)
    assert [report.model_type for report in reports] == ["qwen3_5_moe_text", "qwen3_5_moe"]
    assert reports[0].ignored_tensors == []
    assert sorted(reports[1].ignored_tensors) == [
        "model.visual.blocks.0.attn.qkv.weight",
        "mtp.layers.0.input_layernorm.weight",
    ]


def test_a_key_beside_the_language_model_is_refused_by_name(tmp_path: Path) -> None:
    source = wrapped(qwen3_5_moe(tmp_path / "bare"), tmp_path / "whole", {"action_config": {"a": 1}})
    with pytest.raises(ConversionError, match="action_config"):
        convert(source, tmp_path / "m.colibri")


def test_layers_follow_the_interval_or_the_list(tmp_path: Path) -> None:
    source = qwen3_next(tmp_path / "hf", n_layers=5, config_remove=["layer_types"])
    report = convert(source, tmp_path / "m.colibri")
    assert read_container(report.path).config["mixer"] == [1, 1, 1, 0, 1]
    other = qwen3_next(tmp_path / "other", n_layers=3, full=(1,), config_extra={"full_attention_interval": 2})
    assert read_container(convert(other, tmp_path / "m.colibri").path).config["mixer"] == [1, 0, 1]
    checkpoints.edit_json(other / "config.json", {}, remove=["layer_types"])
    assert read_container(convert(other, tmp_path / "m.colibri").path).config["mixer"] == [1, 0, 1]


def test_defaults_of_the_classes(tmp_path: Path) -> None:
    for maker in (qwen3_next, qwen3_5_moe):
        source = maker(
            tmp_path / maker.__name__, rope={}, conv_width=4, config_remove=["linear_conv_kernel_dim"]
        )
        report = convert(source, tmp_path / "m.colibri")
        config = read_container(report.path).config
        assert (config["rope_dim"], config["conv_width"], config["router_norm"]) == (4, 4, 1)
        assert report.defaults_used["partial_rotary_factor"] == 0.25
        assert report.defaults_used["linear_conv_kernel_dim"] == 4


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("attention_bias", True, "attention_bias"),
        ("attn_output_gate", False, "attn_output_gate"),
        ("layer_types", ["full_attention"] * 3, "layer_types"),
        ("layer_types", ["linear_attention", "sliding_attention"] * 2, "layer_types"),
        ("full_attention_interval", 0, "full_attention_interval"),
        ("sliding_window", 100, "sliding_window"),
        ("linear_num_value_heads", 5, "linear_num_value_heads"),
        ("linear_key_head_dim", 17, "in_proj_qkvz"),
        ("linear_value_head_dim", 23, "in_proj_qkvz"),
        ("linear_conv_kernel_dim", 3, "conv1d"),
        ("linear_conv_kernel_dim", True, "linear_conv_kernel_dim"),
        ("partial_rotary_factor", 0.2, "3 elements of a head rotate"),
        ("linear_decay", 2, "linear_decay"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(
    key: str, value: Any, named: str, tmp_path: Path
) -> None:
    source = qwen3_next(tmp_path / "hf", config_extra={key: value})
    with pytest.raises(ConversionError, match=named):
        convert(source, tmp_path / "m.colibri")


@pytest.mark.parametrize(("key", "value"), [("norm_topk_prob", False), ("mlp_only_layers", [1])])
def test_the_family_without_dense_layers_refuses_them(key: str, value: Any, tmp_path: Path) -> None:
    source = qwen3_5_moe(tmp_path / "hf", config_extra={key: value})
    with pytest.raises(ConversionError, match=key):
        convert(source, tmp_path / "m.colibri")


@pytest.mark.parametrize("name", ["conv1d.weight", "A_log", "dt_bias", "norm.weight", "in_proj_ba.weight"])
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    source = qwen3_next(tmp_path / "hf")
    checkpoints.edit_tensors(source, {}, remove=[f"model.layers.2.linear_attn.{name}"])
    with pytest.raises(ConversionError, match=f"layers.2.linear_attn.{name}"):
        convert(source, tmp_path / "m.colibri")


CONFIG: dict[str, Any] = {
    "n_vocab": 20, "n_vocab_used": 20, "n_layers": 2, "n_embd": 8, "n_heads": 2, "n_kv_heads": 1,
    "head_dim": 6, "rope_dim": 2, "context_length": 64, "norm_eps": 1e-6, "attn_scale": 0.5, "n_ff": 12,
    "mixer": [1, 0], "delta_heads": 3, "delta_key_heads": 1, "delta_key_dim": 5, "delta_value_dim": 7,
    "conv_width": 4,
}  # fmt: skip


def write(path: Path, config: dict[str, Any]) -> Path:
    with Writer(path, config, "f32", {}) as writer:
        for entry in writer.tensors:
            writer.write(entry.name, [bytes(entry.bytes)])
    return path


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"mixer": [0, 0]}, "mixer 1 goes with"),
        ({"delta_heads": 0}, "mixer 1 goes with"),
        ({"delta_key_heads": 0, "delta_heads": 1}, "mixer 1 goes with"),
        ({"delta_key_dim": 0}, "delta_value_dim is above 1"),
        (
            {"mixer": [0, 0], "delta_heads": 0, "delta_key_heads": 0, "delta_value_dim": 0, "conv_width": 0},
            "mixer 1 goes with",
        ),
        ({"delta_value_dim": 0}, "mixer 1 goes with"),
        ({"conv_width": 0}, "mixer 1 goes with"),
        ({"delta_key_heads": 2}, "not a multiple of delta_key_heads"),
        ({"kv_latent_dim": 5, "value_dim": 3, "attn_gate": 1}, "goes without attn_gate"),
    ],
)
def test_files_whose_fields_do_not_fit_are_refused(
    changes: dict[str, Any], fault: str, tmp_path: Path
) -> None:
    native.close_model(native.open_model(write(tmp_path / "good.colibri", CONFIG)))
    with pytest.raises(ModelFileError, match=fault):
        native.open_model(write(tmp_path / "m.colibri", CONFIG | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mixer": [1, 1]},  # no keys and values at all
        {"conv_width": 1},
        {"conv_width": 16, "delta_key_heads": 3, "attn_gate": 1},
        {"kv_latent_dim": 5, "value_dim": 3, "latent_norm_eps": 1e-6},  # latent attention in the other layer
    ],
)
def test_any_shape_runs(changes: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path / "m.colibri", CONFIG | changes)
    with colibri.load(path, threads=1, context=200) as model:
        assert not model.logits([1, 2, 3] * 60).any()


def test_states_too_large_to_count_are_refused(tmp_path: Path) -> None:
    """Every size at its bound fits into 64 bits; the plan refuses what the machine cannot hold."""
    config = CONFIG | {"delta_heads": 64, "delta_key_heads": 1, "delta_key_dim": 512, "delta_value_dim": 512}
    path = write(tmp_path / "m.colibri", config | {"n_embd": 1, "n_ff": 1})
    with pytest.raises(colibri.ColibriError, match="available|smaller"):
        colibri.load(path, threads=1, context=128, max_batch=4096)
