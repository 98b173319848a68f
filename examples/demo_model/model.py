"""A compact training model with the mathematics of the ``qwen3_moe`` architecture.

Grouped-query attention with a norm on every query and key head, rotary positions,
and a softmax router whose top experts are renormalised.  Tokens are sorted by expert,
so each expert is three matrix products whatever the batch looks like.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; every width is a multiple of 32 for group quantisation."""

    vocab: int = 2048
    hidden: int = 192
    layers: int = 5
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    experts: int = 8
    top_k: int = 2
    expert_width: int = 192
    max_positions: int = 1024
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6

    def hf_config(self, eos: int, pad: int) -> dict[str, Any]:
        """The config.json of the same model."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "decoder_sparse_step": 1,
            "dtype": "float32",
            "eos_token_id": eos,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.expert_width * self.top_k,
            "max_position_embeddings": self.max_positions,
            "mlp_only_layers": [],
            "moe_intermediate_size": self.expert_width,
            "norm_topk_prob": True,
            "num_attention_heads": self.heads,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "output_router_logits": False,
            "pad_token_id": pad,
            "rms_norm_eps": self.norm_eps,
            "rope_scaling": None,
            "rope_theta": self.rope_theta,
            "router_aux_loss_coef": 0.01,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": self.vocab,
        }

    def as_dict(self) -> dict[str, Any]:
        """Plain dictionary for checkpoints."""
        return asdict(self)


class _Permute(torch.autograd.Function):
    """Row permutation whose gradient is the inverse permutation (a plain gather)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse), None, None


