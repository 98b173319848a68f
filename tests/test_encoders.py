"""Models with an encoder: the engine's numbers against both oracles, and against itself.

Owns: logits, routing and greedy ids for a source; the same bits on every path; what encoding refuses and what
      it leaves alone. Refuses: texts and the command line (test_sources.py).
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import oracle_encoders as oracle
from colibri import _native as native
from colibri.convert import convert
from colibri.errors import (
    ArgumentError,
    CancelledError,
    ContextFullError,
    ConversionError,
    ModelFileError,
    UnsupportedError,
)
from encoder_checkpoints import MAKERS, VARIANTS
from fixtures import models
from fixtures.native import engine
from test_bits import ISAS

Floats = npt.NDArray[np.float32]
BOUND = 1e-4
TYPES = ("f32", "bf16", "q8", "q6", "q4")
CASES = [(name, type) for name in ("switch_odd", "nllb_odd") for type in TYPES]


@functools.cache
def checkpoint(name: str) -> Path:
    return VARIANTS[name].write(models._directory() / name)


@functools.cache
def converted(name: str, type: str = "f32") -> Path:
    return convert(checkpoint(name), models._directory() / f"{name}-{type}.colibri", type).path


@functools.cache
def fixture(name: str) -> dict[str, npt.NDArray[Any]]:
    with np.load(models.HERE / f"{name}.npz") as file:
        return dict(file)


@functools.cache
def expected(name: str) -> tuple[Floats, list[oracle.Routing]]:
    variant = VARIANTS[name]
    return oracle.forward(oracle.load(checkpoint(name)), variant.source, variant.ids)


# ------------------------------------------------------------------ numbers


@pytest.mark.parametrize("name", VARIANTS)
def test_the_oracle_equals_transformers(name: str) -> None:
    found = fixture(name)
    assert str(found["digest"]) == models.digest(checkpoint(name)), (
        "make_encoder_fixtures.py writes them anew"
    )
    assert np.abs(expected(name)[0][found["rows"]] - found["logits"]).max() < 5e-5


@pytest.mark.parametrize("type", ["f32", "bf16"])
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_routing_equal_the_oracles(name: str, type: str) -> None:
    variant = VARIANTS[name]
    if type == "bf16" and variant.options.get("storage") != "bf16":
        pytest.skip("its weights are not numbers of bf16")
    rows: list[native.RoutingRows] = []
    with engine(converted(name, type)) as run:
        run.encode(variant.source, routing=lambda view: rows.append(view.rows()))
        found = run.feed(variant.ids, routing=lambda view: rows.append(view.rows()))
    logits, routing = expected(name)
    assert np.abs(found - logits).max() < BOUND
    assert np.abs(found[fixture(name)["rows"]] - fixture(name)["logits"]).max() < BOUND
    assert len(rows) == len(routing)
    for ours, theirs in zip(rows, routing, strict=True):
        assert np.array_equal(ours.experts, theirs.experts)
        assert np.abs(ours.logits - theirs.logits).max() < BOUND
        assert np.abs(ours.weights - theirs.weights).max() < BOUND
        assert set(ours.sequences) == {0} and list(ours.positions) == list(range(len(theirs.logits)))


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_ids_equal_those_of_generate(name: str) -> None:
    variant, ids = VARIANTS[name], [oracle.load(checkpoint(name)).config["decoder_start_token_id"]]
    with engine(converted(name)) as run:
        run.encode(variant.source)
        for _ in fixture(name)["greedy"]:
            ids.append(int(np.argmax(run.feed(ids[-1:])[0])))
    assert ids[1:] == fixture(name)["greedy"].tolist()


def test_the_capacity_of_experts_matters() -> None:
    """Beyond it a token's experts weigh nothing, in the encoder alone."""
    _, routing = expected("switch")
    dropped = [int((layer.weights == 0).sum()) for layer in routing]
    assert min(dropped[:2]) > 10 and dropped[2] == 0


# ------------------------------------------------------------------ bits


@functools.cache
def alone(name: str, type: str, seed: int = 0) -> bytes:
    """Logits of the target for a source that begins with another id for each seed: one thread, one chunk."""
    variant = VARIANTS[name]
    with engine(converted(name, type), threads=1) as run:
        run.encode(source(name, seed))
        return run.feed(variant.ids).tobytes()


