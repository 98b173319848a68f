"""One engine in a process of its own: JSON requests on stdin, JSON answers on stdout.

Owns: the requests. {"ids": [...], "n": N} evaluates the prompt and draws N tokens, never stopping early;
{"ids": [...], "then": [...]} evaluates the prompt and then the given ids one after the other, with the
greedy choice made and dropped; {"ids": [...], "logits": FILE} writes the logits of all ids to a file.
Refuses: prompts, rounds, comparing (decode.py, compare.py), loading engines (engines.py, peers.py).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import engines
import peers
from engines import Engine
from machine import memory

MAKERS: dict[str, Callable[..., Engine]] = {
    "colibri": engines.colibri_engine,
    "transformers": engines.transformers_engine,
    "transformers_shape": engines.transformers_shape_engine,
    "llama_cpp": peers.llama_cpp_engine,
    "ik_llama_cpp": peers.ik_llama_cpp_engine,
}


def serve(engine: Engine, answers: Any) -> None:
    """Answers requests until stdin ends."""

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    answer(engine.setting)
    for line in sys.stdin:
        request = json.loads(line)
        if "logits" in request:
            assert engine.logits is not None
            np.save(request["logits"], engine.logits(request["ids"]))
            answer({})
        else:
            done = engine.generate(request["ids"], request.get("n", 0), request.get("then"))
            answer(done._asdict() | {"memory": memory()})


def main() -> None:
    """worker.py ENGINE JSON-ARGUMENTS. What libraries print goes to stderr: stdout is for answers."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        serve(MAKERS[sys.argv[1]](**json.loads(sys.argv[2])), answers)


if __name__ == "__main__":
    main()
