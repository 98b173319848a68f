"""Failures as HTTP: one table from the exception tree to statuses, and one body, that of OpenAI.

Owns: the table, and that a client never sees a trace. Refuses: other interfaces' bodies (messages.py makes
its own of a Failure).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from colibri import errors

_log = logging.getLogger("colibri.server")

# The first class that fits counts: (status, type, code).
_TABLE: list[tuple[type[Exception], int, str, str | None]] = [
    (errors.QueueFullError, 429, "rate_limit_error", "queue_full"),
    (errors.ContextFullError, 400, "invalid_request_error", "context_length_exceeded"),
    (errors.ChatTemplateError, 400, "invalid_request_error", "chat_template"),
    (errors.ArgumentError, 400, "invalid_request_error", None),
    (errors.UnsupportedError, 400, "invalid_request_error", "unsupported"),
    (errors.CancelledError, 503, "server_error", "cancelled"),
    (errors.ColibriError, 500, "server_error", None),
]
_PARAMETER = re.compile(r"^([a-z_]+(?:\[\d+\])?(?:\.[a-z_]+)*)(?:: | of id \d+: | \S+ has no effect)")


class Failure(Exception):
    """What a client is told instead of an answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        type: str = "invalid_request_error",
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.type = status, param, code, type
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The error object of OpenAI."""
        return {"error": {"message": str(self), "type": self.type, "param": self.param, "code": self.code}}


def failure_of(error: Exception) -> Failure:
    """What is told of an exception; one that nobody expected is logged, and told without its text."""
    if isinstance(error, Failure):
        return error
    for kind, status, type, code in _TABLE:
        if isinstance(error, kind):
            found = _PARAMETER.match(str(error))
            headers = {"Retry-After": "1"} if status in (429, 503) else None
            if status == 500:
                _log.error("a request failed: %s", error)
            return Failure(
                status, str(error), param=found and found[1], code=code, type=type, headers=headers
            )
    _log.error("a request failed by a bug", exc_info=error)
    return Failure(500, "the server failed; its log says why", type="server_error")


def invalid(found: Sequence[Any]) -> Failure:
    """Of a body that does not fit its schema: the first thing that is wrong, by name."""
    first: dict[str, Any] = found[0] if found else {"loc": ("body",), "msg": "not valid"}
    where = [part for part in first["loc"] if part not in ("body", "query", "path", "header")]
    named = [part for part in where if not _branch(part)]
    name = _path(named)
    message = str(first["msg"]).removeprefix("Value error, ")
    value = first.get("input")
    shown = (
        "" if value is None or first.get("type") in ("missing", "json_invalid") else f", found {value!r:.80}"
    )
    return Failure(
        400, f"{name}: {message}{shown}" if name else f"the body: {message}{shown}", param=name or None
    )


def _branch(part: object) -> bool:
    """Whether a step of a place is the name of one form of a union, not of a field."""
    return isinstance(part, str) and (part in _TYPES or re.fullmatch(r"[a-z_]+", part) is None)


_TYPES = ("str", "int", "float", "bool", "dict", "list")


def _path(parts: Sequence[object]) -> str:
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
