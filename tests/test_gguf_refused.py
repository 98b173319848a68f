"""What is not known in a GGUF file is refused by its name, and any value of any key is read or refused.

Owns: those errors. Refuses: what is read right (test_gguf_layout.py), containers (test_gguf_container.py).
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import checkpoints
import gguf_files
from colibri.config import complete_config
from colibri.convert import convert
from colibri.convert.gguf.architectures import config_of
from colibri.convert.gguf.container import GgufFile, open_gguf
from colibri.convert.gguf.layout import layout_of
from colibri.convert.keys import Keys
from colibri.convert.registry import family_of
from colibri.errors import ColibriError, ConversionError
from test_gguf_layout import CASES

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
