"""`colibri bench`: what is counted, synthetic models, turns in fresh processes, the JSON object. No speed."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import colibri
from colibri.analysis import bandwidth, bench, cost, instructions, machine, runs, shapes, synthetic, turns
from colibri.cli.bench import _doubts
from colibri.entries import weight_types
from colibri.errors import ArgumentError, ColibriError, ModelFileError
from colibri.format import read_container
from colibri.inspection import describe, require_intact
from colibri.quantize import TYPE_IDS, panel_bytes
from test_cli import Result
from test_cli import call as call


@pytest.fixture(autouse=True)
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests look at the arithmetic of figures, so a probe need not be larger than a cache."""
    monkeypatch.setattr(bandwidth, "buffer_bytes", lambda: 4 << 20)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """mixtral-tiny in a weight type, written once for a run."""
    directory = tmp_path_factory.mktemp("synthetic")

    def make(type: str) -> Path:
        path = directory / f"{type}.colibri"
        if not path.exists():
            synthetic.write("mixtral-tiny", path, weight_types(type))
        return path

    return make


# --- bytes and operations


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "llama"])
def test_bytes_of_a_token_are_those_of_the_directory(make_model: Callable[..., Path], family: str) -> None:
    """By hand: everything but the embedding, of the experts only those that are used, and one panel of the
    embedding (of an output head that is the embedding, the whole)."""
    path = make_model(family, "q8")
    container = read_container(path)
    found, config = cost.cost(path), container.config
    tensors = {entry.name: entry for entry in container.entries if entry.kind != "blob"}
    rest = sum(e.bytes for name, e in tensors.items() if name not in ("embedding", "output"))
    for name, entry in tensors.items():
        if entry.kind == "expert" and int(name.rpartition(".")[2]) >= config["n_experts_used"]:
            rest -= entry.bytes
    embedding = tensors["embedding"]
    assert found.embedding_bytes == panel_bytes(embedding.cols, embedding.types[0])
    assert found.dense_bytes + found.experts_bytes == rest
    assert found.output_bytes == tensors.get("output", embedding).bytes
    weights = found.embedding_bytes + rest + found.output_bytes
    assert found.decode_bytes(10) - weights == 10 * found.kv_bytes_per_position


@pytest.mark.parametrize("family", ["mixtral", "llama"])
def test_the_cache_is_counted_as_the_plan_counts_it(make_model: Callable[..., Path], family: str) -> None:
    path = make_model(family)
    with colibri.load(path, context=128) as model:
        planned = model.memory.kv_cache
    assert 0 <= planned - 128 * cost.cost(path).kv_bytes_per_position < 4096


def test_operations_are_those_of_the_shape(tiny: Callable[[str], Path]) -> None:
    shape = shapes.SHAPES["mixtral-tiny"]
    attention, expert = shape.matrices
    layer = attention + shape.n_experts_used * expert + shape.n_experts * shape.n_embd
    found = cost.cost(tiny("q8"))
    assert found.layers_flops == 2 * shape.n_layers * layer
    assert found.output_flops == 2 * shape.n_vocab * shape.n_embd
    assert found.prefill_flops(7) == 7 * found.layers_flops + found.output_flops


# --- synthetic models


@pytest.mark.parametrize("type", TYPE_IDS)
def test_synthetic_models_are_valid_and_behave(tiny: Callable[[str], Path], type: str) -> None:
    path = tiny(type)
    require_intact(path)
    found = describe(path)
    assert set(found.types) == {type, "f32"} and found.source["type"] == type
    with colibri.load(path, threads=2, context=64) as model:
        ids = np.random.default_rng(1).integers(0, model.n_vocab, 48)
        logits = model.logits(ids)
        assert 2 < logits.std() < 5, "logits single out few tokens, as a trained model's do"
        for routing in model.routing(ids).values():
            assert len(np.unique(routing.experts)) >= 6, "routing spreads over the experts"
        assert model.generate("Hello", max_tokens=4, temperature=1, seed=1).n_generated
        assert model.tokenizer.decode(model.tokenizer.encode("any é text")) == "any é text"


