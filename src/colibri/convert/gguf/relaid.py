"""What lies otherwise in the GGUF files of an architecture: other names, rows and columns in another order,
sums and exponentials that are there already.

Owns: those names and cuts, in place of those that fit the checkpoint. Refuses: nothing; shapes are checked
where tensors are found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from colibri.convert.checkpoint import SourceTensor, View
from colibri.convert.decoder import Cut, Decoder, Names, neighbours_apart, permuted
from colibri.convert.gguf.container import GgufFile
from colibri.convert.gguf.names import NAMES, layer

# The norm between attention and feed-forward where it has the other name.
_POST_NORM = layer(ffn_norm="post_attention_norm.weight")

_DELTA = layer(
    delta_qkv="attn_qkv.weight",
    delta_gate="attn_gate.weight",
    delta_conv="ssm_conv1d.weight",
    delta_log_rate="ssm_a",
    delta_decay_bias="ssm_dt.bias",
    delta_value_norm="ssm_norm.weight",
    delta_out="ssm_out.weight",
)
_SHORT = layer(
    **dict.fromkeys(("delta_beta", "delta_gate", "delta_qkv"), "shortconv.in_proj.weight"),
    delta_conv="shortconv.conv.weight",
    delta_out="shortconv.out_proj.weight",
)
_CONV = "layers.{N}.delta_conv"
_OF_LAYERS = ("own_head_dim", "own_kv_heads")
_PUT_APART = ("layers.{N}.delta_qkv", "layers.{N}.delta_gate")

Relaid = Callable[[GgufFile, Decoder], tuple[Names, Decoder]]


def _turned(_gguf: GgufFile, decoder: Decoder) -> tuple[Names, Decoder]:
    """Elements of a head that rotate together are neighbours, in biases too."""
    cuts = neighbours_apart(decoder.config)
    if decoder.config.get("attn_qkv_bias"):
        for entry in ("layers.{N}.attn_q", "layers.{N}.attn_k"):
            order = _order(cuts[entry])
            cuts[entry + "_bias"] = _numbers(order, len(order))
    return {}, decoder._replace(cuts={**decoder.cuts, **cuts})


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


def _values_of_keys(_gguf: GgufFile, decoder: Decoder) -> tuple[Names, Decoder]:
    """In layers where values are made of the weights of keys."""
    sources = {entry: (f"blk.{entry.split('.')[1]}.attn_k.weight",) for entry in decoder.sources}
    return {}, decoder._replace(sources=sources)


def _delta_by_key_head(gguf: GgufFile, decoder: Decoder) -> tuple[Names, Decoder]:
    """Betas and decays lie by key head as in checkpoints; queries, keys, values and gates have been put
    apart, but not in the first files."""
    names = {**_POST_NORM, **_DELTA, "layers.{N}.attn_gate": NAMES["layers.{N}.attn_q"]}
    names |= layer(delta_beta="ssm_ba.weight", delta_decay="ssm_ba.weight")
    cuts = dict(decoder.cuts)
    if "blk.0.ssm_in.weight" in gguf.tensors:
        names |= layer(delta_qkv="ssm_in.weight", delta_gate="ssm_in.weight")
    else:
        cuts = {entry: cut for entry, cut in cuts.items() if entry not in _PUT_APART}
    cuts = _with_flat_taps(cuts)
    return names, decoder._replace(cuts=cuts, affine={}, logs=("layers.{N}.delta_log_rate",))


def _with_flat_taps(cuts: Mapping[str, Cut]) -> dict[str, Cut]:
    """Convolutions [channels, width] in place of [channels, 1, width]."""
    if _CONV not in cuts:
        return dict(cuts)
    channels, _, width = cuts[_CONV].shape
    return {**cuts, _CONV: cuts[_CONV]._replace(shape=(channels, width))}


def _convolved(_gguf: GgufFile, decoder: Decoder) -> tuple[Names, Decoder]:
    """Short convolutions; the last norm has the name of one behind the embedding."""
    names: Names = {**_SHORT, "output_norm": ("token_embd_norm.weight",)}
    return names, decoder._replace(cuts=_with_flat_taps(decoder.cuts))


def _delta_in_tiles(_gguf: GgufFile, decoder: Decoder) -> tuple[Names, Decoder]:
    """Heads of values lie in turns: first those that are the first to read a key head, and so on. Here all
    that read one are neighbours."""
    names = {**_POST_NORM, **_DELTA, "layers.{N}.attn_gate": NAMES["layers.{N}.attn_q"]}
    names |= layer(delta_beta="ssm_beta.weight", delta_decay="ssm_alpha.weight")
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
    by_layer = {f"layers.{{N}}.{entry}": cut for entry, cut in cuts.items()}
    return names, decoder._replace(cuts={**decoder.cuts, **by_layer})


RELAID: Mapping[str, Relaid] = {
    "deepseek2": _latent,
    "gemma3": _added,
    "gemma4": _values_of_keys,
    "glm4moe": _post_normed,
    "gpt-oss": _post_normed,
    "granitemoe": _turned,
    "lfm2": _convolved,
    "lfm2moe": _convolved,
    "llama": _turned,
    "qwen35moe": _delta_in_tiles,
    "qwen3next": _delta_by_key_head,
}


def fused(gguf: GgufFile, decoder: Decoder) -> Decoder:
    """Layers of attention that have queries, keys and values in one matrix, one after the other, and in one
    vector of biases. In a layer with a state that name means another projection."""
    config = decoder.config
    n_layers, heads = config["n_layers"], config["n_heads"] * (1 + config.get("attn_gate", 0))
    mixers, widths, counts = (config.get(name) or [0] * n_layers for name in ("mixer", *_OF_LAYERS))
    sources, cuts = dict(decoder.sources), dict(decoder.cuts)
    for n in range(n_layers):
        matrix = f"blk.{n}.attn_qkv.weight"
        if mixers[n] or matrix not in gguf.tensors:
            continue
        width = widths[n] or config["head_dim"]
        query, key = heads * width, (counts[n] or config["n_kv_heads"]) * width
        parts = {"q": (0, query), "gate": (0, query), "k": (query, key), "v": (query + key, key)}
        for part, (start, count) in parts.items():
            entry, cut = f"layers.{n}.attn_{part}", decoder.cuts.get(f"layers.{{N}}.attn_{part}")
            order = tuple(start + i for i in _order(cut)) if cut else range(start, start + count)
            sources |= {entry: (matrix,), entry + "_bias": (f"blk.{n}.attn_qkv.bias",)}
            cuts[entry] = _rows_of(order, (query + 2 * key, config["n_embd"]))
            cuts[entry + "_bias"] = _numbers(order, query + 2 * key)
    return decoder._replace(sources=sources, cuts=cuts)


def _order(cut: Cut) -> tuple[int, ...]:
    """The rows that a cut takes."""
    return tuple(cut.view(SourceTensor("", Path(), "", ()), 0).order)


def _rows_of(order: Sequence[int], shape: tuple[int, int]) -> Cut:
    return Cut(shape, lambda tensor, _: View(tensor, len(order), shape[1], order=order))


def _numbers(order: Sequence[int], count: int) -> Cut:
    return Cut((count,), lambda tensor, _: View(tensor, 1, len(order), order=order, flat=True))
