"""Writes tests/fixtures/*.npz: what Hugging Face Transformers answers for the models of fixtures/variants.py.

Role: run by hand when a variant is added or Transformers changes; needs torch and transformers (the everyday
      tests do not).
Owns: the second oracle's numbers and the proof that they are fit to test against: logits of ordinary size, no
      near ties among greedy tokens or chosen experts, every expert used.
Refuses: to write a fixture that fails those checks (choose another seed in variants.py).

    python tools/make_fixtures.py [NAME ...]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path.insert(0, str(TESTS))

import oracle  # noqa: E402
from fixtures import models  # noqa: E402
from fixtures.variants import N_GREEDY, VARIANTS, Variant  # noqa: E402
from oracle_families import CHOSEN_WITH_BIAS  # noqa: E402

TOKEN_MARGIN = 1e-3  # best minus second-best logit at every greedy step
EXPERT_MARGIN = 1e-4  # last chosen minus first rejected probability, relative gate logits
UNORDERED = (*oracle.GROUPED, *CHOSEN_WITH_BIAS)  # the choice is not among gate logits, in no order
Float32 = npt.NDArray[np.float32]


def reference(directory: Path, ids: list[int]) -> tuple[Float32, dict[str, npt.NDArray[Any]], list[int]]:
    """Transformers in f32: logits [n, n_vocab], routing {"logits": [layers, n, E], ...}, greedy tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    model.train(False)
    k = getattr(model.config, "num_experts_per_tok", 0)
    seen: list[tuple[Any, ...]] = []
    hooks = [
        module.register_forward_hook(lambda module, args, out: seen.append(decided(module, args, out, k)))
        for module in model.modules()
        if type(module).__name__.endswith(("TopKRouter", "TopkRouter", "4Router", "4TextRouter"))
    ]
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0].numpy()
        routing = {
            key: np.stack([out[i].numpy() for out in seen])
            for i, key in enumerate(("logits", "weights", "experts"))
            if seen
        }
        for hook in hooks:
            hook.remove()
        tokens: list[int] = []
        for _ in range(N_GREEDY):
            last = model(torch.tensor([ids + tokens]), use_cache=False).logits[0, -1]
            tokens.append(int(last.argmax()))
    return logits, routing, tokens


def decided(module: Any, args: tuple[Any, ...], out: tuple[Any, ...], k: int) -> tuple[Any, ...]:
    """(gate logits, weights, experts) of a router. One kind returns (weights of all experts, gate logits),
    another has probabilities in the place of gate logits."""
    if len(out) == 2:
        weights, experts = out[0].topk(k)
        return out[1], weights, experts
    if hasattr(module, "per_expert_scale"):
        logits = module.proj(module.norm(args[0]) * module.scale * module.scalar_root_size)
        return logits, *out[1:]
    return out


def faults(variant: Variant, directory: Path, logits: Float32, tokens: list[int]) -> list[str]:
    """Why these numbers would make a weak or a fragile test."""
    found = []
    if not 0.3 < logits.std() < 5:
        found.append(f"logit std {logits.std():.3f} is not of ordinary size")
    ours, routings = oracle.forward(oracle.load(directory), variant.prompt + tokens)
    steps = np.sort(ours[variant.n_prompt - 1 : -1], axis=-1)
    margin = float((steps[:, -1] - steps[:, -2]).min())
    if margin < TOKEN_MARGIN:
        found.append(f"greedy margin {margin:.2e} is nearly a tie")
    for routing in routings:
        k = routing.experts.shape[1]
        margins = routing.choice if variant.family in UNORDERED else routing.logits
        ranked = -np.sort(-margins, axis=-1)  # best first
        gaps = (
            ranked[:, :k] - ranked[:, 1 : k + 1]
            if k < ranked.shape[1]
            else ranked[:, : k - 1] - ranked[:, 1:k]
        )
        if gaps.min() < EXPERT_MARGIN:
            found.append(f"layer {routing.layer}: gate logits {gaps.min():.2e} apart are nearly a tie")
        if len(np.unique(routing.experts)) < routing.logits.shape[1]:
            found.append(f"layer {routing.layer}: an expert is never chosen")
    return found


def in_order(routing: dict[str, npt.NDArray[Any]], ours: list[oracle.Routing]) -> None:
    """These routers give their experts in no order (sorted=False): put into the order of choice."""
    for layer, expected in enumerate(ours):
        by_number = np.argsort(routing["experts"][layer], axis=-1)
        order = np.take_along_axis(by_number, np.argsort(np.argsort(expected.experts)), axis=-1)
        for key in ("experts", "weights"):
            routing[key][layer] = np.take_along_axis(routing[key][layer], order, axis=-1)


def make(name: str, out: Path) -> bool:
    """One fixture; False (and nothing written) if its numbers are unfit."""
    variant = VARIANTS[name]
    with tempfile.TemporaryDirectory() as temporary:
        directory = variant.write(Path(temporary) / name)
        logits, routing, tokens = reference(directory, variant.prompt)
        problems = faults(variant, directory, logits, tokens)
        digest = models.digest(directory)
        ours, routings = oracle.forward(oracle.load(directory), variant.prompt)
    if variant.family in UNORDERED:
        in_order(routing, routings)
    error = float(np.abs(ours - logits).max())
    distinct = len(set(tokens))
    print(f"{name:24} logit std {logits.std():5.2f}  oracle off by {error:.1e}  {distinct:2} distinct tokens")
    for problem in problems:
        print(f"{'':24} UNFIT: {problem}")
    if problems:
        return False
    rows = variant.rows
    arrays: dict[str, npt.NDArray[Any]] = {
        "ids": np.array(variant.prompt, np.int32),
        "rows": np.array(rows, np.int32),
        "logits": logits[rows].astype(np.float32),
        "greedy": np.array(tokens, np.int32),
        "digest": np.array(digest),
    }
    kinds = {"logits": np.float32, "weights": np.float32, "experts": np.int16}
    arrays |= {f"router_{key}": values[:, rows].astype(kinds[key]) for key, values in routing.items()}
    np.savez_compressed(out / f"{name}.npz", allow_pickle=False, **arrays)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description="Write tests/fixtures/*.npz from Transformers.")
    parser.add_argument("names", nargs="*", default=list(VARIANTS), help="variants to make; default: all")
    names = parser.parse_args().names
    if unknown := set(names) - set(VARIANTS):
        parser.error(f"unknown variants {sorted(unknown)}; known: {', '.join(VARIANTS)}")
    out = TESTS / "fixtures"
    made = [make(name, out) for name in names]
    total = sum(path.stat().st_size for path in out.glob("*.npz"))
    print(f"{sum(made)} of {len(made)} written; {out.name}/ holds {total / 1e6:.2f} MB")
    return 0 if all(made) else 1


if __name__ == "__main__":
    sys.exit(main())
