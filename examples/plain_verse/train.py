"""Trains the small Switch Transformer for a fixed wall-clock time and saves a checkpoint folder.

The model is Transformers' own class, so the folder is what save_pretrained writes.  The learning rate
follows the clock (short warm-up, then linear to zero at the time budget), so the run ends well annealed
however busy the machine is.

    nohup nice -n 5 python train.py --pairs train.jsonl --out CHECKPOINT --minutes 55 &
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersTop1Router

BATCH_TOKENS = 1024  # of a side, padding included: small steps, for the run is short of them
LONGEST = 128  # ids of a text; longer pairs are left out
PAD = 0
EMBEDDING_RATE = 4.0  # the embedding is some ten times as large as the other weights, and so are its steps
LOOK, SAY = 1.0, 8.0  # how sharply cross attention looks at first, and how loudly it says what it found
IGNORED = -100

Pairs = list[tuple[list[int], list[int]]]


def make_config(vocab: int) -> SwitchTransformersConfig:
    """Two layers a stack, the second of which has experts; every width is a multiple of 32 for q8."""
    return SwitchTransformersConfig(
        vocab_size=vocab,
        d_model=128,
        d_kv=32,
        num_heads=4,
        d_ff=256,
        num_layers=2,
        num_decoder_layers=2,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        num_experts=8,
        expert_capacity=64,
        router_jitter_noise=0.0,
        dropout_rate=0.0,
        relative_attention_num_buckets=32,
        relative_attention_max_distance=64,
        pad_token_id=PAD,
        eos_token_id=1,
        decoder_start_token_id=PAD,
    )


def make_model(vocab: int) -> SwitchTransformersForConditionalGeneration:
    """First weights that let a short run learn to look across.

    All that is added to the embedding begins small, but for one head of each stack.  That of the encoder
    looks one place back and keeps what stood there in a subspace of its own; the head of cross attention
    looks for the place behind the token that was written last, and makes what it finds there likelier.  So
    the model begins as one that copies on, and training teaches it to do otherwise where plain verse does.
    """
    model = SwitchTransformersForConditionalGeneration(make_config(vocab))
    model.generation_config.repetition_penalty = 1.2  # greedy, a small model goes in circles
    width, head = model.config.d_model, slice(0, model.config.d_kv)
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in named.items():
            if name.endswith((".o.weight", ".wo.weight")):
                weight.mul_(0.1)
        named["decoder.final_layer_norm.weight"].fill_(0.6)  # the tied output would say the last token again
        back, last = "encoder.block.0.layer.0.SelfAttention.", "decoder.block.1.layer.1.EncDecAttention."
        named[back + "q.weight"][head] *= 0.3
        named[back + "relative_attention_bias.weight"][1, 0] = 6.0  # bucket 1: one place back
        read = named[back + "v.weight"][head].clone()  # what of a token is kept
        kept = torch.randn(width, model.config.d_kv) * width**-0.5  # where
        named[back + "o.weight"][:, head] = kept
        named[last + "q.weight"][head] = LOOK * read
        named[last + "k.weight"][head] = LOOK * kept.T
        named[last + "o.weight"][:, head] = SAY * named[last + "v.weight"][head].T
    return model


def read_pairs(path: Path, tokenizer: Tokenizer) -> Pairs:
    """Ids of sources and targets, each with </s> behind it."""
    with path.open(encoding="utf-8") as handle:
        lines = [json.loads(line) for line in handle]
    sides = [
        [e.ids for e in tokenizer.encode_batch([x[side] for x in lines])] for side in ("source", "target")
    ]
    return [pair for pair in zip(*sides, strict=True) if max(map(len, pair)) <= LONGEST]


def padded(rows: list[list[int]], fill: int) -> Tensor:
    """Rows of one length."""
    longest = max(map(len, rows))
    return torch.tensor([row + [fill] * (longest - len(row)) for row in rows])


def batches(pairs: Pairs, rng: random.Random) -> list[Pairs]:
    """All pairs once, those of like lengths together."""
    order = sorted(range(len(pairs)), key=lambda i: max(map(len, pairs[i])) + rng.random() * 2)
    made: list[Pairs] = []
    row: Pairs = []
    longest = 0
    for i in order:
        longest = max(longest, *map(len, pairs[i]))
        if row and longest * (len(row) + 1) > BATCH_TOKENS:
            made.append(row)
            row, longest = [], max(map(len, pairs[i]))
        row.append(pairs[i])
    rng.shuffle(made)
    return made


class Routers:
    """What the routers said in a step: the balance loss, and how many tokens each expert took."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.logits: dict[str, Tensor] = {}
        for name, module in model.named_modules():
            if isinstance(module, SwitchTransformersTop1Router):
                module.register_forward_hook(self._keep(name))

    def _keep(self, name: str):  # type: ignore[no-untyped-def]
        def hook(module: torch.nn.Module, inputs: object, output: tuple[Tensor, Tensor, Tensor]) -> None:
            self.logits[name] = output[2]

        return hook

    def losses(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor, list[float]]:
        """Balance loss of the paper (1 when even), z-loss, largest share of an expert by layer; without
        padding."""
        balance, z, most = [], [], []
        for name, logits in self.logits.items():
            real = logits[source if name.startswith("encoder") else target]
            probs = real.softmax(dim=-1)
            share = F.one_hot(probs.argmax(dim=-1), probs.shape[-1]).float().mean(dim=0)
            balance.append(probs.shape[-1] * (share * probs.mean(dim=0)).sum())
            z.append(real.logsumexp(dim=-1).square().mean())
            most.append(share.max().item())
        return torch.stack(balance).mean(), torch.stack(z).mean(), most


