"""`colibri prune`: the file is that of a checkpoint without those experts, and they are the right ones."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import colibri
from colibri.analysis import pruning
from colibri.analysis.evaluation import Passage, evaluate
from colibri.analysis.pruning import Uses, check_counts, chosen, counts_across, layer_counts, prune
from colibri.analysis.recording import Text, record
from colibri.analysis.trace import Trace
from colibri.convert import convert
from colibri.errors import ArgumentError, UnsupportedError
from colibri.format import read_blobs, read_container
from test_cli import Result
from test_cli import call as call

TEXT = "Once upon a time the bird and the cat sat on a mat. " * 2
N_KEYS = ("num_local_experts", "n_routed_experts", "num_experts")


def reduced(source: Path, target: Path, stay: list[int]) -> Path:
    """The checkpoint without experts, the same in all layers."""
    target.mkdir()
    config = json.loads((source / "config.json").read_text())
    key = next(key for key in N_KEYS if key in config)
    n = config[key]
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (target / file.name).write_bytes(file.read_bytes())
            continue
        tensors = {}
        for name, values in load_file(file).items():
            words = name.split(".")
            at = words.index("experts") + 1 if "experts" in words else 0
            if at and words[at].isdigit():
                if int(words[at]) not in stay:
                    continue
                words[at] = str(stay.index(int(words[at])))
            elif len(values) == n and ("gate" in words or "router" in words or at):
                values = np.ascontiguousarray(values[stay])
            tensors[".".join(words)] = values
        save_file(tensors, target / file.name, {"format": "pt"})
    (target / "config.json").write_text(json.dumps(config | {key: len(stay)}))
    index = target / "model.safetensors.index.json"
    if index.exists():
        index.unlink()
    return target


@pytest.mark.parametrize(
    ("family", "options", "stay"),
    [
        ("mixtral", {}, [0, 2, 3]),
        ("gpt_oss", {}, [1, 3]),
        ("deepseek_v3", {"groups": (4, 2), "n_experts": 16}, [0, 3, 4, 5, 9, 10, 12, 15]),
    ],
)
def test_the_file_is_that_of_the_checkpoint_without_those_experts(
    family: str,
    options: dict[str, Any],
    stay: list[int],
    make_model: Callable[..., Path],
    tmp_path: Path,
) -> None:
    path = make_model(family, "q8", storage="f32", **options)
    config = read_container(path).config
    kept = [stay if n else [] for n in config["n_experts"]]
    found = prune(path, tmp_path / "out.colibri", kept)
    source = reduced(path.parent / "checkpoint", tmp_path / "checkpoint", stay)
    expected = convert(source, tmp_path / "expected.colibri", "q8").path
    ours, theirs = read_container(found.path), read_container(expected)
    assert ours.config == theirs.config and found.n_experts == [len(one) for one in kept]
    tensors = [
        [(one.name, one.types, one.bytes, one.crc) for one in container.entries if one.kind != "blob"]
        for container in (ours, theirs)
    ]
    assert tensors[0] == tensors[1]
    assert found.bytes == ours.bytes < found.bytes_before
    with colibri.load(found.path) as a, colibri.load(expected) as b:
        ids = a.prompt_ids(TEXT)
        assert np.array_equal(a.logits(ids), b.logits(ids))


# --- what matters


def test_saliency_of_texts_is_the_formula_of_reap(model_path: Path) -> None:
    with colibri.load(model_path) as model:
        rows: list[tuple[int, int, float, float]] = []

        def see(found: Any) -> None:
            for weight, output in zip(found.weights, found.outputs, strict=True):
                rows.append(
                    (found.layer, found.expert, float(weight), float(np.linalg.norm(output.astype(float))))
                )

        uses, scored = pruning.uses_of_texts(model, [Passage(TEXT)])
        assert scored == evaluate(model, [Passage(TEXT)])
        with model.observe(expert=see):
            evaluate(model, [Passage(TEXT)])
        for layer in range(2):
            for expert in range(4):
                own = [(weight, norm) for at, which, weight, norm in rows if (at, which) == (layer, expert)]
                reap = np.mean([weight * norm for weight, norm in own]) if own else 0.0
                assert uses.saliency("reap")[layer, expert] == pytest.approx(reap, rel=1e-12)
                assert uses.saliency("mass")[layer, expert] == pytest.approx(sum(w for w, _ in own))
                assert uses.saliency("count")[layer, expert] == len(own)
        assert uses.counts.sum() == 2 * 2 * scored.tokens


def test_a_trace_counts_the_same_uses(model_path: Path, tmp_path: Path) -> None:
    container = read_container(model_path)
    with colibri.load(model_path) as model:
        record(model, [Text(TEXT)], tmp_path / "run.trace")
        routed = model.routing(model.prompt_ids(TEXT))
    uses = pruning.uses_of_trace(Trace(tmp_path / "run.trace"), container)
    for layer, found in routed.items():
        for expert in range(4):
            here = found.experts == expert
            assert uses.counts[layer, expert] == here.sum()
            assert uses.masses[layer, expert] == pytest.approx(found.weights[here].sum(), rel=1e-3)
    with pytest.raises(ArgumentError, match="saliency='reap' needs what experts say"):
        uses.saliency("reap")
    with pytest.raises(ArgumentError, match="saliency: expected one of reap, mass, count"):
        uses.saliency("other")


def test_a_trace_of_another_model_is_refused(
    model_path: Path, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    with colibri.load(model_path) as model:
        record(model, [Text(TEXT)], tmp_path / "run.trace")
    with pytest.raises(ArgumentError, match="was recorded with 'model.colibri', another file"):
        pruning.uses_of_trace(Trace(tmp_path / "run.trace"), read_container(make_model("mixtral", "q4")))


# --- which stay

PLAIN = {"n_experts": [0, 8, 8], "n_layers": 3, "n_experts_used": 2, "n_expert_groups": 0}
GROUPED = PLAIN | {"n_expert_groups": 4, "n_groups_used": 2, "n_experts_used": 3, "group_score": 0}


def test_how_many_stay() -> None:
    assert layer_counts(PLAIN, 0.75) == [0, 6, 6]
    assert layer_counts(PLAIN, 0.01) == [0, 2, 2], "a token needs two"
    assert layer_counts(GROUPED | {"n_experts": [0, 16, 16]}, 0.75) == [0, 12, 12]
    with pytest.raises(ArgumentError, match="removes nothing: layers have 8 experts"):
        layer_counts(GROUPED, 0.6)  # two of each group, since two groups hold three
    for share in (0, 1, float("nan"), -1):
        with pytest.raises(ArgumentError, match="keep: expected a share"):
            layer_counts(PLAIN, share)
    assert check_counts(PLAIN, [8, 2]) == [0, 8, 2]
    for counts, text in (
        ([8], "expected 2 numbers"),
        ([8, 1], r"layer 2: expected 2 \(what a token needs\) to 8, found 1"),
        ([9, 8], "found 9"),
        ([8, 8], "nothing is removed"),
    ):
        with pytest.raises(ArgumentError, match=text):
            check_counts(PLAIN, counts)
    sixteen = GROUPED | {"n_experts": [0, 16, 16]}
    with pytest.raises(ArgumentError, match="a multiple of its 4 groups, found 10"):
        check_counts(sixteen, [10, 12])
    with pytest.raises(UnsupportedError, match="across_layers: the router chooses among 4 groups"):
        counts_across(sixteen, 0.75, np.ones((3, 16)))


def test_which_stay() -> None:
    values = np.array([[0.0] * 8, [1, 5, 2, 5, 3, 0, 9, 1], [4, 4, 4, 4, 0, 0, 0, 0]])
    assert chosen(PLAIN, [0, 3, 4], values) == [[], [1, 3, 6], [0, 1, 2, 3]]
    grouped = chosen(GROUPED, [0, 4, 4], values)
    assert grouped == [[], [1, 3, 4, 6], [0, 2, 4, 6]]
    found = counts_across(PLAIN, 0.5, values)
    assert sum(found) == 8 and found == [0, 4, 4]
    assert counts_across(PLAIN, 0.5, values * np.array([[1], [1], [100]])) == found, "layers have one scale"
    flat = np.array([[0.0] * 8, [1.0] * 8, [96, 1, 1, 1, 1, 0, 0, 0]])
    assert counts_across(PLAIN, 0.5, flat) == [0, 6, 2]


def test_measures_differ_where_they_should() -> None:
    uses = Uses(np.array([[10.0, 1]]), np.array([[1.0, 1]]), np.array([[5.0, 4]]))
    assert uses.saliency("reap").tolist() == [[0.5, 4]]


# --- the command


def test_the_command(call: Callable[..., Result], model_path: Path, tmp_path: Path) -> None:
    plain, out, trace = tmp_path / "plain.txt", tmp_path / "out.colibri", tmp_path / "run.trace"
    plain.write_text(TEXT)
    by_text = ("--keep", "75%", "--text", plain)
    found = call("prune", model_path, "-o", out, *by_text, "--eval", plain, "--context", 64)
    assert found.status == 0, found.err
    assert "removed          2 of 8 experts; left by layer: 3, 3" in found.out
    with colibri.load(model_path, context=64) as model, colibri.load(out, context=64) as smaller:
        before, after = (evaluate(one, [Passage(TEXT)]).perplexity for one in (model, smaller))
        saliency = pruning.uses_of_texts(model, [Passage(TEXT)])[0].saliency("reap")
    assert f"perplexity       {before:.4f} before, {after:.4f} after" in found.out and before != after
    told = json.loads(read_blobs(out)["source.json"])["changes"][0]
    assert told["model"] == "model.colibri" and len(told["sha256"]) == 64 and told["saliency"] == "reap"
    assert told["removed_experts"] == {str(at): [int(saliency[at].argmin())] for at in range(2)}
    assert call("trace", model_path, "--text", TEXT, "-o", trace).status == 0
    by_trace = ("--keep", "50%", "--trace", trace)
    assert call("prune", model_path, "-o", out, *by_trace, "--across-layers").status == 0
    assert sum(read_container(out).config["n_experts"]) == 4
    again = call("prune", out, "-o", tmp_path / "third.colibri", "--layer-counts", "2,2", "--text", plain)
    assert again.status and "--layer-counts: nothing is removed" in again.err
    left = sorted(tmp_path.iterdir())
    other = tmp_path / "other"
    for wrong, text in (
        (("-o", other, *by_trace, "--saliency", "reap"), "--saliency reap needs what experts say"),
        (("-o", other, *by_trace, "--threads", 2), "--threads 2 has no effect: with a trace"),
        (("-o", other, *by_trace, "--memory", "1GiB"), "--memory 1GiB has no effect"),
        (("-o", other, *by_trace, *by_text[2:]), "either --trace or texts"),
        (("-o", other, "--keep", "75%"), "either --trace or texts"),
        (("-o", other, "--trace", trace), "either --keep or --layer-counts"),
        (("-o", other, "--trace", trace, "--layer-counts", "2,2", "--across-layers"), "without --keep"),
        (("-o", other, "--trace", trace, "--layer-counts", "2,x"), "--layer-counts: expected numbers"),
        (("-o", other, "--trace", trace, "--keep", "0.75"), "--keep: expected a share"),
        (("-o", other, "--trace", trace, "--keep", "100%"), "--keep: expected a share"),
        (("-o", model_path, *by_trace), "is the model itself"),
        (("-o", plain, *by_trace), "is not a .colibri file"),
        (("-o", tmp_path / "no" / "where", *by_trace), "Cannot write"),
    ):
        failed = call("prune", model_path, *wrong)
        assert failed.status and text in failed.err, failed.err
    assert sorted(tmp_path.iterdir()) == left
