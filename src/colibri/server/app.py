"""The application: which path is answered by what.

Owns: routes, failures as answers, the figures of requests. Refuses: everything behind a path (completions.py,
chat.py …) and in front of it (guard.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from colibri import __version__
from colibri.server import messages
from colibri.server.chat import chat
from colibri.server.choices import ClientLeft
from colibri.server.completions import complete
from colibri.server.failures import Failure, failure_of, invalid
from colibri.server.guard import Guard, Limits, body_of, respond
from colibri.server.metrics import Metrics
from colibri.server.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from colibri.server.responses import ResponsesRequest
from colibri.server.responses import respond as respond_items
from colibri.server.served import Models, Served
from colibri.server.tokens import detokenize, tokenize

_log = logging.getLogger("colibri.server")


def create_app(
    served: list[Served], limits: Limits | None = None, *, allowed_origins: list[str] | None = None
) -> FastAPI:
    """The application for models that are loaded already. It does not close them."""
    models, metrics = Models(served), Metrics(served)

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        app.state.ready = True
        yield
        app.state.ready = False

    app = FastAPI(title="Colibri", version=__version__, lifespan=life)
    app.state.ready, app.state.models, app.state.metrics = True, models, metrics
    _routes(app, models, metrics)
    _failures(app)
    app.add_middleware(_Told, metrics=metrics)
    if allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=allowed_origins, allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(Guard, limits=limits or Limits())
    return app


def _routes(app: FastAPI, models: Models, metrics: Metrics) -> None:
    @app.post("/v1/completions", response_model=None)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        return await _answered(complete(request, body, models.find(body.model), _client(request)))

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        return await _answered(chat(request, body, models.find(body.model), _client(request)))

    @app.post("/v1/responses", response_model=None)
    async def openai_responses(request: Request, body: ResponsesRequest) -> Response:
        return await _answered(respond_items(request, body, models.find(body.model), _client(request)))

    @app.post(messages.PATH, response_model=None)
    async def anthropic_messages(request: Request, body: messages.MessagesRequest) -> Response:
        return await _answered(messages.answer(request, body, models.find(body.model), _client(request)))

    @app.post(f"{messages.PATH}/count_tokens")
    async def count_tokens(body: messages.CountRequest) -> dict[str, int]:
        return await messages.count(body, models.find(body.model))

    @app.post("/tokenize")
    async def tokenize_text(body: TokenizeRequest) -> dict[str, Any]:
        return await asyncio.to_thread(tokenize, body, models.find(body.model))

    @app.post("/detokenize")
    async def detokenize_ids(body: DetokenizeRequest) -> dict[str, Any]:
        return await asyncio.to_thread(detokenize, body, models.find(body.model))

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [one.card() for one in models.all]}

    @app.get("/v1/models/{name:path}")
    async def show_model(name: str) -> dict[str, object]:
        return models.find(name).card()

    @app.get("/v1/experts")
    async def show_experts(model: str | None = None) -> dict[str, Any]:
        from colibri.server.experts import describe

        return describe(models.find(model))

    @app.get("/health")
    @app.get("/ping")
    async def health() -> Response:
        return Response(status_code=200 if app.state.ready else 503)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def show_metrics() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)


async def _answered(work: Awaitable[dict[str, Any] | Response]) -> Response:
    try:
        found = await work
    except ClientLeft:
        return Response(status_code=499)  # nobody reads it
    return found if isinstance(found, Response) else JSONResponse(found)


def _client(request: Request) -> str:
    """Whose request it is, for the queue: a key, else an address."""
    key = request.headers.get("authorization") or request.headers.get("x-api-key")
    return key or (request.client.host if request.client else "")


def _failures(app: FastAPI) -> None:
    def tell(request: Request, failure: Failure) -> JSONResponse:
        return JSONResponse(body_of(failure, request.url.path), failure.status, failure.headers)

    @app.exception_handler(RequestValidationError)
    async def not_valid(request: Request, error: RequestValidationError) -> JSONResponse:
        return tell(request, invalid(error.errors()))

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        text = {
            404: f"there is no {request.url.path}",
            405: f"{request.url.path} does not take {request.method}",
        }
        headers = dict(error.headers or {})
        message = text.get(error.status_code, str(error.detail))
        return tell(request, Failure(error.status_code, message, headers=headers))

    from colibri.errors import ColibriError

    @app.exception_handler(Failure)
    @app.exception_handler(ColibriError)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return tell(request, failure_of(error))


class _Told:
    """Counts answers and logs them; a fault that nobody expected becomes an answer."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, began = 0, time.perf_counter()

        async def told(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, told)
        except Exception as error:
            if status:
                raise
            failure = failure_of(error)
            status = failure.status
            await respond(failure, scope["path"], send)
        finally:
            path = getattr(scope.get("route"), "path", "other")
            self._metrics.answered(path, status)
            _log.info(
                "%s %s %d",
                scope["method"],
                scope["path"],
                status,
                extra={"seconds": round(time.perf_counter() - began, 6), "path": path, "status": status},
            )