def rate(peak: float, progress: float) -> float:
    """Warm-up over the first 2 % of the time, then linear to zero."""
    warm = 0.02
    return peak * ((progress + 0.001) / warm if progress < warm else max(0.0, (1 - progress) / (1 - warm)))


def make_optimizer(model: SwitchTransformersForConditionalGeneration, decay: float) -> torch.optim.AdamW:
    """AdamW; norms, biases by distance and the embedding are not decayed."""
    embedding = model.shared.weight
    small = [p for name, p in model.named_parameters() if p.dim() == 1 or "relative" in name]
    kept = {id(p) for p in small} | {id(embedding)}
    groups = [
        {"params": [p for p in model.parameters() if id(p) not in kept], "weight_decay": decay},
        {"params": [embedding], "weight_decay": 0.0, "scale": EMBEDDING_RATE},
        {"params": small, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), eps=1e-8, fused=True)


class Trainer:
    """The loop and its bookkeeping."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
        self.pairs = read_pairs(args.pairs, tokenizer)
        torch.manual_seed(args.seed)
        self.model = make_model(tokenizer.get_vocab_size())
        self.model.train()
        self.routers = Routers(self.model)
        self.optimizer = make_optimizer(self.model, args.decay)
        self.steps, self.tokens, self.spent = 0, 0, 0.0
        self.state_file: Path = args.out.with_name(args.out.name + ".state.pt")
        if args.resume and self.state_file.exists():
            state = torch.load(self.state_file, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.steps, self.tokens, self.spent = state["steps"], state["tokens"], state["spent"]
        self.rng = random.Random(f"{args.seed}-{self.steps}")

    def save(self) -> None:
        """The checkpoint folder, the state to resume from, and the run's figures."""
        self.model.save_pretrained(self.args.out)
        state = {
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
            "steps": self.steps, "tokens": self.tokens, "spent": self.spent,
        }  # fmt: skip
        torch.save(state, self.state_file)
        record = {"steps": self.steps, "target_tokens": self.tokens, "minutes": round(self.spent / 60, 1)}
        (self.args.out.with_name(self.args.out.name + ".run.json")).write_text(json.dumps(record) + "\n")

    def step(self, batch: Pairs, lr: float) -> tuple[float, float, float]:
        """One update; loss, balance loss, largest share of an expert."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("scale", 1.0)
        source = padded([pair[0] for pair in batch], PAD)
        labels = padded([pair[1] for pair in batch], IGNORED)
        given = F.pad(labels[:, :-1].clamp(min=0), (1, 0), value=PAD)
        mask = source != PAD
        out = self.model(
            input_ids=source, attention_mask=mask, decoder_input_ids=given, use_cache=False
        ).logits
        loss = F.cross_entropy(out.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        balance, z, most = self.routers.losses(mask, labels != IGNORED)
        (loss + self.args.balance * balance + 0.001 * z).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        self.tokens += int((labels != IGNORED).sum())
        return loss.item(), balance.item(), max(most)

    def run(self) -> None:
        """Train until the time budget is used up."""
        budget, began, before = self.args.minutes * 60, time.monotonic(), self.spent
        saved = shown = began
        shown_tokens, average = self.tokens, 0.0
        size = sum(p.numel() for p in self.model.parameters())
        print(f"{size:,} parameters; {len(self.pairs):,} pairs", flush=True)
        while True:
            for batch in batches(self.pairs, self.rng):
                lr = rate(self.args.lr, self.spent / budget)
                loss, balance, most = self.step(batch, lr)
                average = 0.98 * average + 0.02 * loss if average else loss
                now = time.monotonic()
                self.spent = before + now - began
                if now - shown > 20:
                    speed = (self.tokens - shown_tokens) / (now - shown)
                    print(
                        f"{self.spent / 60:5.1f} min  step {self.steps}  {self.tokens / 1e6:.2f} M tokens"
                        f"  loss {average:.3f}  balance {balance:.2f}  most used {most:.2f}"
                        f"  lr {lr:.1e}  {speed:.0f} tokens/s",
                        flush=True,
                    )
                    shown, shown_tokens = now, self.tokens
                if now - saved > self.args.save_every * 60:
                    self.save()
                    saved = now
                if self.spent >= budget:
                    self.save()
                    print("finished", flush=True)
                    return


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=Path, required=True, help="train.jsonl of build_pairs.py")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder with tokenizer.json")
    parser.add_argument("--minutes", type=float, default=55.0, help="wall-clock budget")
    parser.add_argument("--save-every", type=float, default=5.0, help="minutes between checkpoints")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--decay", type=float, default=0.01)
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the load-balancing loss")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    Trainer(args).run()


if __name__ == "__main__":
    main()
