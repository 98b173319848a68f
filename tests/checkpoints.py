"""Tiny random Hugging Face checkpoints, written with numpy and safetensors alone (no torch).

Owns: the list of makers, one per family (they stand in files named by what their models have), each of which
writes a directory with config.json, weights, tokenizer.json, tokenizer_config.json, generation_config.json;
reading and changing such a directory. A tensor's values depend on the seed and on its canonical name only, so
the same model can be written in several spellings (shards, stacked experts, prefixes, types) and must convert
to the same bytes.
Refuses: nothing; it is meant to write broken checkpoints too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from checkpoint_delta import lfm2 as lfm2
from checkpoint_delta import lfm2_moe as lfm2_moe
from checkpoint_delta import qwen3_5_moe as qwen3_5_moe
from checkpoint_delta import qwen3_next as qwen3_next
from checkpoint_dense import llama as llama
from checkpoint_dense import ministral as ministral
from checkpoint_dense import mistral as mistral
from checkpoint_dense import qwen2 as qwen2
from checkpoint_dense import qwen3 as qwen3
from checkpoint_experts import ernie4_5_moe as ernie4_5_moe
from checkpoint_experts import granitemoe as granitemoe
from checkpoint_experts import minimax_m2 as minimax_m2
from checkpoint_experts import mixtral as mixtral
from checkpoint_experts import olmoe as olmoe
from checkpoint_experts import phimoe as phimoe
from checkpoint_experts import qwen2_moe as qwen2_moe
from checkpoint_experts import qwen3_moe as qwen3_moe
from checkpoint_groups import deepseek_v2 as deepseek_v2
from checkpoint_groups import deepseek_v3 as deepseek_v3
from checkpoint_groups import dots1 as dots1
from checkpoint_groups import glm4_moe as glm4_moe
from checkpoint_tensors import Array, Config
from checkpoint_windows import gemma3_text as gemma3_text
from checkpoint_windows import gemma4_text as gemma4_text
from checkpoint_windows import gpt_oss as gpt_oss
from checkpoint_windows import llama4_text as llama4_text
from checkpoint_writer import EXPERT_LAYOUTS as EXPERT_LAYOUTS
from checkpoint_writer import SPECIAL_TOKENS as SPECIAL_TOKENS
from checkpoint_writer import TEMPLATE as TEMPLATE
from checkpoint_writer import tokenizer_json as tokenizer_json

FAMILIES: dict[str, Callable[..., Path]] = {
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "olmoe": olmoe,
    "qwen2_moe": qwen2_moe,
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "mistral": mistral,
    "ministral": ministral,
    "glm4_moe": glm4_moe,
    "dots1": dots1,
    "gpt_oss": gpt_oss,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "qwen3_next": qwen3_next,
    "qwen3_5_moe": qwen3_5_moe,
    "granitemoe": granitemoe,
    "ernie4_5_moe": ernie4_5_moe,
    "minimax_m2": minimax_m2,
    "phimoe": phimoe,
    "llama4_text": llama4_text,
    "gemma3_text": gemma3_text,
    "gemma4_text": gemma4_text,
    "lfm2_moe": lfm2_moe,
    "lfm2": lfm2,
}


def read_tensors(path: str | Path) -> dict[str, npt.NDArray[np.float32]]:
    """Every tensor of a checkpoint directory, as float32, under the names in its files."""
    tensors: dict[str, npt.NDArray[np.float32]] = {}
    for shard in sorted(Path(path).glob("*.safetensors")):
        tensors |= {name: np.asarray(value).astype(np.float32) for name, value in load_file(shard).items()}
    return tensors


def read_config(path: str | Path) -> Config:
    return dict(json.loads((Path(path) / "config.json").read_text("utf-8")))


def edit_json(path: str | Path, changes: Mapping[str, Any], remove: Sequence[str] = ()) -> None:
    """Sets and removes top-level keys of a JSON file, which is created if absent."""
    path = Path(path)
    data = json.loads(path.read_text("utf-8")) if path.exists() else {}
    data.update(changes)
    for key in remove:
        data.pop(key, None)
    path.write_text(json.dumps(data, indent=2), "utf-8")


def edit_tensors(path: str | Path, changes: Mapping[str, Array], remove: Sequence[str] = ()) -> None:
    """Replaces, adds and removes tensors of a single-file checkpoint directory."""
    file = Path(path) / "model.safetensors"
    tensors = load_file(file)
    tensors.update(changes)
    for name in remove:
        del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
