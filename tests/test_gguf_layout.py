"""GGUF files of every architecture convert to what the checkpoints convert to that they were made of.

Owns: that keys, names, orders of rows and spellings of GGUF are read right, and that what is not known is
refused by name. Refuses: the bytes of containers and blocks, vocabularies, and logits, which
tools/compare_gguf_with_llama_cpp.py compares.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import checkpoints
import gguf_files
from colibri.config import complete_config
from colibri.convert import convert
from colibri.convert.gguf import blocks
from colibri.convert.gguf.architectures import config_of
from colibri.convert.gguf.container import GgufFile, open_gguf
from colibri.convert.gguf.layout import layout_of
from colibri.convert.gguf.records import ARCHITECTURES
from colibri.convert.keys import Keys
from colibri.convert.registry import family_of, known
from colibri.errors import ColibriError, ConversionError
from colibri.format import read_container, read_entry

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 256,
    "short_factor": [1 + 0.05 * i for i in range(8)],
    "long_factor": [1 + 0.5 * i for i in range(8)],
    "short_mscale": 1.25,
    "long_mscale": 1.25,
}
GEMMA3 = {"query_pre_attn_scalar": 16, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
GEMMA4_ROPE = {
    "rope_parameters": {
        "full_attention": {"rope_theta": 5e5, "rope_type": "proportional", "partial_rotary_factor": 7 / 12},
        "sliding_attention": {"rope_theta": 2e4, "rope_type": "default"},
    }
}
LLAMA4 = {"floor_scale": 8192, "attn_scale": 0.1, "no_rope_layers": [1, 1, 1, 0]}
# Maker and its options, options of the GGUF file.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "llama, biases": ("llama", {"qkv_bias": True}, {}),
    "llama, fused": ("llama", {"qkv_bias": True}, {"fused_qkv": True}),
    "qwen3moe, all fused": ("qwen3_moe", {}, {"fused_qkv": True, "experts": "fused"}),
    "llama, tied": ("llama", {"tied": True}, {}),
    "llama, linear": (
        "llama",
        {"rope": {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4}}},
        {},
    ),
    "llama, old linear": (
        "llama",
        {"rope": {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4}}},
        {"keys": {"rope.scale_linear": 4.0}, "remove": ["rope.scaling.type", "rope.scaling.factor"]},
    ),
    "llama, no kv heads said": ("llama", {"n_kv_heads": 4}, {"remove": ["attention.head_count_kv"]}),
    "mistral": ("mistral", {}, {}),
    "mixtral": ("mixtral", {}, {}),
    "mixtral, heads wider": ("mixtral", {"head_dim": 24}, {}),
    "mixtral, one by one": ("mixtral", {}, {"experts": "single"}),
    "mixtral, a value for each layer": (
        "mixtral",
        {},
        {"keys": {"feed_forward_length": [96, 96], "attention.head_count_kv": [2, 2]}},
    ),
    "qwen2": ("qwen2", {}, {}),
    "qwen3": ("qwen3", {"qkv_bias": True}, {}),
    "qwen2moe": ("qwen2_moe", {}, {}),
    "qwen2moe, dense between": ("qwen2_moe", {"n_layers": 4, "decoder_sparse_step": 2}, {}),
    "qwen3moe": ("qwen3_moe", {}, {}),
    "qwen3moe, tied": ("qwen3_moe", {"tied": True}, {}),
    "qwen3moe, fused": ("qwen3_moe", {}, {"experts": "fused"}),
    "qwen3moe, dense between": ("qwen3_moe", {"n_layers": 3, "mlp_only_layers": [1]}, {}),
    "qwen3moe, YaRN": ("qwen3_moe", {"rope": {"rope_theta": 1e6, "rope_scaling": YARN}}, {}),
    "olmoe": ("olmoe", {}, {}),
    "deepseek2, V2": ("deepseek_v2", {}, {}),
    "deepseek2, V2 Lite": ("deepseek_v2", {"q_rank": None, "first_dense": 1}, {}),
    "deepseek2, V2, old": ("deepseek_v2", {}, {"absorbed": False, "remove": ["expert_gating_func"]}),
    "deepseek2, V2, groups": ("deepseek_v2", {"topk_method": "group_limited_greedy", "groups": (4, 2)}, {}),
    "deepseek2, mscale": (
        "deepseek_v2",
        {"rope": {"rope_theta": 1e4, "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}}},
        {},
    ),
    "deepseek2, V3": ("deepseek_v3", {"first_dense": 1, "groups": (4, 2), "scale": 1.827}, {}),
    "deepseek2, V3, silent": ("deepseek_v3", {}, {"remove": ["expert_gating_func"]}),
    "deepseek2, V3, fused": ("deepseek_v3", {}, {"experts": "fused"}),
    "gpt-oss": ("gpt_oss", {"config_extra": {"swiglu_limit": 7.0}}, {}),
    "glm4moe": ("glm4_moe", {"first_dense": 1}, {}),
    "glm4moe, no norm, no biases": ("glm4_moe", {"qk_norm": False, "qkv_bias": False}, {}),
    "dots1": ("dots1", {"first_dense": 1}, {}),
    "granitemoe": ("granitemoe", {}, {}),
    "granitemoe, biases": ("granitemoe", {"qkv_bias": True}, {}),
    "phimoe": ("phimoe", {"noise": 0.01}, {}),
    "phimoe, longrope": (
        "phimoe",
        {"noise": 0.01, "rope": {"rope_theta": 1e4, "rope_scaling": LONGROPE}},
        {},
    ),
    "ernie4_5-moe": ("ernie4_5_moe", {}, {}),
    "ernie4_5-moe, every second": ("ernie4_5_moe", {"n_layers": 4, "placed": (1, -1, 2)}, {}),
    "minimax-m2": ("minimax_m2", {}, {}),
    "gemma3": ("gemma3_text", {"n_layers": 6, "cap": 20.0, "config_extra": GEMMA3}, {}),
    "gemma4": ("gemma4_text", {}, {}),
    "gemma4, experts apart": ("gemma4_text", {"n_layers": 6}, {"experts": "apart"}),
    "gemma4, dense, values apart": ("gemma4_text", {"moe": False, "same": False, "cap": None}, {}),
    "gemma4, the same heads": ("gemma4_text", {"full_head_dim": 16, "n_full_kv_heads": 2}, {}),
    "gemma4, another share": ("gemma4_text", {"full_head_dim": 24, "rope": GEMMA4_ROPE}, {}),
    "gemma4, fused": ("gemma4_text", {}, {"fused_qkv": True, "experts": "fused"}),
    "gemma4, all fused": ("gemma4_text", {"same": False}, {"fused_qkv": True}),
    "qwen3next, fused": ("qwen3_next", {"delta": (2, 4, 16, 16)}, {"fused_qkv": True}),
    "llama4": ("llama4_text", {"chunk": 8192, "config_extra": LLAMA4}, {}),
    "qwen3next": ("qwen3_next", {"delta": (2, 4, 16, 16)}, {}),
    "qwen3next, dense between": ("qwen3_next", {"delta": (2, 4, 16, 24), "mlp_only_layers": [1]}, {}),
    "qwen35moe": ("qwen3_5_moe", {"delta": (2, 6, 16, 16)}, {}),
    "lfm2": ("lfm2", {}, {}),
    "lfm2, all attention, a head": ("lfm2", {"full": (0, 1, 2), "tied": False}, {}),
    "lfm2, one number for all": ("lfm2", {"full": (0, 1, 2)}, {"keys": {"attention.head_count_kv": 2}}),
    "lfm2, no attention": ("lfm2", {"full": (), "n_kv_heads": 4}, {}),
    "lfm2, fused": ("lfm2", {}, {"fused_qkv": True}),
    "lfm2moe": ("lfm2_moe", {}, {}),
    "lfm2moe, no bias, a scale": ("lfm2_moe", {"bias": False, "scale": 1.5, "n_dense": 0}, {}),
    "lfm2moe, wide taps, one by one": ("lfm2_moe", {"taps": 5}, {"experts": "single"}),
}


def model(path: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Config fields, and the bytes of entries."""
    container = read_container(path)
    return container.config, {
        e.name: read_entry(container, e.name) for e in container.entries if e.kind != "blob"
    }


