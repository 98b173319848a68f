"""Faults planted into models are found and named in words; a sound model has none of them."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import checkpoints
import colibri
from colibri.analysis.findings import Finding, findings
from colibri.analysis.load import expert_load
from colibri.analysis.measures import Measures, measure
from colibri.analysis.recording import Text, record, texts_of_lines
from colibri.analysis.trace import Trace
from colibri.cache import resolve
from colibri.convert import convert
from colibri.errors import ArgumentError
from colibri.format import read_container
from test_tools import ROOT

LAYERS, EXPERTS = 6, 8
GATE = "model.layers.{}.mlp.router.bias"


def sound(path: Path) -> Path:
    """Random experts behind routers whose bias is 0."""
    checkpoints.gpt_oss(path, n_layers=LAYERS, n_experts=EXPERTS, storage="f32")
    return edited(path, {GATE.format(layer): np.zeros(EXPERTS, np.float32) for layer in range(LAYERS)})


def edited(path: Path, changes: dict[str, np.ndarray]) -> Path:
    checkpoints.edit_tensors(path, changes)
    return path


def faulty(path: Path) -> Path:
    """Layer 1: a gate forced to expert 2. Layer 2: experts 3 and 5 are the same. Layer 3: expert 6 is dead.
    Layer 4: the load is uneven. Layer 5: two thirds of the experts are dead."""
    sound(path)
    tensors = checkpoints.read_tensors(path)
    changes = {GATE.format(layer): np.zeros(EXPERTS, np.float32) for layer in (1, 3, 4, 5)}
    changes[GATE.format(1)][2] = 50
    changes[GATE.format(3)][6] = -50
    changes[GATE.format(4)][:3] = 0.7
    changes[GATE.format(5)][2:] = -50
    for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"):
        full = f"model.layers.2.mlp.experts.{name}"
        changes[full] = tensors[full].copy()
        changes[full][5] = changes[full][3]
    return edited(path, changes)


def texts() -> list[Text]:
    """1,600 tokens that differ, of two labels that say nothing."""
    rng = np.random.default_rng(0)
    words = ["Once", "upon", "time", "there", "was", "colibri", "garden", "near", "sea", "cat", "sat", "mat"]
    return [Text(" ".join(rng.choice(words, 60)), "ab"[at % 2]) for at in range(12)]


def measured(source: Path, path: Path) -> Measures:
    model = convert(source, path / "m.colibri", "q8").path
    with colibri.load(model, context=512) as opened:
        record(opened, texts(), path / "run.trace")
    return measure(Trace(path / "run.trace"), read_container(model))


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Finding]]:
    path = tmp_path_factory.mktemp("faulty")
    yield findings(measured(faulty(path / "hf"), path))


def of(found: list[Finding], kind: str) -> dict[int | None, str]:
    return {one.layer: one.text for one in found if one.kind == kind}


def test_a_gate_forced_to_one_expert_is_named(faults: list[Finding]) -> None:
    text = of(faults, "collapse")[1]
    assert text == "layer 1: expert 2 takes 100 % of tokens"


def test_two_identical_experts_are_named(faults: list[Finding]) -> None:
    found = of(faults, "identical")
    assert list(found) == [2]
    assert found[2] == "layer 2: experts 3 and 5 have the same weights (cosine 1.0000)"


def test_a_dead_expert_is_named(faults: list[Finding]) -> None:
    found = of(faults, "dead")
    assert found[3].startswith("layer 3: expert 6 is never chosen in ") and found[3].endswith(": dead")
    assert found[5].startswith("layer 5: 6 experts (2, 3, 4, 5, 6, 7) are never chosen in ")
    assert set(found) == {3, 5}


def test_an_uneven_layer_is_named(faults: list[Finding]) -> None:
    text = of(faults, "imbalance")[4]
    assert text.startswith("layer 4: the load is uneven: its standard deviation is ") and "above 0.3" in text
    assert next(one for one in faults if one.kind == "imbalance").severity == "warning"


def test_faults_come_first(faults: list[Finding]) -> None:
    order = [one.severity for one in faults]
    assert order == sorted(order, key=["fault", "warning", "note"].index) and order[0] == "fault"


def test_a_sound_model_has_none_of_them(tmp_path: Path) -> None:
    found = findings(measured(sound(tmp_path / "hf"), tmp_path))
    assert not [one for one in found if one.severity == "fault"]
    assert not [one for one in found if one.kind == "domains"]  # labels that say nothing


def test_few_effective_experts_are_a_collapse_without_a_top_expert() -> None:
    """Pairs (0, 1) and (2, 3) by turns, of 64 experts: no expert is in more than half of the rows."""
    from colibri.analysis import findings as words

    load = expert_load(np.array([[0, 1], [2, 3]] * 500), 64)
    assert load.top_share == 0.5 and load.effective_experts == pytest.approx(4)
    told = words._collapse(load)
    assert told is not None and told[0] == "the load is that of 4.00 experts, of 64 (a token chooses 2)"
    assert words._collapse(expert_load(np.arange(2000).reshape(-1, 2) % 64, 64)) is None
    assert words._collapse(expert_load(np.array([[0, 1]] * 20), 64)) is None  # too few to say


def test_a_short_trace_calls_nothing_dead() -> None:
    from colibri.analysis import findings as words

    one = words._unused(3, expert_load(np.array([[0, 1], [2, 1]] * 30), 16))
    assert one.kind == "short" and one.severity == "note" and "too short to call that dead" in one.text


def test_the_demo_is_specialised_by_domain_and_says_so_with_a_number(tmp_path: Path) -> None:
    lines = (ROOT / "examples" / "demo_model" / "heldout.jsonl").read_bytes().splitlines()[::6]
    file = resolve("demo", None)
    with colibri.load(file, context=1024) as model:
        record(model, list(texts_of_lines(Path("heldout"), lines, "text", "domain")), tmp_path / "a.trace")
    found = findings(measure(Trace(tmp_path / "a.trace"), read_container(file)))
    assert not [one for one in found if one.severity == "fault"]
    domains = next(one for one in found if one.kind == "domains")
    assert domains.value > 0.15 and f"{domains.value:.3f} of " in domains.text
    assert "depend on the domain of a text" in domains.text and "of 5 layers" in domains.text
    assert next(one for one in found if one.kind == "classes").value > 0.1


def test_a_file_of_another_model_is_refused(model_path: Path, tmp_path: Path) -> None:
    with colibri.load(model_path, context=64) as model:
        record(model, [Text("Once upon a time")], tmp_path / "a.trace")
    with pytest.raises(ArgumentError, match="was recorded with 'model.colibri', another file than"):
        measure(Trace(tmp_path / "a.trace"), read_container(resolve("demo", None)))


def test_the_python_of_the_docs_runs(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs" / "MICROSCOPE.md").read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    with colibri.load(model_path, context=64) as model:
        record(model, [Text("Once upon a time")], tmp_path / "run.trace")
    monkeypatch.chdir(tmp_path)
    for block in blocks:
        exec(compile(block, "MICROSCOPE.md", "exec"), {})
    assert blocks and "layer 0" in capsys.readouterr().out
