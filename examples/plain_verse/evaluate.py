"""Evaluates a converted model on held-out verses, through Colibri.

Loss, and loss with the source of another verse; chrF and BLEU of what it writes, greedily with the penalty
for repetition that the checkpoint asks for and without it, beside those of the source itself; shares of the
experts.  With --checkpoint also against Transformers: the same loss, the same ids, and
what the same model does untrained.

    python evaluate.py --model plain.colibri --heldout heldout_full.jsonl --samples 5 --checkpoint CHECKPOINT
"""

from __future__ import annotations

import argparse
import json
import math
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

import colibri
from colibri.convert import convert

Pair = dict[str, Any]
Report = dict[str, Any]


def ngrams(text: str, size: int) -> Counter[str]:
    """Character n-grams; spaces do not count."""
    letters = "".join(text.split())
    return Counter(letters[i : i + size] for i in range(len(letters) - size + 1))


def chrf(found: list[str], wanted: list[str], longest: int = 6, beta: float = 2.0) -> float:
    """chrF of a corpus (Popovic 2015), 0 to 100: the mean over n of precision and recall of character
    n-grams, as F-score with recall counting beta times."""
    scores = []
    for size in range(1, longest + 1):
        same = written = asked = 0
        for text, reference in zip(found, wanted, strict=True):
            a, b = ngrams(text, size), ngrams(reference, size)
            same += (a & b).total()
            written += a.total()
            asked += b.total()
        precision, recall = same / max(1, written), same / max(1, asked)
        total = beta**2 * precision + recall
        scores.append((1 + beta**2) * precision * recall / total if total else 0.0)
    return 100 * sum(scores) / len(scores)


def bleu(found: list[str], wanted: list[str]) -> float:
    """BLEU of a corpus (Papineni 2002), 0 to 100: words and marks, n to 4, a penalty for texts too short."""
    same, written, sizes = [0] * 4, [0] * 4, [0, 0]
    for text, reference in zip(found, wanted, strict=True):
        a, b = (re.findall(r"[\w']+|[^\w\s]", side) for side in (text, reference))
        sizes = [sizes[0] + len(a), sizes[1] + len(b)]
        for n in range(4):
            x, y = (Counter(zip(*(side[i:] for i in range(n + 1)), strict=False)) for side in (a, b))
            same[n] += (x & y).total()
            written[n] += x.total()
    if not all(same):
        return 0.0
    mean = sum(math.log(s / w) for s, w in zip(same, written, strict=True)) / 4
    return 100 * math.exp(mean + min(0.0, 1 - sizes[1] / sizes[0]))


def target_ids(model: colibri.Model, pair: Pair) -> list[int]:
    """The ids that should be written, the end included."""
    return [*model.tokenizer.encode(pair["target"]), *model.tokenizer.eos_ids]


def losses(model: colibri.Model, pair: Pair, source: str) -> list[float]:
    """Nats of each id of a pair's target, for a source."""
    ids = target_ids(model, pair)
    logits = model.logits([*model.start_ids(), *ids[:-1]], source=source).astype(np.float64)
    top = logits.max(axis=1)
    return (
        np.log(np.exp(logits - top[:, None]).sum(axis=1)) + top - logits[np.arange(len(ids)), ids]
    ).tolist()


def mean_loss(model: colibri.Model, pairs: list[Pair], shift: int = 0) -> float:
    """Nats a token; shift: each target with the source of the pair so many further on."""
    found = [losses(model, pair, pairs[(i + shift) % len(pairs)]["source"]) for i, pair in enumerate(pairs)]
    return sum(map(sum, found)) / sum(map(len, found))


def score(model: colibri.Model, pairs: list[Pair]) -> Report:
    """The figures of a set of pairs."""
    loss = mean_loss(model, pairs)
    wanted = [pair["target"] for pair in pairs]
    found: Report = {
        "pairs": len(pairs),
        "loss": round(loss, 3),
        "bits_per_token": round(loss / math.log(2), 3),
        "loss_with_another_source": round(mean_loss(model, pairs, shift=101), 3),
    }
    for name, options in (("", {}), ("_without_penalty", {"repetition_penalty": 1.0})):
        written = [model.generate(pair["source"], max_tokens=160, **options) for pair in pairs]
        texts = [one.text for one in written]
        found["chrf" + name] = round(chrf(texts, wanted), 1)
        found["bleu" + name] = round(bleu(texts, wanted), 1)
        found["ended" + name] = sum(one.finish_reason == "stop" for one in written)
    return found


