"""Tiny random checkpoints of models with an encoder, and the table of those that the tests run on.

Role: directories as Transformers saves them; a tensor's values depend on the seed and its name only.
Owns: names and shapes of both families, tokenizers with ids around a text and languages, VARIANTS.
Refuses: decoders alone (checkpoints.py), computing (oracle_encoders.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from checkpoint_tensors import values_of
from checkpoint_writer import DTYPE_NAMES, STORAGE, tokenizer_json

Shapes = dict[str, tuple[int, ...]]
LANGUAGES = ("eng_Latn", "fra_Latn")  # the two ids behind the tokenizer's 300
END = 2  # </s>
VOCAB = 320


def switch_transformers(
    path: str | Path,
    *,
    layers: tuple[int, int] = (4, 3),
    sparse: tuple[int, int] = (2, 1),
    hidden: int = 64,
    n_heads: int = 4,
    d_kv: int = 12,
    n_ff: int = 96,
    n_experts: int = 5,
    capacity: int = 6,
    buckets: int = 16,
    farthest: int = 40,
    router_bias: bool = False,
    tied: bool = False,
    **options: Any,
) -> Path:
    """T5's make, one expert a token, with a capacity in the encoder."""
    steps = [n // s if s else n for n, s in zip(layers, sparse, strict=True)]
    config = {
        "architectures": ["SwitchTransformersForConditionalGeneration"],
        "model_type": "switch_transformers",
        "d_model": hidden,
        "d_kv": d_kv,
        "d_ff": n_ff,
        "num_heads": n_heads,
        "num_layers": layers[0],
        "num_decoder_layers": layers[1],
        "num_sparse_encoder_layers": sparse[0],
        "num_sparse_decoder_layers": sparse[1],
        "num_experts": n_experts,
        "expert_capacity": capacity,
        "relative_attention_num_buckets": buckets,
        "relative_attention_max_distance": farthest,
        "router_bias": router_bias,
        "router_jitter_noise": 0.01,
        "dense_act_fn": "relu",
        "dropout_rate": 0.1,
        "layer_norm_epsilon": 1e-6,
        "tie_word_embeddings": tied,
        "pad_token_id": 0,
        "eos_token_id": END,
        "decoder_start_token_id": 0,
    }
    shapes: Shapes = {"shared.weight": (VOCAB, hidden), "lm_head.weight": (VOCAB, hidden)}
    for stack, n, step in zip(("encoder", "decoder"), layers, steps, strict=True):
        at = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        shapes |= {at: (buckets, n_heads), f"{stack}.final_layer_norm.weight": (hidden,)}
        for layer in range(n):
            block = f"{stack}.block.{layer}.layer."
            kinds = ["0.SelfAttention", "1.EncDecAttention"][: 1 + (stack == "decoder")]
            for kind in kinds:
                shapes |= {f"{block}{kind}.{part}.weight": (n_heads * d_kv, hidden) for part in "qkv"}
                shapes[f"{block}{kind}.o.weight"] = (hidden, n_heads * d_kv)
            shapes |= {f"{block}{i}.layer_norm.weight": (hidden,) for i in range(len(kinds) + 1)}
            mlp = f"{block}{len(kinds)}.mlp"
            routed = step > 0 and (layer % step == 1 or step == 1)
            for at in [f"{mlp}.experts.expert_{e}" for e in range(n_experts)] if routed else [mlp]:
                shapes |= {f"{at}.wi.weight": (n_ff, hidden), f"{at}.wo.weight": (hidden, n_ff)}
            if routed:
                shapes[f"{mlp}.router.classifier.weight"] = (n_experts, hidden)
                shapes |= {f"{mlp}.router.classifier.bias": (n_experts,)} if router_bias else {}
    return _write(path, config, shapes, tied, languages=False, **options)


def nllb_moe(
    path: str | Path,
    *,
    layers: tuple[int, int] = (4, 2),
    steps: tuple[int, int] = (2, 2),
    hidden: int = 64,
    n_heads: int = 4,
    n_ff: int = 96,
    n_experts: int = 5,
    router_bias: bool = False,
    dropped: float = 0.2,
    tied: bool = True,
    **options: Any,
) -> Path:
    """Sinusoids, LayerNorms, biases everywhere, two experts a token."""
    config = {
        "architectures": ["NllbMoeForConditionalGeneration"],
        "model_type": "nllb-moe",
        "d_model": hidden,
        "encoder_layers": layers[0],
        "decoder_layers": layers[1],
        "encoder_attention_heads": n_heads,
        "decoder_attention_heads": n_heads,
        "encoder_ffn_dim": n_ff,
        "decoder_ffn_dim": n_ff,
        "encoder_sparse_step": steps[0],
        "decoder_sparse_step": steps[1],
        "num_experts": n_experts,
        "expert_capacity": 4,
        "router_bias": router_bias,
        "moe_token_dropout": dropped,
        "max_position_embeddings": 512,
        "activation_function": "relu",
        "scale_embedding": True,
        "tie_word_embeddings": tied,
        "bos_token_id": 0,
        "pad_token_id": 1,
        "eos_token_id": END,
        "decoder_start_token_id": END,
    }
    shapes: Shapes = {"model.shared.weight": (VOCAB, hidden), "lm_head.weight": (VOCAB, hidden)}

    def linear(name: str, rows: int, cols: int) -> Shapes:
        return {f"{name}.weight": (rows, cols), f"{name}.bias": (rows,)}

    def norm(name: str) -> Shapes:
        return {f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)}

    for stack, n, step in zip(("encoder", "decoder"), layers, steps, strict=True):
        shapes |= norm(f"model.{stack}.layer_norm")
        for layer in range(n):
            at = f"model.{stack}.layers.{layer}."
            for kind in ["self_attn", "cross_attention"][: 1 + (stack == "decoder")]:
                shapes |= norm(f"{at}{kind}_layer_norm")
                for part in ("q", "k", "v", "out"):
                    shapes |= linear(f"{at}{kind}.{part}_proj", hidden, hidden)
            shapes |= norm(f"{at}ff_layer_norm")
            routed = step > 0 and (layer + 1) % step == 0
            for ffn in [f"{at}ffn.experts.expert_{e}" for e in range(n_experts)] if routed else [at + "ffn"]:
                shapes |= linear(f"{ffn}.fc1", n_ff, hidden) | linear(f"{ffn}.fc2", hidden, n_ff)
            if routed:
                router = linear(f"{at}ffn.router.classifier", n_experts, hidden)
                shapes |= dict(list(router.items())[: 1 + router_bias])
    return _write(path, config, shapes, tied, languages=True, **options)


