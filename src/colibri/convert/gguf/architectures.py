"""The keys of a GGUF file as those of the config.json that it was made of.

Owns: how records.py is applied. Refuses: unknown architectures, other files than text models, and what
metadata.py and rotation.py refuse. What values mean and which are possible is for the family modules to say.
"""

from __future__ import annotations

from colibri.convert.gguf.container import GgufFile
from colibri.convert.gguf.metadata import Metadata
from colibri.convert.gguf.peculiarities import Config
from colibri.convert.gguf.records import ARCHITECTURES, COMMON, LOCAL, Architecture
from colibri.convert.gguf.rotation import read_rotation
from colibri.errors import ConversionError

EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
_GROUPED_STARTS = {"num_key_value_heads": None, "head_dim": None}


def architecture_of(gguf: GgufFile) -> Architecture:
    name, kind = gguf.metadata.get("general.architecture"), gguf.metadata.get("general.type", "model")
    found = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if found is None or not isinstance(kind, str) or kind != "model":  # a file may put an array anywhere
        what = f"general.architecture {name!r:.80}" if found is None else f"general.type {kind!r:.80}"
        raise ConversionError(
            f"{gguf.path}: {what} is not supported. Supported are models of "
            f"{', '.join(sorted(ARCHITECTURES))}."
        )
    return found


def key_names(gguf: GgufFile) -> dict[str, str]:
    """What the file calls keys of its config."""
    keys, start = COMMON | LOCAL | dict(architecture_of(gguf).keys), gguf.metadata["general.architecture"]
    names = {name: f"{start}.{key}" for key, name in keys.items() if f"{start}.{key}" in gguf.metadata}
    return {"num_hidden_layers": f"{start}.block_count", **names}


def config_of(gguf: GgufFile, notes: list[str]) -> Config:
    """The config.json that the family's module reads."""
    record = architecture_of(gguf)
    if not gguf.tensors:
        raise ConversionError(f"{gguf.path} holds a vocabulary and no weights. Give the file of a model.")
    metadata = Metadata(gguf, gguf.metadata["general.architecture"])
    if not metadata.has(EMBEDDING) or len(gguf.tensors[EMBEDDING].shape) != 2:
        raise ConversionError(f"{gguf.path} has no matrix {EMBEDDING}. Download the model again.")
    config: Config = {"model_type": record.model_type, "num_hidden_layers": metadata.n_layers}
    config |= {
        "vocab_size": gguf.tensors[EMBEDDING].shape[0],
        "tie_word_embeddings": not metadata.has(OUTPUT),
    }
    config |= {name: any(map(metadata.has, tensors)) for name, tensors in record.present.items()}
    _read_keys(metadata, record, config)
    rope_head = None if record.other_heads else _head_dim(metadata, config)
    config["rope_parameters"] = read_rotation(metadata, rope_head, record.other_heads)
    for key, value in record.implied.items():
        metadata.require(key, (value, 0) if key == "expert_gating_func" else (value,))
    metadata.pass_over(record.harmless)
    if record.finish is not None:
        record.finish(metadata, config)
    metadata.finish()
    notes += _notes(metadata, config)
    return config


def _read_keys(metadata: Metadata, record: Architecture, config: Config) -> None:
    starts = {**({} if record.other_heads else _GROUPED_STARTS), **record.starts}
    for key, name in (COMMON | dict(record.keys)).items():
        value = metadata.quantity(key)
        if value is None and name not in starts and name not in config:
            raise metadata.error(key, "a value")
        if value is None:
            continue
        if name in config and config[name] != value:
            raise metadata.error(key, f"{config[name]!r}, as another key says")
        config[name] = value
    for name, value in starts.items():
        config.setdefault(name, value)


def _head_dim(metadata: Metadata, config: Config) -> int:
    """As llama.cpp has it where key_length is absent. Heads are bounded before anything is made of them."""
    heads, width = metadata.integer("attention.head_count"), metadata.integer("embedding_length")
    found = metadata.integer("attention.key_length") if config["head_dim"] else width // heads
    metadata.require("attention.value_length", (found,))
    if config["num_key_value_heads"] is None:
        config["num_key_value_heads"] = heads
    for count in (heads, config["num_key_value_heads"]):
        metadata.within("attention.head_count", count * found)
    return found


def _notes(metadata: Metadata, config: Config) -> list[str]:
    if config["model_type"] == "deepseek_v3" and "expert_group_count" not in metadata.values:
        return [
            "the file says nothing about groups of experts, as files of before September 2025 do not: the "
            "choice is among all experts"
        ]
    return []