def test_synthetic_models_repeat_from_their_seed(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.colibri" for number in range(3)]
    seen: list[tuple[int, int]] = []
    for path, seed in zip(paths, (0, 0, 1), strict=True):
        types = weight_types("q8", experts="q4", output="bf16")
        size = synthetic.write(
            "mixtral-tiny", path, types, seed=seed, progress=lambda done, total, _: seen.append((done, total))
        )
        assert size == path.stat().st_size
    first, second, other = (path.read_bytes() for path in paths)
    assert first == second != other and len(first) == len(other)
    assert seen[-1][0] == seen[-1][1] and describe(paths[0]).source["type"] == str(types)
    assert {"q4", "q8", "bf16"} < set(describe(paths[0]).types)


def test_synthetic_models_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLIBRI_CACHE", str(tmp_path / "cache"))
    notes: list[str] = []
    path = synthetic.cached("mixtral-tiny", weight_types("q4"), notify=notes.append)
    assert path.parent == tmp_path / "cache" and "mixtral-tiny-q4" in path.name and str(path) in notes[0]
    when = path.stat().st_mtime_ns
    assert synthetic.cached("mixtral-tiny", weight_types("q4"), notify=notes.append) == path
    assert path.stat().st_mtime_ns == when and len(notes) == 1
    path.write_bytes(path.read_bytes()[:-1])
    synthetic.cached("mixtral-tiny", weight_types("q4"), notify=notes.append)
    require_intact(path)
    assert len(notes) == 3 and notes[1] == f"The cached {path} is damaged; making it again."
    assert len(list(path.parent.iterdir())) == 1
    with pytest.raises(ArgumentError, match="expected one of olmoe-7b"):
        synthetic.cached("gigantic", weight_types("q4"))


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_shapes_keep_to_whole_panels(name: str) -> None:
    shape = shapes.SHAPES[name]
    widths = (shape.n_embd, shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim)
    assert all(width % 32 == 0 for width in (*widths, shape.n_ff_expert)) and shape.n_vocab % 16 == 0


# --- the machine


def test_the_machine_is_described() -> None:
    found = machine.describe()
    assert found["cpus"] >= 1 and found["cpu"] and found["load_1_min"] >= 0
    own = machine.process_bytes()
    assert own is None or own["peak"] >= own["anonymous"] > 0


def test_the_probe_reads_all_of_its_buffer() -> None:
    probe = bandwidth.Probe()
    for threads in (1, 2, 3):
        found = probe.read(threads)
        assert found.threads == threads and found.gb_per_s > 0 and found.cached_gb_per_s > 0
    assert bandwidth.Reading(2, 20, 30).memory_bound and not bandwidth.Reading(2, 20, 11).memory_bound


def test_a_dropped_file_is_known_to_be_dropped(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    path = tmp_path / "copy.colibri"
    path.write_bytes(tiny("f32").read_bytes())
    assert share_of(path) in (1, None), "it was written a moment ago"
    dropped = turns.drop(path)
    assert (dropped is None) == (share_of(path) is None)
    if dropped == 0:
        assert share_of(path) == 0, "asking brings nothing back"
        with path.open("rb") as file:
            file.read(1)
        assert 0 < (share_of(path) or 0) <= 1


def share_of(path: Path) -> float | None:
    with path.open("rb") as file:
        return turns.cached_share(file.fileno())


def test_a_file_that_cannot_be_asked_about_is_not_told(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert share_of(tmp_path / "empty") is None


# --- the benchmark


@pytest.fixture(scope="module")
def report(tiny: Callable[[str], Path]) -> bench.Report:
    steps: list[tuple[int, int, str]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bandwidth, "buffer_bytes", lambda: 4 << 20)
        plan = bench.Plan(24, 6, threads=[2, 1], repeat=2)
        found = bench.bench(tiny("q8"), plan, lambda *step: steps.append(step))
    names = [name.partition(",")[0] for _, _, name in steps]
    assert names == ["threads 2", "threads 1", "threads 2", "threads 1", "cold start"], "interleaved"
    return found


CELL_KEYS = {
    "threads",
    "isa",
    "turns",
    *(
        name + end
        for name in ("prefill_tok_per_s", "decode_tok_per_s", "decode_gb_per_s", "read_gb_per_s")
        for end in ("", "_min", "_max")
    ),
    "prompt_to_first_token_ms",
    "start_warm_ms",
    "decode_bytes_per_token",
    "decode_share_of_read",
    "read_probe_is_memory_bound",
    "prefill_gop_per_s",
    "peak_gop_per_s",
    "prefill_share_of_peak",
    "peak_rss_bytes",
    "peak_rss_beyond_plan_bytes",
    "plan_bytes",
    "residency",
    "streaming",
    "outside_matrices_us_per_token",
    "attention_us_per_token",
    "barrier_wait_share",
}


def test_figures_follow_from_each_other(report: bench.Report, tiny: Callable[[str], Path]) -> None:
    data = json.loads(json.dumps(report.data()))
    assert [cell["threads"] for cell in data["cells"]] == [2, 1]
    price = cost.cost(tiny("q8"))
    for cell, turn in zip(data["cells"], report.cells, strict=True):
        assert set(cell) == CELL_KEYS and cell["turns"] == 2
        # decoded tokens look at 25 to 30 positions
        assert cell["decode_bytes_per_token"] == price.decode_bytes(27.5)
        rate = cell["decode_tok_per_s"]
        assert cell["decode_gb_per_s"] == pytest.approx(cell["decode_bytes_per_token"] * rate / 1e9)
        operations = price.prefill_flops(24) / 24 * cell["prefill_tok_per_s"]
        assert cell["prefill_gop_per_s"] == pytest.approx(operations / 1e9)
        assert cell["prefill_tok_per_s_min"] <= cell["prefill_tok_per_s"] <= cell["prefill_tok_per_s_max"]
        start = cell["start_warm_ms"]
        assert 0 < start["open"] < start["open_to_first_token"] < start["process_to_first_token"]
        assert 0 <= cell["barrier_wait_share"] <= 1 and cell["outside_matrices_us_per_token"] > 0
        assert 0 < cell["attention_us_per_token"] < cell["outside_matrices_us_per_token"]
        shares = sorted(
            price.prefill_flops(24) / one.prefill_seconds / 1e9 / one.peak_gop_per_s for one in turn.turns
        )
        assert cell["prefill_share_of_peak"] == pytest.approx(sum(shares) / 2)
        assert all(one.peak_gop_per_s > 0 for one in turn.turns)
        assert cell["plan_bytes"]["total_bytes"] > data["model"]["file_bytes"]
        assert cell["peak_rss_bytes"] is None or cell["peak_rss_bytes"] > 0
        rates = sorted(6 / one.decode_seconds for one in turn.turns)
        assert rate == pytest.approx(sum(rates) / 2)


def test_the_report_names_its_conditions(report: bench.Report) -> None:
    data = report.data()
    assert (data["prompt_tokens"], data["decode_tokens"], data["repeats"]) == (24, 6, 2)
    assert data["machine"]["cpus"] >= 1 and data["version"] == colibri.__version__
    assert data["read_probe"]["buffer_bytes"] == 4 << 20 and "numpy" in data["read_probe"]["method"]
    cold = data["start_cold"]
    assert (cold["start_ms"] is None) != (cold["not_measured_because"] is None) and cold["threads"] == 2


def test_a_file_that_stays_cached_gives_no_cold_start(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = turns.Settings(tiny("q8"), 4, 1)
    for share, words in ((0.5, "50% of the file"), (None, "does not tell")):
        monkeypatch.setattr(turns, "drop", lambda _path, share=share: share)
        cold = bench._cold_start(settings, 1)
        assert cold.start is None and words in (cold.reason or "")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"n_prompt": 0}, ArgumentError, "prompt: expected at least 1"),
        ({"n_decode": 0}, ArgumentError, "decode: expected at least 1"),
        ({"repeat": 0}, ArgumentError, "repeat: expected at least 1"),
        ({"threads": [1, 1]}, ArgumentError, "different integers"),
        ({"threads": [257]}, ArgumentError, "1 to 256"),
        ({"options": {"residency": "foo"}}, ArgumentError, "residency: expected one of"),
        ({"options": {"pin": True}}, ArgumentError, "pin=True has no effect with threads=1"),
        ({"n_prompt": 4096, "n_decode": 1}, ArgumentError, "trained for 4096"),
    ],
)
def test_wrong_values_are_told_first(
    tiny: Callable[[str], Path], options: dict[str, Any], error: type[Exception], words: str
) -> None:
    defaults: dict[str, Any] = {"n_prompt": 4, "n_decode": 1, "threads": [1], "repeat": 1}
    with pytest.raises(error, match=words):
        bench.bench(tiny("q8"), bench.Plan(**(defaults | options)))


