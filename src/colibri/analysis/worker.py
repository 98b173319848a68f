"""One thread count in a process of its own, driven by turns.py: python -m colibri.analysis.worker SETTINGS

Owns: the order of what is measured. SETTINGS is a JSON object {"model", "threads", "prompt", "decode",
"options", "seed"}, options those of load(); the process opens the model, evaluates a short prompt, answers,
and then serves the lines "prefill", "decode", "phases" and "peak" of stdin until it ends. Answers are JSON
lines on stdout; a failure is {"error", "kind"}, kind a name of errors.py.
Refuses: probes of memory, which would count as this process's own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from colibri.analysis import machine, peak
from colibri.analysis.runs import Loops, outside_matrices_ns, phases_ns, wait_share
from colibri.engine import Model, load
from colibri.errors import ColibriError
from colibri.memory import refusal
from colibri.profiling import measure

SHORT_PROMPT = 4  # ids of the first evaluation
_WARM_UP_TOKENS = 8
_PHASE_TOKENS = 32  # decoded again with times by phase, at most


def _start(settings: dict[str, Any]) -> tuple[Model, dict[str, Any]]:
    """The open model after its first token, and when (time.time()) each step was done."""
    imported = time.time()
    context = max(settings["prompt"] + settings["decode"], SHORT_PROMPT)
    model = load(settings["model"], threads=settings["threads"], context=context, **settings["options"])
    loaded = time.time()
    Loops(model, SHORT_PROMPT, 0, settings["seed"]).prefill()
    first = time.time()
    times = {"imported_at": imported, "loaded_at": loaded, "first_token_at": first}
    about = {"isa": model.isa, "residency": model.residency, "plan": dataclasses.asdict(model.memory)}
    return model, times | about


def _serve(settings: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> None:
    model, started = _start(settings)
    with model:
        answer(started)
        loops = Loops(model, settings["prompt"], settings["decode"], settings["seed"])
        for line in sys.stdin:
            word = line.strip()
            if word == "peak":
                answer({"gop_per_s": peak.matrix_gop_per_s(settings["peak_type"], settings["threads"])})
            else:
                answer({"prefill": _prefill, "decode": _decode, "phases": _phases}[word](loops))


def _prefill(loops: Loops) -> dict[str, Any]:
    loops.renew()
    loops.prefill()
    loops.decode(min(_WARM_UP_TOKENS, loops.n_decode))
    loops.renew()
    before = loops.model.stats
    seconds = loops.prefill()
    return {"seconds": seconds, "traffic": loops.model.stats.since(before).totals()}


def _decode(loops: Loops) -> dict[str, Any]:
    before = loops.model.stats
    seconds = loops.decode()
    traffic = loops.model.stats.since(before).totals()
    return {"seconds": seconds, "traffic": traffic, "memory": machine.process_bytes()}


def _phases(loops: Loops) -> dict[str, Any]:
    n = min(_PHASE_TOKENS, loops.n_decode)
    with measure(loops.model) as profile:
        loops.decode(n)
    return {
        "outside_matrices_us_per_token": outside_matrices_ns(profile) / n / 1e3,
        "attention_us_per_token": phases_ns(profile, "attend") / n / 1e3,
        "barrier_wait_share": wait_share(profile),
    }


def main() -> None:
    """What libraries print goes to stderr: stdout is for answers. Signals leave through every `with`."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda caught, _frame: sys.exit(128 + caught))
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)

        def answer(value: dict[str, Any]) -> None:
            answers.write(json.dumps(value) + "\n")
            answers.flush()

        try:
            _serve(json.loads(sys.argv[1]), answer)
        except (ColibriError, MemoryError, RuntimeError) as error:
            told = error if isinstance(error, ColibriError) else refusal(error)
            if told is None:
                raise
            answer({"error": str(told), "kind": type(told).__name__})
        except (KeyboardInterrupt, BrokenPipeError):
            os._exit(130)  # the parent is ending too; nothing is left to say


if __name__ == "__main__":
    main()
