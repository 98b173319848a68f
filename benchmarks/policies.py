"""Hit rates of the cache policies on recorded traces and on routing that is drawn, as a table for the docs.

    python benchmarks/policies.py [TRACE[:CHUNK] ...] [--drawn]

CHUNK: as if at most so many tokens had been evaluated together; 1: as in decoding. --drawn: routing without a
model, token by token, over layers x experts of released shapes: uniform and independent; experts with
different shares (Zipf, exponent 0.7); shares that drift with the text (first-order autoregressive, 0.97).

Owns: sizes (10, 25, 50 % of all experts), draws, the table. Refuses: the rules (colibri.analysis.policies).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt

from colibri.analysis.policies import POLICIES, Accesses
from colibri.analysis.replay import demand, slot_counts
from colibri.analysis.trace import Trace

SHARES = ("10%", "25%", "50%")
Floats = npt.NDArray[np.float64]
DRAWN = {
    "OLMoE shape, uniform": (16, 64, 8, 0.0, 0.0),
    "OLMoE shape, Zipf 0.7": (16, 64, 8, 0.7, 0.0),
    "OLMoE shape, drifting": (16, 64, 8, 0.3, 1.5),
    "Mixtral shape, uniform": (32, 8, 2, 0.0, 0.0),
    "Mixtral shape, drifting": (32, 8, 2, 0.3, 1.5),
}


def drawn(layers: int, n: int, k: int, zipf: float, drift: float, tokens: int, seed: int = 0) -> Accesses:
    """Experts of every token and layer: the k best of (log share + Gumbel noise)."""
    rng = np.random.default_rng(seed)
    chosen = np.empty((tokens, layers, k), np.int64)
    for layer in range(layers):
        scores = -zipf * np.log1p(rng.permutation(n)) + rng.gumbel(size=(tokens, n))
        if drift:
            topic: Floats = rng.normal(size=n)
            for token in range(tokens):
                topic = 0.97 * topic + np.sqrt(1 - 0.97**2) * rng.normal(size=n)
                scores[token] += drift * topic
        chosen[:, layer] = np.sort(np.argpartition(-scores, k - 1, axis=1)[:, :k], axis=1) + layer * n
    ends = np.tile(np.arange(1, layers + 1) * n, tokens).astype(np.int32)
    starts = np.arange(tokens * layers + 1, dtype=np.int64) * k
    return Accesses(layers * n, chosen.reshape(-1).astype(np.int32), starts, ends)


def row(name: str, accesses: Accesses) -> str:
    uses = len(accesses.experts)
    cells = []
    for slots in slot_counts(SHARES, accesses.n_experts):
        misses = [int(POLICIES[policy](accesses, slots).sum()) for policy in ("lru", "lfru", "belady")]
        rates = [1 - missed / uses for missed in misses]
        cells.append(", ".join(f"{100 * rate:.1f}" for rate in rates))
    steps = len(accesses.ends)
    return f"| {name} | {accesses.n_experts} | {uses / steps:.1f} | {steps:,} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="*", metavar="TRACE[:CHUNK]")
    parser.add_argument("--drawn", action="store_true")
    chosen = parser.parse_args()
    print(
        f"| routing | experts | in a step | steps | {' | '.join(SHARES)} |\n|---|---:|---:|---:|---|---|---|"
    )
    for text in chosen.traces:
        path, _, chunk = text.partition(":")
        found = demand(Trace(path), int(chunk) if chunk else None)
        how = {"": "as recorded", "1": "token by token"}.get(chunk, f"chunks of {chunk}")
        print(row(f"{Path(path).stem}, {how}", found.accesses), flush=True)
    if chosen.drawn:
        for name, (layers, n, k, zipf, drift) in DRAWN.items():
            print(row(name, drawn(layers, n, k, zipf, drift, 2000)), flush=True)


if __name__ == "__main__":
    main()
