"""What a token costs by the model file's directory: bytes that decoding reads, operations of its matrices.
With an encoder: bytes of the layers behind it, operations for a token of the source.

Owns: the count. Refuses: time. Padding counts where it is read (panels of 16 rows), not between entries.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from colibri.config import Config
from colibri.entries import Entry, entry_class, layer_heads
from colibri.format import read_container
from colibri.quantize import panel_bytes

_KV_BYTES = {"f32": 4, "f16": 2}  # values are padded to a multiple of 16 elements of a head
_LANES = 16


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one token. A layer's experts count as n_experts_used of their mean size."""

    embedding_bytes: int  # the panel that holds the token's row
    dense_bytes: int  # attention, norms, routers, shared experts, dense feed-forward
    experts_bytes: int  # of the chosen experts
    output_bytes: int  # output head
    kv_bytes_per_position: int  # keys and values of all layers
    state_bytes: int  # recurrent states of all layers
    layers_flops: int  # 2 x multiply-adds of all matrices but the output head
    output_flops: int

    def decode_bytes(self, positions: float) -> float:
        """Read for a token that looks at so many positions, itself included."""
        weights = self.embedding_bytes + self.dense_bytes + self.experts_bytes + self.output_bytes
        return weights + self.state_bytes + positions * self.kv_bytes_per_position

    def prefill_flops(self, n_ids: int) -> int:
        """Of a prompt of which only the last id's logits are wanted. Attention scores do not count."""
        return n_ids * self.layers_flops + self.output_flops


def cost(path: str | os.PathLike[str], kv_type: str = "f32") -> Cost:
    """The cost of a token of this model."""
    container = read_container(path)
    return count(container.config, [entry for entry in container.entries if entry.kind != "blob"], kv_type)


def count(config: Config, tensors: list[Entry], kv_type: str = "f32") -> Cost:
    """The same from a config and the entries of its tensors."""
    head = "embedding" if config["tied_output"] else "output"
    embedding_bytes = dense_bytes = output_bytes = output_flops = layers_flops = 0
    experts: dict[str, list[Entry]] = {}
    for entry in tensors:
        reads, decodes = _parts(config["n_encoder_layers"], entry.name)
        flops = sum(2 * rows * cols for rows, cols, _ in entry.matrices) if reads else 0
        if entry.name == "embedding":
            embedding_bytes = panel_bytes(entry.cols, entry.types[0])
        if entry.name == head:
            output_bytes, output_flops = entry.bytes, flops
        elif entry.kind == "expert":
            experts.setdefault(entry.name.rpartition(".")[0], []).append(entry)
        elif entry_class(entry) != "embedding":
            dense_bytes += entry.bytes if decodes else 0
            layers_flops += flops
    experts_bytes = 0
    for name, layer in experts.items():
        used = config["n_experts_used"]
        reads, decodes = _parts(config["n_encoder_layers"], name + ".")
        experts_bytes += used * sum(entry.bytes for entry in layer) // len(layer) if decodes else 0
        layers_flops += used * sum(2 * rows * cols for rows, cols, _ in layer[0].matrices) if reads else 0
    latent = config["kv_latent_dim"]
    kv, recurrent = 0, sum(config["mixer"])
    for number in range(config["n_encoder_layers"], config["n_layers"]):
        n_heads, width = layer_heads(config, number)
        key, value = (config["rope_dim"] + latent, latent) if latent else (width, width)
        if not config["mixer"][number]:
            kv += n_heads * (key + -(-value // _LANES) * _LANES) * _KV_BYTES[kv_type]
    lanes = -(-config["delta_value_dim"] // _LANES) * _LANES
    state = recurrent * config["delta_heads"] * config["delta_key_dim"] * lanes * _KV_BYTES["f32"]
    return Cost(
        embedding_bytes, dense_bytes, experts_bytes, output_bytes, kv, state, layers_flops, output_flops
    )


def _parts(n_encoder: int, name: str) -> tuple[bool, bool]:
    """Whether a tensor takes part in reading a prompt, and in decoding."""
    if not n_encoder:
        return True, True
    keys_of_source = name.endswith((".cross_attn_k", ".cross_attn_v"))
    words = name.split(".")
    encoder = name.startswith("encoder_") or (words[0] == "layers" and int(words[1]) < n_encoder)
    return encoder or keys_of_source or words[0] == "output", not (encoder or keys_of_source)
