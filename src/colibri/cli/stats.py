"""The figures of `colibri run --stats`: as lines for people, and as one JSON object for --stats-json.

Owns: which figures there are, and that both forms say the same. Refuses: measuring.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colibri.aside import write_whole
from colibri.cli.report import bytes_text

if TYPE_CHECKING:
    from colibri.engine import Model
    from colibri.generate import Generation

_WORST = 3  # layers that are shown: those that evaluations waited for longest


def figures(model: Model, results: Sequence[Generation]) -> dict[str, Any]:
    """Of all answers together; units are in the key names, memory is in bytes."""
    from colibri import _native as native
    from colibri.analysis import machine

    evaluated = sum(one.n_prompt - one.n_reused for one in results if one.prefill_seconds)
    decoded = sum(max(0, one.n_generated - 1) for one in results)
    process = machine.process_bytes()
    return {
        "version": native.version(),
        "model": str(model.path),
        "prompt": _rate(evaluated, sum(one.prefill_seconds for one in results)),
        "answer": {"tokens": sum(one.n_generated for one in results), "end": results[-1].finish_reason},
        "decode": _rate(decoded, sum(one.decode_seconds for one in results)),
        "isa": model.isa,
        "threads": model.threads,
        "context": model.context,
        "seed": results[-1].seed,
        "logprobs": _logprobs(model, results),
        "residency": model.residency,
        "experts": sum(model.config["n_experts"]),
        "expert_slots": model.memory.expert_slots,
        "stats": model.stats.as_dict(),
        "memory": asdict(model.memory),
        "peak_bytes": None if process is None else process["peak"],
    }


def _logprobs(model: Model, results: Sequence[Generation]) -> list[dict[str, Any]] | None:
    """Of the tokens of all answers in a row; None: nobody asked."""
    if any(one.logprobs is None for one in results):
        return None

    def token(id: int, logprob: float) -> dict[str, Any]:
        return {"id": id, "token": model.tokenizer.decode([id], special=True), "logprob": logprob}

    return [
        token(found.id, found.logprob) | {"top": [token(*one) for one in found.top]}
        for one in results
        for found in one.logprobs or ()
    ]


def write(file: Path, found: dict[str, Any]) -> None:
    write_whole(file, json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Speed, then what streaming cost, then memory by category."""
    memory, answer = found["memory"], found["answer"]
    seed = "none (greedy)" if found["seed"] is None else found["seed"]
    yield f"prompt    {found['prompt']['tokens']} tokens, {_speed(found['prompt'])}"
    yield f"answer    {answer['tokens']} tokens, {_speed(found['decode'])}, end: {answer['end']}"
    yield f"engine    {found['isa']}, threads {found['threads']}, context {found['context']}, seed {seed}"
    if found["residency"] == "streamed":
        yield from _experts(found)
    yield (
        f"memory    {bytes_text(memory['total_bytes'])} planned ({found['residency']}): process "
        f"{bytes_text(memory['process'])}, expert cache {bytes_text(memory['expert_cache'])}, weights "
        f"{bytes_text(memory['weights_mapped'])} mapped and {bytes_text(memory['weights_resident'])} "
        f"resident, model {bytes_text(memory['model'])}, KV cache {bytes_text(memory['kv_cache'])}, "
        f"activations {bytes_text(memory['activations'])}, sampling {bytes_text(memory['sampling'])}, "
        f"threads {bytes_text(memory['threads'])}, control {bytes_text(memory['control'])}"
    )
    if found["peak_bytes"] is not None:
        yield f"peak      {bytes_text(found['peak_bytes'])} resident, Python included"


def _experts(found: dict[str, Any]) -> Iterator[str]:
    stats = found["stats"]
    layers, tokens = stats["layers"], max(1, stats["tokens"])
    uses = [hits + misses for hits, misses in zip(layers["hits"], layers["misses"], strict=True)]
    yield (
        f"experts   {found['expert_slots']} of {found['experts']} in slots, hit rate "
        f"{100 * stats['hit_rate']:.1f} % of {sum(uses)} uses, {bytes_text(round(stats['bytes_per_token']))} "
        f"read per token, waited {stats['wait_seconds']:.2f} s"
    )
    yield _prefetch(stats["prefetch"])
    waits: list[int] = layers["wait_ns"]
    worst = sorted((at for at, of in enumerate(uses) if of), key=lambda at: -waits[at])[:_WORST]
    yield "layers    waited longest for: " + "; ".join(
        f"{at}, hit rate {100 * layers['hits'][at] / uses[at]:.1f} %, "
        f"{bytes_text(layers['bytes_read'][at] // tokens)} per token, waited {waits[at] / 1e9:.2f} s"
        for at in worst
    )


def _prefetch(found: dict[str, Any]) -> str:
    """What is kept, the medians that it was chosen by, and how many of the experts asked for were right."""
    ways = []
    for way in ("on", "off"):
        count, ns = found[way]["evaluations"], found[way]["ns"]
        ways.append(f"{way} in {count} evaluations" + (f", {ns / count / 1e6:.1f} ms each" if count else ""))
    medians = (
        f"; medians of the last of {found['trials']} trials {found['on']['trial_median_ns'] / 1e6:.1f} and "
        f"{found['off']['trial_median_ns'] / 1e6:.1f} ms"
        if found["trials"]
        else ""
    )
    asked = found["asked"]
    used = (
        f"; {100 * found['asked_used'] / asked:.1f} % of {asked} experts asked for came to use"
        if asked
        else ""
    )
    return f"prefetch  {found['state']}: {'; '.join(ways)}{medians}{used}"


def _rate(tokens: int, seconds: float) -> dict[str, Any]:
    rate = tokens / seconds if tokens and seconds else None
    return {"tokens": tokens, "seconds": seconds, "tok_per_s": rate}


def _speed(rate: dict[str, Any]) -> str:
    return "no time measured" if rate["tok_per_s"] is None else f"{rate['tok_per_s']:.1f} tok/s"
