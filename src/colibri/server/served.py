"""The models that a server holds, by name.

Owns: an AsyncEngine for each, and which one a request means. Refuses: loading (cli/serve.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from colibri.async_engine import AsyncEngine
from colibri.drawing import Writing
from colibri.engine import Model
from colibri.sampling import Options
from colibri.server.failures import Failure
from colibri.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class Served:
    """A model under its name."""

    name: str
    model: Model
    engine: AsyncEngine
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None: the model takes and gives ids only."""
        return self.model._prompts.known_tokenizer

    def continuing(self, prompt: str | list[int]) -> Callable[[Options], Writing]:
        """What continues a prompt with some options; takes its time."""
        return lambda options: self.model._prompts.continuing(prompt, None, None, options)

    def answering(self, ids: list[int], special: bool) -> Callable[[Options], Writing]:
        """What answers a conversation. special: its text names control tokens."""
        return lambda options: self.model._prompts.answering(ids, options, special=special)

    def text_of(self, prompt: str | list[int]) -> str:
        """A prompt as text."""
        return prompt if isinstance(prompt, str) else self.model.tokenizer.decode(prompt)

    def card(self) -> dict[str, object]:
        """What /v1/models says of it."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "colibri",
            "root": self.model.path.name,
            "parent": None,
            "max_model_len": self.model.context,
        }


class Models:
    """All of them; the first is meant where a request names none."""

    def __init__(self, served: list[Served]) -> None:
        self.all = served
        self._by_name = {one.name: one for one in served}

    def find(self, name: str | None) -> Served:
        if name is None:
            return self.all[0]
        found = self._by_name.get(name)
        if found is None:
            raise Failure(
                404,
                f"model: expected one of {', '.join(map(repr, self._by_name))}, found {name!r:.200}",
                param="model",
                code="model_not_found",
            )
        return found
