"""Sliding windows: which layers see how many positions back.

Owns: sliding_window, use_sliding_window, max_window_layers and layer_types, read as the family's class in
Transformers 5.24 does. Refuses: unknown layer types, and windows in families whose class has none, by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from colibri.convert.keys import Keys

FULL, SLIDING = "full_attention", "sliding_attention"


class Windows(NamedTuple):
    """How a family's class places windows. `placed` says it of (layer, max_window_layers)."""

    default: int | None  # sliding_window where config.json leaves it out
    placed: Callable[[int, int], bool] = lambda _layer, _first: True
    first: int | None = None  # max_window_layers, None where the class has none
    switched: bool = False  # nothing but use_sliding_window: true turns them on
    by_types: bool = False  # layer_types of config.json takes the place of `placed`


def read_windows(
    keys: Keys, rule: Windows | None, n_layers: int, context_length: int, others: tuple[str, ...] = ()
) -> list[int]:
    """Positions that each layer sees, 0 for all; a window no smaller than the context changes nothing.
    `others`: layer types that the family reads itself; none of them has a window."""
    types = keys.raw("layer_types")
    wanted = " or ".join(map(repr, (FULL, SLIDING, *others))) + f" for each of {n_layers} layers"
    known = types is None or isinstance(types, list) and all(one in (FULL, SLIDING, *others) for one in types)
    if not known or (types is not None and len(types) != n_layers):
        raise keys.error("layer_types", wanted, "num_hidden_layers counts them; other types are not known.")
    types = types and [FULL if one in others else one for one in types]
    switch = keys.raw("use_sliding_window")
    if switch not in (None, True, False):
        raise keys.error("use_sliding_window", "true or false")
    on = rule is not None and (switch is True or not rule.switched)
    window = keys.raw("sliding_window", rule.default if rule is not None and on else None)
    window = 0 if window is None else window
    if isinstance(window, bool) or not isinstance(window, int) or not 0 <= window < 2**30:
        raise keys.error("sliding_window", "null or a number of positions")
    if rule is None and switch is not False and 0 < window < context_length:
        raise keys.error("sliding_window", "null", "This family has no sliding windows.")
    sliding = [False] * n_layers
    if window >= context_length:
        return [0] * n_layers
    if rule is not None and on and window:
        first = 0 if rule.first is None else keys.integer("max_window_layers", rule.first, 0)
        sliding = [rule.placed(layer, first) for layer in range(n_layers)]
    if types is not None and types != [SLIDING if one else FULL for one in sliding]:
        if rule is None or not rule.by_types or not (on and window):
            placed = ", ".join(str(layer) for layer, one in enumerate(sliding) if one)
            why = f"sliding_window = {window or None} and use_sliding_window = {switch}"
            raise keys.error(
                "layer_types",
                (f"{SLIDING!r} in layers {placed}" if placed else f"only {FULL!r}") + f", with {why}",
            )
        sliding = [one == SLIDING for one in types]
    return [window if one else 0 for one in sliding]
