"""Measures of routing: each formula beside a literal second computation, noise told from specialisation."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import colibri
from colibri.analysis import coactivation, drift, information, reuse, similarity, specialisation, visits
from colibri.analysis.choices import Choices, by_layer, counts_by
from colibri.analysis.load import entropy, expert_load
from colibri.analysis.policies import POLICIES, Accesses
from colibri.analysis.recording import Text, record
from colibri.analysis.replay import demand
from colibri.analysis.tokens import tokens_of
from colibri.analysis.trace import Trace
from colibri.errors import TraceError
from colibri.format import read_container
from test_trace import write_made

TEXTS = [Text("Once upon a time the bird", "story"), Text("The cat sat", "verse"), Text("1 2 3", "story")]


def drawn(rng: np.random.Generator, n: int, k: int, shares: np.ndarray) -> np.ndarray:
    """n rows of k distinct experts, drawn by shares [n_experts] or [n, n_experts] (Gumbel top-k)."""
    noise = -np.log(-np.log(rng.random((n, shares.shape[-1]))))
    return np.argsort(-(np.log(shares) + noise), axis=1)[:, :k].astype(np.uint8)


def made(experts: np.ndarray, n_experts: int = 8) -> Choices:
    return Choices(0, n_experts, np.arange(len(experts)), experts, np.ones(experts.shape, np.float16), None)


# --- the order of a trace


@pytest.mark.parametrize("chunk", [3, 64])
def test_layers_hold_what_steps_hold(model_path: Path, tmp_path: Path, chunk: int) -> None:
    with colibri.load(model_path, context=64, chunk=chunk) as model:
        record(model, TEXTS, tmp_path / "a.trace", generate=4, logits=True)
    check_layers(Trace(tmp_path / "a.trace"))


def test_so_they_do_with_an_encoder_and_layers_that_differ(tmp_path: Path) -> None:
    write_made(tmp_path / "a.trace")
    check_layers(Trace(tmp_path / "a.trace"))


def check_layers(trace: Trace) -> None:
    found = {one.layer: one for one in by_layer(trace)}
    rows = np.arange(trace.n_rows)
    for layer in {step.layer for step in trace.steps()}:
        steps = [step for step in trace.steps() if step.layer == layer]
        one = found.pop(layer)
        assert np.array_equal(one.rows, np.concatenate([rows[step.rows] for step in steps]))
        assert np.array_equal(one.experts, np.concatenate([step.experts for step in steps]))
        assert np.array_equal(one.weights, np.concatenate([step.weights for step in steps]))
        assert one.logits is not None
        assert np.array_equal(one.logits, np.concatenate([step.logits for step in steps]))
    assert not found


# --- load


def test_load_of_a_few_rows() -> None:
    load = expert_load(np.array([[0, 1], [0, 2], [0, 1], [0, 3]]), 5, np.array([[0.75, 0.25]] * 4))
    assert load.counts.tolist() == [4, 2, 1, 1, 0] and load.mass.tolist() == [3, 0.5, 0.25, 0.25, 0]
    assert (load.top, load.top_share, load.unused) == (0, 1.0, [4])
    shares = [4 / 8, 2 / 8, 1 / 8, 1 / 8]
    assert load.entropy == pytest.approx(-sum(p * math.log(p) for p in shares))
    assert load.effective_experts == pytest.approx(math.exp(load.entropy))
    assert load.variation == pytest.approx(math.sqrt((2.4**2 + 0.4**2 + 2 * 0.6**2 + 1.6**2) / 5) / 1.6)
    assert load.maximal_violation == pytest.approx(4 / 1.6 - 1)
    assert expert_load(np.zeros((0, 2), np.int64), 5).variation == 0 and entropy(np.zeros(3)) == 0


def test_even_and_collapsed_loads_are_the_ends_of_the_scale() -> None:
    even = expert_load(np.arange(800).reshape(-1, 2) % 8, 8)
    assert (even.variation, even.maximal_violation) == (0, 0)
    assert even.effective_experts == pytest.approx(8)
    assert expert_load(np.tile([3, 5], (100, 1)), 8).effective_experts == pytest.approx(2)


def test_noise_is_the_variation_of_even_draws() -> None:
    rng = np.random.default_rng(0)
    loads = [expert_load(drawn(rng, 200, 2, np.ones(16)), 16) for _ in range(200)]
    squares = np.mean([load.variation**2 for load in loads])
    assert math.sqrt(squares) == pytest.approx(loads[0].noise, rel=0.05)


# --- co-activation


def test_pairs_are_counted_and_compared_with_independence() -> None:
    rng = np.random.default_rng(1)
    experts = drawn(rng, 500, 3, np.array([4, 3, 2, 1, 1, 1]) / 12)
    pairs = coactivation.pair_counts(experts, 6)
    has = np.array([[expert in row for expert in range(6)] for row in experts.tolist()])
    assert np.array_equal(pairs, has.T.astype(int) @ has.astype(int))
    lifts = coactivation.lift(pairs, 500)
    assert lifts[1, 4] == pytest.approx((has[:, 1] & has[:, 4]).mean() / has[:, 1].mean() / has[:, 4].mean())
    assert np.allclose(2 ** coactivation.pmi(pairs, 500)[0, 1:], lifts[0, 1:]) and np.isnan(lifts[2, 2])


def test_chance_is_the_lift_of_even_draws() -> None:
    experts = drawn(np.random.default_rng(2), 40_000, 2, np.ones(8))
    lifts = coactivation.lift(coactivation.pair_counts(experts, 8), len(experts))
    assert np.nanmax(np.abs(lifts - coactivation.chance(8, 2))) < 0.05
    assert coactivation.chance(8, 1) == 0


def test_the_strongest_pair_is_the_planted_one_and_rare_ones_are_left_out() -> None:
    experts = drawn(np.random.default_rng(3), 2000, 2, np.ones(8))
    experts[:300] = [2, 6]
    experts[experts == 7] = 0
    experts = experts[experts[:, 0] != experts[:, 1]]
    experts[0] = [7, 1]  # once: a lift of hundreds that says nothing
    best = coactivation.strongest(coactivation.pair_counts(experts, 8), len(experts), 3)
    assert best[0][:2] == (2, 6) and best[0].lift > 1.2 > best[1].lift
    assert all(7 not in pair[:2] for pair in best)


# --- information


def test_information_is_the_formula() -> None:
    table = np.array([[5, 3, 0], [1, 7, 4]])
    p = table / table.sum()
    literal = sum(
        p[c, e] * math.log2(p[c, e] / p[c].sum() / p[:, e].sum())
        for c in range(2)
        for e in range(3)
        if p[c, e]
    )
    assert information.mutual_information(table) == pytest.approx(literal)
    assert information.mutual_information(np.array([[[4, 0], [0, 4]], [[2, 2], [3, 3]]])) == pytest.approx(
        [1, 0]
    )


def domains(texts: int, strength: float, seed: int, per_text: int = 40) -> information.Information:
    """Texts of 4 domains; each text, and with a strength each domain, has its own taste."""
    rng = np.random.default_rng(seed)
    labels = np.arange(texts) % 4
    of_text = np.exp(rng.normal(size=(texts, 8)))
    of_domain = np.exp(strength * rng.normal(size=(4, 8)))
    sequences = np.repeat(np.arange(texts), per_text)
    experts = drawn(rng, len(sequences), 2, (of_text * of_domain[labels])[sequences])
    return specialisation.by_domain(made(experts), sequences, labels, 4)


@pytest.mark.parametrize("seed", range(6))
def test_texts_with_tastes_are_no_specialisation_by_domain(seed: int) -> None:
    """What their tokens have in common makes far more information than Miller's formula takes off."""
    found = domains(60, 0.0, seed)
    assert found.found > 2 * found.miller and not found.above_chance and found.share < 0.02


