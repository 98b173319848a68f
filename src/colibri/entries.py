"""The directory entries of a model: which tensors there must be, in which order, of which shape and size.

Owns: the canonical list of docs/FORMAT.md section 3 and what each entry is counted as.
Refuses: offsets and bytes (format.py), weight layouts (quantize.py), names in checkpoints (convert/).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from colibri.config import Config
from colibri.errors import ArgumentError, ConversionError
from colibri.quantize import KEPT, check_type, matrix_bytes

DEFAULT_TYPE = "q8"
Types = str | Callable[[str], tuple[str, ...]]

KINDS = {1: "vector", 2: "matrix", 3: "expert", 4: "blob"}
KIND_IDS = {name: number for number, name in KINDS.items()}
ENTRY_CLASSES = (
    "embedding",
    "output",
    "attention",
    "routers",
    "experts",
    "shared",
    "dense",
    "norms",
    "blobs",
)


@dataclass(frozen=True, slots=True)
class WeightTypes:
    """The weight type of each kind of matrix; a function from an entry's name to its types."""

    experts: str  # routed experts; "" for a model without
    dense: str  # attention, shared experts, dense feed-forward
    output: str  # embedding and output head

    def __call__(self, name: str) -> tuple[str, ...]:
        if name in ("embedding", "output"):
            return (self.output,) * 3
        return (self.experts if ".experts." in name else self.dense,) * 3

    def __str__(self) -> str:
        """ "q8", or "q4 experts, q8 dense, q8 output" """
        parts = {"experts": self.experts, "dense": self.dense, "output": self.output}
        given = {part: type for part, type in parts.items() if type}
        if len(set(given.values())) == 1:
            return self.dense
        return ", ".join(f"{type} {part}" for part, type in given.items())


