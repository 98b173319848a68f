"""Where each entry of a model lies in a GGUF file.

Owns: one table of names for all architectures, what an architecture has otherwise, and which rows lie in
another order than in the checkpoint that the file was made of. Refuses: factors of frequencies that a model
does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from colibri.convert.checkpoint import SourceTensor, View
from colibri.convert.decoder import Cut, Decoder, ExpertNames, Names, neighbours_apart, permuted
from colibri.convert.gguf.container import GgufFile
from colibri.convert.gguf.rotation import FREQS, LONG, SHORT, read_vector
from colibri.convert.registry import Family
from colibri.errors import ConversionError


def _layer(**names: str) -> Names:
    """Entries of a layer, and how GGUF calls them."""
    return {f"layers.{{N}}.{entry}": (f"blk.{{N}}.{name}",) for entry, name in names.items()}


NAMES: Names = {
    "embedding": ("token_embd.weight",),
    "output": ("output.weight",),
    "output_bias": ("output.bias",),
    "output_norm": ("output_norm.weight",),
    "output_norm_bias": ("output_norm.bias",),
    **_layer(
        attn_norm="attn_norm.weight",
        attn_norm_bias="attn_norm.bias",
        attn_q="attn_q.weight",
        attn_k="attn_k.weight",
        attn_v="attn_v.weight",
        attn_q_bias="attn_q.bias",
        attn_k_bias="attn_k.bias",
        attn_v_bias="attn_v.bias",
        attn_q_norm="attn_q_norm.weight",
        attn_k_norm="attn_k_norm.weight",
        attn_q_latent="attn_q_a.weight",
        attn_q_latent_norm="attn_q_a_norm.weight",
        attn_kv_latent="attn_kv_a_mqa.weight",
        attn_kv_latent_norm="attn_kv_a_norm.weight",
        attn_out="attn_output.weight",
        attn_out_bias="attn_output.bias",
        attn_sinks="attn_sinks.weight",
        attn_post_norm="post_attention_norm.weight",
        ffn_norm="ffn_norm.weight",
        ffn_norm_bias="ffn_norm.bias",
        ffn_post_norm="post_ffw_norm.weight",
        ffn_gate="ffn_gate.weight",
        ffn_up="ffn_up.weight",
        ffn_down="ffn_down.weight",
        router="ffn_gate_inp.weight",
        router_logit_bias="ffn_gate_inp.bias",
        shared_router="ffn_gate_inp_shexp.weight",
        shared_gate="ffn_gate_shexp.weight",
        shared_up="ffn_up_shexp.weight",
        shared_down="ffn_down_shexp.weight",
        experts_gate_bias="ffn_gate_exps.bias",
        experts_up_bias="ffn_up_exps.bias",
        experts_down_bias="ffn_down_exps.bias",
    ),
    "layers.{N}.router_bias": ("blk.{N}.exp_probs_b.bias", "blk.{N}.exp_probs_b"),
}
EXPERTS = ExpertNames(
    ("blk.{N}",),
    ("ffn_gate", "ffn_up", "ffn_down"),
    stacked=("ffn_gate_up_exps.weight", "ffn_down_exps.weight"),
    transposed=False,
    apart=("ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight"),
    single="{part}.{E}.weight",  # of files of before April 2024
)
# The norm between attention and feed-forward where it has the other name.
_POST_NORM = _layer(ffn_norm="post_attention_norm.weight")

_DELTA = _layer(
    delta_qkv="attn_qkv.weight",
    delta_gate="attn_gate.weight",
    delta_conv="ssm_conv1d.weight",
    delta_log_rate="ssm_a",
    delta_decay_bias="ssm_dt.bias",
    delta_value_norm="ssm_norm.weight",
    delta_out="ssm_out.weight",
)
_CONV = "layers.{N}.delta_conv"
_PUT_APART = ("layers.{N}.delta_qkv", "layers.{N}.delta_gate")

Relaid = Callable[[GgufFile, Decoder], tuple[Names, Decoder]]


def layout_of(gguf: GgufFile, family: Family, decoder: Decoder) -> tuple[Names, ExpertNames | None, Decoder]:
    """Names of tensors, and the decoder with cuts and the like as this file needs them."""
    architecture = gguf.metadata["general.architecture"]
    extra = gguf.metadata.get(f"{architecture}.nextn_predict_layers", 0)
    decoder = _with_factors(gguf, decoder._replace(extra_layers=extra, left_out=()))
    relaid = RELAID.get(architecture)
    names, decoder = relaid(gguf, decoder) if relaid else ({}, decoder)
    return {**NAMES, **names}, EXPERTS if family.EXPERTS is not None else None, decoder


def _with_factors(gguf: GgufFile, decoder: Decoder) -> Decoder:
    """Frequencies divided by factors that the file has for them; those of longrope were read as settings."""
    read = tuple(name for name in (LONG, SHORT) if name in gguf.tensors)
    if FREQS not in gguf.tensors:
        return decoder._replace(read=read)
    factors = read_vector(gguf, FREQS)
    if factors.shape != decoder.inv_freq.shape or read:
        raise ConversionError(
            f"{FREQS} in {gguf.tensors[FREQS].file} has {len(factors)} factors for "
            f"{len(decoder.inv_freq)} frequencies{' beside ' + ' and '.join(read) if read else ''}. Download "
            "the file again."
        )
    inv_freq = decoder.inv_freq / factors
    return decoder._replace(
        inv_freq=inv_freq, made={**decoder.made, "rope_inv_freq": inv_freq}, read=(FREQS,)
    )


def _turned(_gguf: GgufFile, decoder: Decoder) -> tuple[Names, Decoder]:
    """Elements of a head that rotate together are neighbours, in biases too."""
    cuts = neighbours_apart(decoder.config)
    if decoder.config.get("attn_qkv_bias"):
        for entry in ("layers.{N}.attn_q", "layers.{N}.attn_k"):
            cuts[entry + "_bias"] = _numbers(cuts[entry].view)
    return {}, decoder._replace(cuts={**decoder.cuts, **cuts})


def _numbers(rows: Callable[[SourceTensor, int], View]) -> Cut:
    """A vector with its numbers in the order of these rows."""
    order = tuple(rows(SourceTensor("", Path(), "", ()), 0).order)
    return Cut((len(order),), lambda tensor, _: View(tensor, 1, len(order), order=order, flat=True))


def _latent(gguf: GgufFile, decoder: Decoder) -> tuple[Names, Decoder]:
    """Keys and values of each head from the latent vector: two stacks, or in old files one matrix as
    checkpoints have it."""
    names: dict[str, tuple[str, ...]] = {
        "layers.{N}.attn_q": ("blk.{N}.attn_q_b.weight", "blk.{N}.attn_q.weight")
    }
    up = ("layers.{N}.attn_k_up.{H}", "layers.{N}.attn_v_up.{H}")
    if "blk.0.attn_kv_b.weight" in gguf.tensors and "blk.0.attn_k_b.weight" not in gguf.tensors:
        return names | dict.fromkeys(up, ("blk.{N}.attn_kv_b.weight",)), decoder
    config = decoder.config
    heads, rank, value = config["n_heads"], config["kv_latent_dim"], config["value_dim"]
    plain = config["head_dim"] - config["rope_dim"]
    cuts = {
        up[0]: Cut((heads, rank, plain), lambda tensor, head: View(tensor, rank, plain, head)),
        up[1]: Cut((heads, value, rank), lambda tensor, head: View(tensor, value, rank, head)),
    }
    names |= {up[0]: ("blk.{N}.attn_k_b.weight",), up[1]: ("blk.{N}.attn_v_b.weight",)}
    return names, decoder._replace(cuts={**decoder.cuts, **cuts})


def _post_normed(_gguf: GgufFile, decoder: Decoder) -> tuple[Names, Decoder]:
    return _POST_NORM, decoder


def _added(_gguf: GgufFile, decoder: Decoder) -> tuple[Names, Decoder]:
    """The 1 of norms has been added."""
    return {}, decoder._replace(affine={})


def _delta_by_key_head(gguf: GgufFile, decoder: Decoder) -> tuple[Names, Decoder]:
    """Betas and decays lie by key head as in checkpoints; queries, keys, values and gates have been put
    apart, but not in the first files."""
    names = {**_POST_NORM, **_DELTA, "layers.{N}.attn_gate": NAMES["layers.{N}.attn_q"]}
    names |= _layer(delta_beta="ssm_ba.weight", delta_decay="ssm_ba.weight")
    cuts = dict(decoder.cuts)
    if "blk.0.ssm_in.weight" in gguf.tensors:
        names |= _layer(delta_qkv="ssm_in.weight", delta_gate="ssm_in.weight")
    else:
        cuts = {entry: cut for entry, cut in cuts.items() if entry not in _PUT_APART}
    if _CONV in cuts:
        channels, _, width = cuts[_CONV].shape
        cuts[_CONV] = cuts[_CONV]._replace(shape=(channels, width))
    return names, decoder._replace(cuts=cuts, affine={}, logs=("layers.{N}.delta_log_rate",))


def _delta_in_tiles(_gguf: GgufFile, decoder: Decoder) -> tuple[Names, Decoder]:
    """Heads of values lie in turns: first those that are the first to read a key head, and so on. Here all
    that read one are neighbours."""
    names = {**_POST_NORM, **_DELTA, "layers.{N}.attn_gate": NAMES["layers.{N}.attn_q"]}
    names |= _layer(delta_beta="ssm_beta.weight", delta_decay="ssm_alpha.weight")
    decoder = decoder._replace(affine={}, logs=("layers.{N}.delta_log_rate",))
    config = decoder.config
    if not any(config["mixer"]):
        return names, decoder
    key_heads, width, n_embd = config["delta_key_heads"], config["conv_width"], config["n_embd"]
    group, value = config["delta_heads"] // key_heads, config["delta_value_dim"]
    heads = [tile * key_heads + head for head in range(key_heads) for tile in range(group)]
    values = [head * value + i for head in heads for i in range(value)]
    keys = 2 * key_heads * config["delta_key_dim"]
    channels = [*range(keys), *(keys + i for i in values)]
    taps = [channel * width + tap for tap in range(width) for channel in channels]

    def rows(order: list[int]) -> Cut:
        return permuted(tuple(order), n_embd)

    def numbers(order: list[int], shape: tuple[int, ...]) -> Cut:
        return Cut(shape, lambda tensor, _: View(tensor, 1, len(order), order=order, flat=True))

    cuts = {
        "delta_qkv": rows(channels),
        "delta_gate": rows(values),
        "delta_beta": rows(heads),
        "delta_decay": rows(heads),
        "delta_conv": numbers(taps, (len(channels), width)),
        "delta_log_rate": numbers(heads, (len(heads),)),
        "delta_decay_bias": numbers(heads, (len(heads),)),
        "delta_out": Cut(
            (n_embd, len(values)), lambda tensor, _: View(tensor, n_embd, len(values), columns=values)
        ),
    }
    layer = {f"layers.{{N}}.{entry}": cut for entry, cut in cuts.items()}
    return names, decoder._replace(cuts={**decoder.cuts, **layer})


RELAID: Mapping[str, Relaid] = {
    "deepseek2": _latent,
    "gemma3": _added,
    "glm4moe": _post_normed,
    "gpt-oss": _post_normed,
    "granitemoe": _turned,
    "llama": _turned,
    "qwen35moe": _delta_in_tiles,
    "qwen3next": _delta_by_key_head,
}
