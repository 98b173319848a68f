"""What a weight type costs: bf16 and q8 against f32 of the same checkpoint, on a text.

Owns: windows, KL divergence, agreement of the best token, perplexity and its relative change, by domain.
Refuses: the text itself: give JSON lines {"domain", "text"} or a plain text file that is new to the model.
Everything is summed in float64 from the engine's float32 logits.

    python benchmarks/quality.py CHECKPOINT TEXT [--types bf16 q8] [--context N] [--prefix TOKEN]
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

import colibri
from colibri.convert import convert

Doubles = npt.NDArray[np.float64]
BLOCK = 128  # rows of logits whose float64 copies are in memory at once


class Window(NamedTuple):
    """Ids evaluated together; the first has no prediction to score."""

    domain: str
    document: int
    ids: list[int]


class Score(NamedTuple):
    """Sums over the predictions of one window, by one weight type."""

    window: Window
    n: int  # predictions whose next token is known
    reference_loss: float  # nats, by f32
    loss: float  # nats, by the weight type
    kl: float  # nats, over the same predictions
    same_best: int  # predictions whose most likely token is that of f32


class Figures(TypedDict):
    """What is reported of one weight type on some text."""

    tokens: int
    perplexity_f32: float
    perplexity: float
    change: float  # of perplexity, relative
    change_error: float | None  # its standard error; None for a single document
    kl: float
    same_best: float


def read_documents(path: Path) -> list[tuple[str, str]]:
    """(domain, text) of every line of a .jsonl file; a plain text is one document."""
    text = path.read_text("utf-8")
    if path.suffix != ".jsonl":
        return [("text", text)]
    return [(line.get("domain", "text"), line["text"]) for line in map(json.loads, text.splitlines())]


def cut(model: colibri.Model, documents: list[tuple[str, str]], prefix: list[int]) -> Iterator[Window]:
    """Windows of at most `context` ids: documents never share one, and they do not overlap."""
    length = model.context
    for number, (domain, text) in enumerate(documents):
        ids = prefix + model.tokenizer.encode(text, special=True)
        for at in range(0, len(ids), length):
            window = ids[at : at + length]
            if len(window) > 1:
                yield Window(domain, number, window)


def log_softmax(logits: npt.NDArray[np.float32]) -> Doubles:
    """Row by row."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def score(window: Window, reference: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> Score:
    """Compares logits [n, n_vocab] of two weight types, without the last row: what follows it is unknown."""
    n = len(window.ids) - 1
    sums = np.zeros(4)
    for at in range(0, n, BLOCK):
        rows = slice(at, min(at + BLOCK, n))
        p, q = log_softmax(reference[rows]), log_softmax(other[rows])
        following = np.array(window.ids[rows.start + 1 : rows.stop + 1])[:, None]
        losses = [-np.take_along_axis(values, following, -1).sum() for values in (p, q)]
        same = (p.argmax(-1) == q.argmax(-1)).sum()
        sums += [*losses, (np.exp(p) * (p - q)).sum(), same]
    return Score(window, n, float(sums[0]), float(sums[1]), float(sums[2]), int(sums[3]))


def summary(scores: list[Score]) -> Figures:
    """Figures of one weight type over some windows. The standard error of the change of perplexity comes from
    the differences of documents: both types read the same text, so their losses vary together."""
    n = sum(s.n for s in scores)
    reference = sum(s.reference_loss for s in scores) / n
    loss = sum(s.loss for s in scores) / n
    differences: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for s in scores:
        differences[s.window.document][0] += s.loss - s.reference_loss
        differences[s.window.document][1] += s.n
    count = len(differences)
    square = sum((d - (loss - reference) * m) ** 2 for d, m in differences.values())
    return {
        "tokens": n,
        "perplexity_f32": math.exp(reference),
        "perplexity": math.exp(loss),
        "change": math.expm1(loss - reference),
        "change_error": math.sqrt(square * count / (count - 1)) / n if count > 1 else None,
        "kl": sum(s.kl for s in scores) / n,
        "same_best": sum(s.same_best for s in scores) / n,
    }


