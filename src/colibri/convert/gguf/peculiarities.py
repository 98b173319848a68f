"""What no table of keys says of an architecture.

Owns: functions that complete the config.json of one, from keys that mean something else there, from which
tensors there are, or from what is true of all its models. Refuses: keys that contradict that.
"""

from __future__ import annotations

from typing import Any

from colibri.convert.delta import CONV, LINEAR
from colibri.convert.gguf.metadata import Metadata
from colibri.convert.gguf.rotation import still
from colibri.convert.windows import FULL, SLIDING

Config = dict[str, Any]
SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3  # expert_gating_func


def routed_if_said(metadata: Metadata, config: Config) -> None:
    """llama with experts, whose routers always renormalise."""
    if metadata.get("expert_count", 0):
        config |= {"model_type": "mixtral", "sliding_window": None}
        config["num_local_experts"] = metadata.integer("expert_count")
        config["num_experts_per_tok"] = metadata.integer("expert_used_count")
        metadata.require("expert_gating_func", (SOFTMAX,))
        metadata.require("expert_weights_norm", (True,))
        metadata.require("expert_feed_forward_length", (config["intermediate_size"],))
        config.pop("attention_bias")
    else:
        metadata.require("expert_used_count", (0,))


def dense_layers(metadata: Metadata, config: Config) -> None:
    """Layers without experts among the others; no key says which."""
    layers = range(metadata.n_layers)
    config["mlp_only_layers"] = [n for n in layers if not metadata.has(f"blk.{n}.ffn_gate_inp.weight")]


def deepseek(metadata: Metadata, config: Config) -> None:
    """V3 by its sigmoid, or by the bias that goes with it in a file that does not say which function; V2
    otherwise. Where attention is stored absorbed, key_length and value_length are those of the one shared
    head."""
    last = f"blk.{metadata.n_layers - 1}.exp_probs_b"
    biased = metadata.has(last) or metadata.has(last + ".bias")
    gating = metadata.get("expert_gating_func") or (SIGMOID if biased else SOFTMAX)
    if gating not in (SOFTMAX, SIGMOID):
        raise metadata.error("expert_gating_func", f"{SOFTMAX} (softmax) or {SIGMOID} (sigmoid)")
    rope = metadata.integer("rope.dimension_count", 2)
    absorbed = "attention.key_length_mla" in metadata.values
    suffix = "_mla" if absorbed else ""
    head = metadata.integer(f"attention.key_length{suffix}", rope + 1)
    rank, value = (
        metadata.integer("attention.kv_lora_rank"),
        metadata.integer(f"attention.value_length{suffix}"),
    )
    for size in (metadata.integer("attention.head_count") * head, rank, value):
        metadata.within("attention.head_count", size)
    config |= {
        "model_type": "deepseek_v3" if gating == SIGMOID else "deepseek_v2",
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": head - rope,
        "v_head_dim": value,
    }
    metadata.require("attention.head_count_kv", (1,) if absorbed else (config["num_attention_heads"],))
    if absorbed:
        metadata.require("attention.key_length", (rank + rope,))
        metadata.require("attention.value_length", (rank,))
    if gating == SOFTMAX:
        config["topk_method"] = "group_limited_greedy" if config["n_group"] > 1 else "greedy"


def _window(metadata: Metadata, config: Config, period: int) -> None:
    """All layers but each period-th have a window, if the file says none of each."""
    window = metadata.get("attention.sliding_window", 0)
    each = metadata.flags("attention.sliding_window_pattern")
    if each is None:
        period = metadata.period("attention.sliding_window_pattern", period)
        each = [not period or (n + 1) % period > 0 for n in range(metadata.n_layers)]
    config["sliding_window"] = window or None
    config["layer_types"] = [SLIDING if one and window else FULL for one in each]


def gpt_oss(metadata: Metadata, config: Config) -> None:
    """Its YaRN does not round the ends of the ramp, which no key says."""
    _window(metadata, config, 2)
    rope = config["rope_parameters"]
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False
    metadata.require("rope.freq_base_swa", (rope["rope_theta"],))


def gemma3(metadata: Metadata, config: Config) -> None:
    """Scores are scaled by the width of a head, in the model of 62 layers by hidden_size / heads; no key says
    so."""
    _window(metadata, config, 6)
    _of_kinds(metadata, config)
    head_dim, heads = config["head_dim"], config["num_attention_heads"]
    by_width = metadata.n_layers == 62 or head_dim is None
    config["query_pre_attn_scalar"] = config["hidden_size"] // heads if by_width else head_dim


def _of_kinds(metadata: Metadata, config: Config) -> None:
    """What layers with a window have of their own in Gemma, and the cap that all its models may have."""
    theta = metadata.number("rope.freq_base_swa", 1e4)
    local = {"rope_type": "default", "rope_theta": theta}
    config["rope_parameters"] = {FULL: config["rope_parameters"], SLIDING: local}
    config["final_logit_softcapping"] = metadata.get("final_logit_softcapping", 0) or None


