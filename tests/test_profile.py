"""measure() and `colibri profile`: structure and arithmetic of times by phase, layer and expert. No speed."""

import importlib.resources
import json
import re
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import checkpoints
import colibri
from colibri.analysis import chart, instructions, phases
from colibri.analysis.runs import MATRIX_PHASES, Loops, outside_matrices_ns, wait_share
from colibri.arguments import Opening
from colibri.cli.profile import _instruction_table, _phase_table
from colibri.errors import ArgumentError, UnsupportedError
from test_cli import Result
from test_cli import call as call

IDS = list(range(1, 30))


# --- measure()


def test_measuring_changes_no_bit(model: colibri.Model) -> None:
    before = model.logits(IDS)
    with colibri.measure(model):
        during = model.logits(IDS)
    assert np.array_equal(before, during) and np.array_equal(before, model.logits(IDS))


def test_times_have_the_shape_of_the_model_and_add_up(model: colibri.Model) -> None:
    with colibri.measure(model) as profile:
        assert not profile.phase_ns.any() and not profile.expert_ns.any()
        model.logits(IDS)
        once = profile.copy()
        model.logits(IDS)
    n_layers, n_experts = model.config["n_layers"], max(model.config["n_experts"])
    assert once.phase_ns.shape == once.wait_ns.shape == (n_layers + 1, len(once.phases))
    assert once.expert_ns.shape == (n_layers, n_experts)
    assert len(set(once.phases)) == len(once.phases) and set(MATRIX_PHASES) < set(once.phases)
    assert (once.wait_ns <= once.phase_ns).all() and (once.phase_ns <= profile.phase_ns).all()
    assert (profile.phase_ns.sum() > once.phase_ns.sum()) and once.phase_ns.sum() > 0
    inside = [once.phases.index(name) for name in ("norm", "qkv", "attend", "attn_out", "gate_up", "down")]
    assert (once.phase_ns[:-1, inside] > 0).all() and not once.phase_ns[-1, inside].any()
    outside = [once.phases.index(name) for name in ("embed", "output")]
    assert (once.phase_ns[-1, outside] > 0).all() and not once.phase_ns[:-1, outside].any()


def test_nothing_is_added_outside_the_block(model: colibri.Model) -> None:
    with colibri.measure(model) as profile:
        model.logits(IDS)
    after = profile.copy()
    model.logits(IDS)
    assert np.array_equal(profile.phase_ns, after.phase_ns)
    profile.clear()
    assert not profile.phase_ns.any() and not profile.wait_ns.any() and not profile.expert_ns.any()


def test_times_are_those_of_the_chosen_experts(model: colibri.Model) -> None:
    ids = IDS[:1]
    chosen = {layer: set(routing.experts.ravel().tolist()) for layer, routing in model.routing(ids).items()}
    with colibri.measure(model) as profile:
        model.logits(ids)
    for layer, ns in enumerate(profile.expert_ns):
        assert set(np.flatnonzero(ns).tolist()) == chosen[layer]


def test_a_dense_model_has_no_experts(make_model: Callable[..., Path]) -> None:
    with colibri.load(make_model("llama"), context=64) as model, colibri.measure(model) as profile:
        model.logits(IDS)
    assert profile.expert_ns.shape == (model.config["n_layers"], 0) and profile.phase_ns.any()


def test_one_measurement_at_a_time(model: colibri.Model) -> None:
    with (
        colibri.measure(model),
        pytest.raises(ArgumentError, match="measured already"),
        colibri.measure(model),
    ):
        pass
    with colibri.measure(model) as profile:
        model.close()
    assert not profile.phase_ns.any()
    with pytest.raises(ArgumentError, match="closed"), colibri.measure(model):
        pass


def test_an_error_inside_the_block_ends_the_measurement(model: colibri.Model) -> None:
    with pytest.raises(ZeroDivisionError), colibri.measure(model):
        _ = 1 / 0
    with colibri.measure(model) as profile:
        model.logits(IDS)
    assert profile.phase_ns.any()


# --- the loops and the report


def test_loops_measure_what_they_evaluate(model: colibri.Model) -> None:
    loops = Loops(model, 20, 5)
    loops.prefill()
    loops.decode()
    with pytest.raises(colibri.ColibriError, match="not evaluated"):
        loops.prefill()
    loops.renew()
    prefill, decode = loops.timed()
    assert (prefill.tokens, decode.tokens, model.position) == (20, 5, 25)
    for part in (prefill, decode):
        measured = int(part.profile.phase_ns.sum())
        assert 0 < measured <= part.seconds * 1e9
        matrices = [part.profile.phases.index(name) for name in MATRIX_PHASES]
        assert outside_matrices_ns(part.profile) + int(part.profile.phase_ns[:, matrices].sum()) == measured
        assert 0 <= wait_share(part.profile) <= 1