def test_an_error_of_a_turn_is_told(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    settings = turns.Settings(tiny("q8"), 4, 1)
    with pytest.raises(ColibriError, match="absent"):
        turns.start_only(replace(settings, model=tmp_path / "absent.colibri"), 1, 0)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory whose modules must not be imported: each leaves a mark."""
    paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if paths:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    directory = tmp_path / "elsewhere"
    directory.mkdir()
    for name in ("json", "numpy", "colibri", "re"):
        (directory / f"{name}.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\nraise SystemExit(9)\n")
    monkeypatch.chdir(directory)
    return tmp_path / "mark"


def test_children_run_no_code_of_the_current_directory(tiny: Callable[[str], Path], elsewhere: Path) -> None:
    assert turns.start_only(turns.Settings(tiny("q8"), 4, 1), 1, 0).whole > 0
    assert instructions._run(instructions._child(tiny("q8"), 1)).returncode == 0
    assert not elsewhere.exists()


def test_errors_keep_their_class_through_the_process(tiny: Callable[[str], Path]) -> None:
    with pytest.raises(ArgumentError, match="residency: expected"):
        turns.start_only(turns.Settings(tiny("q8"), 4, 1, {"residency": "foo"}), 1, 0)


def test_a_file_that_is_replaced_meanwhile_is_refused(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    path = tmp_path / "model.colibri"
    path.write_bytes(tiny("q8").read_bytes())

    def replace_it(_done: int, _total: int, _name: str) -> None:
        (tmp_path / "new").write_bytes(tiny("q8").read_bytes())
        os.replace(tmp_path / "new", path)

    with pytest.raises(ModelFileError, match="replaced or changed"):
        bench.bench(path, bench.Plan(4, 1, [1], 1), replace_it)


@pytest.mark.parametrize(
    ("bytes", "threads", "words"),
    [
        (2 << 20, 1, ["fits into the last-level cache"]),
        (64 << 20, 3, ["3 threads on 2 processors"]),
        (64 << 20, 2, []),
    ],
)
def test_shares_that_mean_little_are_remarked(bytes: int, threads: int, words: list[str]) -> None:
    cells = [{"threads": threads, "decode_bytes_per_token": bytes}]
    remarks = _doubts(cells, {"cpus": 2, "last_level_cache_bytes": 32 << 20})
    assert len(remarks) == len(words) and all(word in text for word, text in zip(words, remarks, strict=True))


@pytest.mark.parametrize(
    ("limit", "given", "expected"),
    [(4096, (None, None), (512, 64)), (512, (None, None), (448, 64)), (2, (None, None), (1, 1)),
     (128, (100, None), (100, 28)), (128, (None, 100), (28, 100)), (600, (8, 2), (8, 2))],
)  # fmt: skip
def test_defaults_fit_the_model(
    limit: int, given: tuple[int | None, int | None], expected: tuple[int, int]
) -> None:
    assert runs.lengths(limit, *given, default_prompt=512, default_decode=64) == expected


# --- the command


def test_the_command_measures_a_synthetic_model(
    call: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLIBRI_CACHE", str(tmp_path))
    small = ("--prompt", 8, "--decode", 2, "--repeat", 1, "--threads", 1)
    found = call("bench", "--synthetic", "mixtral-tiny", "--type", "q8", "--experts", "q4", *small)
    assert found.status == 0 and "written" not in found.out and "kept as" in found.err
    for words in ("decode, tok/s", "share reached", "the machine reads", "cold start", "peak resident"):
        assert words in found.out
    (file,) = tmp_path.iterdir()
    as_json = call("bench", file, *small, "--json")
    data = json.loads(as_json.out)
    assert as_json.status == 0 and set(data["model"]["bytes_by_type"]) == {"q4", "q8", "f32"}
    assert call("run", file, "Hello", "--max-tokens", 2).status == 0
    assert call("inspect", file, "--verify").status == 0


def test_streamed_experts_are_measured(call: Callable[..., Result], tiny: Callable[[str], Path]) -> None:
    """Half of the experts in slots: what is read are whole experts, and found and read are all uses."""
    small = ("--prompt", 8, "--decode", 20, "--repeat", 1, "--threads", 1)
    streamed = ("--expert-slots", 16, "--expert-policy", "lru", "--lanes", 2, "--prefetch")
    data = json.loads(call("bench", tiny("q8"), *small, *streamed, "--json").out)
    (cell,) = data["cells"]
    chosen = {"residency": "auto", "expert_slots": 16, "expert_policy": "lru", "lanes": 2, "prefetch": True}
    assert data["options"] == chosen
    assert cell["residency"] == "streamed" and cell["plan_bytes"]["expert_slots"] == 16
    assert cell["streaming"]["expert_slots"] == 16
    (prefetch,) = cell["streaming"]["prefetch"]
    assert prefetch["state"] == "on" and prefetch["on"]["evaluations"] >= 20 and prefetch["asked"] > 0
    expert = cell["plan_bytes"]["slot_bytes"]
    for part in ("prefill", "decode"):
        found = cell["streaming"][part]
        assert 0 <= found["hit_rate"] < 1 and found["wait_seconds_per_token"] > 0
        assert found["bytes_read_per_token"] > 0
    found = cell["streaming"]["decode"]
    assert found["bytes_read_per_token"] == pytest.approx(8 * (1 - found["hit_rate"]) * expert, rel=0.02)
    table = call("bench", tiny("q8"), *small, *streamed)
    for words in (
        "experts in slots",
        "on 1",
        "decode: found in slots",
        "read from disk per token",
        "waited for it",
    ):
        assert words in table.out
    mapped = json.loads(call("bench", tiny("q8"), *small, "--json").out)["cells"][0]
    assert (mapped["residency"], mapped["streaming"]) == ("mapped", None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to measure"),
        (["demo", "--residency", "mapped", "--lanes", "2"], "--lanes 2 has no effect"),
        (["demo", "--memory", "much"], "--memory: expected a size"),
        (["demo", "--synthetic", "mixtral-tiny"], "two models"),
        (["demo", "--type", "q8"], "--type q8 has no effect"),
        (["demo", "--threads", "1,x"], "--threads: expected numbers"),
        (["demo", "--threads", "0"], "threads: expected"),
        (["--synthetic", "gigantic"], "expected one of olmoe-7b"),
        (["demo", "--repeat", "0"], "--repeat: expected"),
    ],
)
def test_wrong_use_of_the_command(call: Callable[..., Result], arguments: list[str], words: str) -> None:
    found = call("bench", *arguments)
    assert (found.status, found.out) == (2, "") and words in found.err and "Traceback" not in found.err


def test_the_command_refuses_more_than_the_context(call: Callable[..., Result]) -> None:
    found = call("bench", "demo", "--prompt", 1_000_000)
    assert (found.status, found.out) == (2, "") and "trained for" in found.err
