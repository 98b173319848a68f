"""Traces of models that nobody has: of any number of layers and experts, written by numpy alone.

Owns: the arrays. Refuses: nothing; texts and labels may hold whatever breaks a page.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


def write(
    path: Path,
    n_layers: int,
    n_experts: int,
    n_used: int,
    tokens: int = 2000,
    texts: int = 20,
    labels: Sequence[str] = ("code", "prose"),
    name: str = "made.colibri",
) -> Path:
    """Every layer has its own taste; layer 1 sends all to expert 2; expert 0 of the last layer is dead; texts
    of each label prefer other experts in deeper layers."""
    rng = np.random.default_rng(0)
    per = tokens // texts
    about = np.arange(texts) % max(1, len(labels))
    of_row = np.repeat(about, per)
    experts = []
    for layer in range(n_layers):
        tastes = rng.normal(0, 0.4 * layer / n_layers, (max(1, len(labels)), n_experts))[of_row]
        scores = tastes + rng.normal(0, 0.3, n_experts) + rng.gumbel(size=(len(of_row), n_experts))
        if layer == 1:
            scores[:, 2] = 99
        if layer == n_layers - 1:
            scores[:, 0] = -99
        experts.append(np.argsort(-scores, axis=1)[:, :n_used].reshape(texts, per, n_used))
    shape = (texts * n_layers * per, n_used)
    chosen = np.stack(experts, 1).reshape(shape)
    weights = -np.sort(-rng.dirichlet(np.ones(n_used), len(chosen)), axis=1)
    visits = sum(len(np.unique(one)) for one in chosen.reshape(texts * n_layers, -1))
    arrays: dict[str, Any] = {
        "expert_bytes": np.full((n_layers, n_experts), 4096, "<i8"),
        "sequence_labels": (about if labels else np.full(texts, -1)).astype("<i4"),
        "sequence_prompts": np.full(texts, per, "<i4"),
        "chunks": np.tile(np.array([per, 0], "<i4"), (texts, 1)),
        "ids": rng.integers(0, 300, texts * per).astype("<i4"),
        "positions": np.tile(np.arange(per), texts).astype("<i4"),
        "sequences": np.repeat(np.arange(texts), per).astype("<i4"),
        "experts": chosen.astype("u1" if n_experts <= 256 else "<u2"),
        "weights": weights.astype("<f2"),
        "visit_ns": rng.integers(1000, 90_000, visits).astype("<u4"),
        "visit_read": rng.integers(0, 2, visits).astype("u1"),
    }
    header = {
        "format": "colibri-trace",
        "version": 1,
        "model": {"name": name, "sha256": "", "bytes": 0},
        "n_layers": n_layers,
        "n_encoder_layers": 0,
        "n_experts": [n_experts] * n_layers,
        "n_experts_used": n_used,
        "labels": list(labels),
        "logits": False,
        "visits": True,
    }
    np.savez(path.with_suffix(".npz"), **arrays)
    path.with_suffix(".npz").replace(path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("header.json", json.dumps(header))
    return path
