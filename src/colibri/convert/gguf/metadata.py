"""The keys of a GGUF file's architecture with an account: each is read, harmless, or refused by name.

Owns: typed reading of them, arrays with a value per layer, and decimal numbers as the config.json had them
that the file was made of. Refuses: unknown keys of the architecture's namespace, values that differ between
layers, other values than a mechanism that the engine has in one form only.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np

from colibri.convert.gguf.container import GgufFile
from colibri.errors import ConversionError

# Keys of any architecture that change nothing here.
HARMLESS = frozenset(
    (
        "vocab_size",  # the rows of the embedding count
        "rope.scaling.finetuned",
        "tensor_data_layout",  # in old files, the layout that all files have
    )
)
# Keys of any architecture that are fine with these values and change the mathematics with others.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_used_count": (0,),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "residual_scale": (0, 1),
    "rope.scaling.alpha": (0,),
    "use_parallel_residual": (False,),
}


class Metadata:
    """Reads keys below the architecture's name and remembers which; `finish` refuses what is left."""

    def __init__(self, gguf: GgufFile, architecture: str) -> None:
        self.gguf = gguf
        self.architecture = architecture
        start = architecture + "."
        self.values = {
            key.removeprefix(start): value for key, value in gguf.metadata.items() if key.startswith(start)
        }
        self._read: set[str] = set()
        # Layers of the model itself; those behind them predict tokens further on.
        self.n_layers = self.n_extra = 0
        n_all = self.integer("block_count")
        if n_all > len(gguf.tensors):
            raise self.error("block_count", f"no more than there are tensors, {len(gguf.tensors)}")
        self.n_extra = self.integer("nextn_predict_layers", 0) if "nextn_predict_layers" in self.values else 0
        self.n_layers = n_all - self.n_extra
        if self.n_layers < 1:
            raise self.error("nextn_predict_layers", "less than block_count")

    def error(self, key: str, wanted: str, next_step: str = "") -> ConversionError:
        found = f"{_plain(self.values[key])!r:.120}" if key in self.values else "absent"
        step = next_step or "Check that the download is complete and that the file is a text model's."
        return ConversionError(
            f"{self.gguf.path}: {self.architecture}.{key} is {found}; expected {wanted}. {step}"
        )

    def has(self, tensor: str) -> bool:
        return tensor in self.gguf.tensors

    def get(self, key: str, default: Any = None) -> Any:
        """The value, the one of all layers where an array has one for each; an absent key counts as read
        too."""
        self._read.add(key)
        value = self.values.get(key, default)
        if isinstance(value, str | bool | int | type(None)):
            return value
        if isinstance(value, float):
            return decimal(value)
        found = self._layers(key, list(value))
        if any(one != found[0] for one in found):
            raise self.error(key, "the same value for all layers", "Such models are not supported.")
        return decimal(found[0]) if isinstance(found[0], float) else found[0]

    def _layers(self, key: str, value: list[Any]) -> list[Any]:
        """Of the model's own layers; without a width of 0 where a layer has experts in place of a dense
        feed-forward."""
        if not value or len(value) != self.n_layers + self.n_extra:
            raise self.error(key, f"one value, or {self.n_layers + self.n_extra}, one for each layer")
        own = [one.item() if isinstance(one, np.generic) else one for one in value[: self.n_layers]]
        if not all(isinstance(one, int | float) for one in own):
            raise self.error(key, "numbers")
        if key != "feed_forward_length":
            return own
        return [one for n, one in enumerate(own) if one or not self.has(f"blk.{n}.ffn_gate_inp.weight")] or [
            own[0]
        ]

    def flags(self, key: str) -> list[bool] | None:
        """One for each of the model's layers, or None where the key is absent."""
        self._read.add(key)
        value = self.values.get(key)
        if value is None or isinstance(value, int | float | str):  # a period, if it is one
            return None
        found = self._layers(key, list(value))
        if any(one not in (0, 1) for one in found):
            raise self.error(key, "true or false for each layer")
        return [bool(one) for one in found]

    def counts(self, key: str, default: int) -> list[int]:
        """One for each of the model's layers, also where the key has one for all."""
        self._read.add(key)
        value = self.values.get(key, default)
        scalar = isinstance(value, int | float | str)
        found = [value] * self.n_layers if scalar else self._layers(key, list(value))
        if not all(type(one) is int and 0 <= one < 2**31 for one in found):
            raise self.error(key, "an integer of at least 0, or one for each layer")
        return found

    def integer(self, key: str, minimum: int = 1) -> int:
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value < 2**31:
            raise self.error(key, f"an integer of at least {minimum}")
        return value

    def quantity(self, key: str) -> float | None:
        """A count, a number or a flag as it stands; None where the key is absent."""
        value = self.get(key)
        if value is not None and not (isinstance(value, int | float) and 0 <= value < 2**31):
            raise self.error(key, "a number of at least 0")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e30:
            raise self.error(key, "a number of at least 0")
        return float(value)

    def period(self, key: str, default: int) -> int:
        """Of layers that differ from the others; 0 for none."""
        return self.integer(key, 0) if key in self.values else default

    def require(self, key: str, allowed: tuple[Any, ...]) -> None:
        """For a mechanism in one form only; an absent key is fine."""
        if self.get(key, allowed[0]) not in allowed:
            raise self.error(
                key, " or ".join(map(repr, allowed)), "The architecture has this mechanism in one form only."
            )

    def within(self, key: str, size: float) -> None:
        """A width that `key` makes must be one that some tensor has: a file's size bounds what follows."""
        most = max(max(tensor.shape) for tensor in self.gguf.tensors.values())
        if size > most:
            raise self.error(key, f"widths of tensors, here {most} at most; it makes {size}")

    def pass_over(self, keys: tuple[str, ...]) -> None:
        self._read |= set(keys)

    def finish(self) -> None:
        for key, allowed in NEUTRAL.items():
            if key in self.values and key not in self._read:
                self.require(key, allowed)
        unknown = [
            f"{self.architecture}.{key} = {_plain(value)!r:.60}"
            for key, value in self.values.items()
            if key not in self._read | HARMLESS
        ]
        if unknown:
            raise ConversionError(
                f"{self.gguf.path} has keys that are not known for the architecture {self.architecture!r} "
                f"and may change the mathematics: {'; '.join(unknown)}. Such files are not supported."
            )


def _plain(value: Any) -> Any:
    """As a list, in errors; of thousands of numbers the first ones are enough."""
    return value[:100].tolist() if isinstance(value, np.ndarray) else value


def decimal(value: float) -> float:
    """The shortest decimal number that the float32 stands for: 1e-6 and not 9.99999997e-07, so that all that
    follows from a number of config.json follows from it here."""
    narrow = np.float32(value)
    return float(str(narrow)) if float(narrow) == value else value


def tenfold(value: float) -> float:
    """Without the rounding of a product of binary numbers."""
    return float(Decimal(str(value)) * 10)