def test_specialisation_by_domain_is_found_and_measured() -> None:
    found = domains(60, 1.5, 0)
    assert found.above_chance and found.bits > 0.1 and found.entropy == pytest.approx(2)
    assert found.bits == pytest.approx(found.found - found.shuffled) and found.shuffled > 0.01
    best = np.unravel_index(np.nanargmax(specialisation.preferences(found)), (4, 8))
    shares = found.table / found.table.sum(1, keepdims=True)
    assert shares[best] > 1.5 * found.table.sum(0)[best[1]] / found.table.sum()


def test_an_expert_for_each_label_says_all_of_it() -> None:
    labels = np.arange(400) % 4
    found = specialisation.by_domain(made(labels[:, None]), np.arange(400), labels, 4)
    assert found.found == pytest.approx(2) and found.share > 0.95


def test_a_router_with_a_taste_for_ids_shows_no_classes() -> None:
    rng = np.random.default_rng(4)
    ids = rng.integers(0, 50, 4000)
    own = np.exp(2 * rng.normal(size=(50, 8)))
    classes = {id: ("letters", "digits")[id % 2] for id in range(50)}
    assert not specialisation.by_class(made(drawn(rng, 4000, 2, own[ids])), ids, classes).above_chance
    own[1::2, :4] *= 30
    found = specialisation.by_class(made(drawn(rng, 4000, 2, own[ids])), ids, classes)
    assert found.above_chance and found.share > 0.08


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" bird", "word start"),
        ("ing", "letters"),
        ("été", "letters"),
        (" 12", "digits"),
        ("...", "punctuation"),
        (" +", "symbols"),
        ("\n\n", "spaces"),
        ("a1", "mixed"),
        ("\ufffd", "bytes"),
        ("", "bytes"),
    ],
)
def test_classes_of_tokens(text: str, expected: str) -> None:
    assert specialisation.token_class(text) == expected and expected in specialisation.CLASSES
    assert specialisation.token_class(text, control=True) == "control"