def same(entry: str, expected: bytes, found: bytes) -> bool:
    """A rate's logarithm is stored as the rate, which rounds twice."""
    if not entry.endswith("delta_log_rate"):
        return expected == found
    return bool(np.abs(np.frombuffer(expected, "<f4") - np.frombuffer(found, "<f4")).max() < 5e-7)


def convert_both(
    tmp_path: Path, family: str, options: dict[str, Any], file: dict[str, Any]
) -> tuple[Path, Path]:
    """From the checkpoint, from the GGUF file."""
    source = checkpoints.FAMILIES[family](tmp_path / "hf", storage="f32", **options)
    gguf = gguf_files.write(source, tmp_path / "model.gguf", **file)
    paths = tmp_path / "hf.colibri", tmp_path / "gguf.colibri"
    for one, path in zip((source, gguf), paths, strict=True):
        convert(one, path, "f32")
    return paths


@pytest.mark.parametrize("name", CASES)
def test_both_conversions_are_equal(tmp_path: Path, name: str) -> None:
    hf, gguf = convert_both(tmp_path, *CASES[name])
    (expected, entries), (found, others) = model(hf), model(gguf)
    assert found == expected
    assert list(others) == list(entries)
    assert [entry for entry in entries if not same(entry, entries[entry], others[entry])] == []