def experts(model: colibri.Model, pairs: list[Pair]) -> list[Report]:
    """Shares of the experts in each layer that has some, and the exponential of their entropy."""
    counts: dict[int, np.ndarray[Any, Any]] = {}
    for pair in pairs:
        routed = model.routing([*model.start_ids(), *target_ids(model, pair)[:-1]], source=pair["source"])
        for layer, routing in routed.items():
            into = counts.setdefault(layer, np.zeros(routing.logits.shape[1]))
            into += np.bincount(routing.experts[:, 0], minlength=len(into))
    made = []
    for layer, count in counts.items():
        share = count / count.sum()
        entropy = -(share * np.log(np.maximum(share, 1e-12))).sum()
        made.append(
            {"layer": layer, "effective": round(float(np.exp(entropy)), 2), "share": share.round(3).tolist()}
        )
    return made


def compare(checkpoint: Path, model: colibri.Model, pairs: list[Pair]) -> Report:
    """The checkpoint in f32 in both engines: ids written greedily, and the largest difference of loss."""
    import torch
    from transformers import SwitchTransformersForConditionalGeneration

    torch.set_num_threads(1)
    reference = SwitchTransformersForConditionalGeneration.from_pretrained(checkpoint).eval()
    equal, apart = 0, 0.0
    for pair in pairs:
        source = torch.tensor([model.prompt_ids(pair["source"]).tolist()])
        with torch.inference_mode():
            theirs = reference.generate(source, max_new_tokens=160, do_sample=False)[0, 1:].tolist()
            labels = torch.tensor([target_ids(model, pair)])
            loss = reference(input_ids=source, labels=labels).loss.item()
        ours = model.generate(pair["source"], max_tokens=160)
        ends = [*ours.ids, *model.tokenizer.eos_ids] if ours.finish_reason == "stop" else ours.ids
        equal += ends == theirs
        own = losses(model, pair, pair["source"])
        apart = max(apart, abs(sum(own) / len(own) - loss))
    return {"texts": len(pairs), "equal_ids": equal, "largest_difference_of_loss": apart}


def untrained(vocab: int, tokenizer: Path, folder: Path, pairs: list[Pair]) -> Report:
    """What the first weights of train.py do."""
    import shutil

    import torch
    from train import make_model

    torch.manual_seed(1)
    make_model(vocab).save_pretrained(folder)
    for file in tokenizer.glob("tokenizer*.json"):
        shutil.copy(file, folder)
    with colibri.load(convert(folder, folder / "first.colibri", "f32").path) as first:
        return score(first, pairs)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a .colibri file")
    parser.add_argument("--heldout", type=Path, required=True, help="heldout_full.jsonl of build_pairs.py")
    parser.add_argument("--limit", type=int, help="so many pairs, evenly taken; default: all")
    parser.add_argument("--samples", type=int, default=0, help="show so many pairs, evenly taken")
    parser.add_argument(
        "--checkpoint", type=Path, help="the Hugging Face folder, to compare with Transformers"
    )
    parser.add_argument("--texts", type=int, default=200, help="how many texts to compare")
    parser.add_argument("--report", type=Path, help="write the figures here as JSON")
    args = parser.parse_args()
    pairs = [json.loads(line) for line in args.heldout.read_text(encoding="utf-8").splitlines()]
    pairs = evenly(pairs, args.limit or len(pairs))
    report: Report = {}
    with colibri.load(args.model) as model:
        for name in sorted({pair["from"] for pair in pairs}):
            own = [pair for pair in pairs if pair["from"] == name]
            copied, wanted = [pair["source"] for pair in own], [pair["target"] for pair in own]
            report[name] = {
                **score(model, own),
                "chrf_of_the_source": round(chrf(copied, wanted), 1),
                "bleu_of_the_source": round(bleu(copied, wanted), 1),
            }
        report["experts"] = experts(model, pairs)
        report["samples"] = [
            {**pair, "written": model.generate(pair["source"], max_tokens=160).text}
            for pair in evenly(pairs, args.samples)
        ]
        vocab = model.n_vocab
    if args.checkpoint:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            with colibri.load(convert(args.checkpoint, folder / "f32.colibri", "f32").path) as exact:
                report["f32"] = {
                    source: {"loss": round(mean_loss(exact, [p for p in pairs if p["from"] == source]), 3)}
                    for source in sorted({pair["from"] for pair in pairs})
                }
                report["transformers"] = compare(args.checkpoint, exact, evenly(pairs, args.texts))
            report["untrained"] = untrained(
                vocab, args.checkpoint, folder / "first", evenly(pairs, args.texts)
            )
    print(json.dumps(report, indent=1, ensure_ascii=False))
    if args.report:
        args.report.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


def evenly(pairs: list[Pair], n: int) -> list[Pair]:
    """n of the pairs, or all, in order: no choice by hand."""
    n = min(n, len(pairs))
    return [pairs[(2 * i + 1) * len(pairs) // (2 * n)] for i in range(n)]


if __name__ == "__main__":
    main()