def test_tokens_have_the_texts_of_the_model(model_path: Path) -> None:
    with colibri.load(model_path, context=64) as model:
        ids = model.prompt_ids("The bird sat on 3 mats.")
    tokens = tokens_of(read_container(model_path), ids)
    assert "".join(tokens.texts(ids)) == "<s>The bird sat on 3 mats."
    assert set(tokens.classes) == set(ids.tolist()) and tokens.classes[1] == "control"


# --- drift


def test_bins_grow_fourfold() -> None:
    positions = np.array([0, 1, 3, 4, 15, 16, 63, 64, 255, 256, 1 << 20])
    assert drift.position_bins(positions).tolist() == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 11]
    assert drift.bin_names(4) == ["0", "1-3", "4-15", "16-63"]


def test_drift_is_found_and_long_texts_about_something_else_are_none() -> None:
    rng = np.random.default_rng(5)
    lengths = np.where(np.arange(40) % 2, 200, 20)
    sequences = np.repeat(np.arange(40), lengths)
    positions = np.concatenate([np.arange(n) for n in lengths])
    tastes = np.exp(rng.normal(size=(2, 8)))[(lengths > 100).astype(int)]
    still = made(drawn(rng, len(sequences), 2, tastes[sequences]))
    found = drift.drift(still, positions, sequences)
    assert found.found > 0.005 and not found.above_chance
    shares = tastes[sequences] * np.where((positions < 16)[:, None], np.linspace(0.2, 3, 8), 1)
    assert drift.drift(made(drawn(rng, len(sequences), 2, shares)), positions, sequences).above_chance


# --- similarity


def test_similarity_of_weights_and_of_usage(make_model: Callable[..., Path]) -> None:
    found = similarity.weight_similarity(read_container(make_model("mixtral", "q8")))
    assert list(found) == [0, 1] and found[0].shape == (4, 4)
    assert np.allclose(np.diagonal(found[0]), 1) and np.abs(found[0] - np.eye(4)).max() < 0.1
    counts = counts_by(np.array([0, 0, 1, 1]), 2, np.array([[0, 1], [0, 1], [2, 1], [2, 0]]), 3)
    assert counts.tolist() == [[2, 2, 0], [1, 1, 2]]
    usage = similarity.usage_similarity(counts)
    assert usage[0, 1] == pytest.approx(1) and usage[0, 2] == pytest.approx(2 / math.sqrt(5) / 2)


def test_similarity_of_outputs_is_that_of_what_experts_say(model_path: Path) -> None:
    texts = [text.text for text in TEXTS]
    said: dict[tuple[int, int], dict[tuple[int, int], np.ndarray]] = {}
    with colibri.load(model_path, context=64) as model:
        found = similarity.output_similarity(model, texts)
        for at, text in enumerate(texts):

            def see(one: colibri._native.ExpertOutputs, at: int = at) -> None:
                rows = said.setdefault((one.layer, one.expert), {})
                rows |= {(at, int(p)): o.copy() for p, o in zip(one.positions, one.outputs, strict=True)}

            with model.observe(expert=see):
                model._sequences.forget()
                model.logits(model.prompt_ids(text))
    checked = 0
    for layer in found:
        for i in range(4):
            for j in range(4):
                one, other = said.get((layer, i), {}), said.get((layer, j), {})
                both = one.keys() & other.keys()
                if i == j or not both:
                    assert np.isnan(found[layer][i, j])
                    continue
                cosines = [
                    one[row] @ other[row] / np.linalg.norm(one[row]) / np.linalg.norm(other[row])
                    for row in both
                ]
                assert found[layer][i, j] == pytest.approx(np.mean(cosines), abs=1e-5)
                checked += 1
    assert checked > 8