def test_the_report_counts_rows_of_experts(model_path: Path) -> None:
    report = phases.profile(model_path, Opening(threads=2), 30, 6)
    used = 2
    for part, tokens in zip(report.parts, (30, 6), strict=True):
        assert part.rows.shape == (report.n_layers, report.n_experts)
        assert (part.rows.sum(axis=1) == tokens * used).all()
        for layer in range(report.n_layers):
            experts = part.experts(layer)
            assert {one.number for one in experts} == set(np.flatnonzero(part.rows[layer]).tolist())
            assert [one.ns for one in experts] == sorted((one.ns for one in experts), reverse=True)
            assert all(one.ns > 0 for one in experts)
            assert sum(one.share for one in experts) == pytest.approx(1)


def test_bounds_are_told(model_path: Path) -> None:
    with pytest.raises(ArgumentError, match="decode: expected at least 1"):
        phases.profile(model_path, Opening(), 3, 0)
    with pytest.raises(ArgumentError, match="trained for"):
        phases.profile(model_path, Opening(), 1_000_000, 5)


def test_the_chart_is_one_standalone_picture(model_path: Path) -> None:
    report = phases.profile(model_path, Opening(threads=1), 8, 4)
    root = chart.tree(report)
    assert [child.name for child in root.children] == ["prefill", "decode"]

    def check(box: chart.Box) -> None:
        assert sum(child.ns for child in box.children) <= box.ns * 1.000001
        for child in box.children:
            check(child)

    check(root)
    text = chart.svg(report)
    picture = ElementTree.fromstring(text)
    assert picture.tag == "{http://www.w3.org/2000/svg}svg"
    assert "href" not in text and "script" not in text and "url(" not in text
    assert text.count("http") == 1, "the name space and no other address"
    titles = [title.text or "" for title in picture.iter("{http://www.w3.org/2000/svg}title")]
    for words in ("prefill: 8 tokens", "decode: 4 tokens", "layer 1", "gate_up", "expert "):
        assert any(words in title for title in titles), words


# --- instructions

CALLGRIND = """events: Ir
ob=(1) /usr/lib/libc.so
fn=(7) memcpy
3 999
ob=(2) /somewhere/libcolibri.so
fn=(1) evaluate
12 100
cfn=(2) matmul
calls=3 40
14 5000
+2 7
fn=(2)
40 4000
* 1000
fn=(1)
-1 3
ob=(1)
fn=(7)
4 1
totals: 6110
"""


def test_own_costs_are_read_from_callgrind() -> None:
    assert instructions.function_costs(CALLGRIND.splitlines()) == {"evaluate": 110, "matmul": 5000}


def test_missing_tools_are_named(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _name: None)
    with pytest.raises(UnsupportedError, match="Install valgrind"):
        instructions.count(model_path, 2)


