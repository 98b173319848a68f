"""Weight types expert by expert: what is proposed, and the files that follow a plan."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import colibri
from colibri.analysis.bits import propose, requantize
from colibri.convert import convert
from colibri.errors import ArgumentError, ConversionError
from colibri.expert_bits import read_plan
from colibri.format import read_blobs, read_container
from test_cli import Result
from test_cli import call as call

TEXT = "Once upon a time the bird and the cat sat on a mat. " * 2
PLAN = {"0": ["q8", "q4", "q6", "q4"], "1": ["q4", "q4", "q8", "q8"]}


def write_plan(path: Path, experts: object = PLAN) -> Path:
    path.write_text(json.dumps({"format": "colibri-expert-bits", "version": 1, "experts": experts}))
    return path


def test_both_ways_in_follow_the_plan(make_model: Callable[..., Path], tmp_path: Path) -> None:
    exact = make_model("mixtral", storage="f32")
    source = exact.parent / "checkpoint"
    converted = convert(source, tmp_path / "a.colibri", "f32", expert_bits=PLAN).path
    requantize(exact, tmp_path / "b.colibri", PLAN)
    a, b = read_container(converted), read_container(tmp_path / "b.colibri")
    tensors = [
        [(one.name, one.types, one.crc) for one in container.entries if one.kind != "blob"]
        for container in (a, b)
    ]
    assert tensors[0] == tensors[1]
    found = {entry.name: entry.types for entry in b.entries if entry.kind == "expert"}
    for layer, types in PLAN.items():
        for expert, type in enumerate(types):
            assert found[f"layers.{layer}.experts.{expert}"] == (type,) * 3
    assert json.loads(read_blobs(b.path)["source.json"])["changes"][0]["expert_bits"] == {
        "q8": 3,
        "q6": 1,
        "q4": 4,
    }
    pure = {type: read_container(make_model("mixtral", type, storage="f32")) for type in ("q8", "q6", "q4")}
    for entry in b.entries:  # each expert is that of a file of one type
        if entry.kind == "expert":
            same = next(one for one in pure[entry.types[0]].entries if one.name == entry.name)
            assert entry.crc == same.crc
    with colibri.load(a.path) as one, colibri.load(b.path) as other:
        ids = one.prompt_ids(TEXT)
        assert np.array_equal(one.logits(ids), other.logits(ids))
    with pytest.raises(ArgumentError, match="experts='q4' has no effect: expert_bits"):
        convert(source, tmp_path / "c.colibri", experts="q4", expert_bits=PLAN)
    with pytest.raises(ArgumentError, match="the plan is of another model"):
        convert(source, tmp_path / "c.colibri", expert_bits={"0": ["q8"]})
    with pytest.raises(ConversionError, match="layers.0.experts.0 is q4 in .*as few bits or fewer, found q8"):
        requantize(make_model("mixtral", "q4"), tmp_path / "c.colibri", PLAN)
    assert not (tmp_path / "c.colibri").exists()


def test_hot_experts_get_the_bits(make_model: Callable[..., Path]) -> None:
    container = read_container(make_model("mixtral", "q8"))
    mass = np.array([[8.0, 4, 2, 1], [0, 100, 0, 0]])
    low, high = (propose(container, mass, average=bits) for bits in (6.6, 20.0))
    assert high.types["0"] == ["q8"] * 4 and high.types["1"] == ["q4", "q8", "q4", "q4"], "idle ones stay"
    assert high.error == 0 and high.average < 20
    assert set(propose(container, mass * 0 + 1, average=20).types["0"]) == {"q8"}
    order = ["q4", "q6", "q8"]
    ranks = [order.index(type) for type in low.types["0"]]
    assert ranks == sorted(ranks, reverse=True) and low.average <= 6.6 and low.bytes < high.bytes
    least = propose(container, mass * 0, average=20)
    for budget in np.linspace(least.bytes + 512, container.bytes, 6).astype(int):
        found = propose(container, mass, budget=int(budget))
        assert least.bytes <= found.bytes <= budget and found.error <= least.error + mass.sum()
    for options in ({"budget": least.bytes - 1}, {"average": 1.0}):
        with pytest.raises(ArgumentError, match="is too little: with the fewest bits the file has"):
            propose(container, mass, **options)


def test_the_commands(call: Callable[..., Result], make_model: Callable[..., Path], tmp_path: Path) -> None:
    model, trace, plan = make_model("mixtral", "q8"), tmp_path / "run.trace", tmp_path / "plan.json"
    plain, out = tmp_path / "plain.txt", tmp_path / "out.colibri"
    plain.write_text(TEXT)
    assert call("trace", model, "--text", TEXT, "-o", trace).status == 0
    found = call("bits", model, "--trace", trace, "--average", 6.5, "-o", plan)
    assert found.status == 0 and "bits a weight" in found.out, found.err
    size = json.loads(plan.read_text())["bytes"]
    source = model.parent / "checkpoint"
    for way in (model, source):
        told = call("convert", way, out, "--expert-bits", plan, "--eval", plain)
        assert told.status == 0 and "before," in told.out, told.err
        types = {entry.types[0] for entry in read_container(out).entries if entry.kind == "expert"}
        assert types <= {"q4", "q6", "q8"} and len(types) > 1
    requantize(model, out, read_plan(plan))
    changed = len(read_blobs(out)["source.json"]) - len(read_blobs(model)["source.json"])
    assert abs(out.stat().st_size - changed - size) < 4096
    other, wrong = tmp_path / "other", write_plan(tmp_path / "wrong", {"0": ["q9"]})
    for words, text in (
        (("convert", model, other, "--expert-bits", plan, "--type", "q4"), "--type q4 has no effect on a"),
        (("convert", source, other, "--expert-bits", plan, "--experts", "q4"), "--experts q4 has no effect"),
        (("convert", source, other, "--eval", plain), "--eval has no effect without --expert-bits"),
        (("convert", source, "--explain", "--expert-bits", plan), "--expert-bits has no effect with"),
        (("convert", source, other, "--expert-bits", plain), "is not JSON"),
        (("convert", source, other, "--expert-bits", wrong), "found 'q9'"),
        (("bits", model, "--trace", trace, "-o", other), "either --budget or --average"),
        (("bits", model, "--trace", trace, "-o", other, "--budget", "1K"), "--budget: 1,024 bytes is too"),
    ):
        failed = call(*words)
        assert failed.status and text in failed.err, failed.err
    assert not other.exists()