def evaluate(args: argparse.Namespace, work: Path) -> dict[str, list[Score]]:
    """Scores of every weight type."""
    files: dict[str, Path] = {}
    for name in ("f32", *args.types):
        files[name] = convert(args.checkpoint, work / f"{name}.colibri", name).path
        print(f"{name:5} {files[name].stat().st_size / 2**20:9.1f} MiB", flush=True)
    return compare(files.pop("f32"), files, args)


def compare(expected: Path, files: dict[str, Path], args: argparse.Namespace) -> dict[str, list[Score]]:
    """Scores of every file beside the expected one. All models are open at once and read the same window in
    turn."""
    reference = colibri.load(expected, threads=args.threads, context=args.context)
    models = {
        name: colibri.load(file, threads=args.threads, context=args.context) for name, file in files.items()
    }
    prefix = reference.tokenizer.encode(args.prefix, special=True)
    windows = list(cut(reference, read_documents(args.text), prefix))
    if args.windows is not None and args.windows < len(windows):
        windows = [windows[at * len(windows) // args.windows] for at in range(args.windows)]
    print(f"{len(windows)} windows of at most {reference.context} tokens from {args.text.name}", flush=True)
    scores: dict[str, list[Score]] = {name: [] for name in models}
    for window in windows:
        logits = reference.logits(window.ids)
        for name, model in models.items():
            scores[name].append(score(window, logits, model.logits(window.ids)))
    return scores


def report(scores: dict[str, list[Score]]) -> dict[str, dict[str, Figures]]:
    """{type: {domain: figures}}, the whole text under "all"."""
    found: dict[str, dict[str, Figures]] = {}
    for name, all_scores in scores.items():
        domains = sorted({s.window.domain for s in all_scores})
        parts = {domain: [s for s in all_scores if s.window.domain == domain] for domain in domains}
        found[name] = {domain: summary(part) for domain, part in parts.items()} | {"all": summary(all_scores)}
    return found


def show(found: dict[str, dict[str, Figures]]) -> None:
    """The table."""
    print(
        f"\n{'type':6}{'domain':14}{'tokens':>8}{'ppl f32':>11}{'ppl':>11}{'change':>11}{'+-':>9}"
        f"{'KL nats':>11}{'same best':>11}"
    )
    for name, domains in found.items():
        for domain, f in domains.items():
            error = "-" if f["change_error"] is None else f"{100 * f['change_error']:.3f}%"
            print(
                f"{name:6}{domain:14}{f['tokens']:8.0f}{f['perplexity_f32']:11.4f}{f['perplexity']:11.4f}"
                f"{100 * f['change']:+10.3f}%{error:>9}{f['kl']:11.6f}{100 * f['same_best']:10.2f}%"
            )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What compare() needs, and where files go."""
    parser.add_argument("checkpoint", type=Path, help="Hugging Face directory")
    parser.add_argument("text", type=Path, help='JSON lines {"domain", "text"} (.jsonl) or a plain text file')
    parser.add_argument("--context", type=int, help="tokens of a window; none: the model's own")
    parser.add_argument("--prefix", default="", help="text or control token put before every document")
    parser.add_argument("--windows", type=int, help="only so many, evenly spread")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--work", type=Path, help="directory for converted files; none: a temporary one")
    parser.add_argument("--json", type=Path, help="write the figures here too")


def main() -> None:
    """Command line. Exit status 1 if --limit is given and passed."""
    parser = argparse.ArgumentParser(description="Compares weight types with f32 on a text.")
    add_arguments(parser)
    parser.add_argument("--types", nargs="+", default=["bf16", "q8"], help="weight types to compare with f32")
    parser.add_argument("--limit", type=float, help="largest allowed rise of q8's perplexity, in percent")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.work) as work:
        found = report(evaluate(args, Path(work)))
    show(found)
    if args.json is not None:
        content: dict[str, Any] = {"model": args.checkpoint.absolute().name, "text": args.text.name} | found
        args.json.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    if args.limit is not None and (change := 100 * found["q8"]["all"]["change"]) > args.limit:
        raise SystemExit(f"quality.py: q8 changes perplexity by {change:.3f} %, allowed are {args.limit} %")


if __name__ == "__main__":
    main()
