"""llama.cpp and ik_llama.cpp in a worker, by the C interface under their Python packages: what these add
above it (text, samplers, copies of logits) is not what is compared.

Owns: their parameters, one batch of tokens, the cache emptied before each prompt, their log kept for errors.
Refuses: choosing settings: lineup.py's.
"""

from __future__ import annotations

import ctypes
import importlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from engines import Answer, Engine

LOG_LINES = 12  # shown when a model cannot be opened
LARGEST_UBATCH = 2048
_log: list[str] = []


def _keep(_level: int, text: bytes, _data: Any) -> None:
    _log.append(text.decode("utf-8", "replace"))


_KEEP = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(_keep)  # lives as long as it


def llama_cpp_engine(
    model: str, threads: int, context: int, prompt: int, flash: bool, repack: bool
) -> Engine:
    """llama-cpp-python. repack: a second copy of those matrices whose type has an interleaved layout for this
    processor, made at load; the rest stays mapped."""
    c: Any = importlib.import_module("llama_cpp.llama_cpp")
    c.llama_log_set(ctypes.cast(_KEEP, c.llama_log_callback), None)
    c.llama_backend_init()
    model_options = c.llama_model_default_params()
    model_options.n_gpu_layers = 0
    model_options.load_mode = c.LLAMA_LOAD_MODE_MMAP
    model_options.use_extra_bufts = repack
    options = _context_options(c, threads, context, prompt)
    options.flash_attn_type = c.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else c.LLAMA_FLASH_ATTN_TYPE_DISABLED
    loaded, opened = _open(c, model, model_options, options)
    system = c.llama_print_system_info()

    def clear() -> None:
        c.llama_memory_clear(c.llama_get_memory(opened), False)

    return _engine(c, loaded, opened, options, clear, {"flash": flash, "repack": repack}, system)


def ik_llama_cpp_engine(
    model: str, threads: int, context: int, prompt: int, flash: bool, repack: bool
) -> Engine:
    """ik-llama-cpp-python. repack: all matrices are interleaved at load and none is mapped."""
    c: Any = importlib.import_module("ik_llama_cpp._ctypes_api")
    c._lib.llama_log_set(_KEEP, None)
    c._lib.llama_print_system_info.restype = ctypes.c_char_p
    c.llama_backend_init()
    model_options = c.llama_model_default_params()
    model_options.n_gpu_layers = 0
    model_options.use_mmap = not repack
    model_options.repack_tensors = repack
    model_options.flash_attn = flash
    options = _context_options(c, threads, context, prompt)
    options.flash_attn = flash
    loaded, opened = _open(c, model, model_options, options)
    system = c._lib.llama_print_system_info()

    def clear() -> None:
        c.llama_kv_cache_clear(opened)

    return _engine(c, loaded, opened, options, clear, {"flash": flash, "repack": repack}, system)


def _context_options(c: Any, threads: int, context: int, prompt: int) -> Any:
    """The whole prompt is one batch, and is computed in pieces as large as it is, at most 2048."""
    options = c.llama_context_default_params()
    options.n_ctx = context
    options.n_batch = max(prompt, 512)
    options.n_ubatch = min(options.n_batch, LARGEST_UBATCH)
    options.n_threads = options.n_threads_batch = threads
    return options


def _open(c: Any, model: str, model_options: Any, options: Any) -> tuple[Any, Any]:
    loaded = c.llama_model_load_from_file(model.encode(), model_options)
    opened = c.llama_init_from_model(loaded, options) if loaded else None
    if not opened:
        words = "".join(_log).splitlines()[-LOG_LINES:]
        raise SystemExit("\n".join([f"peers.py: cannot open {model}; the engine's last words:", *words]))
    return loaded, opened


def _engine(
    c: Any,
    loaded: Any,
    opened: Any,
    options: Any,
    clear: Callable[[], None],
    setting: dict[str, Any],
    system: bytes,
) -> Engine:
    """The loop of both."""
    n_vocab = int(c.llama_vocab_n_tokens(c.llama_model_get_vocab(loaded)))
    batch = c.llama_batch_init(options.n_batch, 0, 1)
    for at in range(options.n_batch):
        batch.n_seq_id[at] = 1
        batch.seq_id[at][0] = 0

    def fill(ids: list[int], position: int) -> None:
        """Only the last id's logits are wanted."""
        batch.n_tokens = len(ids)
        for at, token in enumerate(ids):
            batch.token[at], batch.pos[at], batch.logits[at] = token, position + at, 0
        batch.logits[len(ids) - 1] = 1

    def decode() -> int:
        """Evaluates the batch; the likeliest next id."""
        status = c.llama_decode(opened, batch)
        if status:
            raise SystemExit(f"peers.py: llama_decode returned {status}: {''.join(_log[-LOG_LINES:])}")
        logits = np.ctypeslib.as_array(c.llama_get_logits_ith(opened, batch.n_tokens - 1), (n_vocab,))
        return int(logits.argmax())

    def generate(ids: list[int], n: int, then: list[int] | None) -> Answer:
        clear()
        fill(ids, 0)
        started = time.perf_counter()
        tokens = [decode()]
        first, first_at = time.perf_counter(), time.time()
        decoded = n - 1 if then is None else len(then)
        for at in range(decoded):
            fill([tokens[-1] if then is None else then[at]], len(ids) + at)
            tokens.append(decode())
        return Answer(tokens, first - started, time.perf_counter() - first, decoded, first_at)

    whole = {"n_batch": options.n_batch, "n_ubatch": options.n_ubatch, "kv": "f16"}
    enabled = [word for word in system.decode().replace("|", ";").split(";") if word.strip().endswith("= 1")]
    features = " ".join(word.split("=")[0].split(":")[-1].strip() for word in enabled)
    return Engine(generate, None, setting | whole | {"features": features})