# --- reuse


def accesses(seed: int, n_experts: int = 24, layers: int = 3, tokens: int = 200) -> Accesses:
    """As decoding: every token uses two experts of each layer."""
    rng = np.random.default_rng(seed)
    per = n_experts // layers
    steps = [
        np.sort(layer * per + drawn(rng, 1, 2, rng.dirichlet(np.ones(per)))[0].astype(int))
        for _ in range(tokens)
        for layer in range(layers)
    ]
    starts = np.arange(len(steps) + 1) * 2
    ends = np.tile((np.arange(layers) + 1) * per, tokens).astype(np.int32)
    return Accesses(n_experts, np.concatenate(steps).astype(np.int32), starts, ends)


def test_one_pass_says_what_simulating_each_size_says() -> None:
    for seed in range(3):
        asked = accesses(seed)
        rates = reuse.lru_hit_rates(reuse.reuse_distances(asked), range(2, 25))
        for slots, rate in zip(range(2, 25), rates, strict=True):
            assert rate == pytest.approx(1 - POLICIES["lru"](asked, slots).sum() / len(asked.experts)), slots


def test_the_curve_is_that_of_the_simulators(model_path: Path, tmp_path: Path) -> None:
    with colibri.load(model_path, context=64) as model:
        record(model, TEXTS, tmp_path / "a.trace")
    asked = demand(Trace(tmp_path / "a.trace")).accesses  # chunks: steps wider than some sizes
    curve = reuse.cache_curve(asked)
    assert curve.accesses == curve.of_accesses == len(asked.experts) and curve.slots[-1] == 8
    for policy, rates in curve.hit_rates.items():
        for slots, rate in zip(curve.slots, rates, strict=True):
            misses = POLICIES[policy](asked, slots).sum()
            assert rate == pytest.approx(1 - misses / len(asked.experts)), (policy, slots)


def test_a_long_trace_is_cut_at_a_step() -> None:
    cut = reuse.head(accesses(0), 101)
    assert len(cut.experts) == 100 and len(cut.ends) == 50 and cut.starts[-1] == 100


def test_working_sets_are_counted_windows() -> None:
    asked = accesses(7, tokens=60)
    tokens = np.append(np.repeat(np.arange(60), 3), 60)
    used = [set(asked.experts[6 * at : 6 * at + 6].tolist()) for at in range(60)]
    for window, found in zip((1, 4, 16, 64), reuse.working_sets(asked, tokens, (1, 4, 16, 64)), strict=True):
        sizes = [len(set().union(*used[max(0, at - window + 1) : at + 1])) for at in range(60)]
        assert found == pytest.approx(np.mean(sizes)), window


# --- visits


def test_visits_are_summed_by_layer_and_expert(model_path: Path, tmp_path: Path) -> None:
    with colibri.load(model_path, context=64) as model:
        record(model, TEXTS, tmp_path / "a.trace")
    trace = Trace(tmp_path / "a.trace")
    recorded = visits.visits_of(trace)
    assert recorded is not None and recorded.ns.sum() == trace.array("visit_ns").sum(dtype=np.int64)
    order = [(step.layer, e) for step in trace.steps() for e in sorted(set(step.experts.ravel().tolist()))]
    ns = np.arange(1, len(order) + 1, dtype=np.uint32)
    found = visits.summed(trace, ns, (ns % 3 == 0).astype(np.uint8))
    for layer in range(2):
        for expert in range(4):
            own = [int(n) for n, at in zip(ns, order, strict=True) if at == (layer, expert)]
            assert found.visits[layer, expert] == len(own) and found.ns[layer, expert] == sum(own)
            assert found.reads[layer, expert] == sum(n % 3 == 0 for n in own)
    with pytest.raises(TraceError, match=f"expected {len(order)} visits of experts, found {len(order) - 1}"):
        visits.summed(trace, ns[:-1], ns[:-1].astype(np.uint8))
