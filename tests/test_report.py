"""`colibri report`: the page holds the measures and nothing that breaks it, loads nothing; tables, pictures,
sentences, options. What a browser makes of the page: tests/browser."""

import base64
import csv
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import colibri
import made_traces
from colibri.analysis import page
from colibri.analysis.findings import findings
from colibri.analysis.measures import Measures, measure
from colibri.analysis.recording import Text, record
from colibri.analysis.trace import Trace
from colibri.format import read_container
from test_cli import Result
from test_cli import call as call

BAD = "</script><img src=x onerror=alert(1)>&amp;<!--"
TEXTS = [
    Text("Once upon " + BAD, BAD),
    Text("The bird sat. 12 + 3", "verse"),
    Text("one\ntwo", "verse"),
]


class Page(HTMLParser):
    """Elements and the contents of scripts and styles, as a browser would part them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, list[str]] = {}
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = tag

    def handle_data(self, data: str) -> None:
        self.inside.setdefault(self._open, []).append(data)

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    @property
    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.inside["script"][0])
        return found


@pytest.fixture(scope="module")
def traced(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace beside its model."""
    path = tmp_path_factory.mktemp("traced")
    (path / model_path.name).symlink_to(model_path)
    with colibri.load(model_path, context=64) as model:
        record(model, TEXTS, path / "run.trace", generate=3)
    return path / "run.trace"


@pytest.fixture(scope="module")
def measured(traced: Path, model_path: Path) -> Iterator[Measures]:
    yield measure(Trace(traced), read_container(model_path))


@pytest.fixture(scope="module")
def parsed(measured: Measures) -> Page:
    return Page(page.page(measured, findings(measured)))


def test_no_text_of_the_trace_becomes_mark_up(parsed: Page) -> None:
    assert not [tag for tag, _ in parsed.tags if tag in ("img", "link", "iframe", "object")]
    assert len(parsed.inside["script"]) == 2
    texts = parsed.data["texts"]["texts"]
    assert texts[0]["label"] == BAD and "".join(texts[0]["texts"]).startswith("<s>Once upon " + BAD)
    assert parsed.data["labels"] == [BAD, "verse"]


