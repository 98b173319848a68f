"""Colibri: Mixture-of-Experts inference for machines with little memory.

    import colibri

    with colibri.load("demo") as model:
        print(model.generate("Once upon a time", max_tokens=50).text)

Owns: the public names, pinned by tests/test_public_names.py. They are imported when first used, so that
`import colibri` stays quick. Refuses: everything else; converting lives in colibri.convert.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from colibri._native import MemoryPlan
    from colibri.analysis.plan import Plan, plan
    from colibri.async_engine import AsyncEngine, AsyncStream
    from colibri.engine import Model, Routing, load
    from colibri.errors import (
        ArgumentError,
        CancelledError,
        ChatTemplateError,
        ColibriError,
        ContextFullError,
        ConversionError,
        MemoryPlanError,
        ModelFileError,
        ModelIOError,
        NumericError,
        QueueFullError,
        TraceError,
        UnsupportedError,
    )
    from colibri.generate import Generation, Logprobs, Stream
    from colibri.profiling import Profile, measure
    from colibri.sampling import Sampling
    from colibri.tokenizer import Tokenizer

    __version__: str

__all__ = [
    "ArgumentError",
    "AsyncEngine",
    "AsyncStream",
    "CancelledError",
    "ChatTemplateError",
    "ColibriError",
    "ContextFullError",
    "ConversionError",
    "Generation",
    "Logprobs",
    "MemoryPlan",
    "MemoryPlanError",
    "Model",
    "ModelFileError",
    "ModelIOError",
    "NumericError",
    "Plan",
    "Profile",
    "QueueFullError",
    "Routing",
    "Sampling",
    "Stream",
    "Tokenizer",
    "TraceError",
    "UnsupportedError",
    "__version__",
    "load",
    "measure",
    "plan",
]

_HOMES = {
    "_native": ("MemoryPlan",),
    "analysis.plan": ("Plan", "plan"),
    "async_engine": ("AsyncEngine", "AsyncStream"),
    "engine": ("Model", "Routing", "load"),
    "generate": ("Generation", "Logprobs", "Stream"),
    "profiling": ("Profile", "measure"),
    "sampling": ("Sampling",),
    "tokenizer": ("Tokenizer",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used (PEP 562)."""
    if name == "__version__":
        value = importlib.import_module("colibri._native").declared_version()
    elif name in __all__:
        value = getattr(importlib.import_module(f"colibri.{_HOME_OF.get(name, 'errors')}"), name)
    else:
        raise AttributeError(f"module 'colibri' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
