"""Trains the demo model for a fixed wall-clock time and saves a checkpoint folder.

The learning rate follows the clock (short warm-up, then linear to zero at the time
budget), so the run ends well annealed however busy the machine is.  One process per
core computes gradients that are averaged once a step: on a shared machine this loses
far less time to waiting than threads that meet in every matrix product.

    nohup nice -n 5 python train.py --corpus train.jsonl --out CHECKPOINT --minutes 65 &
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from model import DemoModel, Shape, hf_tensors, parameter_counts
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

TOKENS_PER_WORKER = 512  # small steps: the run is short of tokens, so more updates are worth more
# Mostly short windows (cheap attention); some long ones so that every position is trained.
LENGTHS = [(256, 0.90), (512, 0.07), (1024, 0.03)]

REPEATED_WEIGHT = 3.0  # of a rarer token that stood in the window before: names, above all
RARE = 0.002  # share of the corpus below which a token counts as rarer
FIGURES = 4  # clock, loss, balance loss, loss on repeated tokens: what workers average beside gradients
EMBEDDING_RATE = 8.0  # the embedding is some eight times as large as the other weights, and so are its steps


@dataclass
class Stream:
    """All documents as one id array, with the place where each document starts."""

    ids: NDArray[np.uint16]
    starts: NDArray[np.int64]

    def window(self, rng: random.Random, length: int) -> NDArray[np.int64]:
        """``length + 1`` ids: half the windows begin at a document, as generation does."""
        last = len(self.ids) - length - 1
        begin = rng.randrange(last)
        if rng.random() < 0.5:
            # Snapping a random place keeps every domain's share of the tokens.
            begin = int(self.starts[np.searchsorted(self.starts, begin, side="right") - 1])
        begin = min(begin, last)
        return self.ids[begin : begin + length + 1].astype(np.int64)


def encode(corpus: Path, tokenizer: Tokenizer) -> Stream:
    """Encode every document, each followed by the end-of-text token."""
    with corpus.open(encoding="utf-8") as handle:
        texts = [json.loads(line)["text"] for line in handle]
    end = tokenizer.token_to_id("<|endoftext|>")
    pieces: list[list[int]] = []
    starts, position = [], 0
    for index in range(0, len(texts), 2000):
        for encoding in tokenizer.encode_batch(texts[index : index + 2000]):
            starts.append(position)
            pieces.append([*encoding.ids, end])
            position += len(pieces[-1])
    flat = np.fromiter((token for piece in pieces for token in piece), dtype=np.uint16, count=position)
    return Stream(flat, np.array(starts))


def batch(stream: Stream, rng: random.Random) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one length, about TOKENS_PER_WORKER tokens in all."""
    length = rng.choices([size for size, _ in LENGTHS], weights=[share for _, share in LENGTHS])[0]
    windows = [stream.window(rng, length) for _ in range(max(1, TOKENS_PER_WORKER // length))]
    ids = torch.from_numpy(np.stack(windows))
    return ids[:, :-1], ids[:, 1:]


def repeated(inputs: Tensor, targets: Tensor, rare: Tensor) -> Tensor:
    """Where a target is a rarer token that its window held before: [batch, length] of bool."""
    held = (targets.unsqueeze(2) == inputs.unsqueeze(1)).tril().any(dim=2)
    return held & rare[targets]


def learning_rate(peak: float, progress: float) -> float:
    """Warm-up over the first 2 % of the time, then linear to zero."""
    warm = 0.02
    if progress < warm:
        return peak * (progress + 0.001) / warm
    return peak * max(0.0, (1.0 - progress) / (1.0 - warm))


def make_optimizer(model: DemoModel, decay: float) -> torch.optim.AdamW:
    """AdamW; norms and the embedding are not decayed."""
    matrices = [p for p in model.parameters() if p.dim() > 1 and p is not model.embedding.weight]
    groups = [
        {"params": matrices, "weight_decay": decay},
        {"params": [model.embedding.weight], "weight_decay": 0.0, "scale": EMBEDDING_RATE},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.97), eps=1e-8, fused=True)


def save_checkpoint(model: DemoModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Weights, config.json and generation_config.json in the classic layout."""
    folder.mkdir(parents=True, exist_ok=True)
    end_text, end_turn = tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<|end|>")
    scratch = folder / "model.safetensors.part"
    save_file(hf_tensors(model), scratch, metadata={"format": "pt"})
    scratch.replace(folder / "model.safetensors")
    config = model.shape.hf_config(eos=end_text, pad=end_text)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {
        "do_sample": True,
        "eos_token_id": [end_turn, end_text],
        "pad_token_id": end_text,
        "temperature": 0.7,
        "top_p": 0.9,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


class SharedGradients:
    """Gradients of all parameters in one buffer, averaged over the workers in one call."""

    def __init__(self, model: DemoModel, extra: int) -> None:
        parameters = list(model.parameters())
        size = sum(parameter.numel() for parameter in parameters)
        self.buffer = torch.zeros(size + extra)
        self.extra = self.buffer[size:]
        position = 0
        for parameter in parameters:
            parameter.grad = self.buffer[position : position + parameter.numel()].view_as(parameter)
            position += parameter.numel()

    def average(self, workers: int) -> None:
        """Mean over the workers, of the gradients and of the extra figures alike."""
        if workers > 1:
            dist.all_reduce(self.buffer)
            self.buffer /= workers


def figures_tokens(extra: Tensor, shape: Shape) -> float:
    """Mean tokens per worker of a step: what the experts of one layer took, over top-k."""
    return extra[FIGURES : FIGURES + shape.experts].sum().item() / shape.top_k


class Trainer:
    """The training loop of one worker and its bookkeeping."""

    def __init__(self, args: argparse.Namespace, stream: Stream, rank: int) -> None:
        self.args, self.rank = args, rank
        self.tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
        self.stream = stream
        counts = torch.bincount(torch.from_numpy(stream.ids.astype(np.int64)), minlength=Shape().vocab)
        self.rare = counts < RARE * len(stream.ids)
        torch.manual_seed(args.seed)  # the same first weights in every worker
        self.model = DemoModel(Shape())
        self.optimizer = make_optimizer(self.model, args.decay)
        self.steps, self.tokens, self.spent = 0, 0, 0.0
        self.state_file: Path = args.out.with_name(args.out.name + ".state.pt")
        if args.resume and self.state_file.exists():
            self._load()
        self.rng = random.Random(f"{args.seed}-{rank}-{self.steps}")
        # Extra figures: time spent, losses, and every expert's load.
        self.gradients = SharedGradients(
            self.model, FIGURES + self.model.shape.layers * self.model.shape.experts
        )

    def _load(self) -> None:
        state = torch.load(self.state_file, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps, self.tokens, self.spent = state["steps"], state["tokens"], state["spent"]

    def save(self) -> None:
        """Checkpoint folder, and the state to resume from."""
        if self.rank > 0:
            return
        save_checkpoint(self.model, self.tokenizer, self.args.out)
        state = {
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
            "steps": self.steps, "tokens": self.tokens, "spent": self.spent,
        }  # fmt: skip
        torch.save(state, self.state_file)
        record = {"steps": self.steps, "tokens": self.tokens, "minutes": round(self.spent / 60, 1)}
        (self.args.out.with_name(self.args.out.name + ".run.json")).write_text(json.dumps(record) + "\n")

    def step(self, rate: float, clock: float) -> Tensor:
        """One update; returns the worker mean of clock, loss, balance loss and loads."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("scale", 1.0)
        self.gradients.buffer.zero_()
        inputs, targets = batch(self.stream, self.rng)
        logits, balance, loads = self.model(inputs)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        again = repeated(inputs, targets, self.rare).flatten()
        weights = 1.0 + (REPEATED_WEIGHT - 1.0) * again
        ((losses * weights).sum() / weights.sum() + self.args.balance * balance).backward()
        known = losses[again].mean().item() if again.any() else losses.mean().item()
        head = [clock, losses.mean().item(), balance.item(), known]
        figures = torch.cat([torch.tensor(head), loads.flatten().float()])
        self.gradients.extra.copy_(figures)
        self.gradients.average(self.args.workers)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.steps += 1
        self.tokens += round(figures_tokens(self.gradients.extra, self.model.shape) * self.args.workers)
        return self.gradients.extra.clone()

    def run(self) -> None:
        """Train until the time budget is used up; the workers agree on the mean clock."""
        budget = self.args.minutes * 60
        if self.rank == 0:
            total, active = parameter_counts(self.model.shape)
            size = len(self.stream.ids)
            print(f"{total:,} parameters, {active:,} active; {size:,} tokens in the corpus", flush=True)
        began, before = time.monotonic(), self.spent
        saved = shown = began
        average: float | None = None
        known: float | None = None
        shown_tokens = self.tokens
        while self.spent < budget:
            rate = learning_rate(self.args.lr, self.spent / budget)
            figures = self.step(rate, before + time.monotonic() - began)
            self.spent, loss, balance = figures[:3].tolist()
            average = loss if average is None else 0.98 * average + 0.02 * loss
            known = figures[3].item() if known is None else 0.98 * known + 0.02 * figures[3].item()
            now = time.monotonic()
            if self.rank == 0 and now - shown > 20:
                speed = (self.tokens - shown_tokens) / (now - shown)
                loads = figures[FIGURES:].view(self.model.shape.layers, -1)
                least = (loads / loads.sum(dim=1, keepdim=True)).min().item()
                print(
                    f"{self.spent / 60:5.1f} min  step {self.steps}  {self.tokens / 1e6:.2f} M tokens"
                    f"  loss {average:.3f}  repeated {known:.3f}  balance {balance:.2f}"
                    f"  least used {least:.3f}  lr {rate:.1e}  {speed:.0f} tokens/s",
                    flush=True,
                )
                shown, shown_tokens = now, self.tokens
            if now - saved > self.args.save_every * 60:
                self.save()
                saved = now
        self.save()
        if self.rank == 0:
            print("finished", flush=True)


def work(rank: int, args: argparse.Namespace, stream: Stream) -> None:
    """One training process."""
    torch.set_num_threads(1)
    if args.workers > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(args.port))
        dist.init_process_group("gloo", rank=rank, world_size=args.workers)
    Trainer(args, stream, rank).run()
    if args.workers > 1:
        dist.destroy_process_group()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True, help="train.jsonl of build_corpus.py")
    parser.add_argument(
        "--tokenizer", type=Path, help="folder with tokenizer.json (default: the output folder)"
    )
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--minutes", type=float, default=65.0, help="wall-clock budget")
    parser.add_argument("--save-every", type=float, default=5.0, help="minutes between checkpoints")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--decay", type=float, default=0.1)
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the load-balancing loss")
    parser.add_argument("--workers", type=int, default=2, help="training processes, one per core")
    parser.add_argument("--port", type=int, default=29511, help="local port on which the workers meet")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    args.tokenizer = args.tokenizer or args.out
    stream = encode(args.corpus, Tokenizer.from_file(str(args.tokenizer / "tokenizer.json")))
    if args.workers == 1:
        work(0, args, stream)
    else:
        mp.spawn(work, args=(args, stream), nprocs=args.workers)


if __name__ == "__main__":
    main()