def test_it_loads_nothing_and_runs_its_own_script_alone(parsed: Page) -> None:
    policy = next(a["content"] or "" for tag, a in parsed.tags if tag == "meta" and a.get("http-equiv"))
    script, style = parsed.inside["script"][1], parsed.inside["style"][0]
    for kind, text in (("script", script), ("style", style)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; ")
    assert not [
        name for _, a in parsed.tags for name in a if name in ("src", "style") or name.startswith("on")
    ]
    assert not re.search(
        r"\b(fetch|XMLHttpRequest|innerHTML|eval|import)\b|https?://(?!www\.w3\.org/)", script
    )


def test_the_page_holds_the_choices_of_the_trace(parsed: Page, measured: Measures) -> None:
    texts = parsed.data["texts"]
    chosen = np.frombuffer(base64.b64decode(texts["experts"]), "<u2").reshape(2, texts["rows"], texts["k"])
    weights = np.frombuffer(base64.b64decode(texts["weights"]), "u1").reshape(chosen.shape)
    ids = np.concatenate([text["ids"] for text in texts["texts"]])
    trace = measured.trace
    order = np.concatenate([np.flatnonzero(trace.array("sequences") == t["number"]) for t in texts["texts"]])
    assert np.array_equal(ids, trace.array("ids")[order]) and texts["rows"] == trace.n_rows
    for at, one in enumerate(measured.choices):
        assert np.array_equal(chosen[at], one.experts[order])
        assert np.abs(weights[at] / 255 - one.weights[order]).max() < 0.003
        assert parsed.data["layers"][at]["counts"] == np.bincount(one.experts.ravel(), minlength=4).tolist()
    assert texts["texts"][0]["prompt"] < texts["texts"][0]["length"]  # what the model wrote is told apart


def test_the_upper_triangle_is_packed_row_by_row() -> None:
    values = np.array([[1, -1, 0], [-1, 1, np.nan], [0, np.nan, 1]])
    assert list(base64.b64decode(page._triangle(values, -1, 1))) == [0, 127, 255]


def test_a_row_that_does_not_pass_a_layer_has_no_choice(tmp_path: Path) -> None:
    from test_trace import write_made

    write_made(tmp_path / "a.trace")
    measures = measure(Trace(tmp_path / "a.trace"))
    texts = Page(page.page(measures, findings(measures))).data["texts"]
    chosen = np.frombuffer(base64.b64decode(texts["experts"]), "<u2").reshape(3, 3, 2)
    assert (chosen[0] != page.NONE).all(1).tolist() == [True, True, False]  # of the encoder
    assert (chosen[1] != page.NONE).all(1).tolist() == [False, False, True]


def test_a_page_of_64_layers_of_256_experts_is_bounded(tmp_path: Path) -> None:
    path = made_traces.write(tmp_path / "big.trace", 64, 256, 8, tokens=64, texts=2)
    measures = measure(Trace(path))
    found = findings(measures)
    text = page.page(measures, found)
    assert len(text) < 16 << 20
    told = [one.text for one in found if one.severity == "fault"]
    assert told == ["layer 1: expert 2 takes 100 % of tokens"]
    assert any("not chosen in 64 tokens; the trace is too short" in one.text for one in found)


def test_long_traces_show_some_texts_of_every_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MOST_ROWS", 250)
    path = made_traces.write(tmp_path / "a.trace", 2, 8, 2, tokens=2000, texts=20, labels=("a", "b", "c"))
    texts = page.page_data(measure(Trace(path)))["texts"]
    assert [text["label"] for text in texts["texts"]] == ["a", "b", "c"] and texts["rows"] == 250
    assert [len(text["ids"]) for text in texts["texts"]] == [100, 100, 50]
    assert texts["texts"][2]["length"] == 100


# --- the command


def test_the_command_writes_page_tables_and_sentences(
    call: Callable[..., Result], traced: Path, tmp_path: Path
) -> None:
    result = call("report", traced, "-o", tmp_path / "r.html", "--csv", tmp_path / "tables")
    assert result.status == 0 and result.err == ""  # the model lies beside the trace
    assert all(line.split()[0] in ("fault", "warning", "note") for line in result.out.splitlines())
    text = (tmp_path / "r.html").read_text("utf-8")
    assert page.MARK in text and Page(text).data["texts"]["texts"][0]["classes"]
    tables = {file.stem: list(csv.DictReader(file.open())) for file in (tmp_path / "tables").iterdir()}
    assert {"findings", "layers", "load", "pairs", "cache", "domains", "classes", "drift"} == tables.keys()
    trace = Trace(traced)
    assert sum(int(row["tokens"]) for row in tables["load"]) == len(trace.array("experts")) * 2
    assert sum(int(row["ns"]) for row in tables["load"]) == trace.array("visit_ns").sum()
    assert {row["label"] for row in tables["domains"]} == {BAD, "verse"}
    assert len(tables["layers"]) == 2 and tables["cache"][-1]["slots"] == "8"


def test_json_has_findings_and_figures(call: Callable[..., Result], traced: Path) -> None:
    result = call("report", traced, "--json")
    told = json.loads(result.out)
    assert told["tokens"] == Trace(traced).n_rows and len(told["layers"]) == 2
    assert all({"kind", "severity", "layer", "text", "value"} == one.keys() for one in told["findings"])
    assert told["layers"][1]["domains"]["label_entropy"] > 0 and set(told["cache"]["hit_rates"]) >= {"lru"}


def test_without_the_model_there_are_ids_and_a_note(
    call: Callable[..., Result], traced: Path, model_path: Path, tmp_path: Path
) -> None:
    alone = tmp_path / "run.trace"
    alone.write_bytes(traced.read_bytes())
    result = call("report", alone, "-o", tmp_path / "r.html")
    assert result.status == 0 and "--model names the model of the trace" in result.err
    data = Page((tmp_path / "r.html").read_text("utf-8")).data
    assert data["texts"]["texts"][0]["names"][0] == "id 1" and "classes" not in data["layers"][0]
    assert call("report", alone, "-o", tmp_path / "r.html", "--model", model_path).err == ""  # replaces it
    assert "classes" in Page((tmp_path / "r.html").read_text("utf-8")).data["layers"][0]
    wrong = call("report", alone, "--model", "demo")
    assert wrong.status == 2 and "was recorded with 'model.colibri', another file than" in wrong.err


def test_nothing_else_is_written_over(call: Callable[..., Result], traced: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.html").write_text("<html>mine</html>")
    result = call("report", traced, "-o", tmp_path / "mine.html")
    assert result.status == 2 and "exists and is no report" in result.err
    assert (tmp_path / "mine.html").read_text() == "<html>mine</html>"
    assert call("report", traced, "-o", tmp_path / "r.txt").err.startswith("colibri: -o: expected a file")
    assert call("report", traced, "-o", tmp_path / "no" / "r.html").status == 1
    (tmp_path / "file").write_text("")
    assert "Cannot make the directory" in call("report", traced, "--csv", tmp_path / "file").err


def test_pictures_are_drawn_or_the_command_to_get_them_is_named(
    call: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made_traces.write(tmp_path / "a.trace", 3, 8, 2, tokens=600)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib", None)
        result = call("report", path, "--png", tmp_path / "png")
        assert result.status == 1 and "pip install 'colibri-moe[report]'" in result.err
        assert not (tmp_path / "png").exists()
    pytest.importorskip("matplotlib")
    assert call("report", path, "--png", tmp_path / "png").status == 0
    names = {"load", "balance", "cache", "coactivation", "domains", "time"}
    assert {file.stem for file in (tmp_path / "png").iterdir()} == names
    assert all(file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for file in (tmp_path / "png").iterdir())