def test_every_architecture_is_compared() -> None:
    of = gguf_files.ARCHITECTURES | {"qwen3_5_moe": "qwen35moe"}
    compared = {of[family] for family, _, _ in CASES.values()}
    assert compared == set(ARCHITECTURES)


def test_the_docs_say_what_each_family_is_in_gguf() -> None:
    """Every model_type, and every architecture beside the one that it becomes."""
    text = (Path(__file__).parent.parent / "docs" / "GGUF.md").read_text("utf-8")
    rows = re.findall(r"^\| (`[\w`, -]+`) \| (`[\w.-]+`|none\b.*) \|$", text, re.MULTILINE)
    said = {name: to for names, to in rows for name in re.findall(r"`([^`]+)`", names)}
    assert set(said) == set(known())
    assert {to.strip("`") for to in said.values() if to[0] == "`"} == set(ARCHITECTURES)
    for name, record in ARCHITECTURES.items():
        assert f"`{name}`" in [to for of, to in said.items() if known()[of] is known()[record.model_type]]


def test_factors_of_frequencies(tmp_path: Path) -> None:
    """llama3: the file has factors, the checkpoint a formula, which round otherwise."""
    options = {"rope": {"rope_theta": 500000.0, "rope_scaling": LLAMA3}}
    (expected, entries), (found, others) = map(model, convert_both(tmp_path, "llama", options, {}))
    assert found == expected
    assert [entry for entry in entries if entries[entry] != others[entry]] in ([], ["rope_inv_freq"])
    both = [np.frombuffer(one["rope_inv_freq"], "<f4") for one in (entries, others)]
    np.testing.assert_allclose(both[1], both[0], rtol=2e-7)
    assert both[0][-1] < 0.2 * 500000.0 ** (-14 / 16)  # slowed down


@pytest.mark.parametrize("held", ["nothing", "a part", "all"])
def test_layers_for_further_tokens_are_left_out(tmp_path: Path, held: str) -> None:
    """block_count counts them. Case 7."""
    extra = np.ones((64, 64), np.float32)
    names = {"nothing": [], "a part": ["nextn.eh_proj"], "all": ["nextn.eh_proj", "attn_q", "ffn_gate"]}[held]
    file: dict[str, Any] = {
        "keys": {"block_count": 3, "nextn_predict_layers": 1},
        "tensors": {f"blk.2.{name}.weight": extra for name in names},
    }
    source = checkpoints.FAMILIES["glm4_moe"](tmp_path / "hf", storage="f32")
    gguf = gguf_files.write(source, tmp_path / "model.gguf", **file)
    report = convert(gguf, tmp_path / "m.colibri", "f32")
    assert report.ignored_tensors == [f"blk.2.{name}.weight" for name in names]
    assert model(report.path)[0]["n_layers"] == 2


def test_v3_without_groups_is_noted(tmp_path: Path) -> None:
    source = checkpoints.FAMILIES["deepseek_v3"](tmp_path / "hf", storage="f32", groups=(4, 2))
    gone = ["expert_group_count", "expert_group_used_count"]
    gguf = gguf_files.write(source, tmp_path / "model.gguf", remove=gone)
    report = convert(gguf, tmp_path / "m.colibri", "f32")
    assert [note for note in report.notes if "groups of experts" in note]
    assert model(report.path)[0]["n_expert_groups"] == 0


