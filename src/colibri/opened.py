"""A `.colibri` file that is open, before a context is made: what load() and plan() begin with.

Owns: the parameters that the caller's choices become, and what the file says of itself. Nothing larger than
the tokenizer is allocated. Refuses: the choice of residency (residency.py).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colibri import _native as native
from colibri.arguments import KV_TYPES, Opening
from colibri.format import read_blobs
from colibri.model_facts import TextRules, config_of, text_rules

_log = logging.getLogger("colibri")


@dataclass(frozen=True, slots=True)
class Opened:
    """The caller closes the handle."""

    handle: native.ModelHandle
    info: native.ModelInfo
    params: native.Params  # without what residency decides
    config: dict[str, Any]
    rules: TextRules
    chat_template: str | None

    @property
    def n_experts(self) -> int:
        """Routed experts of all layers together."""
        return sum(self.config["n_experts"])


def open_file(path: Path, chosen: Opening) -> Opened:
    """Opens and checks the file. Nothing stays open after an error."""
    handle = native.open_model(path)
    try:
        info, params, config = native.info(handle), _params(handle, chosen), config_of(handle)
        if params.context > info.context_length:
            _log.warning(
                "context %d is longer than the %d positions that %s was trained for: beyond them it may "
                "write nonsense",
                params.context,
                info.context_length,
                path.name,
            )
        blobs = read_blobs(path)
        template = blobs.get("chat_template.jinja")
        text = None if template is None else template.decode("utf-8", "replace")
        return Opened(handle, info, params, config, text_rules(blobs, config), text)
    except BaseException:
        native.close_model(handle)
        raise


def _params(handle: native.ModelHandle, chosen: Opening) -> native.Params:
    asked, defaults = chosen.counts(), native.default_params(handle)
    values = {name: getattr(defaults, name) if count is None else count for name, count in asked.items()}
    return native.Params(**values, pin=int(chosen.pin), kv_type=KV_TYPES[chosen.kv_type])
