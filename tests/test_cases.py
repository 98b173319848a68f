"""Public reports about routers, experts and extra layers, with their kinds: cases 5, 6 and 7.

Owns: the smallest models that show each report, beside the oracle (tests/live/test_live_cases.py: beside
      Transformers). Refuses: rules in general (test_router.py, test_parity.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import checkpoints
import oracle
from colibri.convert import ConversionReport, convert
from colibri.format import read_container, read_entry
from fixtures.native import engine
from test_convert import tensors_only

IDS = [int(i) for i in np.random.default_rng(5).integers(3, 295, 60)]
BOUND = 1e-4


def logits_of(report: ConversionReport) -> Any:
    with engine(report.path) as run:
        return run.feed(IDS)


# ------------------------------------------------------------------ case 5: a bias for the choice alone


def biased(path: Path, family: str, **options: Any) -> Path:
    """Values near +-3, which bf16 cannot hold, in a checkpoint that is bf16 otherwise."""
    directory = checkpoints.FAMILIES[family](path, scale=2.5, n_experts_used=3, **options)
    signs = np.array([1, -1, -1, 1, -1, 1, -1, -1], np.float32)
    changes = {}
    for layer in range(2):
        noise = np.random.default_rng(layer).uniform(-1e-3, 1e-3, 8).astype(np.float32)
        changes[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"] = 3 * np.roll(signs, layer) + noise
    checkpoints.edit_tensors(directory, changes)
    return directory


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "dots1"])
def test_case_5_the_bias_chooses_and_does_not_weigh(
    family: str, groups: tuple[int, int], norm: bool, tmp_path: Path
) -> None:
    directory = biased(tmp_path / "hf", family, groups=groups, norm_topk_prob=norm)
    report = convert(directory, tmp_path / "m.colibri", "f32")
    expected, routings = oracle.forward(oracle.load(directory), IDS)
    assert np.abs(logits_of(report) - expected).max() < BOUND
    with engine(report.path) as run:
        rows = run.routing(IDS)
    tensors = checkpoints.read_tensors(directory)
    for routing in routings:
        found = rows[routing.layer]
        assert np.array_equal(found.experts, routing.experts)
        scores = 1 / (1 + np.exp(-found.logits.astype(np.float64)))
        weights = np.take_along_axis(scores, found.experts, axis=1)
        weights *= 2.5 / weights.sum(axis=1, keepdims=True) if norm else 2.5
        assert np.abs(found.weights - weights).max() < 1e-5 and (found.weights > 0).all()
        without = np.argsort(-scores, axis=1)[:, :3]
        assert (np.sort(without) != np.sort(found.experts)).any(axis=1).mean() > 0.3  # the bias matters
        name = f"model.layers.{routing.layer}.mlp.gate.e_score_correction_bias"
        for type in ("f32", "q4"):  # kept in f32, whatever the type of the weights
            path = convert(directory, tmp_path / f"{type}.colibri", type).path
            kept = read_entry(read_container(path), f"layers.{routing.layer}.router_bias")
            assert np.array_equal(np.frombuffer(kept, "<f4"), tensors[name])


# ------------------------------------------------------------------ case 6: experts of two architectures


def clamped(path: Path, **options: Any) -> Path:
    """GPT-OSS whose gate and up go far beyond the clamp of 7, in both directions."""
    directory = checkpoints.gpt_oss(path, config_extra={"swiglu_limit": 7.0}, **options)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, value in tensors.items():
        if name.endswith("gate_up_proj"):
            tensors[name] = (value.astype(np.float32) * 12).astype(value.dtype)
        elif name.endswith("gate_up_proj_scales"):
            tensors[name] = value + 3
        elif name.endswith(("down_proj", "down_proj_bias")):  # logits of ordinary size
            tensors[name] = (value.astype(np.float32) / 16).astype(value.dtype)
        elif name.endswith("down_proj_scales"):
            tensors[name] = value - 4
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("kind", ["f32", "bf16", "mxfp4"])
def test_case_6_clamp_offset_and_layout_beside_an_ordinary_model(kind: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"mxfp4": True} if kind == "mxfp4" else {"storage": kind}
    stored: dict[str, Any] = {"storage": "bf16" if kind == "mxfp4" else kind}
    ours = clamped(tmp_path / "oss", **options)
    shape: dict[str, Any] = {"n_ff_expert": 96, "n_experts": 4}
    apart = checkpoints.qwen3_moe(tmp_path / "apart", **shape, **stored)
    plain = checkpoints.qwen3_moe(tmp_path / "qwen", experts="stacked", **shape, **stored)
    shapes = [
        next(v.shape for n, v in load_file(path / "model.safetensors").items() if "gate_up_proj" in n)
        for path in (ours, plain)
    ]
    assert kind == "mxfp4" or shapes == [(4, 64, 192), (4, 192, 64)]
    for directory in (ours, plain, ours):  # no choice is left behind for the next
        model = oracle.load(apart if directory == plain else directory)
        expected = oracle.forward(model, IDS)[0]
        report = convert(directory, tmp_path / "m.colibri", "f32", experts="f32")
        assert np.abs(logits_of(report) - expected).max() < BOUND
        if directory == ours:
            for clamp in (6.9, 1e9):  # it is reached, and it is 7
                other = model._replace(config=dataclasses.replace(model.config, clamp=clamp))
                assert np.abs(oracle.forward(other, IDS)[0] - expected).max() > 100 * BOUND
    fields = read_container(convert(ours, tmp_path / "m.colibri").path).config
    assert (fields["ffn_limit"], fields["ffn_up_offset"]) == (7, 1)
    fields = read_container(convert(plain, tmp_path / "m.colibri").path).config
    assert (fields["ffn_limit"], fields["ffn_up_offset"], fields["ffn_alpha"]) == (0, 0, 1)


# ------------------------------------------------------------------ case 7: layers that predict more tokens


def extra_layer(source: Path, at: str = "model.layers.2.") -> dict[str, Any]:
    """All that a layer has, and what joins it to the model, as the releases name it."""
    tensors = load_file(source / "model.safetensors")
    last = "model.layers.1."
    layer = {at + name.removeprefix(last): value for name, value in tensors.items() if name.startswith(last)}
    more = {"eh_proj.weight": (64, 128), "enorm.weight": (64,), "hnorm.weight": (64,)}
    more |= {"shared_head.norm.weight": (64,), "shared_head.head.weight": (300, 64)}
    more |= {"embed_tokens.weight": (300, 64)}
    return layer | {at + name: np.full(shape, 0.5, np.float32) for name, shape in more.items()}


def absent(source: Path) -> list[str]:
    return []


def partly_absent(source: Path) -> list[str]:
    extra = extra_layer(source)
    some = {name: extra[name] for name in sorted(extra)[::3]}
    checkpoints.edit_tensors(source, some)
    return list(some)


def full(source: Path) -> list[str]:
    checkpoints.edit_tensors(source, extra := extra_layer(source))
    return list(extra)


def beside(source: Path, names: str, listed: bool) -> list[str]:
    """A file of its own, which the index names or does not."""
    extra = extra_layer(source, names)
    save_file(extra, source / "mtp.safetensors", metadata={"format": "pt"})
    weight_map = dict.fromkeys(load_file(source / "model.safetensors"), "model.safetensors")
    weight_map |= dict.fromkeys(extra, "mtp.safetensors") if listed else {}
    checkpoints.edit_json(source / "model.safetensors.index.json", {"weight_map": weight_map})
    return list(extra) if listed else []


KINDS: dict[str, Callable[[Path], list[str]]] = {
    "absent": absent,
    "partly absent": partly_absent,
    "a full layer": full,
    "in a side file": lambda source: beside(source, "mtp.layers.0.", True),
    "in a side file, usual names": lambda source: beside(source, "model.layers.2.", True),
    "in a side file that nothing names": lambda source: beside(source, "mtp.layers.0.", False),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_case_7_an_announced_extra_layer_is_neither_run_nor_missed(
    family: str, kind: str, tmp_path: Path
) -> None:
    make = checkpoints.FAMILIES[family]
    plain = convert(make(tmp_path / "plain"), tmp_path / "plain.colibri", "f32")
    source = make(tmp_path / "hf", config_extra={"num_nextn_predict_layers": 1})
    extra = KINDS[kind](source)
    report = convert(source, tmp_path / "m.colibri", "f32")
    assert tensors_only(report.path) == tensors_only(plain.path)
    assert read_container(report.path).config["n_layers"] == 2
    assert sorted(report.ignored_tensors) == sorted(extra)
    told = [note for note in report.notes if "further on" in note]
    assert len(told) == bool(extra)
    if kind == "in a side file that nothing names":
        assert any("mtp.safetensors" in note for note in report.notes)
    assert np.array_equal(logits_of(report), logits_of(plain))
