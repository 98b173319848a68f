"""Where each entry of a model lies in a GGUF file, for the converter that every source has.

Owns: how names.py and relaid.py are applied, and factors of frequencies. Refuses: factors that a model does
not have.
"""

from __future__ import annotations

from colibri.convert.decoder import Decoder, ExpertNames, Names
from colibri.convert.gguf.container import GgufFile
from colibri.convert.gguf.names import EXPERTS, NAMES
from colibri.convert.gguf.records import ARCHITECTURES
from colibri.convert.gguf.relaid import RELAID, fused
from colibri.convert.gguf.rotation import FREQS, LONG, SHORT, read_vector
from colibri.convert.registry import Family
from colibri.errors import ConversionError


def layout_of(gguf: GgufFile, family: Family, decoder: Decoder) -> tuple[Names, ExpertNames | None, Decoder]:
    """Names of tensors, and the decoder with cuts and the like as this file needs them."""
    architecture = gguf.metadata["general.architecture"]
    extra = gguf.metadata.get(f"{architecture}.nextn_predict_layers", 0)
    decoder = decoder._replace(extra_layers=extra, left_out=())
    divided = ARCHITECTURES[architecture].factors
    decoder = _with_factors(gguf, decoder) if divided else decoder._replace(read=(FREQS,))
    relaid = RELAID.get(architecture)
    names, decoder = relaid(gguf, decoder) if relaid else ({}, decoder)
    decoder = fused(gguf, decoder)
    return {**NAMES, **names}, EXPERTS if family.EXPERTS is not None else None, decoder


def _with_factors(gguf: GgufFile, decoder: Decoder) -> Decoder:
    """Frequencies divided by factors that the file has for them; those of longrope were read as settings."""
    read = tuple(name for name in (LONG, SHORT) if name in gguf.tensors)
    if FREQS not in gguf.tensors:
        return decoder._replace(read=read)
    factors = read_vector(gguf, FREQS)
    if factors.shape != decoder.inv_freq.shape or read:
        raise ConversionError(
            f"{FREQS} in {gguf.tensors[FREQS].file} has {len(factors)} factors for "
            f"{len(decoder.inv_freq)} frequencies{' beside ' + ' and '.join(read) if read else ''}. Download "
            "the file again."
        )
    inv_freq = decoder.inv_freq / factors
    return decoder._replace(
        inv_freq=inv_freq, made={**decoder.made, "rope_inv_freq": inv_freq}, read=(FREQS,)
    )
