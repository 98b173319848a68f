"""Colibri beside Transformers on one checkpoint in one run: decode, prefill, first token, peak memory.

Owns: prompts, the choice of Transformers' fastest setting, interleaved rounds, agreement of the engines.
Refuses: running an engine itself: each is a process of its own (worker.py), so that memory is its own.

    python benchmarks/decode.py CHECKPOINT [--text TEXT] [--prompt 256] [--new 64] [--rounds 5] [--threads N]
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import machine
from contestant import HEAD, Contestant, describe, start, write_csv

DTYPES = ("bfloat16", "float32")
EXPERTS = ("eager", "batched_mm", "grouped_mm")  # all that Transformers 5 can run on a CPU
TRIAL_TURNS = 2


def make_prompts(args: argparse.Namespace, n_vocab: int) -> list[list[int]]:
    """Prompts of equal length, no two with the same beginning: no engine may reuse earlier work."""
    count = args.rounds + TRIAL_TURNS + 1
    if args.text is None:
        generator = np.random.default_rng(0)
        firsts = generator.choice(n_vocab, count, replace=False)
        return [[int(first), *generator.integers(0, n_vocab, args.prompt - 1).tolist()] for first in firsts]
    from tokenizers import Tokenizer

    lines = args.text.read_text("utf-8").splitlines()
    if args.text.suffix == ".jsonl":
        lines = [json.loads(line)["text"] for line in lines]
    ids = Tokenizer.from_file(str(args.checkpoint / "tokenizer.json")).encode("\n".join(lines)).ids
    prompts: dict[int, list[int]] = {}
    for at in range(0, len(ids) - args.prompt, max(1, (len(ids) - args.prompt) // (8 * count))):
        prompts.setdefault(ids[at], ids[at : at + args.prompt])
    if len(prompts) < count:
        raise SystemExit(f"decode.py: expected text for {count} prompts, {args.text} has {len(prompts)}")
    return list(prompts.values())[:count]


def check_agreement(
    args: argparse.Namespace, work: Path, config: dict[str, Any], prompts: list[list[int]]
) -> str:
    """The same weights, unrounded, must give the same text in both engines: only then is it the same work.

    A bf16 checkpoint is kept as bf16: every weight has the same value as in f32, and arithmetic is f32."""
    from colibri.convert import convert

    kind = "bf16" if str(config.get("dtype", config.get("torch_dtype"))).endswith("bfloat16") else "f32"
    warm_up, prompt = prompts[:2]
    exact = convert(args.checkpoint, work / "exact.colibri", kind, require_tokenizer=False).path
    logits, tokens = [], []
    arguments = {"model": str(exact), "context": len(prompt) + args.check}
    other = {"model": str(args.checkpoint), "dtype": "float32", "experts": "eager" if is_moe(config) else ""}
    for engine, settings in (("colibri", arguments), ("transformers", other)):
        worker = start(engine, "exact", settings | {"threads": args.threads}, asked(warm_up, 1))
        tokens.append(worker.ask(asked(prompt, args.check))["ids"])
        file = work / f"{engine}.npy"
        worker.ask({"ids": prompt, "logits": str(file)})
        logits.append(np.load(file))
        worker.stop()
    exact.unlink()
    apart = float(np.abs(logits[0] - logits[1]).max())
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*tokens, strict=True)))
    if same < args.check or apart > 1e-2:
        raise SystemExit(
            f"decode.py: the engines disagree on unrounded weights: {same} of {args.check} greedy tokens are "
            f"equal, logits differ by up to {apart:.2e}. Figures of different work are not worth comparing."
        )
    return f"{same} of {args.check} greedy tokens equal, logits within {apart:.1e} ({kind} weights)"


def asked(ids: list[int], n: int) -> dict[str, Any]:
    """The request to write n tokens after a prompt."""
    return {"ids": ids, "n": n}


def is_moe(config: dict[str, Any]) -> bool:
    return any(config.get(key) for key in ("num_experts", "num_local_experts"))


def fastest_settings(
    args: argparse.Namespace, config: dict[str, Any], prompts: list[list[int]]
) -> tuple[list[Contestant], list[str]]:
    """Tries every setting of Transformers; all, and the names of those fastest at decode and at prefill."""
    tried = []
    for dtype, experts in itertools.product(DTYPES, EXPERTS if is_moe(config) else ("",)):
        name = f"{dtype} {experts}".strip()
        arguments = transformers_arguments(args, name)
        contestant = start("transformers", name, arguments, asked(prompts[0], args.new))
        contestant.turns = [contestant.turn(asked(ids, args.new)) for ids in prompts[1 : 1 + TRIAL_TURNS]]
        contestant.stop()
        print(describe(contestant), flush=True)
        tried.append(contestant)
    best = {max(tried, key=lambda one: one.median(key)).name for key in ("decode", "prefill")}
    return tried, sorted(best)


def transformers_arguments(args: argparse.Namespace, name: str) -> dict[str, Any]:
    dtype, _, experts = name.partition(" ")
    return {"model": str(args.checkpoint), "threads": args.threads, "dtype": dtype, "experts": experts}


def compare(args: argparse.Namespace, work: Path) -> None:
    """The whole comparison."""
    from colibri.convert import convert

    config = json.loads((args.checkpoint / "config.json").read_text("utf-8"))
    prompts = make_prompts(args, config["vocab_size"])
    facts = {
        "date": machine.today(),
        "cpu": machine.cpu_model(),
        "threads": args.threads,
        "load": f"{machine.load():.2f}",
        "commit": machine.commit(),
        "python": sys.version.split()[0],
        "torch": machine.version("torch"),
        "transformers": machine.version("transformers"),
        "model": args.checkpoint.name,
        "prompt": args.prompt,
        "new": args.new,
    }
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    machine.warn_if_busy()
    if args.check:
        print(f"agreement: {check_agreement(args, work, config, prompts)}", flush=True)
    report = convert(args.checkpoint, work / "q8.colibri", "q8", require_tokenizer=False)
    print(f"converted to q8 in {report.seconds:.1f} s: {report.bytes / machine.MIB:.1f} MiB\n\n{HEAD}")

    tried, best = fastest_settings(args, config, prompts)
    arguments = {"model": str(report.path), "threads": args.threads, "context": args.prompt + args.new}
    warm_up = asked(prompts[0], args.new)
    contestants = [start("colibri", "q8", arguments, warm_up)]
    contestants += [start("transformers", name, transformers_arguments(args, name), warm_up) for name in best]
    for ids in prompts[1 + TRIAL_TURNS :]:
        for contestant in contestants:
            contestant.turns.append(contestant.turn(asked(ids, args.new)))
    for contestant in contestants:
        contestant.stop()
    contestants[0].name = f"q8 {contestants[0].setting['isa']}"

    print(f"\n{args.rounds} interleaved rounds against the fastest of these\n{HEAD}")
    for contestant in contestants:
        print(describe(contestant))
    ours, others = contestants[0], contestants[1:]
    fastest = {key: max(others, key=lambda one: one.median(key)) for key in ("decode", "prefill")}
    for key, other in fastest.items():
        print(f"{key}: {ours.median(key) / other.median(key):.2f} times Transformers ({other.name})")
    leanest = min(one.turns[-1]["memory"]["peak"] for one in tried)
    peak = ours.turns[-1]["memory"]["peak"]
    print(f"peak memory: {peak / leanest:.2f} of the leanest Transformers setting's")
    disturbance = max(one.median("others") for one in contestants)
    print(f"other processes took up to {disturbance:.2f} processors in the median turn of an engine")
    if args.csv:
        write_csv([("trial", one) for one in tried] + [("rounds", one) for one in contestants], facts)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Compares Colibri q8 with Transformers on one checkpoint.")
    parser.add_argument("checkpoint", type=Path, help="Hugging Face directory")
    parser.add_argument("--text", type=Path, help="prompts from this text or JSON lines; none: random ids")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt (%(default)s)")
    parser.add_argument("--new", type=int, default=64, help="tokens to write (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (%(default)s)")
    parser.add_argument("--threads", type=int, default=machine.cpus(), help="of both engines (%(default)s)")
    parser.add_argument("--check", type=int, default=32, help="greedy tokens that must be equal; 0: no check")
    parser.add_argument("--work", type=Path, help="directory for converted files; none: a temporary one")
    parser.add_argument("--no-csv", dest="csv", action="store_false", help="leave benchmarks/results alone")
    args = parser.parse_args()
    if args.new < 2 or args.prompt < 1 or args.rounds < 1:
        parser.error("expected --new of at least 2, --prompt and --rounds of at least 1")
    args.checkpoint = args.checkpoint.absolute()
    with tempfile.TemporaryDirectory(dir=args.work) as work:
        compare(args, Path(work))


if __name__ == "__main__":
    main()
