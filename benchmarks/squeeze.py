"""Decode where the weights are larger than memory: Colibri in a budget against engines that map their file.

    python benchmarks/squeeze.py [--shape olmoe-7b] [--type q8] [--budget 2.45GB] [--leave 3GB] [--tokens 24]
        [--threads 2] [--turns 2] [--policy lfru] [--lanes 4] [--prefetch auto] [--skip NAME ...]

A balloon locks all memory but --leave, so that the page cache cannot hold the file; then the engines, in
turns and each alone, open the model, evaluate a short prompt and decode given tokens. Colibri keeps a budget
(--memory); the others may use whatever is left. Weights and tokens are random, so routing is nearly uniform:
the hardest case for a cache. Disk bandwidth, read past the page cache in the squeeze, stands beside the
figures. The page cache is emptied before each engine where that is allowed (root).

Owns: the squeeze, the table, the CSV. Refuses: a machine with less memory than it leaves. Needs what
benchmarks/README.md lists for compare.py.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
from pathlib import Path
from typing import Any

import numpy as np

import balloon
import contestant
import lineup
import machine
from colibri.analysis import disk
from colibri.analysis.shapes import SHAPES
from colibri.memory import available_bytes, bytes_of

PROMPT = 8
CONTEXT = 128


def drop_page_cache() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("1\n")


def measure(entrant: lineup.Entrant, asked: argparse.Namespace) -> dict[str, Any]:
    made = lineup.source(entrant, asked.shape, asked.type)
    arguments = lineup.arguments(entrant, made, asked.shape, asked.threads, PROMPT, CONTEXT - PROMPT)
    if entrant.engine == "colibri":
        arguments |= {"memory": asked.budget, "expert_policy": asked.policy, "lanes": asked.lanes}
        arguments |= {"prefetch": {"auto": None, "on": True, "off": False}[asked.prefetch]}
    n_vocab = SHAPES[asked.shape].n_vocab
    ids = np.random.default_rng(7).integers(5, n_vocab - 5, 2 * PROMPT + 8 + asked.tokens).tolist()
    drop_page_cache()
    assert made.path is not None
    probe = disk.measure(made.path, asked.lanes)
    one = contestant.start(
        entrant.engine, entrant.name, arguments, {"ids": ids[:PROMPT], "then": ids[PROMPT : PROMPT + 8]}
    )
    try:
        answer = one.ask({"ids": ids[PROMPT + 8 : 2 * PROMPT + 8], "then": ids[2 * PROMPT + 8 :]})
    finally:
        one.stop()
    return {
        "engine": entrant.name,
        "decode_tok_s": answer["decoded"] / answer["decode_seconds"],
        "start_s": one.start_seconds,
        "peak_mib": answer["memory"]["peak"] / machine.MIB,
        "disk_mb_s": 1e3 * probe.gb_per_s,
        "stats": answer.get("stats"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="olmoe-7b", choices=sorted(SHAPES))
    parser.add_argument("--type", default="q8")
    parser.add_argument("--budget", default="2.45GB")
    parser.add_argument("--leave", default="3GB")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--policy", default="lfru")
    parser.add_argument("--lanes", type=int, default=4)
    parser.add_argument("--prefetch", default="auto", choices=("auto", "on", "off"))
    parser.add_argument("--skip", nargs="*", default=[])
    asked = parser.parse_args()
    machine.warn_if_busy()
    taking_part = [
        one
        for one in lineup.ENTRANTS
        if one.default
        and one.engine != lineup.TRANSFORMERS
        and one.installed()
        and one.name not in asked.skip
        and not one.private.get(asked.type)  # a copy of its own cannot fit
    ]
    for one in taking_part:
        lineup.source(one, asked.shape, asked.type)
    rows = []
    with balloon.leaving(bytes_of("leave", asked.leave)) as held:
        print(f"{held / 1e9:.1f} GB locked, {(available_bytes() or 0) / 1e9:.1f} GB available", flush=True)
        for one in asked.turns * taking_part:
            row = measure(one, asked)
            rows.append(row)
            print(
                f"{row['engine']:18}{row['decode_tok_s']:8.2f} tok/s, start {row['start_s']:.1f} s, peak "
                f"{row['peak_mib']:.0f} MiB, disk {row['disk_mb_s']:.0f} MB/s {row['stats'] or ''}",
                flush=True,
            )
    facts = {"date": machine.today(), "commit": machine.commit(), "shape": asked.shape, "type": asked.type}
    facts |= {"threads": asked.threads, "budget": asked.budget, "leave": asked.leave, "tokens": asked.tokens}
    path = machine.results_file("-squeeze")
    new = not path.exists()
    with path.open("a", newline="") as file:
        for row in rows:
            line = facts | {
                key: f"{value:.2f}" if isinstance(value, float) else value for key, value in row.items()
            }
            writer = csv.DictWriter(file, list(line), lineterminator="\n")
            if new:
                writer.writeheader()
                new = False
            writer.writerow(line)
    print(f"{len(rows)} rows appended to {path.relative_to(machine.ROOT)}")


if __name__ == "__main__":
    main()
