"""Writes the directory of a tiny random checkpoint: config.json, weights, tokenizer, generation settings.

Owns: the options that every maker of checkpoints.py takes: spellings, shards, storage types, a tokenizer.
Refuses: knowing which family has which keys.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from checkpoint_tensors import Array, Config, in_turns, shapes_of, stack_experts, values_of
from family_names import released

STORAGE: dict[str, Any] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}
DTYPE_NAMES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
EXPERT_LAYOUTS = ("per_expert", "stacked", "stacked_transposed", "switch_mlp")
GPT_OSS_LAYOUTS = ("in_turns", "mxfp4")
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
TEMPLATE = "".join(
    (
        "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n",
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )
)
CORPUS = (
    "The bird that drinks from flowers is small, and it is quick.",
    "A mixture of experts sends every token to the few who know it best.",
    "Once upon a time there was a little colibri who lived in a garden near the sea.",
    "She counted one, two, three, four flowers, and then she flew home again.",
)


@lru_cache(maxsize=8)
def tokenizer_json(vocab: int = 300, adds_bos: bool = False) -> str:
    """A byte-level BPE tokenizer of exactly `vocab` tokens (at least 261), trained on four sentences."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if tokenizer.get_vocab_size() != vocab:
        raise ValueError(f"the corpus gives {tokenizer.get_vocab_size()} tokens, not {vocab}")
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
        )
    return str(tokenizer.to_str())


def base_config(
    model_type: str,
    architecture: str,
    n_layers: int,
    hidden: int,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int | None,
) -> Config:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": n_layers,
        "num_attention_heads": n_heads,
        "num_key_value_heads": n_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "attention_dropout": 0.0,
        "use_cache": True,
        "transformers_version": "5.24.0",
    }


def write(
    path: str | Path,
    config: Config,
    experts_of: Sequence[int],
    n_ff: int,
    n_ff_expert: int,
    *,
    n_ff_shared: int = 0,
    qk_norm: str = "",
    qkv_bias: bool = False,
    out_bias: bool = False,
    seed: int = 0,
    tied: bool = False,
    lm_head: bool | None = None,
    shards: int = 1,
    experts: str = "per_expert",
    prefix: str = "",
    storage: str = "bf16",
    vocab: int = 300,
    extra_rows: int = 0,
    rope: Mapping[str, Any] | None = None,
    config_extra: Mapping[str, Any] | None = None,
    config_remove: Sequence[str] = (),
    tokenizer: bool = True,
    adds_bos: bool = False,
    generation: Mapping[str, Any] | None = None,
    only_end: int | None = None,
) -> Path:
    """Common options of every maker.

    lm_head: None writes it unless tied; True and False force it. shards > 1 writes an index. experts: one of
    EXPERT_LAYOUTS. prefix: e.g. "language_model.", put before every tensor name. extra_rows: embedding rows
    beyond the tokenizer's tokens. rope: keys put into config.json as they are (default: rope_theta 10000).
    only_end: the one end token, whichever file is asked; a padding row makes a model that never ends a text.
    """
    if experts not in EXPERT_LAYOUTS + GPT_OSS_LAYOUTS:
        raise ValueError(f"experts={experts!r} is not one of {EXPERT_LAYOUTS}")
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    config = config | {
        "vocab_size": vocab + extra_rows,
        "tie_word_embeddings": tied,
        "dtype": DTYPE_NAMES[storage],
    }
    config |= dict(rope) if rope is not None else {"rope_theta": 10000.0}
    shapes = shapes_of(config, experts_of, n_ff, n_ff_expert, n_ff_shared, qk_norm, qkv_bias, out_bias)
    if lm_head is False or (lm_head is None and tied):
        del shapes["lm_head.weight"]
    config |= {} if only_end is None else {"eos_token_id": only_end}
    config |= dict(config_extra or {})
    for key in config_remove:
        del config[key]
    centered = "linear_key_head_dim" in config
    values = {name: values_of(seed, name, shape, centered) for name, shape in shapes.items()}
    if config["model_type"] == "gemma3_text":  # whose norms add 1
        values |= {name: value - 1 for name, value in values.items() if name.endswith("norm.weight")}
    if config["model_type"] == "gemma4_text":  # whose scores have no other scale
        scale = np.float32(0.3)
        values |= {name: scale * value for name, value in values.items() if name.endswith("q_norm.weight")}
    tensors = {name: value.astype(STORAGE[storage]) for name, value in values.items()}
    if experts in GPT_OSS_LAYOUTS:
        tensors = in_turns(tensors, experts_of, experts == "mxfp4")
    elif experts != "per_expert":
        tensors = stack_experts(tensors, experts_of, config["model_type"] == "mixtral", experts)
    tensors = {prefix + name: value for name, value in released(config["model_type"], tensors).items()}
    (path / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
    _save(path, tensors, shards)
    if tokenizer:
        (path / "tokenizer.json").write_text(tokenizer_json(vocab, adds_bos), "utf-8")
        (path / "tokenizer_config.json").write_text(
            json.dumps(
                {
                    "tokenizer_class": "PreTrainedTokenizerFast",
                    "bos_token": "<s>",
                    "eos_token": "</s>" if only_end is None else None,
                    "unk_token": "<unk>",
                    "chat_template": TEMPLATE,
                },
                indent=2,
            ),
            "utf-8",
        )
    settings = {"bos_token_id": 1, "eos_token_id": 2} if generation is None else dict(generation)
    if only_end is not None:
        settings["eos_token_id"] = only_end
    (path / "generation_config.json").write_text(json.dumps(settings, indent=2), "utf-8")
    return path


def _save(path: Path, tensors: Mapping[str, Array], shards: int) -> None:
    metadata = {"format": "pt"}
    if shards == 1:
        save_file(dict(tensors), path / "model.safetensors", metadata=metadata)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(_split(list(tensors), shards), start=1):
        file = f"model-{number:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name] for name in names}, path / file, metadata=metadata)
        weight_map |= dict.fromkeys(names, file)
    total = sum(value.nbytes for value in tensors.values())
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2), "utf-8"
    )


def _split(names: list[str], parts: int) -> Iterator[list[str]]:
    for part in range(parts):
        yield names[len(names) * part // parts : len(names) * (part + 1) // parts]
