"""Conversion of latent attention: how projections are cut, what is refused, what the cache costs.

Owns: the rows that each entry takes from its source, and configs that do not fit together.
Refuses: numbers of whole models (test_parity.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import checkpoints
import colibri
from colibri import _native as native
from colibri.convert import convert
from colibri.errors import ConversionError, ModelFileError
from colibri.format import Writer, read_container, read_entry
from colibri.quantize import unpack

PLAIN, ROPE, VALUE, RANK, N_HEADS = 24, 8, 16, 32, 4  # of the maker's defaults


def load(path: Path, name: str) -> Any:
    container = read_container(path)
    entry = next(e for e in container.entries if e.name == name)
    return unpack(read_entry(container, name), entry.rows, entry.cols, entry.types[0])


@pytest.mark.parametrize("interleaved", [True, False])
def test_projections_are_cut_by_head_with_the_rotated_rows_first(interleaved: bool, tmp_path: Path) -> None:
    source = checkpoints.deepseek_v3(tmp_path / "hf", config_extra={"rope_interleave": interleaved})
    path = convert(source, tmp_path / "m.colibri", "f32").path
    tensors, at = checkpoints.read_tensors(source), "model.layers.1.self_attn."
    q, found = (
        tensors[at + "q_b_proj.weight"].reshape(N_HEADS, PLAIN + ROPE, -1),
        load(path, "layers.1.attn_q"),
    )
    pairs = [0, 2, 4, 6, 1, 3, 5, 7] if interleaved else list(range(ROPE))
    for h, head in enumerate(found.reshape(N_HEADS, PLAIN + ROPE, -1)):
        assert np.array_equal(head[:ROPE], q[h, PLAIN:][pairs])
        assert np.array_equal(head[ROPE:], q[h, :PLAIN])
    kv, found = tensors[at + "kv_a_proj_with_mqa.weight"], load(path, "layers.1.attn_kv_latent")
    assert np.array_equal(found, np.concatenate([kv[RANK:][pairs], kv[:RANK]]))
    up = tensors[at + "kv_b_proj.weight"].reshape(N_HEADS, PLAIN + VALUE, RANK)
    for h in range(N_HEADS):
        assert np.array_equal(load(path, f"layers.1.attn_k_up.{h}"), up[h, :PLAIN].T)
        assert np.array_equal(load(path, f"layers.1.attn_v_up.{h}"), up[h, PLAIN:])


def test_another_model_type_and_its_own_code_give_the_same_tensors(tmp_path: Path) -> None:
    """Kimi-K2 is DeepSeek-V3 under another name; both were released beside a module of modelling code."""
    source, found = checkpoints.deepseek_v3(tmp_path / "hf"), []
    code = {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}
    for name in ("deepseek_v3", "kimi_k2"):
        checkpoints.edit_json(source / "config.json", {"model_type": name, "auto_map": code})
        report = convert(source, tmp_path / "m.colibri", "f32")
        assert report.model_type == name
        container = read_container(report.path)
        found.append([read_entry(container, e.name) for e in container.entries if e.kind != "blob"])
    assert found[0] == found[1]
    checkpoints.edit_json(source / "config.json", {"auto_map": {"AutoModel": "modeling_other.X"}})
    with pytest.raises(ConversionError, match="auto_map"):
        convert(source, tmp_path / "m.colibri")


def test_the_cache_holds_one_latent_for_all_heads(tmp_path: Path) -> None:
    """Keys of 8 + 32 elements, values of 32: as they lie for the kernels, the latent stands in both."""
    for heads in (4, 8):
        source = checkpoints.deepseek_v3(tmp_path / f"hf{heads}", n_heads=heads)
        path = convert(source, tmp_path / "m.colibri", "f32").path
        with colibri.load(path, threads=1, context=128) as model:
            blocks = 2 * 128 * (ROPE + 2 * RANK) * 4
            assert blocks <= model.memory.kv_cache < blocks + 1024


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_bias", True),
        ("num_key_value_heads", 2),
        ("qk_head_dim", 33),
        ("head_dim", 16),
        ("kv_lora_rank", 31),
        ("qk_rope_head_dim", 7),
        ("v_head_dim", 15),
        ("rope_interleave", None),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(key: str, value: Any, tmp_path: Path) -> None:
    source = checkpoints.deepseek_v3(tmp_path / "hf", config_extra={key: value})
    named = {"kv_lora_rank": "kv_a_proj", "qk_rope_head_dim": "qk_rope_head_dim", "v_head_dim": "_proj"}
    with pytest.raises(ConversionError, match=named.get(key, key)):
        convert(source, tmp_path / "m.colibri")


@pytest.mark.parametrize(
    ("key", "value"),
    [("norm_topk_prob", True), ("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")],
)
def test_the_softmax_family_refuses_what_it_has_not(key: str, value: Any, tmp_path: Path) -> None:
    source = checkpoints.deepseek_v2(tmp_path / "hf", config_extra={key: value})
    with pytest.raises(ConversionError, match=key):
        convert(source, tmp_path / "m.colibri")


CONFIG: dict[str, Any] = {
    "n_vocab": 20, "n_vocab_used": 20, "n_layers": 1, "n_embd": 8, "n_heads": 2, "n_kv_heads": 1,
    "head_dim": 6, "rope_dim": 2, "context_length": 64, "norm_eps": 1e-6, "attn_scale": 0.5, "n_ff": 12,
    "kv_latent_dim": 5, "value_dim": 3,
}  # fmt: skip


def write(path: Path, config: dict[str, Any]) -> Path:
    with Writer(path, config, "f32", {}) as writer:
        for entry in writer.tensors:
            writer.write(entry.name, [bytes(entry.bytes)])
    return path


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"kv_latent_dim": 0}, "its companions are set"),
        ({"kv_latent_dim": 0, "value_dim": 0, "latent_norm_eps": 1e-6}, "its companions are set"),
        ({"kv_latent_dim": 0, "value_dim": 0, "q_latent_dim": 4}, "its companions are set"),
        ({"n_kv_heads": 2}, "needs n_kv_heads 1"),
        ({"value_dim": 0}, "needs a value_dim"),
        ({"rope_dim": 6}, "needs a head_dim above rope_dim"),
        ({"kv_latent_dim": 1023}, "more than 1024"),
        ({"qk_norm": 1}, "goes without"),
        ({"qkv_clip": 1.0}, "goes without"),
        ({"attn_qkv_bias": 1}, "goes without"),
    ],
)
def test_files_whose_fields_do_not_fit_are_refused(
    changes: dict[str, Any], fault: str, tmp_path: Path
) -> None:
    native.close_model(native.open_model(write(tmp_path / "good.colibri", CONFIG)))
    with pytest.raises(ModelFileError, match=fault):
        native.open_model(write(tmp_path / "m.colibri", CONFIG | changes))


def test_a_latent_without_rotation_runs(tmp_path: Path) -> None:
    path = write(tmp_path / "m.colibri", CONFIG | {"rope_dim": 0, "q_latent_dim": 3, "latent_norm_eps": 1e-6})
    with colibri.load(path, threads=1, context=16) as model:
        assert not model.logits([1, 2, 3]).any()
