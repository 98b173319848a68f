"""What a request must be before anything else looks at it: from whom, to whom, how large, how slow.

Owns: keys, the Host header, sizes and times of bodies, origins of other pages. Refuses: what a body says.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from colibri.server.failures import Failure
from colibri.server.messages import PATH as MESSAGES
from colibri.server.messages import failure_body

OPEN_PATHS = ("/health", "/ping", "/version")  # probes have no key


@dataclass(frozen=True, slots=True)
class Limits:
    """What is let in."""

    api_keys: tuple[str, ...] = ()  # none: everybody
    hosts: tuple[str, ...] | None = None  # names that a Host header may have, without ports; None: any
    max_body_bytes: int = 32 * 1024 * 1024
    body_seconds: float = 60.0  # from a request's first byte to the last of its body
    open_paths: tuple[str, ...] = OPEN_PATHS


class Guard:
    """Turns away what the limits do not allow, in front of an application."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app, self._limits = app, limits
        self._keys = [key.encode() for key in limits.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
            body = await self._body(scope, receive)
        except Failure as failure:
            await respond(failure, scope["path"], send)
            return
        if body is not None:
            await self._app(scope, _replayed(body, receive), send)

    def _check(self, scope: Scope) -> None:
        headers = {name.lower(): value for name, value in scope["headers"]}
        host = _name(headers.get(b"host", b"").decode("latin-1"))
        if self._limits.hosts is not None and host not in self._limits.hosts:
            raise Failure(
                403,
                f"the Host header: expected {' or '.join(self._limits.hosts)}, found {host!r:.100}: a page "
                "of another site may be asking; the server's --allowed-hosts lets more names in",
                code="host_not_allowed",
            )
        if self._keys and scope["method"] != "OPTIONS" and scope["path"] not in self._limits.open_paths:
            self._check_key(headers)

    def _check_key(self, headers: dict[bytes, bytes]) -> None:
        given = headers.get(b"authorization", b"")
        found = given[7:].strip() if given[:7].lower() == b"bearer " else headers.get(b"x-api-key", b"")
        # all keys are compared, each in a time that does not tell where it differs
        if not sum(hmac.compare_digest(found, key) for key in self._keys):
            raise Failure(
                401,
                "the API key is wrong or absent: send `Authorization: Bearer KEY`, or `x-api-key: KEY`",
                type="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body; None: the client has left."""
        most, parts, size = self._limits.max_body_bytes, [], 0
        too_large = Failure(413, f"the body: expected at most {most} bytes", code="request_too_large")
        for name, value in scope["headers"]:
            if name.lower() == b"content-length" and value.isdigit() and int(value) > most:
                raise too_large
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > most:
                        raise too_large
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise Failure(
                408, f"the body did not come within {self._limits.body_seconds:g} seconds", code="timeout"
            ) from None


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body once, then what the connection says."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def body_of(failure: Failure, path: str) -> dict[str, Any]:
    """In the shape of the interface that was asked."""
    return failure_body(failure) if path.startswith(MESSAGES) else failure.body()


async def respond(failure: Failure, path: str, send: Send) -> None:
    """A failure as a whole answer."""
    body = json.dumps(body_of(failure, path)).encode()
    headers: dict[str, Any] = {"content-type": "application/json", "content-length": str(len(body))}
    raw = [(name.lower().encode(), value.encode()) for name, value in (headers | failure.headers).items()]
    await send({"type": "http.response.start", "status": failure.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def hosts_of(host: str, allowed: Sequence[str]) -> tuple[str, ...] | None:
    """The names that a Host header may have: on a loopback address those of this machine, and what the user
    allows; elsewhere any, unless the user allows some."""
    names = _LOOPBACK if _is_loopback(host) else ()
    return tuple(dict.fromkeys([*names, *(_name(one) for one in allowed)])) if names or allowed else None


_LOOPBACK: Collection[str] = ("localhost", "127.0.0.1", "::1")


def _is_loopback(host: str) -> bool:
    return host in _LOOPBACK or host.startswith("127.")


def _name(host: str) -> str:
    """A Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return (host.rpartition(":")[0] if host.count(":") == 1 else host).lower()