def gemma4(metadata: Metadata, config: Config) -> None:
    """Layers that see all have heads of their own, of which a part rotates: a factor of 1e30 makes the other
    frequencies stand still. Values without weights are made of those of keys."""
    _window(metadata, config, 6)
    metadata.integer("attention.sliding_window")
    kinds = config["layer_types"]
    if kinds[-1] != FULL:
        raise metadata.error("attention.sliding_window_pattern", "false for the last layer")
    heads = metadata.integer("attention.head_count")
    each = metadata.counts("attention.head_count_kv", heads)
    own: dict[str, Config] = {}
    for kind, suffix in ((FULL, ""), (SLIDING, "_swa")):
        width = metadata.integer(f"attention.key_length{suffix}", 2)
        counts = {count for count, of in zip(each, kinds, strict=True) if of == kind} or {heads}
        if len(counts) > 1 or 0 in counts:
            raise metadata.error("attention.head_count_kv", "one number for all layers of a kind, at least 1")
        own[kind] = {"head_dim": width, "num_key_value_heads": counts.pop()}
        metadata.require(f"attention.value_length{suffix}", (width,))
        metadata.require(f"rope.dimension_count{suffix}", (width,))
        metadata.within(f"attention.key_length{suffix}", heads * width)
        metadata.within("attention.head_count_kv", own[kind]["num_key_value_heads"] * width)
    full = [str(n) for n, kind in enumerate(kinds) if kind == FULL]
    config |= own[SLIDING] | {"per_layer_config": dict.fromkeys(full, own[FULL])}
    config["attention_k_eq_v"] = not any(metadata.has(f"blk.{n}.attn_v.weight") for n in full)
    if not config["enable_moe_block"]:
        metadata.require("expert_count", (0,))
    if config["rope_parameters"]["rope_type"] != "default":
        raise metadata.error("rope.scaling.type", "none")
    config["rope_parameters"] |= {
        "rope_type": "proportional",
        "partial_rotary_factor": still(metadata, own[FULL]["head_dim"]),
    }
    _of_kinds(metadata, config)


def convolved(metadata: Metadata, config: Config) -> None:
    """Layers without heads of keys are convolutions. Widths of feed-forwards are as they say."""
    heads = config["num_attention_heads"]
    each = metadata.counts("attention.head_count_kv", heads)
    counts = {count for count in each if count}
    if len(counts) > 1:
        raise metadata.error("attention.head_count_kv", "one number, or 0 in layers without attention")
    head_dim = config["head_dim"] or config["hidden_size"] // heads
    config["num_key_value_heads"] = counts.pop() if counts else heads
    metadata.within("attention.head_count_kv", config["num_key_value_heads"] * head_dim)
    metadata.within("shortconv.l_cache", config["conv_L_cache"])
    config["layer_types"] = [FULL if count else CONV for count in each]
    if config["model_type"] == "lfm2":
        config["block_auto_adjust_ff_dim"] = False
    else:
        last = f"blk.{metadata.n_layers - 1}.exp_probs_b"
        config["norm_topk_prob"] = True
        config["use_expert_bias"] = metadata.has(last) or metadata.has(last + ".bias")


def granite(metadata: Metadata, config: Config) -> None:
    """Without a scale of scores, that of the others."""
    if not config["attention_multiplier"]:
        config["attention_multiplier"] = (config["hidden_size"] // config["num_attention_heads"]) ** -0.5


def llama4(metadata: Metadata, config: Config) -> None:
    """Every fourth layer sees all and does not rotate. A window of 0: all rotate and see all, and none scales
    by position. What else belongs to the attention is the same in all models."""
    whole = metadata.get("attention.sliding_window") == 0
    metadata.require("attention.sliding_window", (8192, 0))
    each = metadata.flags("attention.sliding_window_pattern")
    if each is None:
        period = metadata.period("attention.sliding_window_pattern", 4)
        each = [not period or (n + 1) % period > 0 for n in range(metadata.n_layers)]
    metadata.require("rope.freq_base_swa", (config["rope_parameters"]["rope_theta"],))
    config |= {
        "no_rope_layers": [int(one or whole) for one in each],
        "attention_chunk_size": None if whole else 8192,
        "attn_temperature_tuning": not whole,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "use_qk_norm": config["num_local_experts"] != 128,
    }


def delta(metadata: Metadata, config: Config) -> None:
    """Keys of state-space models, and the layers that have none."""
    inner, heads = metadata.integer("ssm.inner_size"), metadata.integer("ssm.time_step_rank")
    metadata.within("ssm.inner_size", inner)
    metadata.within(
        "ssm.state_size", metadata.integer("ssm.state_size") * metadata.integer("ssm.group_count")
    )
    metadata.within("ssm.conv_kernel", metadata.integer("ssm.conv_kernel"))
    if inner % heads:
        raise metadata.error("ssm.inner_size", f"a multiple of ssm.time_step_rank = {heads}")
    config["linear_value_head_dim"] = inner // heads
    each = metadata.flags("attention.recurrent_layers")
    period = metadata.period("full_attention_interval", 4) or 1
    if each is None:
        each = [(n + 1) % period > 0 for n in range(metadata.n_layers)]
    config["layer_types"] = [LINEAR if one else FULL for one in each]


def delta_next(metadata: Metadata, config: Config) -> None:
    delta(metadata, config)
    dense_layers(metadata, config)
