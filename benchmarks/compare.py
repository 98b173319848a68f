"""Colibri beside llama.cpp, ik_llama.cpp and Transformers: the same shape, bits a weight, threads and ids, in
one run, interleaved.

Owns: cells, turns, what is written down of them. Refuses: who the contestants are (lineup.py), their loops
(engines.py, peers.py), the README's table (table.py).

    python benchmarks/compare.py [--shape olmoe-7b] [--type q8 q4] [--threads 1 2] [--transformers]
    python benchmarks/compare.py --table

How a cell (shape, type, threads) is measured. Every contestant is a process of its own that opens the model
and evaluates a short prompt unmeasured, which touches every expert: mapped files are in the page cache before
and mapped pages in place after. Then they take turns, A B C A B C, each turn a prompt of random ids of which
only the last one's logits are wanted, then ids one by one. The ids are the same for all and not drawn from
the model: the same experts are asked often or seldom by chance, not because a text repeats itself; the greedy
choice is made and dropped. Nobody may reuse an earlier prompt's work. A process sleeps while others work.
A turn in which other processes took part of a processor is taken again: engines that spin at barriers fall
tenfold behind then. The rate of reading memory is probed before and after each cell. Figures are medians over
turns; a ratio is ours to a peer's in the same cell. Random weights do not change the work: no engine skips
zeros or experts.

Fairness. Peers are called by the C interface under their Python package. Each runs as it is
meant to be fast: flash attention on, the prompt one batch and one micro-batch, their f16 KV cache (ours is
f32). Where a repacking of weights is a choice that costs memory, both ways are contestants. GGUF files hold
every matrix as Q8_0 (against q8) or Q4_K (against q4), the router in f32, under the qwen3moe graph for all
shapes, as ik_llama.cpp has no olmoe graph; ours is converted under the shape's own family. Transformers
computes the same graph, not at the same bits a weight but in bf16 and in f32, each with the way to compute
experts that is fastest for a prompt and the one that is fastest for a token, its KV cache allocated ahead.
Where all do not fit in memory together, those whose weights are in memory of their own run afterwards in
groups beside Colibri: the column `group` tells, and ratios stay inside a group.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import lineup
import machine
import table
from colibri.analysis import machine as system
from colibri.analysis.bandwidth import Probe
from colibri.analysis.cost import cost
from colibri.analysis.shapes import SHAPES
from contestant import Contestant, WorkerDied, start
from lineup import ENTRANTS, OURS, Entrant, Source

WARM_UP_PROMPT, WARM_UP_DECODE = 64, 4  # so many ids ask every expert
TYPES = ("q8", "q4")
TRANSFORMERS = ("transformers-bf16", "transformers-f32")
DISTURBED, TRIES = 0.15, 4  # processors that others took in a turn that is taken again, so many times in all


@dataclass(frozen=True)
class Cell:
    """What its contestants have in common."""

    shape: str
    type: str
    threads: int
    prompt: int
    decode: int

    def __str__(self) -> str:
        return f"{self.shape} {self.type}, {self.threads} threads, prompt {self.prompt}, decode {self.decode}"

    def requests(self, turns: int) -> list[dict[str, Any]]:
        """A warm-up and one for each turn; no two begin alike."""
        generator = np.random.default_rng([self.prompt, self.decode])
        n_vocab = SHAPES[self.shape].n_vocab
        firsts = generator.choice(n_vocab, turns + 1, replace=False)
        sizes = [(min(WARM_UP_PROMPT, self.prompt), min(WARM_UP_DECODE, self.decode))]
        sizes += [(self.prompt, self.decode)] * turns
        made = []
        for first, (prompt, decode) in zip(firsts, sizes, strict=True):
            ids = [int(first), *generator.integers(0, n_vocab, prompt + decode - 1).tolist()]
            made.append({"ids": ids[:prompt], "then": ids[prompt:]})
        return made


def measure(cell: Cell, sources: dict[Entrant, Source], turns: int) -> tuple[list[Contestant], list[str]]:
    """The contestants after their turns, and the names of those whose process died."""
    requests, running, died = cell.requests(turns), [], []
    try:
        for entrant, source in sources.items():
            given = lineup.arguments(entrant, source, cell.shape, cell.threads, cell.prompt, cell.decode)
            python = lineup.interpreter(entrant)
            try:
                running.append(start(entrant.engine, entrant.name, given, requests[0], python))
            except WorkerDied as error:
                print(error, flush=True)
                died.append(entrant.name)
        for request in requests[1:]:
            for one in running:
                one.turns.append(quiet_turn(one, request))
        for one in running:
            one.stop()
    finally:
        for one in running:
            one.kill()
    return running, died


def quiet_turn(one: Contestant, request: dict[str, Any]) -> dict[str, Any]:
    """A turn, taken again with another first id if other processes disturbed it; the last try counts."""
    ids = request["ids"]
    for first in (ids[0] ^ bit for bit in range(TRIES)):  # below n_vocab, a multiple of 16
        answer = one.turn(request | {"ids": [first, *ids[1:]]})
        if answer["others"] < DISTURBED:
            break
    return answer


def run_cell(cell: Cell, entrants: list[Entrant], args: argparse.Namespace, facts: dict[str, Any]) -> None:
    """One cell, group after group; its rows are printed and appended to the CSV."""
    sources = {entrant: lineup.source(entrant, cell.shape, cell.type) for entrant in entrants}
    total = system.memory_bytes()["total"]
    groups, too_large = lineup.groups(list(sources.items()), cell.type, total)
    for entrant, source in too_large:
        print(
            f"{cell}: {entrant.name} is left out, its weights ({source.n_bytes / 1e9:.1f} GB) and ours "
            f"({sources[OURS].n_bytes / 1e9:.1f} GB) are more than {lineup.SHARE_OF_MEMORY:.0%} of "
            f"{(total or 0) / 1e9:.1f} GB of memory"
        )
    file = sources[OURS].path
    assert file is not None
    touched = cost(file).decode_bytes(cell.prompt + (cell.decode + 1) / 2)
    for number, group in enumerate(groups, 1):
        for path in {sources[entrant].path for entrant in group}:
            if path is not None:
                read_once(path)
        probe = Probe()
        before = probe.read(cell.threads)
        running, died = measure(cell, {entrant: sources[entrant] for entrant in group}, args.turns)
        after = probe.read(cell.threads)
        shared = {
            "shape": cell.shape,
            "type": cell.type,
            "threads": cell.threads,
            "prompt": cell.prompt,
            "decode": cell.decode,
            "group": number,
            "turns": args.turns,
            "read_before_gb_s": f"{before.gb_per_s:.2f}",
            "read_after_gb_s": f"{after.gb_per_s:.2f}",
            "bytes_per_token": round(touched),
        }
        print(f"\n{cell}: memory read at {before.gb_per_s:.1f} GB/s before, {after.gb_per_s:.1f} after")
        rows = [facts | shared | row(one, running, sources) for one in running]
        for line in table.cell_lines(rows):
            print(line, flush=True)
        for name in died:
            print(f"{name} could not run: its words are above")
        if args.csv:
            table.append(rows)


def row(one: Contestant, running: list[Contestant], sources: dict[Entrant, Source]) -> dict[str, Any]:
    """What is written down of a contestant. Rates of all turns stay in the file."""
    entrant = next(entrant for entrant in ENTRANTS if entrant.name == one.name)
    ours = next((other for other in running if other.name == OURS.name), None)
    held = one.turns[-1]["memory"]
    setting = entrant.options | one.setting
    made: dict[str, Any] = {"engine": one.name, "version": lineup.version(entrant)}
    for key in ("prefill", "decode"):
        rates = [turn[key] for turn in one.turns]
        median = statistics.median(rates)
        made[f"{key}_tok_s"] = f"{median:.2f}" if median else ""
        made[f"{key}_all"] = " ".join(f"{rate:.2f}" for rate in rates) if median else ""
        made[f"ours_to_this_{key}"] = f"{ours.median(key) / median:.3f}" if ours and median else ""
    return made | {
        "start_s": f"{one.start_seconds:.2f}",
        "peak_mib": f"{held['peak'] / machine.MIB:.0f}",
        "anonymous_mib": f"{held['anonymous'] / machine.MIB:.0f}",
        "file_mib": f"{held['file'] / machine.MIB:.0f}",
        "model_bytes": sources[entrant].n_bytes,
        "others": f"{one.median('others'):.2f}",
        "setting": json.dumps(setting, separators=(",", ":")),
    }


def read_once(path: Path) -> None:
    """Into the page cache, so that nobody reads from the disk."""
    with path.open("rb", buffering=0) as file:
        block = bytearray(8 << 20)
        while file.readinto(block):
            pass


def choose(args: argparse.Namespace) -> list[Entrant]:
    """Who takes part; says who could and is not installed."""
    wanted = [one for one in ENTRANTS if one.default or (args.transformers and one.name in TRANSFORMERS)]
    if args.only:
        wanted = [one for one in ENTRANTS if one.name in args.only or one is OURS]
    wanted = [one for one in wanted if one.name not in args.skip or one is OURS]
    for one in wanted:
        if not one.installed():
            print(f"{one.name} is left out, it is not installed here: {one.install}")
    return [one for one in wanted if one.installed()]


def compare(args: argparse.Namespace) -> None:
    """All cells."""
    entrants = choose(args)
    facts = {
        "run": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "cpu": machine.cpu_model(),
        "cpus": machine.cpus(),
        "load": f"{machine.load():.2f}",
        "commit": machine.commit(),
        "python": sys.version.split()[0],
        "command": shlex.join(["python", "benchmarks/compare.py", *sys.argv[1:]]),
    }
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    machine.warn_if_busy()
    for shape in args.shape:
        for type in args.type:
            for threads in args.threads:
                run_cell(Cell(shape, type, threads, args.prompt, args.decode), entrants, args, facts)
                if args.long:
                    run_cell(Cell(shape, type, threads, args.long, 0), [OURS], args, facts)


def main() -> None:
    """Command line."""
    names = [one.name for one in ENTRANTS]
    parser = argparse.ArgumentParser(description="Compares Colibri with other engines on random weights.")
    parser.add_argument("--shape", nargs="+", choices=sorted(SHAPES), default=["qwen3-moe-1b", "olmoe-7b"])
    parser.add_argument("--type", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--threads", nargs="+", type=int, default=[2, 1])
    parser.add_argument("--turns", type=int, default=3, help="of each contestant in a cell (%(default)s)")
    parser.add_argument("--prompt", type=int, default=512, help="ids of a prompt (%(default)s)")
    parser.add_argument("--decode", type=int, default=64, help="ids evaluated after it (%(default)s)")
    parser.add_argument("--long", type=int, default=4096, help="a longer prompt for Colibri alone; 0: none")
    parser.add_argument("--only", nargs="+", choices=names, help="these, and Colibri")
    parser.add_argument("--skip", nargs="+", choices=names, default=[])
    parser.add_argument("--transformers", action="store_true", help="with Transformers too, in bf16 and f32")
    parser.add_argument("--no-csv", dest="csv", action="store_false", help="leave benchmarks/results alone")
    parser.add_argument("--table", action="store_true", help="print the README's table from the CSV and end")
    args = parser.parse_args()
    if args.table:
        print(table.marked(table.results()))
        return
    if min(args.turns, args.prompt, args.decode, *args.threads) < 1:
        parser.error("expected --turns, --prompt, --decode and --threads of at least 1")
    compare(args)


if __name__ == "__main__":
    main()
