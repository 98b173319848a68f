"""What the families with an encoder share: names of two stacks of layers, keys that both write, the biases by
distance.

Owns: where a stack's layers have experts, T5's buckets of distances, as the classes in Transformers do.
Refuses: what makes the two stacks unlike each other, and models without an encoder, by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from colibri.convert.checkpoint import SourceTensor, View
from colibri.convert.decoder import Cut, Names
from colibri.convert.keys import Keys

# Both stacks have an embedding of their own; save_pretrained leaves out those that are tied to the first.
EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_REPEATED = 15  # the engine takes biases 16 at a time: beyond a span the outer 16 count, so they are equal


def both_stacks(shared: Names, encoder: Names, decoder: Names, layers: str) -> Names:
    """Names of a layer's tensors, {target: names below the layer}, as names of both stacks; `layers`:
    what a stack calls its list of layers."""
    return {
        f"{stack}.{{N}}.{target}": tuple(f"{stack}.{layers}.{{N}}.{name}" for name in names)
        for stack, own in (("encoder", encoder), ("decoder", decoder))
        for target, names in {**shared, **own}.items()
    }


def require_encoder(keys: Keys) -> None:
    keys.require("is_encoder_decoder", (True,), True)
    keys.require("router_ignore_padding_tokens", (True, False), False)  # a source has no padding here
    keys.require("router_dtype", ("float32",), "float32")


def same(keys: Keys, encoder: str, decoder: str, defaults: Mapping[str, int]) -> int:
    """A size that both stacks have."""
    size = keys.integer(encoder, defaults[encoder])
    if keys.integer(decoder, defaults[decoder]) != size:
        raise keys.error(decoder, f"{encoder} = {size}", "Stacks of unlike layers are not supported.")
    return size


def distance_biases(keys: Keys, n_heads: int) -> tuple[int, dict[str, Cut]]:
    """(attn_bias_span, the entries made of tables [n_buckets, n_heads]): a bias for each distance of a key
    from a query, key minus query, in place of one for each bucket of distances."""
    n_buckets = keys.integer("relative_attention_num_buckets", 32, 4)
    farthest = keys.integer("relative_attention_max_distance", 128, field="attn_bias_span")
    if farthest <= n_buckets // 2:
        raise keys.error(
            "relative_attention_max_distance",
            f"more than half of relative_attention_num_buckets = {n_buckets}",
        )
    span = farthest + _REPEATED

    def cut(both_ways: bool) -> Cut:
        def view(tensor: SourceTensor, _head: int) -> View:
            buckets = [_bucket(at, n_buckets, farthest, both_ways) for at in range(-span, span + 1)]
            order = tuple(bucket * n_heads + head for head in range(n_heads) for bucket in buckets)
            return View(tensor, 1, len(order), order=order, flat=True)

        return Cut((n_buckets, n_heads), view)

    return span, {"attn_bias": cut(False), "encoder_attn_bias": cut(True)}


def _bucket(distance: int, n_buckets: int, farthest: int, both_ways: bool) -> int:
    """Near distances have buckets of their own, farther ones share them by their logarithm, in f32; it is
    rounded once from float64, so that every machine gets the same."""
    first = 0
    if both_ways:
        n_buckets //= 2
        first = n_buckets if distance > 0 else 0
    size, exact = abs(distance) if both_ways else max(-distance, 0), n_buckets // 2
    if size < exact:
        return first + size
    times = math.log(np.float32(size) / np.float32(exact))
    share = np.float32(times) / np.float32(math.log(farthest / exact))
    return first + min(exact + int(share * np.float32(n_buckets - exact)), n_buckets - 1)
