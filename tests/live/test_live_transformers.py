"""The engine beside a running Transformers: on the same checkpoints, and on checkpoints that it wrote itself.

Role:    run by .ci/run where torch and transformers are installed (`pip install .[live]`); skipped elsewhere.
Owns:    that the fixtures have not drifted from the installed Transformers; that what save_pretrained writes
         today converts; spellings of RoPE settings (case 8).
Refuses: everything that the committed fixtures already show without torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import checkpoints
import oracle
from colibri.convert import convert
from fixtures import models
from fixtures.native import engine
from fixtures.variants import LLAMA3, LONGROPE, MSCALE, VARIANTS, YARN

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

BOUND = 1e-4
# Transformers in bf16 rounds every intermediate to 8 bits, the engine keeps f32: the median over rows of the
# largest difference, for logits of standard deviation 1.
BF16_MEDIAN = 0.12
IDS = VARIANTS["mixtral"].prompt


def reference(directory: Path, ids: list[int], dtype: Any = None) -> npt.NDArray[np.float32]:
    """Logits [n, n_vocab] of a checkpoint as Transformers computes them, in f32 unless a dtype is given."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype or torch.float32, attn_implementation="eager"
    )
    model.train(False)
    with torch.no_grad():
        return np.asarray(model(torch.tensor([ids])).logits[0].float().numpy())


def ours(
    directory: Path, out: Path, type: str, ids: list[int], context: int | None = None
) -> npt.NDArray[np.float32]:
    convert(directory, out, type, context=context, require_tokenizer=False)
    with engine(out) as run:
        return run.feed(ids)


@pytest.mark.parametrize("name", VARIANTS)
def test_f32_and_the_fixtures_equal_live_transformers(name: str) -> None:
    ids = VARIANTS[name].prompt
    expected = reference(models.checkpoint(name), ids)
    with engine(models.converted(name, "f32")) as run:
        assert np.abs(run.feed(ids) - expected).max() < BOUND
    fixture = models.fixture(name)
    assert np.abs(expected[fixture["rows"]] - fixture["logits"]).max() < 1e-5


@pytest.mark.parametrize("name", [name for name, v in VARIANTS.items() if v.options.get("storage") == "bf16"])
def test_bf16_stays_near_transformers_in_bf16(name: str) -> None:
    """Both start from the same bf16 weights. Rows where bf16 changes the choice of experts are left out."""
    ids = VARIANTS[name].prompt
    expected = reference(models.checkpoint(name), ids, torch.bfloat16)
    with engine(models.converted(name, "bf16")) as run:
        errors = np.abs(run.feed(ids) - expected).max(axis=-1)
    assert np.median(errors) < BF16_MEDIAN
    exact, _ = oracle.forward(models.model(name), ids)
    assert np.median(errors) < 2 * np.median(np.abs(expected - exact).max(axis=-1))  # its rounding, not ours


def tiny(cls: str, changes: dict[str, Any]) -> Any:
    """A random model of a Transformers class, at a scale where routing and attention matter."""
    config = {
        "vocab_size": 120, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
    }  # fmt: skip
    torch.manual_seed(3)
    settings = getattr(transformers, f"{cls}Config")(**{**config, **changes})
    model = getattr(transformers, f"{cls.removesuffix('Text')}ForCausalLM")(settings)
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.randn(value.shape)
            if name.endswith("A_log"):
                value.copy_(noise - 3)
            elif name.endswith("conv1d.weight"):
                value.copy_(2 * noise)
            elif value.ndim == 1:
                centered = "linear_num_key_heads" in changes and "linear_attn" not in name
                value.copy_(0.1 * noise + (1.0 if "norm" in name and not centered else 0.0))
            else:
                value.copy_(noise / value.shape[-1] ** 0.5)
    return model.to(torch.float32)


EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2}
GROUPED = {
    "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
}  # fmt: skip
YARN_PARAMETERS = {**YARN["rope_scaling"], "rope_type": "yarn", "rope_theta": 1e4}  # type: ignore[dict-item]
MSCALE_PARAMETERS = {**MSCALE["rope_scaling"], "rope_type": "yarn", "rope_theta": 1e4}  # type: ignore[dict-item]
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
LINEAR = "linear_attention"
DELTA = {
    "num_hidden_layers": 3, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 40,
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
}  # fmt: skip
SHORT = ["conv", "full_attention", "conv", "conv"]
SAVED: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 3, "head_dim": 16}),
    "qwen3_moe": (
        "Qwen3Moe",
        {**EXPERTS, "moe_intermediate_size": 24, "head_dim": 20, "norm_topk_prob": True},
    ),
    "qwen3_moe tied, dense layers": (
        "Qwen3Moe",
        {
            **EXPERTS,
            "moe_intermediate_size": 24,
            "head_dim": 12,
            "mlp_only_layers": [0],
            "tie_word_embeddings": True,
        },
    ),
    "olmoe": ("Olmoe", {**EXPERTS, "clip_qkv": 0.8}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            **EXPERTS,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "num_key_value_heads": 4,
        },
    ),
    "qwen2_moe 2H = I": (  # gate_up_proj and its transpose have one shape (case 12)
        "Qwen2Moe",
        {
            **EXPERTS,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
    "llama": ("Llama", {"tie_word_embeddings": True, "attention_bias": True}),
    "llama llama3": (
        "Llama",
        {"rope_parameters": {**LLAMA3["rope_scaling"], "rope_theta": 10000.0}},  # type: ignore[dict-item]
    ),
    "llama linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral window": ("Mistral", {"sliding_window": 24}),
    "ministral": (
        "Ministral",
        {"sliding_window": 24, "head_dim": 12, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen3": ("Qwen3", {"head_dim": 20}),
    "glm4_moe": ("Glm4Moe", {**GROUPED, "head_dim": 16, "use_qk_norm": True, "attention_bias": True}),
    "glm4_moe yarn": ("Glm4Moe", {**GROUPED, "head_dim": 24, "rope_parameters": YARN_PARAMETERS}),
    "deepseek_v2": ("DeepseekV2", {**LATENT, **GROUPED, "q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek_v2 groups": (
        "DeepseekV2",
        {**LATENT, **GROUPED, "topk_method": "group_limited_greedy", "rope_parameters": MSCALE_PARAMETERS},
    ),
    "deepseek_v3": ("DeepseekV3", {**LATENT, **GROUPED}),
    "deepseek_v3 yarn, not interleaved": (
        "DeepseekV3",
        {**LATENT, **GROUPED, "rope_interleave": False, "rope_parameters": MSCALE_PARAMETERS},
    ),
    "mixtral window": ("Mixtral", {"num_local_experts": 5, "sliding_window": 24}),
    "qwen3_moe window": (
        "Qwen3Moe",
        {**EXPERTS, "moe_intermediate_size": 24, "use_sliding_window": True, "sliding_window": 150},
    ),
    "qwen2_moe window": (
        "Qwen2Moe",
        {
            **EXPERTS,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "use_sliding_window": True,
            "sliding_window": 24,
        },
    ),
    "qwen3 window": ("Qwen3", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "dots1 window": (
        "Dots1",
        {**GROUPED, "num_key_value_heads": 4, "sliding_window": 24, "max_window_layers": 1},
    ),
    "gpt_oss": (
        "GptOss",
        {"num_local_experts": 5, "num_experts_per_tok": 3, "head_dim": 12, "sliding_window": 24},
    ),
    "gpt_oss, square down": (
        "GptOss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 12, "intermediate_size": 48},
    ),
    "qwen3_next": ("Qwen3Next", {**EXPERTS, **DELTA, "full_attention_interval": 3}),
    "qwen3_next dense layers": (
        "Qwen3Next",
        {**EXPERTS, **DELTA, "mlp_only_layers": [0], "layer_types": [LINEAR, "full_attention", LINEAR]},
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeText",
        {**EXPERTS, **DELTA, "num_hidden_layers": 2, "layer_types": ["full_attention", LINEAR]},
    ),
    "granitemoe": (
        "GraniteMoe",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "embedding_multiplier": 4.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.4,
            "logits_scaling": 0.6,
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_interval": 2},
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5},
        },
    ),
    "phimoe": (
        "Phimoe",
        {"num_local_experts": 5, "attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.2},
    ),
    "llama4_text": (
        "Llama4Text",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "head_dim": 12,
            "intermediate_size_mlp": 40,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 2,
            "attention_chunk_size": 30,
            "floor_scale": 16,
        },
    ),
    "gemma3_text": (
        "Gemma3Text",
        {"head_dim": 12, "sliding_window": 24, "final_logit_softcapping": 3.0, "num_hidden_layers": 7},
    ),
    "gemma4_text": (
        "Gemma4Text",
        {
            "head_dim": 12,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 24,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "gemma4_text, dense": (
        "Gemma4Text",
        {"head_dim": 24, "global_head_dim": 8, "sliding_window": 24, "hidden_size_per_layer_input": 0},
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        {
            **EXPERTS,
            "num_hidden_layers": 4,
            "moe_intermediate_size": 24,
            "layer_types": SHORT,
            "conv_L_cache": 4,
        },
    ),
    "lfm2_moe dense": ("Lfm2", {"num_hidden_layers": 4, "layer_types": SHORT, "block_multiple_of": 32}),
    "dots1": ("Dots1", {**GROUPED, "num_key_value_heads": 4, "norm_topk_prob": True}),
}


@pytest.mark.parametrize("storage", ["f32", "bf16"])
@pytest.mark.parametrize("kind", SAVED)
def test_what_save_pretrained_writes_converts(kind: str, storage: str, tmp_path: Path) -> None:
    """f32 in one file, bf16 in shards; 200 positions."""
    model, saved = tiny(*SAVED[kind]), tmp_path / "saved"
    if storage == "bf16":
        model.to(torch.bfloat16).save_pretrained(saved, max_shard_size="60KB")
        assert len(list(saved.glob("*.safetensors"))) > 1
    else:
        model.save_pretrained(saved)
    ids = [int(i) for i in np.random.default_rng(1).integers(3, 120, 200)]
    found, expected = ours(saved, tmp_path / "m.colibri", "f32", ids), reference(saved, ids)
    assert expected.std() > 0.3
    assert np.abs(found - expected).max() < BOUND
    logits, _ = oracle.forward(oracle.load(saved), ids)
    assert np.abs(logits - expected).max() < 2e-5


def test_a_language_model_inside_a_larger_one_converts(tmp_path: Path) -> None:
    """As it is released: text_config, prefixes, a vision tower, which is left out."""
    text = tiny(*SAVED["qwen3_5_moe"])
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 20, "out_hidden_size": 48}
    settings = transformers.Qwen3_5MoeConfig(text_config=text.config.to_dict(), vision_config=vision)
    whole = transformers.Qwen3_5MoeForConditionalGeneration(settings)
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.save_pretrained(tmp_path / "saved")
    ids = [int(i) for i in np.random.default_rng(1).integers(3, 120, 200)]
    with torch.no_grad():
        expected = text(torch.tensor([ids])).logits[0].numpy()
    report = convert(tmp_path / "saved", tmp_path / "m.colibri", "f32", require_tokenizer=False)
    assert report.model_type == "qwen3_5_moe"
    assert report.ignored_tensors and all(".visual." in name for name in report.ignored_tensors)
    with engine(report.path) as run:
        assert np.abs(run.feed(ids) - expected).max() < BOUND


def test_mxfp4_equals_what_transformers_makes_of_it(tmp_path: Path) -> None:
    """Dequantised on both sides: experts bit by bit, and the logits of a whole model."""
    from safetensors.torch import load_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    directory = models.checkpoint("gpt_oss_mxfp4")
    tensors = load_file(directory / "model.safetensors")
    at = "model.layers.1.mlp.experts."
    apart = oracle.separate(oracle.read_safetensors(directory / "model.safetensors"))
    for part, kinds in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
        blocks, scales = (tensors[f"{at}{part}_{kind}"] for kind in ("blocks", "scales"))
        wanted = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [E, cols, rows]
        for expert, values in enumerate(wanted.numpy()):
            for start, kind in enumerate(kinds):
                found = apart[f"{at}{expert}.{kind}_proj.weight"]
                assert np.array_equal(found, values.T[start :: len(kinds)])
    ids = [int(i) for i in np.random.default_rng(4).integers(3, 295, 200)]
    convert(directory, tmp_path / "m.colibri", "f32", experts="f32")
    with engine(tmp_path / "m.colibri") as run:
        logits = run.feed(ids)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    ).to(torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    assert np.abs(logits - expected).max() < BOUND


ROPES: dict[str, dict[str, Any]] = {
    "top level": {"rope_theta": 1e6},
    "rope_parameters": {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
    "rope_scaling null": {"rope_theta": 1e6, "rope_scaling": None},
    "type": {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "rope_type": {"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "dynamic": {"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
    "proportional": {
        "rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    },
    "longrope": LONGROPE,
    "longrope with all settings": {
        "rope_parameters": {
            **LONGROPE["rope_scaling"],  # type: ignore[dict-item]
            "rope_type": "longrope",
            "rope_theta": 1e5,
            "attention_factor": 1.25,
        }
    },
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn without a factor": {
        "rope_theta": 1e4,
        "rope_scaling": {"type": "yarn", "factor": None, "original_max_position_embeddings": 64},
    },
    "yarn with all settings": {
        "rope_theta": 1e4,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 3.0,
            "mscale": 0.8,
            "mscale_all_dim": 0.5,
            "beta_fast": 8,
            "beta_slow": 2,
            "truncate": False,
            "original_max_position_embeddings": 48,
        },
    },
}


@pytest.mark.parametrize("spelling", ROPES)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "mixtral"])
def test_case_8_rope_spellings(family: str, spelling: str, tmp_path: Path) -> None:
    """200 positions: more than three times the original length of the scalings."""
    directory = checkpoints.FAMILIES[family](
        tmp_path / "m", rope=ROPES[spelling], storage="f32", tokenizer=False, head_dim=32
    )
    ids = [int(i) for i in np.random.default_rng(2).integers(3, 295, 200)]
    found = ours(directory, tmp_path / "m.colibri", "f32", ids, context=512)
    assert np.abs(found - reference(directory, ids)).max() < BOUND
    if "longrope" in spelling:  # its other side
        found = ours(directory, tmp_path / "m.colibri", "f32", ids[:64])
        assert np.abs(found - reference(directory, ids[:64])).max() < BOUND