def test_keys_beside_the_architecture_are_harmless(tmp_path: Path) -> None:
    keys = {"general.name": "tiny", "quantize.imatrix.file": "x", "other.key": 1, "vocab_size": 300}
    convert_both(tmp_path, "mixtral", {}, {"keys": keys})


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown key": ("mixtral", {"keys": {"attention.brand_new": 1}}, r"llama\.attention\.brand_new = 1"),
    "key of another": ("mixtral", {"keys": {"logit_scale": 2.0}}, r"llama\.logit_scale is 2\.0"),
    "absent key": ("mixtral", {"remove": ["context_length"]}, r"llama\.context_length is absent"),
    "absent count": ("qwen3_moe", {"remove": ["expert_used_count"]}, "expert_used_count is absent"),
    "no causal mask": ("llama", {"keys": {"attention.causal": False}}, r"attention\.causal is False"),
    "embeddings": ("llama", {"keys": {"pooling_type": 1}}, "pooling_type is 1"),
    "values of other width": (
        "llama",
        {"keys": {"attention.value_length": 8}},
        r"value_length is 8; expected 16",
    ),
    "heads that do not divide": (
        "llama",
        {"keys": {"attention.head_count": 3, "attention.head_count_kv": 3}},
        "hidden_size 64 is not a multiple of num_attention_heads 3",
    ),
    "layers unlike": (
        "llama",
        {"keys": {"attention.head_count_kv": [2, 4]}},
        r"is \[2, 4\]; expected the same value for all layers",
    ),
    "layers of attention unlike": (
        "lfm2",
        {"keys": {"attention.head_count_kv": [0, 2, 4]}},
        r"is \[0, 2, 4\]; expected one number, or 0 in layers without attention",
    ),
    "heads that are no count": (
        "lfm2",
        {"keys": {"attention.head_count_kv": 2.0}},
        r"head_count_kv is 2\.0; expected an integer",
    ),
    "more heads than rows": (
        "lfm2",
        {"keys": {"attention.head_count_kv": [0, 0, 2**30]}},
        "expected widths of tensors",
    ),
    "a norm of embeddings": (
        "lfm2",
        {"tensors": {"output_norm.weight": np.ones(64, np.float32)}},
        r"not part of the model.*output_norm\.weight",
    ),
    "inputs by layer": (
        "gemma4_text",
        {"keys": {"embedding_length_per_layer_input": 256}},
        r"gemma4\.embedding_length_per_layer_input = 256; expected 0",
    ),
    "shared keys and values": (
        "gemma4_text",
        {"keys": {"attention.shared_kv_layers": 1}},
        r"gemma4\.attention\.shared_kv_layers = 1; expected 0",
    ),
    "a window in the last layer": (
        "gemma4_text",
        {"keys": {"attention.sliding_window_pattern": [True, False, True]}},
        "expected false for the last layer",
    ),
    "no window": ("gemma4_text", {"keys": {"attention.sliding_window": 0}}, "sliding_window is 0"),
    "layers of a kind unlike": (
        "gemma4_text",
        {"keys": {"attention.head_count_kv": [1, 2, 1]}},
        r"is \[1, 2, 1\]; expected one number for all layers of a kind",
    ),
    "layers without heads": (
        "gemma4_text",
        {"keys": {"attention.head_count_kv": [2, 2, 0]}},
        r"is \[2, 2, 0\]; expected one number",
    ),
    "local heads not said": (
        "gemma4_text",
        {"remove": ["attention.key_length_swa"]},
        r"key_length_swa is absent",
    ),
    "a part of a local head": (
        "gemma4_text",
        {"keys": {"rope.dimension_count_swa": 8}},
        r"dimension_count_swa is 8; expected 16",
    ),
    "scaled frequencies": (
        "gemma4_text",
        {"keys": {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}},
        r"rope\.scaling\.type is 'linear'; expected none",
    ),
    "no factors": ("gemma4_text", {"without": "rope_freqs"}, r"rope_freqs\.weight is absent"),
    "factors between": (
        "gemma4_text",
        {"tensors": {"rope_freqs.weight": np.array([1.0] * 4 + [8.0] * 12, np.float32)}},
        r"1\.0, 8\.0.*expected 16 factors, 1 for each frequency",
    ),
    "factors of fewer": (
        "gemma4_text",
        {"tensors": {"rope_freqs.weight": np.ones(8, np.float32)}},
        "is 8 numbers.*expected 16 factors",
    ),
    "experts without a router": (
        "gemma4_text",
        {"without": r"blk\.0\.ffn_gate_inp\.weight"},
        "expert_count is 6; expected 0",
    ),
    "values in some layers": (
        "gemma4_text",
        {"tensors": {"blk.2.attn_v.weight": np.ones((32, 64), np.float32)}, "without": r"blk\.2\.attn_k\."},
        r"absent: blk\.2\.attn_k\.weight",
    ),
    "too few layers": ("llama", {"keys": {"attention.head_count_kv": [2]}}, "one value, or 2"),
    "more extra layers": ("llama", {"keys": {"nextn_predict_layers": 2}}, "nextn_predict_layers is 2"),
    "scaling type": ("llama", {"keys": {"rope.scaling.type": "spiral"}}, r"rope\.scaling\.type is 'spiral'"),
    "part of a head": ("llama", {"keys": {"rope.dimension_count": 8}}, "partial_rotary_factor"),
    "more than a head": ("glm4_moe", {"keys": {"rope.dimension_count": 18}}, r"rope\.dimension_count is 18"),
    "scale of YaRN": (
        "qwen3_moe",
        {"keys": {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 1.5}},
        r"rope\.scaling\.attn_factor is 1\.5",
    ),
    "longrope without factors": (
        "phimoe",
        {"keys": {"rope.scaling.type": "longrope"}},
        r"no rope_factors_long\.weight",
    ),
    "router of another": ("qwen3_moe", {"keys": {"expert_gating_func": 2}}, "expert_gating_func is 2"),
    "router not renormalised": ("qwen3_moe", {"keys": {"expert_weights_norm": False}}, "expert_weights_norm"),
    "gating of deepseek2": ("deepseek_v2", {"keys": {"expert_gating_func": 4}}, "expert_gating_func is 4"),
    "kv heads of latent attention": (
        "deepseek_v2",
        {"keys": {"attention.head_count_kv": 2}},
        r"head_count_kv is 2; expected 1",
    ),
    "shared experts": (
        "granitemoe",
        {"keys": {"expert_shared_feed_forward_length": 32}},
        "expert_shared_feed_forward_length is 32",
    ),
    "two widths": ("minimax_m2", {"keys": {"feed_forward_length": 32}}, "as another key says"),
    "general.type": ("llama", {"keys": {"general.type": "adapter"}}, "general.type 'adapter'"),
    "types of a model": ("llama", {"keys": {"general.type": [1, 2]}}, r"general\.type array"),
    "kinds of a tokenizer": (
        "llama",
        {"keys": {"tokenizer.ggml.model": [1, 2]}},
        r"tokenizer\.ggml\.model = array",
    ),
    "factors": (
        "llama",
        {"tensors": {"rope_freqs.weight": np.ones(3, np.float32)}},
        "3 factors for 8 frequencies",
    ),
    "factors of 0": ("llama", {"tensors": {"rope_freqs.weight": np.zeros(8, np.float32)}}, "numbers above 0"),
    "unknown tensor": (
        "llama",
        {"tensors": {"blk.0.attn_q.scale": np.ones(1, np.float32)}},
        r"not part of the model.*blk\.0\.attn_q\.scale",
    ),
    "absent tensor": ("llama", {"without": r"blk\.1\.attn_v"}, r"absent: blk\.1\.attn_v\.weight"),
    "absent experts": ("mixtral", {"without": "ffn_up_exps"}, r"blk\.0\.ffn_up_exps\.weight"),
    "an absent expert": (
        "mixtral",
        {"experts": "single", "without": r"blk\.1\.ffn_up\.2"},
        r"blk\.1\.ffn_up\.2\.weight",
    ),
    "no embedding": ("llama", {"without": "token_embd"}, r"no matrix token_embd\.weight"),
    "a rate that is none": (
        "qwen3_next",
        {"tensors": {"blk.0.ssm_a": np.ones(4, np.float32)}},
        r"blk\.0\.ssm_a holds 1\.0; expected the negative of a rate",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused_by_name(tmp_path: Path, name: str) -> None:
    family, file, message = REFUSED[name]
    source = checkpoints.FAMILIES[family](tmp_path / "hf", storage="f32")
    gguf = gguf_files.write(source, tmp_path / "model.gguf", **file)
    with pytest.raises(ConversionError, match=message):
        convert(gguf, tmp_path / "m.colibri", "f32")
    assert not (tmp_path / "m.colibri").exists()


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ({"keys": {"context_length": 0}}, r"llama\.context_length = 0; expected"),
        ({"keys": {"expert_used_count": 9}}, r"llama\.expert_used_count = 9; expected"),
        ({"keys": {"feed_forward_length": 32}}, "has shape .* its metadata makes"),
        ({"keys": {"block_count": 1}}, "not part of the model that its metadata describes"),
        ({"keys": {"tokenizer.ggml.model": None}}, "no tokenizer.ggml.model"),
        ({"without": "."}, "a vocabulary and no weights"),
    ],
)
def test_errors_speak_of_the_file(tmp_path: Path, file: dict[str, Any], message: str) -> None:
    """Who has a GGUF file has no config.json."""
    source = checkpoints.FAMILIES["mixtral"](tmp_path / "hf", storage="f32")
    gguf = gguf_files.write(source, tmp_path / "model.gguf", **file)
    with pytest.raises(ConversionError, match=message) as told:
        convert(gguf, tmp_path / "m.colibri")
    assert "config.json" not in str(told.value) and "DIRECTORY" not in str(told.value)


