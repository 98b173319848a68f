"""Models of Colibri in EleutherAI's lm_eval (`pip install 'colibri-moe[lm_eval]'`), named "colibri":

    python -m colibri.lm_eval run --model colibri --model_args pretrained=demo,context=1024 --tasks arc_easy

takes the arguments of `lm_eval`, which has no way for a package to add a model by itself. model_args:
pretrained (what colibri.load takes as path) and the keywords of colibri.load.

Owns: requests as ids, and what is cut. Refuses: encoders; scoring is analysis/evaluation.py's."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from colibri.analysis.evaluation import Passage, evaluate, token_logprobs
from colibri.engine import load
from colibri.errors import ArgumentError, UnsupportedError

try:
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError as error:
    raise UnsupportedError(
        f"lm_eval is not installed ({error}): pip install 'colibri-moe[lm_eval]'"
    ) from error

_DEFAULT_DEVICE = "cuda:0"  # what lm_eval says where nobody chose one


@register_model("colibri")
class ColibriLM(LM):  # type: ignore[misc]
    """lm_eval.api.model.LM on colibri.load(pretrained, **options)."""

    def __init__(self, pretrained: str, **options: Any) -> None:
        super().__init__()
        for name in ("batch_size", "max_batch_size", "device"):  # lm_eval always passes them
            if options.pop(name, None) not in (None, 1, "1", "cpu", _DEFAULT_DEVICE):
                raise ArgumentError(
                    f"{name} has no effect: requests are evaluated one after the other, on CPUs"
                )
        self.model = load(pretrained, **options)
        if self.model.config["n_encoder_layers"]:
            self.model.close()
            raise UnsupportedError(
                f"{pretrained} has an encoder, but lm_eval's requests continue a text: use colibri eval"
            )

    @property
    def tokenizer_name(self) -> str:
        return self.model.path.name

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """ln p(continuation | context), and whether it is what greedy decoding writes. Spaces between both
        belong to the continuation. What is too long loses its beginning."""
        return [self._pair(*request.args) for request in _bar(requests, disable_tqdm)]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """ln p(text), in windows as evaluate() has them."""
        texts = (request.args[0] for request in _bar(requests, disable_tqdm))
        return [-evaluate(self.model, [Passage(text)]).nll for text in texts]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """What the model writes up to one of the texts in "until", greedy unless the request samples."""
        return [self._written(*request.args) for request in _bar(requests, disable_tqdm)]

    def _pair(self, context: str, continuation: str) -> tuple[float, bool]:
        tokenizer = self.model.tokenizer
        stripped = context.rstrip()
        context, continuation = stripped, context[len(stripped) :] + continuation
        before = tokenizer.encode_prompt(context) if context else []
        if not before:
            start = tokenizer.bos_id if tokenizer.bos_id is not None else next(iter(tokenizer.eos_ids), None)
            if start is None:
                raise UnsupportedError(
                    "a request has no context, and the model no token to begin a text with"
                )
            before = [start]
        whole = tokenizer.encode_prompt(context + continuation) if context else []
        targets = whole[len(before) :] if whole[: len(before)] == before else tokenizer.encode(continuation)
        if not targets:
            return 0.0, True
        if len(targets) > self.model.context:
            raise ArgumentError(
                f"context: a continuation of {len(targets)} tokens, the context holds {self.model.context}"
            )
        ids = np.array([*before, *targets], np.int32)[-(self.model.context + 1) :]
        logs, best = token_logprobs(self.model, ids[:-1], ids[-len(targets) :])
        return float(logs.sum()), bool(best.all())

    def _written(self, context: str, settings: dict[str, Any]) -> str:
        settings = dict(settings)
        until = settings.pop("until", None) or []
        until = [until] if isinstance(until, str) else list(until)
        most = settings.pop("max_gen_toks", 256)
        options: dict[str, Any] = {
            name: settings.pop(name) for name in ("top_k", "top_p", "min_p") if name in settings
        }
        options["temperature"] = settings.pop("temperature", 0) if settings.pop("do_sample", False) else 0
        if options["temperature"] == 0:
            settings.pop("temperature", None)
            options = {"temperature": 0}
        if settings:
            raise ArgumentError(f"generation_kwargs: {', '.join(map(repr, settings))} are not known here")
        ids = self.model.prompt_ids(context)
        most = min(most, self.model.context - 1)
        ids = ids[-(self.model.context - most) :]
        return self.model.generate(ids, max_tokens=most, stop=until or None, **options).text


def _bar(requests: Sequence[Any], disable: bool) -> Any:
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(requests, "colibri", console=console, disable=disable or not console.is_terminal)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    sys.exit(cli_evaluate())
