"""/tokenize and /detokenize: texts to ids and back.

Owns: the bodies, those of vLLM. Refuses: the rules (tokenizer.py, prompts.py).
"""

from __future__ import annotations

from typing import Any

from colibri.server.chat import template_message
from colibri.server.failures import Failure
from colibri.server.requests import DetokenizeRequest, TokenizeRequest
from colibri.server.served import Served


def tokenize(body: TokenizeRequest, served: Served) -> dict[str, Any]:
    """Ids of a text, or of a conversation as the model's template renders it."""
    model = served.model
    if (body.prompt is None) == (body.messages is None):
        raise Failure(400, "prompt, messages: expected one of them", param="prompt")
    if body.messages is not None:
        if not body.add_special_tokens:
            raise Failure(400, "add_special_tokens has no effect on messages", param="add_special_tokens")
        ids = model.chat_ids(
            [template_message(message) for message in body.messages],
            tools=[tool.model_dump(exclude_none=True) for tool in body.tools or []] or None,
        )
    elif body.tools is not None:
        raise Failure(400, "tools has no effect without messages", param="tools")
    else:
        encode = model.tokenizer.encode_prompt if body.add_special_tokens else model.tokenizer.encode
        ids = encode(body.prompt or "")
    found: dict[str, Any] = {"count": len(ids), "max_model_len": model.context, "tokens": ids}
    if body.return_token_strs:
        found["token_strs"] = [model.tokenizer.token(id) for id in ids]
    return found


def detokenize(body: DetokenizeRequest, served: Served) -> dict[str, str]:
    """The text of ids, with control tokens under their names."""
    for at, id in enumerate(body.tokens):
        if not 0 <= id < served.model.n_vocab:
            raise Failure(
                400,
                f"tokens[{at}]: expected 0 to {served.model.n_vocab - 1}, found {id}",
                param=f"tokens[{at}]",
            )
    return {"prompt": served.model.tokenizer.decode(body.tokens, special=True)}
