"""config.json with an account: every key is read by a family, harmless for a stated reason, or refused by
name.

Owns: typed reading of keys, the list of harmless keys, class defaults that were used.
Refuses: unknown keys with a value, keys of the wrong type, mechanisms that the engine does not have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from colibri.config import config_schema
from colibri.errors import ConversionError

_REASONS = {
    "names and provenance": (
        "architectures model_type _name_or_path name_or_path transformers_version _commit_hash "
        "unsloth_version unsloth_fixed is_llama_config transformers.js_config finetuning_task "
        "base_model_name_or_path license"
    ),
    "training only": (
        "initializer_range attention_dropout hidden_dropout resid_pdrop embd_pdrop router_aux_loss_coef "
        "output_router_logits router_jitter_noise router_z_loss_coef gradient_checkpointing problem_type "
        "id2label label2id num_labels task_specific_params aux_loss_alpha seq_aux"
    ),
    "how Transformers runs or stores it": (
        "torch_dtype dtype use_cache return_dict output_attentions output_hidden_states torchscript "
        "use_bfloat16 tf_legacy_loss chunk_size_feed_forward attn_implementation _attn_implementation "
        "_attn_implementation_autoset _experts_implementation experts_implementation _flash_attn_2_enabled "
        "use_flash_attn cache_implementation low_cpu_mem_usage ep_size mamba_ssm_dtype"
    ),
    "layers for tokens further on: left out": "mtp_num_hidden_layers mtp_use_dedicated_embeddings",
    "token ids, read for generation.json": (
        "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id forced_bos_token_id "
        "forced_eos_token_id bos_token eos_token"
    ),
    "sampling of old dumps": (
        "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty "
        "temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size "
        "encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores "
        "return_dict_in_generate exponential_decay_length_penalty suppress_tokens begin_suppress_tokens "
        "max_new_tokens min_p remove_invalid_values"
    ),
    "without effect, or read where they have one": "is_decoder tokenizer_class prefix max_window_layers "
    "original_max_position_embeddings",
}
HARMLESS = {key: reason for reason, keys in _REASONS.items() for key in keys.split()}

# Keys of any family that are fine with these values and change the mathematics with others.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "pretraining_tp": (1,),
    "mlp_bias": (False,),
    "attention_bias": (False,),
    "qkv_bias": (False,),
    "use_sliding_window": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "use_mrope": (False,),
    "rope_interleaved": (False,),
    "clip_qkv": (),
    "quantization_config": (),
    "num_nextn_predict_layers": (0,),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "logits_scaling": (1,),
}
# What a checkpoint of several modalities says beside its text.
_OTHER_MODALITIES = re.compile(
    r"(vision|audio|image|video|mm|bo[iav]|eo[iav])_\w*(config|token|index|id|image|soft_tokens)\w*"
)
_MISSING = object()


@cache
def _largest() -> dict[str, int]:
    return {field["name"]: int(field["max"]) for field in config_schema()}


def harmless(name: str) -> str:
    """Why a key changes nothing; empty if it may."""
    return "other inputs than text: left out" if _OTHER_MODALITIES.fullmatch(name) else HARMLESS.get(name, "")


def home(path: Path) -> tuple[str, str]:
    """What errors call the place of a source's keys, and what to do where they do not fit its tensors. path:
    of config.json, or of a GGUF file, which holds both."""
    if path.name == "config.json" or path.is_dir():
        return "config.json", "Check that config.json belongs to these weights."
    return (
        "its metadata",
        "The file is damaged or was badly made; get another GGUF file of the model.",
    )


class Keys:
    """Reads keys and remembers which; `finish` refuses what is left."""

    def __init__(
        self,
        values: dict[str, Any],
        path: Path,
        context: int | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.values = dict(values)  # a family may replace some, for itself alone
        self.path = path
        self.names = names or {}  # what errors call a key, where the file calls it otherwise
        self.next_step = home(path)[1]
        self.context = context  # longest text that the file shall be for; None: as config.json says
        self.defaults: dict[str, Any] = {}
        self.notes: list[str] = []  # for the user: what holds within limits only
        self.required: dict[str, tuple[Any, ...]] = {}  # keys of mechanisms in one form only, and the values
        self._read: set[str] = set()
        self._own_code = ""

    def error(self, name: str, wanted: str, next_step: str = "") -> ConversionError:
        found = f"{self.values[name]!r:.120}" if name in self.values else "nothing"
        step = next_step or self.next_step
        shown = self.names.get(name, name)
        return ConversionError(f"{self.path}: {shown} = {found}; expected {wanted}. {step}")

    def raw(self, name: str, default: Any = None) -> Any:
        """The value as it is; an absent key counts as read too."""
        self._read.add(name)
        value = self.values.get(name, _MISSING)
        if value is _MISSING:
            if default is not None:
                self.defaults[name] = default
            return default
        return value

    def integer(self, name: str, default: int, minimum: int = 1, field: str = "") -> int:
        """field: of the file, whose largest value is the key's too: lists are as long as some of them say."""
        value = self.raw(name, default)
        most = _largest()[field] if field else 2**31 - 1
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= most:
            raise self.error(name, f"an integer from {minimum} to {most}")
        return value

    def optional_integer(
        self, name: str, default: int | None, minimum: int = 1, field: str = ""
    ) -> int | None:
        """None where the key is null, or absent with a default of None."""
        if self.raw(name, default) is None:
            return None
        return self.integer(name, default or minimum, minimum, field)

    def number(self, name: str, default: float) -> float:
        value = self.raw(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e30:
            raise self.error(name, "a number of at least 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def alias(self, name: str, other: str) -> str:
        """The spelling that is present; both are fine only if they agree."""
        if name in self.values and other in self.values and self.values[name] != self.values[other]:
            raise self.error(name, f"the same as {other} = {self.values[other]!r}")
        self._read |= {name, other}
        return other if other in self.values and name not in self.values else name

    def require(self, name: str, allowed: tuple[Any, ...], default: Any) -> None:
        """For a mechanism that the engine has in one form only."""
        value = self.raw(name, default)
        self.required[name] = allowed
        if value is not None and value not in allowed:
            raise self.error(
                name, " or ".join(map(repr, allowed)) or "null", "The engine does not have this mechanism."
            )

    def finish(self) -> None:
        """Refuses every key that nobody read, unless it is harmless, neutral or empty."""
        for name, allowed in NEUTRAL.items():
            if name in self.values and name not in self._read:
                self.require(name, allowed, None)
        self._refuse_own_code()
        unknown = [
            f"{name} = {value!r:.60}"
            for name, value in self.values.items()
            if not (name in self._read | NEUTRAL.keys() or value in (None, [], {}, "") or harmless(name))
        ]
        if unknown:
            raise ConversionError(
                f"{self.path} has keys that are not known for model_type {self.values.get('model_type')!r} "
                f"and may change the mathematics: {'; '.join(unknown)}. Remove a key only if you know that "
                "it has no effect on the output."
            )

    def reason(self, name: str) -> str:
        """Why a key of config.json that `finish` let pass has no part in the model; empty if it was read."""
        if name == "auto_map":
            return "names code, which is never run"
        if name in self._read and name not in NEUTRAL:
            return ""
        if why := harmless(name):
            return why
        if name in NEUTRAL:
            return "" if name in self._read and name not in self.required else "without effect at this value"
        return "empty"

    def allow_code(self, module: str) -> None:
        """The checkpoint may name this module of modelling code, which the family is known to compute."""
        self._own_code = module + "."

    def _refuse_own_code(self) -> None:
        self._read.add("auto_map")
        auto_map = self.values.get("auto_map")
        models = (
            [
                key
                for key, code in auto_map.items()
                if key.startswith("AutoModel") and not str(code).startswith(self._own_code or "\0")
            ]
            if isinstance(auto_map, dict)
            else []
        )
        if models:
            raise self.error(
                "auto_map",
                "no model code of its own",
                "A checkpoint with its own modelling code is not supported.",
            )
