"""Families of the second wave: what is folded, permuted or made at conversion, checkpoints of several
modalities, and what is refused.

Owns: values that differ from the checkpoint's by design. Refuses: the mathematics (test_parity.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import checkpoints
from checkpoints import FAMILIES
from colibri.convert import convert
from colibri.errors import ConversionError
from colibri.format import read_blobs, read_container, read_entry, read_json_blob
from colibri.quantize import unpack

Floats = npt.NDArray[np.float32]
FIELDS: dict[str, dict[str, Any]] = {
    "granitemoe": {"embed_scale": 6.0, "residual_scale": pytest.approx(0.7), "router_norm": 1},
    "ernie4_5_moe": {
        "n_experts": [0, 8, 8],
        "n_ff_shared": 96,
        "router_bias": 1,
        "router_norm_min": pytest.approx(1e-12),
    },
    "minimax_m2": {"qk_norm": 2, "rope_dim": 8, "router_score": 1, "router_bias": 1, "router_norm": 1},
    "phimoe": {"layer_norm": 1, "output_bias": 1, "router_near": pytest.approx(0.6), "router_norm": 0},
    "llama4_text": {
        "window": [24, 24, 0, 24],
        "window_aligned": 1,
        "rope_set": [0, 0, 2, 0],
        "qk_norm": 3,
        "temperature_step": 8,
        "router_score": 2,
        "router_on_input": 1,
        "n_experts": [0, 4, 0, 4],
        "n_ff_shared": 48,
    },
    "gemma4_text": {
        "window": [24, 24, 0],
        "rope_set": [1, 1, 0],
        "parallel_dense": 1,
        "value_norm": 1,
        "layer_scale": 1,
        "router_expert_scale": 1,
        "n_experts": [6, 6, 6],
        "n_kv_heads": 2,
        "own_kv_heads": [0, 0, 1],
        "head_dim": 16,
        "own_head_dim": [0, 0, 32],
        "rope_dim": 32,
        "attn_scale": 1.0,
        "output_cap": 2.0,
    },
    "gemma3_text": {
        "window": [24, 24, 0, 24],
        "rope_set": [1, 1, 0, 1],
        "rope_sets": 2,
        "post_norm": 1,
        "embed_scale": 8.0,
        "attn_scale": pytest.approx(24**-0.5),
        "ffn_cubic": pytest.approx(0.044715),
    },
    "lfm2_moe": {
        "mixer": [1, 1, 0, 1],
        "delta_heads": 64,
        "delta_key_heads": 1,
        "delta_key_dim": 0,
        "delta_value_dim": 1,
        "conv_width": 3,
        "qk_norm": 1,
        "n_experts": [0, 8, 8, 8],
        "n_ff": 96,
        "router_score": 1,
        "router_bias": 1,
        "router_norm": 1,
        "router_norm_add": pytest.approx(1e-6),
        "tied_output": 1,
    },
    "lfm2": {
        "mixer": [1, 1, 0],
        "n_experts": [0] * 3,
        "n_ff": 96,
        "router_score": 0,
        "norm_eps": pytest.approx(1e-5),
    },
}


def entry(path: Path, name: str) -> Floats:
    """A vector or matrix of a file as float32."""
    container = read_container(path)
    found = next(entry for entry in container.entries if entry.name == name)
    data = read_entry(container, name)
    if found.kind == "vector":
        return np.frombuffer(data, "<f4")
    return unpack(data, found.rows, found.cols, found.types[0])


def tensors_only(path: Path) -> bytes:
    container = read_container(path)
    return b"".join(read_entry(container, e.name) for e in container.entries if e.kind != "blob")


@pytest.mark.parametrize("family", FIELDS)
def test_fields_of_each_family(tmp_path: Path, family: str) -> None:
    report = convert(FAMILIES[family](tmp_path / "hf"), tmp_path / "m.colibri")
    config = read_container(report.path).config
    assert {name: config[name] for name in FIELDS[family]} == FIELDS[family]
    assert report.ignored_tensors == [] and report.notes == [] and report.model_type == family


def test_a_scale_of_logits_is_folded_into_the_last_norm(tmp_path: Path) -> None:
    source = FAMILIES["granitemoe"](tmp_path / "hf")
    path = convert(source, tmp_path / "m.colibri", "f32").path
    weight = checkpoints.read_tensors(source)["model.norm.weight"].astype(np.float64)
    assert np.array_equal(entry(path, "output_norm"), (weight * (1 / 0.8)).astype(np.float32))


def test_norms_that_add_one_are_stored_with_it(tmp_path: Path) -> None:
    source = FAMILIES["gemma3_text"](tmp_path / "hf")
    path = convert(source, tmp_path / "m.colibri", "f32").path
    tensors = checkpoints.read_tensors(source)
    for target, name in (
        ("output_norm", "model.norm"),
        ("layers.1.attn_post_norm", "model.layers.1.post_attention_layernorm"),
        ("layers.2.attn_k_norm", "model.layers.2.self_attn.k_norm"),
    ):
        assert np.array_equal(entry(path, target), tensors[name + ".weight"] + np.float32(1))


@pytest.mark.parametrize("family", ["ernie4_5_moe", "llama4_text"])
def test_rows_that_rotate_as_neighbours_are_set_apart(tmp_path: Path, family: str) -> None:
    source = FAMILIES[family](tmp_path / "hf")
    path = convert(source, tmp_path / "m.colibri", "f32").path
    for part, heads in (("q", 4), ("k", 2)):
        rows = checkpoints.read_tensors(source)[f"model.layers.1.self_attn.{part}_proj.weight"]
        by_head = rows.reshape(heads, 8, 2, -1)  # pairs of neighbours
        assert np.array_equal(
            entry(path, f"layers.1.attn_{part}"), by_head.swapaxes(1, 2).reshape(rows.shape)
        )


def test_values_made_of_the_weights_of_keys(tmp_path: Path) -> None:
    path = convert(FAMILIES["gemma4_text"](tmp_path / "hf"), tmp_path / "m.colibri", "f32").path
    for layer, same in ((0, False), (2, True)):
        key, value = (entry(path, f"layers.{layer}.attn_{part}") for part in "kv")
        assert np.array_equal(key, value) == same
    full, local = np.split(entry(path, "rope_inv_freq"), 2)
    assert np.allclose(full, [*(1e6 ** (-n / 16) for n in range(4)), *[0] * 12])
    assert (local[:8] > 0).all() and not local[8:].any()


def test_values_have_weights_of_their_own_where_the_config_says_so(tmp_path: Path) -> None:
    """In a layer of the other kind no weight of keys stands in, and none of values is passed over."""
    value = "model.layers.{}.self_attn.v_proj.weight"
    source = FAMILIES["gemma4_text"](tmp_path / "without")
    checkpoints.edit_tensors(source, {}, remove=[value.format(1)])
    with pytest.raises(ConversionError, match="layers.1.self_attn.v_proj.weight"):
        convert(source, tmp_path / "m.colibri")
    source = FAMILIES["gemma4_text"](tmp_path / "with")
    checkpoints.edit_tensors(source, {value.format(2): np.zeros((32, 64), np.float32)})
    with pytest.raises(ConversionError, match="not part of the model.*layers.2.self_attn.v_proj"):
        convert(source, tmp_path / "m.colibri")


def test_heads_by_layer_in_either_spelling(tmp_path: Path) -> None:
    old = FAMILIES["gemma4_text"](tmp_path / "old")
    new = FAMILIES["gemma4_text"](tmp_path / "new")
    own = {"per_layer_config": {"2": {"head_dim": 32, "num_key_value_heads": 1}}}
    checkpoints.edit_json(new / "config.json", own, remove=["global_head_dim", "num_global_key_value_heads"])
    paths = [convert(one, tmp_path / f"{one.name}.colibri").path for one in (old, new)]
    assert read_container(paths[0]).config == read_container(paths[1]).config
    key, value = (entry(paths[1], f"layers.2.attn_{part}") for part in "kv")
    assert key.shape == (32, 64) and np.array_equal(key, value)


def test_entries_without_a_source_are_made(tmp_path: Path) -> None:
    path = convert(FAMILIES["llama4_text"](tmp_path / "hf"), tmp_path / "m.colibri", "f32").path
    assert np.array_equal(entry(path, "layers.0.attn_q_norm"), np.ones(16, np.float32))
    names = {one.name for one in read_container(path).entries}
    assert "layers.1.attn_k_norm" in names and "layers.2.attn_k_norm" not in names
    factors = 0.3 * np.log(1 + np.arange(512 // 8 + 1))
    assert np.allclose(entry(path, "attn_temperature"), factors, rtol=1e-7)


def test_equal_factors_of_llama3_leave_no_ramp(tmp_path: Path) -> None:
    """As released: waves longer than the original length are divided, all others kept."""
    rope = {
        "rope_theta": 1e4,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 1.0,
            "original_max_position_embeddings": 64,
        },
    }
    path = convert(FAMILIES["llama4_text"](tmp_path / "hf", rope=rope), tmp_path / "m.colibri").path
    plain = 1e4 ** -(np.arange(0, 16, 2) / 16)
    expected = np.where(2 * np.pi / plain > 64, plain / 16, plain)
    assert np.allclose(entry(path, "rope_inv_freq"), expected, rtol=1e-6)


def test_both_spellings_of_rope_by_kind_of_layer_agree(tmp_path: Path) -> None:
    old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}}
    paths = [
        convert(FAMILIES["gemma3_text"](tmp_path / name, rope=rope), tmp_path / f"{name}.colibri").path
        for name, rope in (("new", None), ("old", old))
    ]
    frequencies = [entry(path, "rope_inv_freq") for path in paths]
    assert np.array_equal(frequencies[0], frequencies[1])
    local = 1e4 ** -(np.arange(0, 16, 2) / 16)
    full = 1e6 ** -(np.arange(0, 16, 2) / 16) / 4
    assert np.allclose(frequencies[0], np.concatenate([full, local]), rtol=1e-6)


def test_layers_behind_the_last_one_are_left_out(tmp_path: Path) -> None:
    source = FAMILIES["ernie4_5_moe"](tmp_path / "hf", config_extra={"num_nextn_predict_layers": 1})
    extra = "model.mtp_linear_proj.0.weight"
    checkpoints.edit_tensors(source, {extra: np.zeros((64, 128), np.float32)})
    assert convert(source, tmp_path / "m.colibri").ignored_tensors == [extra]


# ------------------------------------------------------------------ several modalities


def wrapped(
    path: Path, family: str, model_type: str, architecture: str, tower: str
) -> tuple[Path, list[str]]:
    """A checkpoint whose text is inside a larger model; and the names that do not belong to the text."""
    source = FAMILIES[family](path, prefix="language_model.", extra_rows=4)
    text = checkpoints.read_config(source) | {"eos_token_id": [2, 4]}
    outer = {
        "architectures": [architecture],
        "model_type": model_type,
        "text_config": text,
        "vision_config": {"hidden_size": 8},
        "image_token_index": 301,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    }
    checkpoints.edit_json(source / "config.json", outer, remove=[key for key in text if key not in outer])
    others = [f"{tower}.layers.0.weight", f"{tower}.norm.weight"]
    checkpoints.edit_tensors(source, {name: np.zeros((3, 2), np.float32) for name in others})
    (source / "generation_config.json").unlink()
    return source, others


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e3, "original_max_position_embeddings": 64}


def test_what_a_norm_takes_away_again_scales_nothing(tmp_path: Path) -> None:
    """llama4 norms q and k behind the rotation, whose scale is then without effect; else it counts."""
    for norm, scale in ((True, 1.0), (False, float(np.float32(0.1 * np.log(4) + 1)))):
        name = f"norm-{norm}"
        source = FAMILIES["llama4_text"](tmp_path / name, qk_norm=norm)
        checkpoints.edit_json(source / "config.json", {"rope_parameters": YARN}, remove=["rope_scaling"])
        path = convert(source, tmp_path / f"{name}.colibri").path
        assert read_container(path).config["rope_scale"] == pytest.approx(scale)


WRAPPED = [
    ("llama4_text", "llama4", "Llama4ForConditionalGeneration", "vision_model"),
    ("gemma3_text", "gemma3", "Gemma3ForConditionalGeneration", "vision_tower"),
    ("gemma4_text", "gemma4", "Gemma4ForConditionalGeneration", "embed_vision"),
]


@pytest.mark.parametrize(("family", "model_type", "architecture", "tower"), WRAPPED)
def test_the_text_of_a_larger_model(
    tmp_path: Path, family: str, model_type: str, architecture: str, tower: str
) -> None:
    plain = convert(FAMILIES[family](tmp_path / "plain", extra_rows=4), tmp_path / "plain.colibri").path
    source, others = wrapped(tmp_path / "hf", family, model_type, architecture, tower)
    report = convert(source, tmp_path / "m.colibri")
    assert tensors_only(report.path) == tensors_only(plain)
    assert sorted(report.ignored_tensors) == sorted(others) and report.model_type == model_type
    assert read_json_blob(read_blobs(report.path), "generation.json")["eos_ids"] == [2, 4]


@pytest.mark.parametrize("tied", [True, False])
def test_the_larger_model_says_whether_its_head_is_tied(tmp_path: Path, tied: bool) -> None:
    """What text_config says of it has no effect in Transformers 5.24."""
    source, _ = wrapped(tmp_path / "hf", *WRAPPED[0])
    text = checkpoints.read_config(source)["text_config"] | {"tie_word_embeddings": not tied}
    changes = {"text_config": text, "tie_word_embeddings": tied}
    checkpoints.edit_json(source / "config.json", changes)
    path = convert(source, tmp_path / "m.colibri").path
    assert read_container(path).config["tied_output"] == 0  # two tensors that differ
    checkpoints.edit_tensors(source, {}, remove=["language_model.lm_head.weight"])
    if tied:
        assert read_container(convert(source, path).path).config["tied_output"] == 1
        return
    with pytest.raises(
        ConversionError, match="lm_head.weight.*tie_word_embeddings: true, beside text_config"
    ):
        convert(source, path)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"deepstack_layers": [1]}, "deepstack_layers"),
        ({"text_config": [1]}, "text_config"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ],
)
def test_what_stands_beside_the_text_may_not_change_it(
    tmp_path: Path, changes: dict[str, Any], match: str
) -> None:
    source, _ = wrapped(tmp_path / "hf", *WRAPPED[0])
    checkpoints.edit_json(source / "config.json", changes)
    with pytest.raises(ConversionError, match=match):
        convert(source, tmp_path / "m.colibri")


# ------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    ("family", "extra", "match"),
    [
        ("granitemoe", {"logits_scaling": 0}, "logits_scaling = 0"),
        ("granitemoe", {"embedding_multiplier": 0.1}, "embed_scale"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias = True"),
        ("ernie4_5_moe", {"moe_gate": "top2_fused"}, "moe_gate"),
        ("ernie4_5_moe", {"moe_k": 9}, "moe_k = 9; expected at most moe_num_experts"),
        ("minimax_m2", {"shared_intermediate_size": 8}, "shared_intermediate_size = 8"),
        ("minimax_m2", {"attn_type_list": [1, 0]}, "attn_type_list"),
        ("minimax_m2", {"rotary_dim": 7}, "even number"),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok = 3"),
        ("phimoe", {"router_jitter_noise": 0}, "router_jitter_noise = 0"),
        (
            "phimoe",
            {"rope_scaling": {"rope_type": "longrope", "short_mscale": 1.2, "long_mscale": 1.3}},
            "the same short_mscale and long_mscale",
        ),
        ("llama4_text", {"attention_bias": True}, "attention_bias = True"),
        ("llama4_text", {"no_rope_layers": [1, 1]}, "no_rope_layers"),
        ("llama4_text", {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ("llama4_text", {"moe_layers": "all"}, "moe_layers"),
        ("gemma4_text", {"global_head_dim": 0}, "global_head_dim = 0"),
        ("gemma4_text", {"num_global_key_value_heads": 3}, "num_global_key_value_heads = 3"),
        ("gemma4_text", {"rope_parameters": {"full_attention": {}}}, "rope_parameters"),
        ("gemma4_text", {"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input = 8"),
        ("gemma4_text", {"num_kv_shared_layers": 1}, "num_kv_shared_layers = 1"),
        ("gemma4_text", {"use_double_wide_mlp": True}, "use_double_wide_mlp = True"),
        ("gemma4_text", {"top_k_experts": 7}, "top_k_experts = 7"),
        ("gemma4_text", {"per_layer_config": {"1": {"head_dim": 32}}}, "per_layer_config"),
        ("gemma4_text", {"per_layer_config": {"2": {"head_dim": 0}}}, "head_dim = 0"),
        ("gemma4_text", {"per_layer_config": {"2": {"num_key_value_heads": 3}}}, "a divisor of"),
        ("gemma4_text", {"per_layer_config": {"2": {"head_size": 32}}}, "head_size"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50"),
        (
            "gemma3_text",
            {"rope_parameters": {"rope_type": "linear", "factor": 4.0}},
            "settings by kind of layer",
        ),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}},
            "one attention factor in all layers",
        ),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ("gemma3_text", {"hidden_activation": "silu"}, "hidden_activation = 'silu'"),
        ("gemma3_text", {"layer_types": ["full_attention"]}, "layer_types"),
        ("gemma3_text", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0"),
    ],
)
def test_settings_are_refused_by_name(tmp_path: Path, family: str, extra: dict[str, Any], match: str) -> None:
    source = FAMILIES[family](tmp_path / "hf", config_extra=extra)
    with pytest.raises(ConversionError, match=match):
        convert(source, tmp_path / "m.colibri")
