"""The numpy oracle against what Transformers answered (tests/fixtures/), and against plain arithmetic.

Owns: trust in the oracle; needs neither torch nor the engine. Refuses: testing the engine (test_parity.py).
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import checkpoints
import encoder_checkpoints
import oracle
from fixtures import models
from fixtures.variants import LLAMA3, N_GREEDY, VARIANTS

TOLERANCE = 1e-5  # Transformers' own f32 rounding: 5.3e-6 at most was measured


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_routing_equal_transformers(name: str) -> None:
    """Every family and knob: logits, gate logits and weights within 1e-5, the same experts in order."""
    expected, model = models.fixture(name), models.model(name)
    logits, routings = oracle.forward(model, expected["ids"])
    rows = expected["rows"]
    assert np.abs(logits[rows] - expected["logits"]).max() < TOLERANCE
    assert len(routings) == sum(model.config.moe_layers) == len(expected.get("router_logits", ()))
    for i, routing in enumerate(routings):
        assert np.abs(routing.logits[rows] - expected["router_logits"][i]).max() < TOLERANCE
        assert np.array_equal(routing.experts[rows], expected["router_experts"][i])
        assert np.abs(routing.weights[rows] - expected["router_weights"][i]).max() < TOLERANCE


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_tokens_equal_transformers(name: str) -> None:
    """Each of 64 tokens is the argmax after all before it: by induction that is greedy generation."""
    expected = models.fixture(name)
    ids, greedy = expected["ids"], expected["greedy"]
    assert len(greedy) == N_GREEDY
    logits, _ = oracle.forward(models.model(name), np.concatenate([ids, greedy]))
    assert np.array_equal(np.argmax(logits[len(ids) - 1 : -1], axis=-1), greedy)


def test_greedy_helper_equals_the_fixture() -> None:
    expected = models.fixture("mixtral")
    assert oracle.greedy(models.model("mixtral"), list(expected["ids"]), 8) == list(expected["greedy"][:8])


def test_fixtures_have_variants_and_stay_small() -> None:
    files = sorted(models.HERE.glob("*.npz"))
    assert [file.stem for file in files] == sorted([*VARIANTS, *encoder_checkpoints.VARIANTS])
    assert sum(file.stat().st_size for file in files) < 1.5e6


@pytest.mark.parametrize("name", [name for name in VARIANTS if models.has_experts(name)])
def test_experts_and_attention_matter(name: str) -> None:
    """The tiny models are not trivial: without experts, or with tokens swapped, logits change a lot."""
    model, ids = models.model(name), VARIANTS[name].prompt
    logits, _ = oracle.forward(model, ids)
    silent = {k: v * 0 if ".experts." in k else v for k, v in model.weights.items()}
    assert np.abs(oracle.forward(model._replace(weights=silent), ids)[0] - logits).max() > 0.1
    swapped, _ = oracle.forward(model, [*ids[:-3], ids[-2], ids[-3], ids[-1]])
    assert np.abs(swapped[-1] - logits[-1]).max() > 0.01


# ------------------------------------------------------------------ case 4: renormalise or not


def one_moe_layer(name: str) -> tuple[oracle.Checkpoint, oracle.Array]:
    model = models.model(name)
    hidden = model.weights["model.norm.weight"].size
    return model, np.random.default_rng(0).standard_normal((5, hidden))


@pytest.mark.parametrize("name", ["olmoe", "olmoe_norm", "qwen3_moe", "qwen3_moe_plain", "mixtral"])
def test_case_4_weights_come_from_the_softmax_over_all_experts(name: str) -> None:
    model, x = one_moe_layer(name)
    _, routing = oracle.mixture(model, 0, x)
    for row in range(len(x)):  # the rule written out with plain floats
        powers = [math.exp(v) for v in routing.logits[row]]
        chosen = [powers[e] / sum(powers) for e in routing.experts[row]]
        assert chosen == sorted(chosen, reverse=True)
        assert min(chosen) >= max(
            p / sum(powers) for e, p in enumerate(powers) if e not in routing.experts[row]
        )
        total = sum(chosen) if model.config.renormalise else 1.0
        assert routing.weights[row] == pytest.approx([c / total for c in chosen], abs=1e-12)


@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe", "qwen2_moe"])
def test_case_4_the_flag_decides_and_absent_means_no(family: str, tmp_path: Path) -> None:
    def weights(name: str, **changes: Any) -> oracle.Array:
        directory = checkpoints.FAMILIES[family](tmp_path / name, storage="f32", **changes)
        if name == "absent":
            checkpoints.edit_json(directory / "config.json", {}, remove=["norm_topk_prob"])
        model = oracle.load(directory)
        return oracle.forward(model, range(10, 20))[1][0].weights

    plain, normed = weights("no", norm_topk_prob=False), weights("yes", norm_topk_prob=True)
    assert np.allclose(normed, plain / plain.sum(axis=-1, keepdims=True), atol=1e-12)
    assert plain.sum(axis=-1).max() < 0.999
    assert np.array_equal(weights("absent", norm_topk_prob=False), plain)


def test_equal_gate_logits_choose_the_lowest_indices() -> None:
    config = models.model("qwen3_moe").config
    routing = oracle.route(config, 0, np.array([[0.0] * 8, [0.0, 1, 0, 1, 1, 0, 0, 0]]))
    assert routing.experts.tolist() == [[0, 1], [1, 3]]


# ------------------------------------------------------------------ case 13: shared expert, odd layers


def test_case_13_gate_logit_zero_halves_the_shared_part() -> None:
    model, x = one_moe_layer("qwen2_moe")
    prefix = "model.layers.0.mlp."
    whole = oracle.gated_ffn(model, oracle.ffn_names(prefix + "shared_expert."), x)
    zero = model.weights | {prefix + "shared_expert_gate.weight": np.zeros((1, x.shape[1]))}
    assert np.allclose(oracle.shared_expert(model._replace(weights=zero), 0, x), 0.5 * whole, atol=1e-13)
    mixed, _ = oracle.mixture(model._replace(weights=zero), 0, x)
    unshared = model._replace(config=dataclasses.replace(model.config, shared=""))
    routed, _ = oracle.mixture(unshared, 0, x)
    assert np.allclose(mixed - routed, 0.5 * whole, atol=1e-13)


@pytest.mark.parametrize(
    ("name", "moe"),
    [
        ("qwen3_moe_dense_layers", [False, True, False, False]),  # step 2, and layer 3 dense by list
        ("qwen2_moe_dense_layers", [True, False, True]),
        ("qwen2_moe_step", [False, True]),
        ("mixtral", [True, True]),
        ("llama", [False, False]),
    ],
)
def test_case_13_routing_lists_the_moe_layers_only(name: str, moe: list[bool]) -> None:
    model = models.model(name)
    _, routings = oracle.forward(model, VARIANTS[name].prompt)
    assert [routing.layer for routing in routings] == [n for n, is_moe in enumerate(moe) if is_moe]


# ------------------------------------------------------------------ case 8: RoPE spellings


def spelled(tmp_path: Path, name: str, rope: dict[str, Any]) -> oracle.Config:
    directory = checkpoints.llama(tmp_path / name, rope=rope, tokenizer=False, head_dim=32)
    return oracle.read_config(json.loads((directory / "config.json").read_text()))


def test_case_8_spellings_of_theta_and_type_agree(tmp_path: Path) -> None:
    scaling = LLAMA3["rope_scaling"]
    assert isinstance(scaling, dict)
    renamed = {"type" if k == "rope_type" else k: v for k, v in scaling.items()}
    plain = [
        spelled(tmp_path, "a", {"rope_theta": 1e6}).inv_freq,
        spelled(tmp_path, "b", {"rope_parameters": {"rope_theta": 1e6}}).inv_freq,
        spelled(tmp_path, "c", {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}).inv_freq,
    ]
    scaled = [
        spelled(tmp_path, "d", LLAMA3).inv_freq,
        spelled(tmp_path, "e", {"rope_theta": 10000.0, "rope_scaling": renamed}).inv_freq,
        spelled(tmp_path, "f", {"rope_parameters": {**scaling, "rope_theta": 10000.0}}).inv_freq,
    ]
    for group in (plain, scaled):
        assert all(np.array_equal(group[0], other) for other in group[1:])
    assert not np.array_equal(plain[0], spelled(tmp_path, "g", {}).inv_freq)


def test_case_8_llama3_formula_on_its_three_ranges() -> None:
    """Short waves keep their frequency, long ones are divided by 8, between them a ramp."""
    kept = oracle.rope_frequencies({**LLAMA3, "max_position_embeddings": 512}, 32, 1e4)
    plain = oracle.rope_frequencies({"rope_theta": 1e4}, 32, 1e4)
    wave = 2 * np.pi / plain
    short, long = wave < 64 / 4, wave > 64 / 1
    assert short.sum() >= 2 and long.sum() >= 3 and (~short & ~long).sum() >= 1
    assert np.array_equal(kept[short], plain[short])
    assert np.allclose(kept[long], plain[long] / 8, rtol=1e-7)
    between = ~short & ~long
    assert np.all((kept[between] > plain[between] / 8) & (kept[between] < plain[between]))


def test_case_8_unknown_type_is_refused() -> None:
    with pytest.raises(ValueError, match="spiral"):
        oracle.rope_frequencies({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, 16, 1e4)


# ------------------------------------------------------------------ strict reading


def test_a_missing_or_unknown_tensor_is_an_error(tmp_path: Path) -> None:
    directory = checkpoints.qwen3_moe(tmp_path / "m", storage="f32", tokenizer=False)
    lost = "model.layers.1.mlp.experts.3.up_proj.weight"
    tensor = checkpoints.read_tensors(directory)[lost]
    checkpoints.edit_tensors(directory, {"stray": tensor}, remove=[lost])
    with pytest.raises(ValueError, match="experts.3.up_proj.*stray"):
        oracle.load(directory)


def test_shards_and_a_single_file_are_the_same_model(tmp_path: Path) -> None:
    ids = range(20, 30)
    one, three = (
        oracle.load(checkpoints.olmoe(tmp_path / str(shards), shards=shards, tokenizer=False))
        for shards in (1, 3)
    )
    assert np.array_equal(oracle.forward(one, ids)[0], oracle.forward(three, ids)[0])


def test_case_3_a_head_that_contradicts_the_tied_flag_is_refused(tmp_path: Path) -> None:
    """Without the head, the embedding is used; with one that differs the checkpoint contradicts itself."""
    bare = checkpoints.qwen3_moe(tmp_path / "bare", tied=True, tokenizer=False)
    both = checkpoints.qwen3_moe(tmp_path / "both", tied=True, lm_head=True, tokenizer=False)
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        oracle.load(both)
    checkpoints.edit_tensors(
        both,
        {"lm_head.weight": checkpoints.read_tensors(both)["model.embed_tokens.weight"].astype(np.float32)},
    )
    ids = range(20, 30)
    assert np.array_equal(
        oracle.forward(oracle.load(bare), ids)[0], oracle.forward(oracle.load(both), ids)[0]
    )
