"""`colibri serve`: models behind the HTTP interfaces of OpenAI and others.

Owns: options, loading with progress, the socket, logs, the end of the process. Refuses: what is served
(colibri.server).
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from colibri.cli.report import (
    DenseType,
    ExpertPolicy,
    ExpertSlots,
    ExpertsType,
    KvType,
    LockMemory,
    MemoryLimit,
    NumaNode,
    OutputType,
    PinThreads,
    Prefetch,
    ReadLanes,
    Requantize,
    ResidencyKind,
    note,
    progress_bar,
    resolve_model,
)
from colibri.errors import ArgumentError, ModelIOError, UnsupportedError

if TYPE_CHECKING:
    from colibri.server.served import Served

KEY_VARIABLE = "COLIBRI_API_KEY"
DRAIN_SECONDS = 30
BACKLOG = 2048


def serve_models(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL…",
            help='.colibri files, Hugging Face directories, GGUF files, or "demo"; the first is meant where '
            "a request names none.",
            show_default=False,
        ),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0: any free one.", min=0, max=65535)] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="Name of a model, in the order of the models; none: that of its file."),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help=f"Key that requests need; may be given often. Also from {KEY_VARIABLE}."),
    ] = None,
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(
            help="Further names that a Host header may have; on a loopback address others are refused."
        ),
    ] = None,
    allowed_origins: Annotated[
        list[str] | None, typer.Option(help="Origins of pages that may ask (CORS); none: no other page.")
    ] = None,
    context: Annotated[
        int | None, typer.Option("--context", "--max-model-len", help="Most positions of a text.")
    ] = None,
    max_batch: Annotated[
        int, typer.Option("--max-batch", "--max-num-seqs", help="Texts written at the same time.")
    ] = 8,
    max_waiting: Annotated[int, typer.Option(help="Most requests that wait; more are told 429.")] = 1024,
    prefill_rows: Annotated[
        int,
        typer.Option(
            "--prefill-rows",
            "--max-num-batched-tokens",
            help="Most tokens of prompts that are read between two tokens of texts in writing.",
        ),
    ] = 256,
    max_body: Annotated[str, typer.Option(metavar="SIZE", help="Largest body of a request.")] = "32MiB",
    threads: Annotated[
        int | None, typer.Option(help="1 to 256; none: the physical cores this process may use.")
    ] = None,
    type: Annotated[
        str | None, typer.Option(metavar="TYPE", help="Weight type to convert to: f32, bf16, q8, q6, q4.")
    ] = None,
    experts: ExpertsType = None,
    dense: DenseType = None,
    output: OutputType = None,
    requantize: Requantize = False,
    memory: MemoryLimit = None,
    residency: ResidencyKind = "auto",
    expert_slots: ExpertSlots = None,
    expert_policy: ExpertPolicy = None,
    lanes: ReadLanes = None,
    prefetch: Prefetch = None,
    kv_type: KvType = "f32",
    pin: PinThreads = False,
    numa: NumaNode = None,
    mlock: LockMemory = False,
    log_format: Annotated[
        str, typer.Option(metavar="KIND", help="text or json, one line a request.")
    ] = "text",
) -> None:
    """Serve models over HTTP: /v1/chat/completions, /v1/completions, /v1/messages (docs/SERVER.md)."""
    from colibri.arguments import Opening
    from colibri.memory import bytes_of

    opening: dict[str, Any] = {
        "threads": threads,
        "context": context,
        "max_batch": max_batch,
        "memory": memory,
        "residency": residency,
        "expert_slots": expert_slots,
        "expert_policy": expert_policy,
        "lanes": lanes,
        "prefetch": prefetch,
        "kv_type": kv_type,
        "pin": pin,
        "numa": numa,
        "mlock": mlock,
    }
    Opening(**opening)  # wrong values are told before a model is converted or loaded
    body_bytes = bytes_of("max_body", max_body)
    if log_format not in ("text", "json"):
        raise ArgumentError(f"log_format: expected text or json, found {log_format!r}")
    need_extra()
    names = _names(models, served_model_name or [])
    keys = tuple(api_key or ([os.environ[KEY_VARIABLE]] if os.environ.get(KEY_VARIABLE) else []))
    types = {"type": type, "experts": experts, "dense": dense, "output": output}
    files = [resolve_model(model, types, requantize) for model in models]
    with _listening(host, port) as listening:
        served = [
            load_served(name, file, opening, max_waiting, prefill_rows)
            for name, file in zip(names, files, strict=True)
        ]
        try:
            _run(served, listening, host, keys, body_bytes, allowed_hosts, allowed_origins, log_format)
        finally:
            for one in served:
                one.engine.close()
                one.model.close()


def need_extra() -> None:
    """UnsupportedError where a package of the extra is missing."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            f"the server needs the package {error.name}, which is not installed: "
            "pip install 'colibri-moe[server]'"
        ) from None


def _names(models: list[str], given: list[str]) -> list[str]:
    if len(given) > len(models):
        raise ArgumentError(
            f"served_model_name: expected at most {len(models)}, one for each model, found {len(given)}"
        )
    names = [*given, *(Path(model).stem or model for model in models[len(given) :])]
    if double := next((name for name in names if names.count(name) > 1), None):
        raise ArgumentError(f"served_model_name: two models have the name {double!r}: give each its own")
    return names


def _listening(host: str, port: int) -> socket.socket:
    """A socket that holds the address, so that it is known to be free before models are loaded."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        raise ModelIOError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; give another --host or --port"
        ) from None
    return found


def load_served(
    name: str, file: Path, opening: dict[str, Any], max_waiting: int, prefill_rows: int
) -> Served:
    """A model with its engine, loaded with a bar."""
    from colibri.async_engine import AsyncEngine
    from colibri.engine import load
    from colibri.server.served import Served

    with progress_bar(f"reading {file.name}") as bar:
        told = opening["prefetch"] is not False or opening["residency"] == "streamed"
        follow = (lambda done, total: bar(done, total, "")) if told else None
        model = load(file, progress=follow, **opening)
    try:
        return Served(name, model, AsyncEngine(model, max_waiting=max_waiting, prefill_rows=prefill_rows))
    except BaseException:
        model.close()
        raise


def _run(
    served: list[Served],
    listening: socket.socket,
    host: str,
    keys: tuple[str, ...],
    body_bytes: int,
    allowed_hosts: list[str] | None,
    allowed_origins: list[str] | None,
    log_format: str,
) -> None:
    import uvicorn

    from colibri.server.app import create_app
    from colibri.server.guard import Limits, hosts_of

    limits = Limits(keys, hosts_of(host, allowed_hosts or []), body_bytes)
    app = create_app(served, limits, allowed_origins=allowed_origins)
    _log_to_stderr(log_format)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=DRAIN_SECONDS,
        lifespan="on",
    )
    listening.listen(BACKLOG)  # who connects from now on waits, but is not refused
    shown, port = listening.getsockname()[:2]
    shown = f"[{shown}]" if ":" in shown else shown
    note(f"serving {', '.join(one.name for one in served)} on http://{shown}:{port}")
    uvicorn.Server(config).run(sockets=[listening])


def _log_to_stderr(form: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _Json() if form == "json" else logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    )
    for name, level in (("colibri", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


class _Json(logging.Formatter):
    """One object a line."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        found: dict[str, Any] = {"time": at, "level": record.levelname, "message": record.getMessage()}
        found |= {
            name: getattr(record, name) for name in ("path", "status", "seconds") if hasattr(record, name)
        }
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found, ensure_ascii=False)
