"""Hugging Face checkpoints to `.colibri` files.

Flow: checkpoint (files, shards, rows) -> keys and families (config.json to config fields) -> tensors (names
and spellings) -> embedded (tokenizer and the like) -> prepare (all of it, checked) -> pipeline (quantize and
write) or explain (say what becomes of what).
"""

from colibri.convert.explain import Explanation, explain
from colibri.convert.pipeline import CONVERTER_VERSION, ConversionReport, convert

__all__ = ["CONVERTER_VERSION", "ConversionReport", "Explanation", "convert", "explain"]