def source(name: str, seed: int = 0) -> list[int]:
    ids = VARIANTS[name].source
    return [5 + seed, *ids[1 : len(ids) - 31 * seed]]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("name", "type"), CASES)
def test_instruction_sets_and_threads(
    name: str, type: str, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = alone(name, type)
    monkeypatch.setenv("COLIBRI_ISA", isa)
    try:
        with engine(converted(name, type), threads=3, chunk=300) as run:
            run.encode(source(name))
            assert run.feed(VARIANTS[name].ids).tobytes() == want
    except UnsupportedError as error:
        pytest.skip(f"this machine cannot run {isa}: {error}")


@pytest.mark.parametrize(("name", "type"), CASES)
def test_calls_batches_forks_and_rewinds(name: str, type: str) -> None:
    ids = VARIANTS[name].ids
    with engine(converted(name, type), max_batch=4, threads=4, chunk=320) as run:
        for sequence in (3, 1, 0):
            run.encode(source(name, sequence), sequence)
        heads = run.feed_all({3: ids[:40], 0: ids[:7], 1: ids[:1]})
        native.fork(run.context, 3, 2)  # shares the source
        native.rewind(run.context, 3, 0)
        run.encode(source(name, 2), 3)  # another source for the first of the two
        found = {2: [heads[3]], 0: [heads[0]], 1: [heads[1]], 3: []}
        done = {2: 40, 0: 7, 1: 1, 3: 0}
        while min(done.values()) < len(ids):
            step = {s: ids[at : at + 37] for s, at in done.items() if at < len(ids)}
            for s, logits in run.feed_all(step).items():
                found[s].append(logits)
                done[s] += len(logits)
        for sequence, seed in ((2, 3), (0, 0), (1, 1), (3, 2)):
            assert np.concatenate(found[sequence]).tobytes() == alone(name, type, seed), sequence
        native.rewind(run.context, 1, 5)
        again = run.feed(ids[5:], sequence=1)
        assert again.tobytes() == alone(name, type, 1)[5 * run.n_vocab * 4 :]


# ------------------------------------------------------------------ refused, and left alone


def test_what_encoding_refuses() -> None:
    name = "switch"
    with engine(converted(name), max_batch=2, context=64, chunk=32) as run:
        with pytest.raises(ArgumentError, match="0 has no source.*colibri_encode"):
            run.feed([0])
        for ids, sequence, error, match in (
            ([5] * 33, 0, ContextFullError, "33 tokens.*allow 32"),
            ([], 0, ArgumentError, "at least one id"),
            ([5, run.n_vocab], 0, ArgumentError, r"^ids\[1\]: expected 0 to"),
            ([5], 2, ArgumentError, "sequence: expected 0 to 1, found 2"),
            ([5], -1, ArgumentError, "found -1"),
        ):
            with pytest.raises(error, match=match):
                run.encode(ids, sequence)
        run.encode([5, 6, 7])
        first = run.feed([0, 9])
        with pytest.raises(ArgumentError, match="holds 2 positions made from another source"):
            run.encode([5])
        with pytest.raises(ArgumentError, match="1 has no source"):
            run.feed_all({0: [9], 1: [9]})
        assert native.position(run.context, 0) == 2
        native.rewind(run.context, 0, 0)
        assert run.feed([0, 9]).tobytes() == first.tobytes()  # the source stays
    with (
        engine(models.converted("qwen3_tied", "f32")) as run,
        pytest.raises(ArgumentError, match="no encoder"),
    ):
        run.encode([5])


def test_a_failed_encoding_leaves_no_source_and_other_sequences_alone() -> None:
    name = "nllb"
    ids = VARIANTS[name].ids

    def stop(done: int, total: int) -> None:
        seen.append((done, total))
        if done > total // 2:
            raise LookupError("stop here")

    seen: list[tuple[int, int]] = []
    with engine(converted(name), max_batch=2) as run:
        run.encode(source(name), 1)
        head = run.feed(ids[:10], sequence=1)
        run.encode(source(name), 0)
        with pytest.raises(LookupError, match="stop here"):
            run.encode(source(name), 0, progress=stop)
        assert seen[0] == (len(source(name)), 4 * len(source(name)))
        with pytest.raises(ArgumentError, match="no source"):
            run.feed([2])
        native.cancel(run.context)
        with pytest.raises(CancelledError):
            run.encode(source(name), 0)
        run.encode(source(name), 0)
        rest = run.feed_all({0: ids, 1: ids[10:]})
        assert rest[0].tobytes() == alone(name, "f32")
        assert np.concatenate([head, rest[1]]).tobytes() == alone(name, "f32")


def test_the_plan_counts_sources() -> None:
    """Twice the blocks of the decoder's layers, and ids."""
    model = native.open_model(converted("switch"))
    layers, heads, width = 3, 4, 12 + 16
    found = native.plan(model, native.Params(256, 3, 1, 64))
    least = 2 * 3 * 256 * (layers * heads * width + 1) * 4
    assert least <= found.kv_cache < least + 4096
    native.close_model(model)


DELTA = dict.fromkeys(("delta_heads", "delta_key_heads", "delta_key_dim", "delta_value_dim", "conv_width"), 2)
CONFIG_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no layer left": ({"n_encoder_layers": 7}, "leaves no layer"),
    "short biases": ({"attn_bias_span": 5}, "below 8"),
    "capacity without encoder": ({"n_encoder_layers": 0}, "expert_capacity needs n_encoder_layers"),
    "rotation": ({"rope_dim": 4}, "goes without rope_dim"),
    "states": (DELTA | {"mixer": [0] * 6 + [1]}, "goes without .*mixer 1"),
}


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_damaged_configs_are_refused_by_name(fault: str, tmp_path: Path) -> None:
    from colibri.format import Writer, read_container

    changes, match = CONFIG_FAULTS[fault]
    config = dict(read_container(converted("switch")).config)
    with Writer(tmp_path / "m.colibri", config | changes, "f32", {}) as writer:
        for entry in writer.tensors:
            writer.write(entry.name, [bytes(entry.bytes)])
    with pytest.raises(ModelFileError, match=match):
        native.open_model(tmp_path / "m.colibri")