def weight_types(
    type: str | None = None,
    *,
    experts: str | None = None,
    dense: str | None = None,
    output: str | None = None,
) -> WeightTypes:
    """The choice with `type` (None: q8) where there is none; an error for what is no weight type, or has no
    effect."""
    for chosen in (type, experts, dense, output):
        if chosen == KEPT and chosen is not experts:
            raise ConversionError(
                f"Weight type {KEPT} is for experts alone, left as a checkpoint stores them. Choose q4."
            )
        if chosen is not None and chosen != KEPT:
            check_type(chosen)
    if None not in (type, experts, dense, output):
        raise ArgumentError(f"type={type!r} has no effect: experts, dense and output have types of their own")
    rest = DEFAULT_TYPE if type is None else type
    return WeightTypes(experts or rest, dense or rest, output or rest)


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the directory. `types`: one weight type; three for an expert (gate, up or "" for none,
    down); none for a blob."""

    name: str
    kind: str
    rows: int
    cols: int
    types: tuple[str, ...]
    bytes: int
    offset: int = 0
    crc: int = 0

    @property
    def matrices(self) -> tuple[tuple[int, int, str], ...]:
        """(rows, cols, type) of the packed matrices, in file order; none for vectors and blobs."""
        if self.kind == "matrix":
            return ((self.rows, self.cols, self.types[0]),)
        if self.kind == "expert":
            *inner, down = self.types
            gated = tuple((self.rows, self.cols, type) for type in inner if type)
            return (*gated, (self.cols, self.rows, down))
        return ()


def layer_heads(config: Config, layer: int) -> tuple[int, int]:
    """Key and value heads of a layer, and the width of a head."""
    own = config["own_kv_heads"][layer], config["own_head_dim"][layer]
    return own[0] or config["n_kv_heads"], own[1] or config["head_dim"]


def expected_entries(config: Config, types: Types) -> list[Entry]:
    """The tensors of a model in canonical order, without offsets.

    `types` is one weight type for all matrices, or a function from an entry's name to its types. Vectors and
    routers are f32 whatever it says. `config` comes from complete_config.
    """
    return list(iter_tensors(config, types))


def iter_tensors(config: Config, types: Types) -> Iterator[Entry]:
    """Lazy, so that a damaged file is refused at its first wrong entry, before a long list is built."""
    n_vocab, n_embd = config["n_vocab"], config["n_embd"]
    n_heads, kv_latent, q_latent = config["n_heads"], config["kv_latent_dim"], config["q_latent_dim"]

    def of(name: str, count: int) -> tuple[str, ...]:
        return (types,) * count if isinstance(types, str) else types(name)

    def vector(name: str, cols: int) -> Entry:
        return Entry(name, "vector", 1, cols, ("f32",), 4 * cols)

    def matrix(name: str, rows: int, cols: int, type: str | None = None) -> Entry:
        chosen = type or of(name, 1)[0]
        return Entry(name, "matrix", rows, cols, (chosen,), matrix_bytes(rows, cols, chosen))

    def norm(name: str) -> Iterator[Entry]:
        yield vector(name, n_embd)
        if config["layer_norm"]:
            yield vector(name + "_bias", n_embd)

    ungated = bool(config["ffn_ungated"])

    def latent(at: str) -> Iterator[Entry]:
        if q_latent:
            yield matrix(at + "attn_q_latent", q_latent, n_embd)
            yield vector(at + "attn_q_latent_norm", q_latent)
        yield matrix(at + "attn_q", n_heads * config["head_dim"], q_latent or n_embd)
        yield matrix(at + "attn_kv_latent", config["rope_dim"] + kv_latent, n_embd)
        yield vector(at + "attn_kv_latent_norm", kv_latent)
        for head in range(n_heads):
            yield matrix(f"{at}attn_k_up.{head}", kv_latent, config["head_dim"] - config["rope_dim"])
        for head in range(n_heads):
            yield matrix(f"{at}attn_v_up.{head}", config["value_dim"], kv_latent)

    def grouped(at: str, layer: int) -> Iterator[Entry]:
        n_kv_heads, head_dim = layer_heads(config, layer)
        n_q, n_kv = n_heads * head_dim, n_kv_heads * head_dim
        projections = (("q", n_q), ("k", n_kv), ("v", n_kv))
        for part, rows in projections:
            yield matrix(f"{at}attn_{part}", rows, n_embd)
        if config["attn_gate"]:
            yield matrix(at + "attn_gate", n_q, n_embd)
        if config["attn_qkv_bias"]:
            for part, rows in projections:
                yield vector(f"{at}attn_{part}_bias", rows)
        if config["qk_norm"] and (config["qk_norm"] != 3 or config["rope_set"][layer] != 2):
            for part, rows in projections[:2]:
                yield vector(f"{at}attn_{part}_norm", rows if config["qk_norm"] == 2 else head_dim)

    def delta(at: str) -> Iterator[Entry]:
        heads, value_dim, key_dim = config["delta_heads"], config["delta_value_dim"], config["delta_key_dim"]
        channels = 2 * config["delta_key_heads"] * key_dim + heads * value_dim
        yield matrix(at + "delta_qkv", channels, n_embd)
        yield matrix(at + "delta_gate", heads * value_dim, n_embd)
        yield matrix(at + "delta_beta", heads, n_embd, "f32" if key_dim else None)
        if key_dim:
            yield matrix(at + "delta_decay", heads, n_embd, "f32")
        yield vector(at + "delta_conv", channels * config["conv_width"])
        if key_dim:
            yield vector(at + "delta_log_rate", heads)
            yield vector(at + "delta_decay_bias", heads)
            yield vector(at + "delta_value_norm", value_dim)
        yield matrix(at + "delta_out", n_embd, heads * value_dim)

    def attention(at: str, layer: int) -> Iterator[Entry]:
        yield from norm(at + "attn_norm")
        if config["mixer"][layer]:
            yield from delta(at)
            return
        yield from latent(at) if kv_latent else grouped(at, layer)
        width = config["value_dim"] if kv_latent else layer_heads(config, layer)[1]
        yield matrix(at + "attn_out", n_embd, n_heads * width)
        if config["attn_out_bias"]:
            yield vector(at + "attn_out_bias", n_embd)
        if config["post_norm"]:
            yield vector(at + "attn_post_norm", n_embd)
        if config["attn_sinks"]:
            yield vector(at + "attn_sinks", n_heads)

    def gated(at: str, width: int) -> Iterator[Entry]:
        yield matrix(f"{at}_gate", width, n_embd)
        if not ungated:
            yield matrix(f"{at}_up", width, n_embd)
        yield matrix(f"{at}_down", n_embd, width)

    def biases(at: str, width: int, count: int) -> Iterator[Entry]:
        for part, rows in (("gate", width), ("up", width), ("down", n_embd)):
            if config["expert_bias"] and not (ungated and part == "up"):
                yield vector(f"{at}_{part}_bias", count * rows)

    yield matrix("embedding", n_vocab, n_embd)
    if not config["tied_output"]:
        yield matrix("output", n_vocab, n_embd)
    if config["output_bias"]:
        yield vector("output_bias", n_vocab)
    yield from norm("output_norm")
    if config["rope_dim"]:
        yield vector("rope_inv_freq", config["rope_sets"] * (config["rope_dim"] // 2))
    if step := config["temperature_step"]:
        yield vector("attn_temperature", config["context_length"] // step + 1)
    n_encoder, span = config["n_encoder_layers"], config["attn_bias_span"]
    if config["sinusoids"]:
        yield vector("position_freq", n_embd // 2)
    if span:
        yield vector("attn_bias", n_heads * (2 * span + 1))
    if n_encoder:
        yield from norm("encoder_norm")
        if span:
            yield vector("encoder_attn_bias", n_heads * (2 * span + 1))
    for layer in range(config["n_layers"]):
        at = f"layers.{layer}."
        yield from attention(at, layer)
        if 0 < n_encoder <= layer:
            yield from attention(at + "cross_", layer)
        yield from norm(at + "ffn_norm")
        if config["post_norm"]:
            yield vector(at + "ffn_post_norm", n_embd)
        n_experts = config["n_experts"][layer]
        if config["layer_scale"]:
            yield vector(at + "layer_scale", 1)
        if not n_experts or config["parallel_dense"]:
            yield from gated(at + "ffn", config["n_ff"])
            if not n_experts:
                yield from biases(at + "ffn", config["n_ff"], 1)
        if not n_experts:
            continue
        if config["parallel_dense"]:
            for name in ("router_norm", "expert_norm", "dense_post_norm", "expert_post_norm"):
                yield vector(at + name, n_embd)
        yield matrix(at + "router", n_experts, n_embd, "f32")
        if config["router_logit_bias"]:
            yield vector(at + "router_logit_bias", n_experts)
        if config["router_bias"]:
            yield vector(at + "router_bias", n_experts)
        if config["router_expert_scale"]:
            yield vector(at + "router_expert_scale", n_experts)
        if config["n_ff_shared"]:
            if config["shared_gate"]:
                yield vector(at + "shared_router", n_embd)
            yield from gated(at + "shared", config["n_ff_shared"])
        rows = config["n_ff_expert"]
        yield from biases(at + "experts", rows, n_experts)
        for expert in range(n_experts):
            name = f"{at}experts.{expert}"
            gate, up, down = of(name, 3)
            entry = Entry(name, "expert", rows, n_embd, (gate, "" if ungated else up, down), 0)
            size = sum(matrix_bytes(*matrix) for matrix in entry.matrices)
            yield replace(entry, bytes=size)


_CLASS_OF = dict.fromkeys(("attn", "cross", "delta", "rope", "encoder"), "attention") | {
    "ffn": "dense",
    "layer": "norms",
    "position": "embedding",
}


def entry_class(entry: Entry) -> str:
    """What an entry serves: embedding, output, attention, routers, experts, shared, dense, norms or blobs."""
    if entry.kind in ("expert", "blob"):
        return "experts" if entry.kind == "expert" else "blobs"
    words = entry.name.split(".")
    part = words[2] if words[0] == "layers" else words[0]
    if part in ("embedding", "output"):
        return part
    if part in ("router", "router_logit_bias", "router_bias", "router_expert_scale", "shared_router"):
        return "routers"
    if part.removesuffix("_bias").endswith("_norm"):
        return "norms"
    kind = part.split("_", 1)[0]
    return _CLASS_OF.get(kind, kind)


def bytes_by_class(entries: Iterable[Entry]) -> dict[str, int]:
    """Bytes without padding, for every class, in the order of ENTRY_CLASSES."""
    sums = dict.fromkeys(ENTRY_CLASSES, 0)
    for entry in entries:
        sums[entry_class(entry)] += entry.bytes
    return sums