def test_an_architecture_that_is_not_known(tmp_path: Path) -> None:
    source = checkpoints.FAMILIES["llama"](tmp_path / "hf", storage="f32")
    gguf = gguf_files.write(source, tmp_path / "model.gguf")
    data = gguf.read_bytes().replace(b"llama", b"mambo")
    gguf.write_bytes(data)
    with pytest.raises(
        ConversionError, match="general.architecture 'mambo' is not supported.*deepseek2.*olmoe"
    ):
        convert(gguf, tmp_path / "m.colibri", "f32")


HOSTILE = (
    *("x", 0, 1, -1, 3, 2**31 - 1, 2**40, 1e30, math.nan, True, ["a"], [np.array([1])], None),
    *(np.array(numbers) for numbers in ([], [1, 2], [0.5, 0.5])),
)


@pytest.mark.parametrize(
    "name", ["mixtral", "deepseek2, V3", "gpt-oss", "gemma3", "gemma4", "llama4", "qwen35moe", "lfm2moe"]
)
def test_any_value_of_any_key_is_read_or_refused(tmp_path: Path, name: str) -> None:
    """Quickly and without much memory; None removes the key. Case 14."""
    family, options, file = CASES[name]
    source = checkpoints.FAMILIES[family](tmp_path / "hf", storage="f32", **options)
    gguf = open_gguf(gguf_files.write(source, tmp_path / "model.gguf", **file))
    refused = 0
    for key in [key for key in gguf.metadata if not key.startswith("tokenizer.")]:
        for value in HOSTILE:
            metadata = {k: v for k, v in gguf.metadata.items() if k != key}
            metadata |= {} if value is None else {key: value}
            try:
                read_model(replace(gguf, metadata=metadata))
            except ColibriError:
                refused += 1
    assert refused > 100
    read_model(gguf)