def test_counters_count_the_difference(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for perf: it runs the child and reports 1,000 instructions, and 500 for each token."""
    perf = tmp_path / "perf"
    perf.write_text(
        '#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done; shift\n"$@" || exit 1\n'
        'for last; do :; done\necho "$((1000 + 500 * last)),,instructions:u,1,100.00,," >&2\n'
    )
    perf.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda name: str(perf) if name == "perf" else None)
    found = instructions.count(model_path, 3)
    assert (found.tool, found.tokens, found.per_token) == ("perf", 3, 500)


# --- the command


def test_the_command_prints_tables(call: Callable[..., Result], model_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "chart.svg"
    found = call("profile", model_path, "--prompt", 8, "--decode", 4, "--threads", 1, "--chart", file)
    assert found.status == 0 and str(file) in found.err and file.read_text().startswith("<svg")
    for words in ("gate_up", "waiting", "slowest experts", "most used experts", "tok/s", "outside"):
        assert words in found.out


def test_columns_add_up_to_what_a_token_takes(model_path: Path) -> None:
    """Phases, and what is outside the engine, are all of the time that tok/s is computed from."""
    report = phases.profile(model_path, Opening(threads=1), 8, 4)
    for at, part in enumerate(report.parts):
        data = part.data()
        assert data["measured_ns"] + data["outside_engine_ns"] == pytest.approx(data["seconds"] * 1e9, abs=1)
        assert 1e6 / data["tok_per_s"] == pytest.approx(data["us_per_token"])
        columns = _phase_table(report).columns
        shown = dict(zip(columns[0].cells, columns[1 + 3 * at].cells, strict=True))
        inside = sum(
            float(str(shown[name])) for name in (*report.parts[0].timed.profile.phases, "outside the engine")
        )
        assert inside == pytest.approx(float(str(shown["all"])), abs=0.05 * len(shown))
        assert float(str(shown["all"])) == pytest.approx(data["us_per_token"], abs=0.06)
    assert (report.data()["residency"], report.data()["pin"]) == ("mapped", False)


def test_a_narrow_terminal_cuts_no_figure(
    call: Callable[..., Result], model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"FORCE_COLOR": "1", "COLUMNS": "40", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, value)
    found = call("profile", model_path, "--prompt", 8, "--decode", 4, "--threads", 1)
    assert found.status == 0 and "100.0%" in found.out and "attn_out" in found.out
    assert "1 thread," in found.out and not re.search(r"[\w.%]…", found.out)


def test_functions_have_names_and_shares_add_up() -> None:
    found = instructions.Instructions("callgrind", 1, 100, (("evaluate", 60), ("matmul", 36)), "")
    assert found.others == found.data()["other_instructions_per_token"] == 4
    rows = list(zip(*(column.cells for column in _instruction_table(found).columns), strict=True))
    assert rows[-2:] == [("others", "4", "4.0%"), ("all", "100", "100.0%")]
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["scikit-build"]["install"]["strip"] is False
    library = importlib.resources.files("colibri") / "libcolibri.so"
    assert b".symtab" in library.read_bytes(), "pip keeps the symbols of the library"


def test_the_command_prints_json(call: Callable[..., Result], model_path: Path) -> None:
    found = call("profile", model_path, "--prompt", 8, "--decode", 4, "--json")
    data = json.loads(found.out)
    assert (found.status, found.err) == (0, "")
    assert {
        "version",
        "machine",
        "model",
        "threads",
        "isa",
        "residency",
        "expert_slots",
        "pin",
        "prefill",
        "decode",
    } == set(data)
    for name, tokens in (("prefill", 8), ("decode", 4)):
        part = data[name]
        assert part["tokens"] == tokens and len(part["experts"]) == data["model"]["n_layers"]
        assert sum(phase["ns"] for phase in part["phases"].values()) == part["measured_ns"]
        for phase in part["phases"].values():
            assert sum(phase["ns_by_layer"]) == phase["ns"] >= phase["wait_ns"]


def test_streamed_experts_have_figures(call: Callable[..., Result], model_path: Path) -> None:
    """Eight experts in two layers, of which a token uses two in each; three have slots."""
    options = ("--prompt", 8, "--decode", 12, "--expert-slots", 3)
    data = json.loads(call("profile", model_path, *options, "--json").out)
    assert (data["residency"], data["expert_slots"]) == ("streamed", 3)
    for name, tokens in (("prefill", 8), ("decode", 12)):
        found = data[name]["streaming"]
        layers = found["layers"]
        uses = sum(layers["hits"]) + sum(layers["misses"])
        assert found["tokens"] == tokens and len(layers["hits"]) == data["model"]["n_layers"]
        assert found["hit_rate"] == sum(layers["hits"]) / uses < 1
        assert found["bytes_per_token"] == sum(layers["bytes_read"]) / tokens > 0
        assert found["wait_seconds"] == pytest.approx(sum(layers["wait_ns"]) / 1e9)
    assert sum(data["decode"]["streaming"]["layers"]["misses"]) <= 12 * 4
    table = call("profile", model_path, *options)
    for words in ("streamed, 3 experts in slots", "found in slots", "read from disk", "waited for reads"):
        assert words in table.out
    mapped = call("profile", model_path, "--prompt", 8, "--decode", 4)
    assert "found in slots" not in mapped.out and "mapped" in mapped.out


def test_the_command_refuses(call: Callable[..., Result], model_path: Path, tmp_path: Path) -> None:
    lost = tmp_path / "none" / "c.svg"
    for status, arguments, words in (
        (2, ["--prompt", 0], "prompt: expected at least 1"),
        (2, ["--prompt", 100_000_000], "trained for"),
        (2, ["--threads", 0], "threads: expected"),
        (2, ["--residency", "cloud"], "residency: expected"),
        (2, ["--expert-slots", 9], "--expert-slots: expected 1 to 8"),
        (1, ["--prompt", 2, "--decode", 1, "--chart", lost], "Cannot write"),
    ):
        found = call("profile", model_path, *arguments)
        assert (found.status, found.out) == (status, ""), found.err
        assert words in found.err and "Traceback" not in found.err


def test_a_dense_model_has_tables_too(call: Callable[..., Result], tmp_path: Path) -> None:
    call("convert", checkpoints.llama(tmp_path / "base"), tmp_path / "base.colibri")
    found = call("profile", tmp_path / "base.colibri", "--prompt", 4, "--decode", 2)
    assert found.status == 0 and "gate_up" in found.out and "experts" not in found.out
