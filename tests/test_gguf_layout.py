"""GGUF files of every architecture convert to what the checkpoints convert to that they were made of.

Owns: that keys, names, orders of rows and spellings of GGUF are read right. Refuses: what is not known
(test_gguf_refused.py), the bytes of containers and blocks, vocabularies, and logits, which
tools/compare_gguf_with_llama_cpp.py compares.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import checkpoints
import gguf_files
from colibri.convert import convert
from colibri.convert.gguf import blocks
from colibri.convert.gguf.records import ARCHITECTURES
from colibri.convert.registry import known
from colibri.format import read_container, read_entry
from gguf_names import ARCHITECTURES as BY_MODEL_TYPE
from gguf_settings import GEMMA3, LINEAR, LLAMA3, LLAMA4, LONGROPE, same, yarn

KINDS_OF_62 = [("sliding" if (n + 1) % 6 else "full") + "_attention" for n in range(62)]
GEMMA4_ROPE = {
    "rope_parameters": {
        "full_attention": {"rope_theta": 5e5, "rope_type": "proportional", "partial_rotary_factor": 7 / 12},
        "sliding_attention": {"rope_theta": 2e4, "rope_type": "default"},
    }
}
# Maker and its options, options of the GGUF file.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "llama, biases": ("llama", {"qkv_bias": True}, {}),
    "llama, fused": ("llama", {"qkv_bias": True}, {"fused_qkv": True}),
    "qwen3moe, all fused": ("qwen3_moe", {}, {"fused_qkv": True, "experts": "fused"}),
    "llama, tied": ("llama", {"tied": True}, {}),
    "llama, linear": (
        "llama",
        {"rope": LINEAR},
        {},
    ),
    "llama, old linear": (
        "llama",
        {"rope": LINEAR},
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
    "qwen3moe, YaRN": ("qwen3_moe", {"rope": yarn(8.0, 64)}, {}),
    "olmoe": ("olmoe", {}, {}),
    "deepseek2, V2": ("deepseek_v2", {}, {}),
    "deepseek2, V2 Lite": ("deepseek_v2", {"q_rank": None, "first_dense": 1}, {}),
    "deepseek2, V2, old": ("deepseek_v2", {}, {"absorbed": False, "remove": ["expert_gating_func"]}),
    "deepseek2, V2, groups": ("deepseek_v2", {"topk_method": "group_limited_greedy", "groups": (4, 2)}, {}),
    "deepseek2, mscale": (
        "deepseek_v2",
        {"rope": yarn(8.0, 64, mscale=0.707, mscale_all_dim=0.707)},
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
        {"noise": 0.01, "rope": LONGROPE},
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
    "llama4, all see all": (
        "llama4_text",
        {
            "chunk": None,
            "config_extra": LLAMA4 | {"no_rope_layers": [1] * 4, "attn_temperature_tuning": False},
        },
        {"keys": {"attention.sliding_window": 0}},
    ),
    "llama4, 128 experts": (
        "llama4_text",
        {"chunk": 8192, "n_experts": 128, "n_ff_expert": 8, "qk_norm": False, "config_extra": LLAMA4},
        {},
    ),
    "gemma3, 62 layers": (
        "gemma3_text",
        {"n_layers": 62, "head_dim": 24, "config_extra": GEMMA3 | {"layer_types": KINDS_OF_62}},
        {},
    ),
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
    of = BY_MODEL_TYPE | {"qwen3_5_moe": "qwen35moe"}
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
    options = {"rope": LLAMA3}
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