def read_model(gguf: GgufFile) -> None:
    """As far as config fields, before tensors are looked for."""
    keys = Keys(config_of(gguf, []), gguf.path)
    family = family_of(keys)
    decoder = layout_of(gguf, family, family.read_config(keys))[2]
    keys.finish()
    complete_config(decoder.config | {"n_vocab_used": decoder.config["n_vocab"]})


@pytest.mark.parametrize(
    ("dtype", "run", "stays"), [("Q8_0", 32, True), ("Q8_0", 16, False), ("Q4_K", 128, False)]
)
def test_columns_in_another_order_stay_blocks_where_none_is_torn(dtype: str, run: int, stays: bool) -> None:
    random = np.random.default_rng(0)
    block, width = blocks.sizes()[dtype]
    n_cols = 4 * max(block, run)
    data = random.integers(0, 60, (3, n_cols // block * width), np.uint8)
    lines = blocks.Blocks(data, dtype)
    runs = random.permutation(n_cols // run)
    columns = [int(start) * run + i for start in runs for i in range(run)]
    found = blocks.with_columns(lines, columns)
    assert isinstance(found, blocks.Blocks) == blocks.are_whole(dtype, columns) == stays
    expected = blocks.widen(lines)[:, columns]
    np.testing.assert_array_equal(blocks.widen(found) if stays else found, expected)