@pytest.mark.parametrize(
    ("family", "extra", "match"),
    [
        ("switch_transformers", {"dense_act_fn": "gated-gelu"}, "dense_act_fn = 'gated-gelu'"),
        ("switch_transformers", {"is_encoder_decoder": False}, "is_encoder_decoder"),
        ("switch_transformers", {"router_dtype": "bfloat16"}, "router_dtype"),
        ("switch_transformers", {"num_heads": 5}, r"\[16, 4\].*\[16, 5\]"),
        ("switch_transformers", {"rope_theta": 1e4}, "rope_theta"),
        ("nllb_moe", {"moe_eval_capacity_token_fraction": 0.5}, "moe_eval_capacity_token_fraction = 0.5"),
        ("nllb_moe", {"second_expert_policy": "random"}, "second_expert_policy"),
        ("nllb_moe", {"decoder_ffn_dim": 64}, "encoder_ffn_dim = 96"),
        ("nllb_moe", {"activation_function": "gelu"}, "activation_function"),
        ("nllb_moe", {"encoder_sparse_step": 3}, r"encoder.layers.2.ffn.router.classifier.weight"),
        ("nllb_moe", {"moe_token_dropout": 1.0}, "below 1"),
    ],
)
def test_settings_are_refused_by_name(family: str, extra: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=match):
        convert(MAKERS[family](tmp_path / "hf", config_extra=extra), tmp_path / "m.colibri")


def test_embeddings_unlike_each_other_are_refused(tmp_path: Path) -> None:
    import checkpoints

    directory = MAKERS["switch_transformers"](tmp_path / "hf")
    name = "decoder.embed_tokens.weight"
    values = checkpoints.read_tensors(directory)[name]
    checkpoints.edit_tensors(directory, {name: values + 1})
    with pytest.raises(ConversionError, match="decoder.embed_tokens.weight .* differs from shared.weight"):
        convert(directory, tmp_path / "m.colibri")