def _write(
    path: str | Path,
    config: dict[str, Any],
    shapes: Shapes,
    tied: bool,
    *,
    languages: bool,
    seed: int = 1,
    storage: str = "f32",
    config_extra: Mapping[str, Any] | None = None,
    tokenizer: bool = True,
    generation: Mapping[str, Any] | None = None,
) -> Path:
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    config |= {"vocab_size": VOCAB, "is_encoder_decoder": True, "dtype": DTYPE_NAMES[storage]}
    config |= dict(config_extra or {})
    (path / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
    tensors = {}
    for name, shape in shapes.items():
        if name == "lm_head.weight" and tied:
            continue
        values = values_of(seed, name, shape)
        if name == "shared.weight" and tied:  # the head multiplies by hidden^-0.5
            values = values * np.float32(shape[1] ** 0.5)
        if name.endswith("shared.weight") and not tied:  # small, so that a target does not repeat its ids
            values = values * np.float32(0.25)
        tensors[name] = values.astype(STORAGE[storage])
        if name.endswith("shared.weight") and not tied:  # else Transformers would draw them
            for stack in ("encoder", "decoder"):
                tensors[name.replace("shared", f"{stack}.embed_tokens")] = tensors[name].copy()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    if tokenizer:
        (path / "tokenizer.json").write_text(_tokenizer(languages), "utf-8")
    settings = {key: config[key] for key in ("decoder_start_token_id", "eos_token_id", "pad_token_id")}
    (path / "generation_config.json").write_text(json.dumps(settings | dict(generation or {})), "utf-8")
    return path


def _tokenizer(languages: bool) -> str:
    """`text </s>`, or `eng_Latn text </s>`."""
    data = json.loads(tokenizer_json())
    ids = {"</s>": END} | ({name: 300 + at for at, name in enumerate(LANGUAGES)} if languages else {})
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for name, id in list(ids.items())[1:]:
        data["added_tokens"].append({"id": id, "content": name, "special": True, **flags})
    around = [LANGUAGES[0]] * languages
    template: list[dict[str, Any]] = [{"SpecialToken": {"id": name, "type_id": 0}} for name in around]
    template.append({"Sequence": {"id": "A", "type_id": 0}})
    template.append({"SpecialToken": {"id": "</s>", "type_id": 0}})
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": template,
        "pair": template,
        "special_tokens": {name: {"id": name, "ids": [id], "tokens": [name]} for name, id in ids.items()},
    }
    return json.dumps(data)


MAKERS: dict[str, Callable[..., Path]] = {"switch_transformers": switch_transformers, "nllb_moe": nllb_moe}


@dataclass(frozen=True)
class Variant:
    """One tiny model, a source for it and the first ids of a target."""

    family: str
    options: Mapping[str, Any] = field(default_factory=dict)
    n_source: int = 70
    n_ids: int = 40
    seed: int = 1  # chosen so that no greedy choice and no choice of experts is nearly a tie

    def write(self, directory: Path, **changes: Any) -> Path:
        return MAKERS[self.family](directory, **{"seed": self.seed, **self.options, **changes})

    @property
    def source(self) -> list[int]:
        return list(_numbers(self.seed, self.n_source))

    @property
    def ids(self) -> list[int]:
        return list(_numbers(self.seed + 100, self.n_ids))


def _numbers(seed: int, n: int) -> Iterator[int]:
    """A plain linear generator, so that no library's random numbers matter."""
    state = 12345 + seed
    for _ in range(n):
        state = (state * 1103515245 + 12345) % 2**31
        yield 5 + (state >> 16) % 290


VARIANTS: dict[str, Variant] = {
    "switch": Variant("switch_transformers", seed=6),
    "switch_tied": Variant("switch_transformers", {"tied": True, "storage": "bf16", "router_bias": True}),
    "switch_odd": Variant(  # no size a multiple of 16; both directions over blocks; all layers of one stack
        "switch_transformers",
        {
            "hidden": 60,
            "n_heads": 3,
            "d_kv": 20,
            "n_ff": 72,
            "layers": (2, 2),
            "sparse": (2, 0),
            "capacity": 50,
            "buckets": 32,
            "farthest": 128,
        },
        n_source=300,
        n_ids=150,
        seed=2,
    ),
    "nllb": Variant("nllb_moe", {"storage": "bf16"}, seed=8),
    "nllb_untied": Variant("nllb_moe", {"tied": False, "layers": (2, 2)}, seed=6),
    "nllb_odd": Variant(
        "nllb_moe",
        {
            "hidden": 60,
            "n_heads": 3,
            "n_ff": 72,
            "layers": (2, 3),
            "steps": (1, 2),
            "router_bias": True,
            "dropped": 0.0,
            "tied": False,
        },
        n_source=300,
        n_ids=150,
    ),
}