class Norm(nn.Module):
    """Root-mean-square norm with a learned scale."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def rotary_tables(shape: Shape) -> tuple[Tensor, Tensor]:
    """Cosines and sines for every position, both halves of a head alike."""
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(shape.max_positions, dtype=torch.float32), shape.rope_theta**-half)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the half-split layout."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        q_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.sizes = [q_width, kv_width, kv_width]
        self.qkv = nn.Linear(shape.hidden, sum(self.sizes), bias=False)
        self.out = nn.Linear(q_width, shape.hidden, bias=False)
        self.q_norm = Norm(shape.head_dim, shape.norm_eps)
        self.k_norm = Norm(shape.head_dim, shape.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        split = self.qkv(x).split(self.sizes, dim=-1)
        q, k, v = (part.view(batch, length, -1, self.shape.head_dim).transpose(1, 2) for part in split)
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        repeat = self.shape.heads // self.shape.kv_heads
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


def _feed_forward(rows: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """One expert on its own tokens."""
    gate, up = F.linear(rows, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


class Experts(nn.Module):
    """Router and expert feed-forward networks of one layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.router = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(shape.experts, 2 * shape.expert_width, shape.hidden))
        self.down = nn.Parameter(torch.empty(shape.experts, shape.hidden, shape.expert_width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Output, load-balancing loss, and how many tokens each expert took."""
        flat = x.reshape(-1, x.shape[-1])
        probs = self.router(flat).softmax(dim=-1)
        weights, chosen = probs.topk(self.shape.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel()))
        counts = torch.bincount(chosen.flatten(), minlength=self.shape.experts)
        copies = flat.unsqueeze(1).expand(-1, self.shape.top_k, -1).reshape(-1, flat.shape[-1])
        grouped = _Permute.apply(copies, order, inverse).split(counts.tolist())
        # unbind, not indexing: its gradient is one stack instead of a zero-filled copy per expert.
        experts = zip(grouped, self.gate_up.unbind(0), self.down.unbind(0), strict=True)
        results = [_feed_forward(rows, gate_up, down) for rows, gate_up, down in experts]
        back = _Permute.apply(torch.cat(results), inverse, order).view(flat.shape[0], self.shape.top_k, -1)
        mixed = (back * weights.unsqueeze(-1)).sum(dim=1)
        share = counts.float() / counts.sum()
        balance = self.shape.experts * (share * probs.mean(dim=0)).sum()
        return mixed.view_as(x), balance, counts


class Layer(nn.Module):
    """Pre-norm attention and experts with residual connections."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1 = Norm(shape.hidden, shape.norm_eps)
        self.attention = Attention(shape)
        self.norm2 = Norm(shape.hidden, shape.norm_eps)
        self.experts = Experts(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x + self.attention(self.norm1(x), cos, sin)
        out, balance, counts = self.experts(self.norm2(x))
        return x + out, balance, counts


class DemoModel(nn.Module):
    """The whole language model; the output matrix is the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.norm_eps)
        cos, sin = rotary_tables(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        """First weights that let a short run learn to look back.

        The embedding is as large as what the layers add to it, so that every layer still sees which token a
        place holds; the last norm makes up for that before the tied output.  Experts start silent.  Each
        head's output undoes its value projection, so that a token that is attended to is also made likelier
        (in the spirit of mimetic initialisation, Trockman and Kolter, arXiv:2305.09828).
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                continue
            deviation = 1.0 if "embedding" in name else parameter.shape[-1] ** -0.5 * 0.8
            if "router" in name:
                deviation = 0.02
            nn.init.normal_(parameter, std=0.0 if name.endswith("down") else deviation)
        nn.init.constant_(self.norm.weight, 0.3 * self.shape.hidden**-0.5)
        group = self.shape.heads // self.shape.kv_heads
        with torch.no_grad():
            for layer in self.layers:
                assert isinstance(layer, Layer)
                value = layer.attention.qkv.weight.split(layer.attention.sizes, dim=0)[2]
                heads = value.view(self.shape.kv_heads, -1, self.shape.hidden).repeat_interleave(group, dim=0)
                layer.attention.out.weight.copy_(0.5 * heads.reshape(-1, self.shape.hidden).T)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, mean balance loss, and tokens per layer and expert."""
        length = ids.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]  # type: ignore[index]
        x = self.embedding(ids)
        losses, loads = [], []
        for layer in self.layers:
            x, balance, counts = layer(x, cos, sin)
            losses.append(balance)
            loads.append(counts)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return logits, torch.stack(losses).mean(), torch.stack(loads)


def hf_tensors(model: DemoModel) -> dict[str, Tensor]:
    """The weights under the names of the classic per-expert checkpoint layout."""
    out = {"model.embed_tokens.weight": model.embedding.weight, "model.norm.weight": model.norm.weight}
    for number, module in enumerate(model.layers):
        assert isinstance(module, Layer)
        prefix = f"model.layers.{number}."
        attention, experts = module.attention, module.experts
        q, k, v = attention.qkv.weight.split(attention.sizes, dim=0)
        out |= {
            prefix + "input_layernorm.weight": module.norm1.weight,
            prefix + "post_attention_layernorm.weight": module.norm2.weight,
            prefix + "self_attn.q_proj.weight": q,
            prefix + "self_attn.k_proj.weight": k,
            prefix + "self_attn.v_proj.weight": v,
            prefix + "self_attn.o_proj.weight": attention.out.weight,
            prefix + "self_attn.q_norm.weight": attention.q_norm.weight,
            prefix + "self_attn.k_norm.weight": attention.k_norm.weight,
            prefix + "mlp.gate.weight": experts.router.weight,
        }
        for expert in range(model.shape.experts):
            gate, up = experts.gate_up[expert].chunk(2, dim=0)
            name = f"{prefix}mlp.experts.{expert}."
            out[name + "gate_proj.weight"] = gate
            out[name + "up_proj.weight"] = up
            out[name + "down_proj.weight"] = experts.down[expert]
    return {name: tensor.detach().contiguous().clone() for name, tensor in out.items()}


def parameter_counts(shape: Shape) -> tuple[int, int]:
    """Total parameters and those that one token uses."""
    attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads) + 2 * shape.head_dim
    expert = 3 * shape.hidden * shape.expert_width
    rest = attention + shape.hidden * shape.experts + 2 * shape.hidden
    outside = shape.vocab * shape.hidden + shape.hidden
    total = outside + shape.layers * (rest + shape.experts * expert)
    return total, outside + shape.layers * (rest + shape.top_k * expert)
