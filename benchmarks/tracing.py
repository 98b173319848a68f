"""What recording a routing trace costs: the same prompts and the same decoding with and without it, in turns.

    python benchmarks/tracing.py [MODEL] [--rounds 100] [--tokens 60] [--threads 1]

Owns: processor time of this process a token, the least of many short rounds: on a machine with other work
everything else is waiting. Refuses: texts; ids are drawn from a seed.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import colibri
from colibri._native import Ids
from colibri.analysis.recording import describe_model, recorded
from colibri.analysis.trace_writer import TraceWriter

KINDS = ("without", "traced", "with logits")


@contextmanager
def traced(model: colibri.Model, kind: str, file: Path) -> Iterator[None]:
    """One round, recorded or not; the end of a trace is not in the time."""
    if kind == "without":
        yield
        return
    header, sizes = describe_model(model, (), kind == "with logits")
    with TraceWriter(file, header, sizes) as writer, recorded(model, kind == "with logits") as take:
        yield
        writer.add_sequence(take(), n_prompt=1)


def prompt_us(model: colibri.Model, ids: Ids) -> float:
    """Processor time a token, in microseconds, of a prompt in one piece."""
    began = time.process_time()
    model.logits(ids)
    return (time.process_time() - began) / len(ids) * 1e6


def decode_us(model: colibri.Model, n: int) -> float:
    """The same of a text that is written greedily, as a program reads it."""
    model._sequences.forget()
    began = time.process_time()
    for _ in model.stream([1, 2, 3], max_tokens=n, temperature=0):
        pass
    return (time.process_time() - began) / n * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    rng = np.random.default_rng(0)
    least: dict[tuple[str, str], float] = {}
    context = chosen.tokens + 8
    with (
        colibri.load(chosen.model, threads=chosen.threads, context=context) as model,
        tempfile.TemporaryDirectory() as directory,
    ):
        model._prompts.end_ids = []  # every round writes as many tokens
        for _ in range(chosen.rounds):
            ids = rng.integers(3, model.n_vocab, chosen.tokens).astype(np.int32)
            for kind in KINDS:
                for work in ("prompt", "decode"):
                    with traced(model, kind, Path(directory) / "run.trace"):
                        us = prompt_us(model, ids) if work == "prompt" else decode_us(model, chosen.tokens)
                    least[work, kind] = min(us, least.get((work, kind), us))
    for (work, kind), us in least.items():
        print(f"{work:8}{kind:14}{us:10.1f} us a token  {us / least[work, 'without'] - 1:+6.1%}")


if __name__ == "__main__":
    main()
