"""Hugging Face checkpoints to `.colibri` files.

Flow: checkpoint (files, shards, rows) -> keys and families (config.json to config fields) -> tensors (names
and spellings) -> embedded (tokenizer and the like) -> pipeline (quantize and write).
"""

from colibri.convert.pipeline import CONVERTER_VERSION, ConversionReport, convert

__all__ = ["CONVERTER_VERSION", "ConversionReport", "convert"]
