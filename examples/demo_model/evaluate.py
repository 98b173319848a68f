"""Measures a checkpoint: loss per domain, expert shares, samples, and agreement.

Perplexity is per token, bits per byte per byte of text (special tokens counted as
their text).  ``--compare`` also loads the checkpoint with Transformers, checks that no
weight is missing and compares its logits with this folder's own model.

    python evaluate.py --model CHECKPOINT --heldout heldout_full.jsonl --samples --compare
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from model import DemoModel, Layer, Shape, hf_tensors, parameter_counts
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

Report = dict[str, Any]

SAMPLE_PROMPTS = [
    "Once upon a time",
    "Once upon a time, there was a little dragon named Pip.",
    "<|user|>\nTell me a story about a cat.<|end|>\n<|assistant|>\n",
    "<|user|>\nHello!<|end|>\n<|assistant|>\n",
    "<|user|>\nWhat is 3 plus 4?<|end|>\n<|assistant|>\n",
    "<|user|>\nWhat color is the sky?<|end|>\n<|assistant|>\n",
    "Tom has 3 apples. He finds 2 more. Now he has",
    "In the beginning",
    "def add(a, b):\n",
    "A rabbit is",
]


def load(folder: Path) -> DemoModel:
    """The training model, filled from a checkpoint folder."""
    config = json.loads((folder / "config.json").read_text())
    shape = Shape(
        vocab=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        experts=config["num_experts"],
        top_k=config["num_experts_per_tok"],
        expert_width=config["moe_intermediate_size"],
        max_positions=config["max_position_embeddings"],
        rope_theta=config["rope_theta"],
        norm_eps=config["rms_norm_eps"],
    )
    model = DemoModel(shape).eval()
    tensors = load_file(folder / "model.safetensors")
    fill(model, tensors)
    return model


def fill(model: DemoModel, tensors: dict[str, Tensor]) -> None:
    """Copy checkpoint tensors into the fused parameters."""
    if set(tensors) != set(hf_tensors(model)):
        raise ValueError("the checkpoint does not hold the tensors of this model")
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    with torch.no_grad():
        model.embedding.weight.copy_(tensors["model.embed_tokens.weight"])
        model.norm.weight.copy_(tensors["model.norm.weight"])
        for number, layer in enumerate(model.layers):
            assert isinstance(layer, Layer)
            fill_layer(layer, model.shape.experts, f"model.layers.{number}.", tensors)


def fill_layer(layer: Layer, experts: int, prefix: str, tensors: dict[str, Tensor]) -> None:
    """The same for one layer."""

    def get(name: str) -> Tensor:
        return tensors[f"{prefix}{name}.weight"]

    layer.norm1.weight.copy_(get("input_layernorm"))
    layer.norm2.weight.copy_(get("post_attention_layernorm"))
    layer.attention.qkv.weight.copy_(torch.cat([get(f"self_attn.{part}_proj") for part in "qkv"]))
    layer.attention.out.weight.copy_(get("self_attn.o_proj"))
    layer.attention.q_norm.weight.copy_(get("self_attn.q_norm"))
    layer.attention.k_norm.weight.copy_(get("self_attn.k_norm"))
    layer.experts.router.weight.copy_(get("mlp.gate"))
    for expert in range(experts):
        name = f"mlp.experts.{expert}."
        layer.experts.gate_up[expert] = torch.cat([get(name + "gate_proj"), get(name + "up_proj")])
        layer.experts.down[expert] = get(name + "down_proj")


@dataclass
class Tally:
    """Sums over the documents of one domain."""

    loss: float = 0.0
    tokens: int = 0
    size: int = 0

    def figures(self) -> Report:
        """Loss, perplexity and bits per byte."""
        mean = self.loss / self.tokens
        bits = self.loss / math.log(2) / self.size
        return {
            "tokens": self.tokens,
            "bytes": self.size,
            "loss": round(mean, 4),
            "perplexity": round(math.exp(mean), 3),
            "bits_per_byte": round(bits, 4),
        }


@torch.inference_mode()
def score(model: DemoModel, tokenizer: Tokenizer, heldout: Path) -> Report:
    """Loss per domain and the expert loads, over every held-out document.

    A document is scored after one end-of-text token and including its own, as in training.
    """
    end = tokenizer.token_to_id("<|endoftext|>")
    tallies: dict[str, Tally] = defaultdict(Tally)
    loads: dict[str, Tensor] = {}
    with heldout.open(encoding="utf-8") as handle:
        documents = [json.loads(line) for line in handle]
    for number, document in enumerate(documents):
        ids = [end, *tokenizer.encode(document["text"]).ids, end][: model.shape.max_positions]
        tokens = torch.tensor(ids)
        logits, _, load = model(tokens[None, :-1])
        tally = tallies[document["domain"]]
        tally.loss += F.cross_entropy(logits[0], tokens[1:], reduction="sum").item()
        tally.tokens += len(ids) - 1
        tally.size += len(document["text"].encode())
        loads[document["domain"]] = loads.get(document["domain"], torch.zeros_like(load)) + load
        if number % 200 == 0:
            print(f"  scored {number}/{len(documents)} documents", flush=True)
    everything = Tally(
        sum(t.loss for t in tallies.values()),
        sum(t.tokens for t in tallies.values()),
        sum(t.size for t in tallies.values()),
    )
    total = torch.stack(list(loads.values())).sum(dim=0)
    return {
        "overall": everything.figures(),
        "domains": {name: tallies[name].figures() for name in sorted(tallies)},
        "experts": [layer_shares(row) for row in total],
        "experts_by_domain": {name: [shares(row) for row in loads[name]] for name in sorted(loads)},
    }


def shares(counts: Tensor) -> list[float]:
    """Share of the token assignments that each expert took."""
    return [round(value, 4) for value in (counts.float() / counts.sum()).tolist()]


def layer_shares(counts: Tensor) -> Report:
    """Smallest, largest and effective number (exponential of the entropy)."""
    share = counts.float() / counts.sum()
    entropy = -(share * share.clamp_min(1e-12).log()).sum().item()
    return {
        "min": round(share.min().item(), 4),
        "max": round(share.max().item(), 4),
        "effective": round(math.exp(entropy), 2),
        "shares": shares(counts),
    }


@torch.inference_mode()
def sample(
    model: DemoModel,
    ids: list[int],
    stops: set[int],
    generator: torch.Generator,
    temperature: float,
    top_p: float,
    limit: int,
) -> list[int]:
    """Continue ``ids`` by nucleus sampling; temperature 0 is greedy."""
    start = len(ids)
    while len(ids) - start < limit and len(ids) < model.shape.max_positions:
        logits = model(torch.tensor([ids]))[0][0, -1]
        if temperature == 0:
            token = int(logits.argmax())
        else:
            probs, order = (logits / temperature).softmax(dim=-1).sort(descending=True)
            keep = probs.cumsum(dim=-1) - probs < top_p
            token = int(order[torch.multinomial(probs * keep, 1, generator=generator)])
        if token in stops:
            break
        ids = [*ids, token]
    return ids[start:]


def show_samples(model: DemoModel, tokenizer: Tokenizer, args: argparse.Namespace) -> list[Report]:
    """Sample every prompt with the given seeds and print the results."""
    stops = {tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<|end|>")}
    results = []
    for prompt in SAMPLE_PROMPTS:
        for seed in args.seeds:
            generator = torch.Generator().manual_seed(seed)
            ids = tokenizer.encode(prompt).ids
            new = sample(model, ids, stops, generator, args.temperature, args.top_p, args.length)
            text = tokenizer.decode(new)
            results.append({"prompt": prompt, "seed": seed, "tokens": len(new), "text": text})
            print(f"--- {prompt!r} seed {seed}, {len(new)} tokens\n{text}\n", flush=True)
    return results


@torch.inference_mode()
def arithmetic_accuracy(model: DemoModel, tokenizer: Tokenizer) -> float:
    """Share of the sums 0..10 plus 0..10 that greedy decoding gets right in a chat."""
    stops = {tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<|end|>")}
    right = 0
    for a in range(11):
        for b in range(11):
            prompt = f"<|user|>\nWhat is {a} plus {b}?<|end|>\n<|assistant|>\n"
            new = sample(model, tokenizer.encode(prompt).ids, stops, torch.Generator(), 0.0, 1.0, 12)
            right += tokenizer.decode(new).strip() == f"{a} plus {b} is {a + b}."
    return right / 121


@torch.inference_mode()
def compare(model: DemoModel, tokenizer: Tokenizer, folder: Path) -> Report:
    """Load with Transformers; report missing weights and the largest logit difference."""
    from transformers import Qwen3MoeForCausalLM

    loaded = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    reference, info = loaded
    reference.eval()
    ids = torch.tensor([tokenizer.encode("".join(SAMPLE_PROMPTS) * 3).ids[:600]])
    ours, theirs = model(ids)[0], reference(ids).logits
    problems = {key: sorted(map(str, value)) for key, value in info.items() if value}
    return {"loading_problems": problems, "largest_logit_difference": (ours - theirs).abs().max().item()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--heldout", type=Path, help="JSON lines with domain and text")
    parser.add_argument("--samples", action="store_true")
    parser.add_argument("--sums", action="store_true", help="greedy accuracy on small sums")
    parser.add_argument("--compare", action="store_true", help="check against Transformers")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--top-p", type=float, default=0.9)
    parser.add_argument("--length", type=int, default=300, help="most tokens per sample")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--report", type=Path, help="write the figures here as JSON")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = load(args.model)
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    total, active = parameter_counts(model.shape)
    report: Report = {"parameters": total, "active_parameters": active}
    if args.compare:
        report["compare"] = compare(model, tokenizer, args.model)
    if args.heldout:
        report |= score(model, tokenizer, args.heldout)
    if args.sums:
        report["sums_right"] = arithmetic_accuracy(model, tokenizer)
    print(json.dumps({key: value for key, value in report.items() if key != "experts_by_domain"}, indent=1))
    if args.samples:
        report["samples"] = show_samples(model, tokenizer, args)
    if args.report:
        args.report.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
