"""Routing traces: what is recorded is what the engine says, numpy alone can read it, damage has a name."""

import json
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import colibri
from colibri import _native as native
from colibri.analysis.recording import Text, record, recorded
from colibri.analysis.trace import Header, Trace
from colibri.analysis.trace_writer import TraceWriter
from colibri.errors import ArgumentError, ModelIOError, UnsupportedError
from colibri.format import read_container
from test_cli import Result
from test_cli import call as call

TEXTS = [
    Text("Once upon a time", "story"),
    Text("The bird and the cat sat", "verse"),
    Text("Once upon", "story"),
]


@pytest.fixture
def trace_file(model: colibri.Model, tmp_path: Path) -> Path:
    record(model, TEXTS, tmp_path / "run.trace", logits=True)
    return tmp_path / "run.trace"


def left(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def plain(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Header and arrays of a trace, with numpy alone."""
    with np.load(path) as found:
        arrays = {name: found[name] for name in found.files if name != "header.json"}
        return json.loads(found["header.json"]), arrays


def all_but_times(path: Path) -> dict[str, bytes]:
    """The members of a trace that tell of no time and no place."""
    with zipfile.ZipFile(path) as archive:
        names = (name for name in archive.namelist() if not name.startswith("visit_"))
        return {name: archive.read(name) for name in names}


# --- what is recorded


def test_numpy_alone_reads_what_the_engine_says(trace_file: Path, model: colibri.Model) -> None:
    header, arrays = plain(trace_file)
    assert (header["format"], header["version"], header["labels"]) == ("colibri-trace", 1, ["story", "verse"])
    assert header["model"]["name"] == model.path.name and header["stacks"] == [[0, 1], []]
    assert arrays["sequence_labels"].tolist() == [0, 1, 0]
    start = row = 0
    for number, (text, (n, stack)) in enumerate(zip(TEXTS, arrays["chunks"], strict=True)):
        ids = model.prompt_ids(text.text)
        assert (n, stack) == (len(ids), 0) and arrays["sequence_prompts"][number] == n
        rows = slice(row, row + n)
        assert arrays["ids"][rows].tolist() == ids.tolist()
        assert arrays["positions"][rows].tolist() == list(range(n))
        assert set(arrays["sequences"][rows]) == {number}
        for layer, expected in model.routing(ids).items():
            here = slice(start, start + n)
            assert np.array_equal(arrays["experts"][here], expected.experts), layer
            assert np.array_equal(arrays["weights"][here], expected.weights.astype(np.float16))
            assert np.array_equal(arrays["logits"][here], expected.logits)
            start += n
        row += n
    assert start == len(arrays["experts"]) and arrays["experts"].dtype == np.uint8
    assert row == len(arrays["ids"])


def test_the_bytes_of_experts_are_those_of_the_file(make_model: Callable[..., Path], tmp_path: Path) -> None:
    path = make_model("mixtral", "q8")
    with colibri.load(path, context=64) as model:
        record(model, TEXTS, tmp_path / "a.trace")
    found = Trace(tmp_path / "a.trace").array("expert_bytes")
    entries = {entry.name: entry for entry in read_container(path).entries}
    assert found.shape == (2, 4)
    for layer in range(2):
        for expert in range(4):
            entry = entries[f"layers.{layer}.experts.{expert}"]
            assert entry.bytes % 4096 and found[layer, expert] % 4096 == 0
            assert 0 < found[layer, expert] - entry.bytes < 4096


def test_steps_come_in_the_order_of_the_engine(model_path: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, list[list[int]]]] = []
    with colibri.load(model_path, context=64, chunk=3) as model:
        with model.observe(routing=lambda v: seen.append((v.layer, v.rows().experts.tolist()))):
            model.logits(model.prompt_ids(TEXTS[1].text))
        record(model, TEXTS[1:2], tmp_path / "a.trace")
    trace = Trace(tmp_path / "a.trace")
    steps = list(trace.steps())
    assert [(step.layer, step.experts.tolist()) for step in steps] == seen and len(steps) > 4
    assert [step.chunk for step in steps] == [at // 2 for at in range(len(steps))]
    assert steps[0].rows == slice(0, 3) and steps[0].logits is None
    assert trace.array("positions")[steps[-1].rows].tolist()[-1] == trace.n_rows - 1


def test_written_tokens_are_traced_one_by_one(model_path: Path, tmp_path: Path) -> None:
    with colibri.load(model_path, context=64) as model:
        ids = model.prompt_ids("Once upon")
        result = model.generate(ids, max_tokens=6, temperature=0)
        recorded = record(model, [Text("Once upon")] * 2, tmp_path / "a.trace", generate=6, temperature=0)
        whole = np.concatenate([ids, result.ids])
        expected = model.routing(whole[: recorded.tokens // 2])
    trace = Trace(tmp_path / "a.trace")
    n = trace.n_rows // 2
    assert n in (len(whole) - 1, len(whole)) and recorded == (2, 2 * n)
    assert trace.array("chunks")[:, 0].tolist() == [len(ids), *[1] * (n - len(ids))] * 2
    assert trace.array("ids").tolist() == whole[:n].tolist() * 2, "a text that comes again is traced whole"
    assert trace.array("sequence_prompts").tolist() == [len(ids)] * 2
    found: dict[int, list[Any]] = {0: [], 1: []}
    for step in trace.steps():
        if trace.array("sequences")[step.rows.start] == 0:
            found[step.layer] += step.experts.tolist()
    assert found == {layer: routing.experts.tolist() for layer, routing in expected.items()}


def test_long_texts_become_several_sequences(model_path: Path, tmp_path: Path) -> None:
    with colibri.load(model_path, context=16) as model:
        ids = model.prompt_ids("The bird sat on the mat and the cat ate it. " * 3)
        recorded = record(
            model, [Text("The bird sat on the mat and the cat ate it. " * 3)], tmp_path / "a.trace"
        )
        begin = ids[:1].tolist() if model.tokenizer.add_bos else []
    trace = Trace(tmp_path / "a.trace")
    numbers, all_ids = trace.array("sequences"), trace.array("ids").tolist()
    assert recorded.sequences == len(np.unique(numbers)) > 2
    joined = [all_ids[0]] if begin else []
    for number in range(recorded.sequences):
        piece = [id for id, at in zip(all_ids, numbers, strict=True) if at == number]
        assert len(piece) <= 16 and piece[: len(begin)] == begin
        joined += piece[len(begin) :]
    assert joined == ids.tolist()


def test_a_source_and_what_is_made_of_it(make_model: Callable[..., Path], tmp_path: Path) -> None:
    path = Path(__file__).parent.parent / "examples" / "plain_verse" / "plain.colibri"
    with colibri.load(path, context=64) as model:
        source = model.prompt_ids("My son, hear the words.")
        written = model.generate("My son, hear the words.", max_tokens=5, temperature=0).ids
        record(model, [Text("My son, hear the words.")], tmp_path / "a.trace", generate=5, temperature=0)
        target = [*model.start_ids(), *written]
        expected = model.routing(target[: len(written)], source="My son, hear the words.")
    trace = Trace(tmp_path / "a.trace")
    assert trace.header.stacks == ((3,), (1,))
    steps = list(trace.steps())
    assert [step.layer for step in steps] == [1] + [3] * (len(steps) - 1)
    assert trace.array("chunks")[:, 1].tolist() == [1] + [0] * (len(steps) - 1)
    assert np.array_equal(steps[0].experts, expected[1].experts)
    assert [step.experts[0].tolist() for step in steps[1:]][: len(written)] == expected[3].experts.tolist()
    assert trace.array("ids").tolist() == [*source, *target][: trace.n_rows]
    assert trace.array("sequence_prompts").tolist() == [len(source)]


def test_tracing_changes_no_bit(model: colibri.Model, tmp_path: Path) -> None:
    before = model.generate("Once upon", max_tokens=8, temperature=0.9, seed=3)
    record(model, TEXTS, tmp_path / "a.trace", generate=4)
    after = model.generate("Once upon", max_tokens=8, temperature=0.9, seed=3)
    assert before.ids == after.ids


def test_equal_runs_are_equal_files(model: colibri.Model, tmp_path: Path) -> None:
    for name in "ab":
        record(model, TEXTS, tmp_path / name, generate=4, temperature=0.8, seed=1)
    assert all_but_times(tmp_path / "a") == all_but_times(tmp_path / "b")


def test_what_cannot_be_traced_is_said(
    model: colibri.Model, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    with (
        colibri.load(make_model("llama"), context=64) as dense,
        pytest.raises(UnsupportedError, match="no routed"),
    ):
        record(dense, TEXTS, tmp_path / "a.trace")
    with pytest.raises(ArgumentError, match="at least one"):
        record(model, [], tmp_path / "a.trace")
    with pytest.raises(ArgumentError, match="generate: expected 0 to 63"):
        record(model, TEXTS, tmp_path / "a.trace", generate=64)
    with pytest.raises(ModelIOError, match="Cannot write"):
        record(model, TEXTS, tmp_path / "none" / "a.trace")
    with recorded(model), pytest.raises(ArgumentError, match="recorded already"):
        record(model, TEXTS, tmp_path / "a.trace")
    assert left(tmp_path) == []


# --- the writer, without a model

HEADER = Header({"name": "made"}, 4, 1, (2, 0, 300, 5), 2, ("a",), True)


def found(chunks: list[tuple[int, int]], experts: list[list[int]], ids: list[int]) -> dict[str, Any]:
    """What a recording would hold of a sequence; all weights are a half, visits are left out."""
    return {
        "chunks": np.array(chunks, np.int32),
        "ids": np.array(ids, np.int32),
        "positions": np.arange(len(ids), dtype=np.int32),
        "sequences": np.zeros(len(ids), np.int32),
        "experts": np.array(experts, np.int32),
        "weights": np.full((len(experts), 2), 0.5, np.float32),
    }


def write_made(path: Path) -> None:
    with TraceWriter(path, HEADER, np.arange(1200).reshape(4, 300)) as writer:
        made = found([(2, 1), (1, 0)], [[1, 0], [0, 1], [299, 7], [4, 0]], [5, 6, 7])
        logits = np.random.default_rng(0).random((4, 300)).astype(np.float32)
        logits[3] = np.nan
        logits[3, :5] = range(5)
        writer.add_sequence(made | {"logits": logits}, label="a", n_prompt=2)


def test_layers_may_differ_in_experts(tmp_path: Path) -> None:
    write_made(tmp_path / "a.trace")
    trace = Trace(tmp_path / "a.trace")
    assert trace.header == HEADER and trace.array("experts").dtype == np.uint16
    steps = list(trace.steps())
    assert [step.layer for step in steps] == [0, 2, 3]
    assert [step.experts.tolist() for step in steps] == [[[1, 0], [0, 1]], [[299, 7]], [[4, 0]]]
    assert [step.logits.shape for step in steps if step.logits is not None] == [(2, 2), (1, 300), (1, 5)]
    assert steps[2].logits is not None and steps[2].logits.tolist() == [[0, 1, 2, 3, 4]]
    assert np.isnan(trace.array("logits")[-1, 5:]).all()
    assert trace.array("ids").tolist() == [5, 6, 7]


def test_memory_does_not_grow_with_the_trace(model: colibri.Model, tmp_path: Path) -> None:
    """What was recorded is taken out after each text: the same arrays take the next one's."""
    seen = set()
    with recorded(model) as take:
        for _ in range(3):
            model.logits([1, 2, 3])
            arrays = take()
            assert len(arrays["ids"]) == 3
            seen.add(arrays["experts"].__array_interface__["data"][0])
        for _ in range(2):
            model.logits(range(1, 64))
        with pytest.raises(ArgumentError, match="126 of 128 rows are taken and 3 more may come"):
            model.logits([1, 2, 3])
    assert len(seen) == 1
    model.logits([1, 2, 3])


def test_visits_are_of_the_chosen_experts_in_order(make_model: Callable[..., Path], tmp_path: Path) -> None:
    """Timed, and with as many reads as the model has counted."""
    with colibri.load(make_model("mixtral", "q8"), context=64, expert_slots=3, residency="streamed") as model:
        record(model, TEXTS, tmp_path / "a.trace", generate=8)
        hits, misses = int(model.stats.hits.sum()), int(model.stats.misses.sum())
    trace = Trace(tmp_path / "a.trace")
    ns, read = trace.array("visit_ns"), trace.array("visit_read")
    visits = sum(len(np.unique(step.experts)) for step in trace.steps())
    assert len(ns) == len(read) == visits == hits + misses and int(read.sum()) == misses > 0
    assert ns.min() > 0


def test_the_python_of_the_docs_runs(trace_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parent.parent / "docs" / "TRACE.md").read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 3
    monkeypatch.chdir(trace_file.parent)
    for block in blocks:
        if "observe" in block:
            seen: dict[str, Any] = {}
            exec(compile(block, "TRACE.md", "exec"), seen)
            assert seen["saliency"] and min(seen["saliency"].values()) > 0
            continue
        names: dict[str, Any] = {}
        exec(compile(block, "TRACE.md", "exec"), names)
        last = names["step"].experts if "step" in names else names["experts"]
        assert np.array_equal(last, list(Trace(trace_file).steps())[-1].experts)
    for name in Trace(trace_file).header.columns():
        assert f"`{name}`" in text, f"docs/TRACE.md does not tell of {name}"


# --- interruption


@pytest.mark.parametrize("error", [RuntimeError("x"), KeyboardInterrupt()])
def test_after_an_error_the_older_file_is_untouched(
    model: colibri.Model, tmp_path: Path, error: BaseException
) -> None:
    (tmp_path / "a.trace").write_bytes(b"older")

    def fail(done: int, _total: int) -> None:
        if done == 2:
            raise error

    with pytest.raises(type(error)):
        record(model, TEXTS, tmp_path / "a.trace", progress=fail)
    assert left(tmp_path) == ["a.trace"] and (tmp_path / "a.trace").read_bytes() == b"older"
    record(model, TEXTS, tmp_path / "a.trace")
    assert left(tmp_path) == ["a.trace"] and Trace(tmp_path / "a.trace").n_rows > 0


def test_a_full_disk_leaves_nothing(
    model: colibri.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ModelIOError, match="Cannot write.*No space left"):
        record(model, TEXTS, tmp_path / "a.trace")
    assert left(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_process_that_ends_leaves_nothing(model_path: Path, tmp_path: Path, number: signal.Signals) -> None:
    lines = tmp_path / "texts.jsonl"
    lines.write_text('{"text": "Once upon a time"}\n' * 20_000)
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-m", "colibri", "trace", str(model_path), "--jsonl", str(lines)]
    process = subprocess.Popen([*command, "-o", str(tmp_path / "out" / "a.trace")], stderr=subprocess.PIPE)
    try:
        wait_until(lambda: holds_files_in(process.pid, tmp_path / "out"))
        process.send_signal(number)
        process.wait(30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode != 0 and left(tmp_path / "out") == []


def wait_until(true: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.02)


def holds_files_in(pid: int, directory: Path) -> bool:
    """Whether a process has (nameless) files of a directory open."""
    try:
        links = [link.readlink() for link in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return False
    return any(str(link).startswith(str(directory)) for link in links)


# --- the command


def test_the_command_traces_texts(call: Callable[..., Result], model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("The bird")
    (tmp_path / "a.jsonl").write_text(
        '{"said": "The cat", "about": "pets"}\n\n{"said": "Once", "about": null}\n'
    )
    out = tmp_path / "run.trace"
    sources = ["--text", "Once upon", "--file", tmp_path / "a.txt", "--jsonl", tmp_path / "a.jsonl"]
    options = ["--field", "said", "--label", "about", "--chunk", 1, "--context", 32, "--logits"]
    found = call("trace", model_path, *sources, *options, "-o", out)
    assert (found.status, found.out) == (0, "") and f"{out}: " in found.err and "of 4 sequences" in found.err
    trace = Trace(out)
    assert trace.header.labels == ("pets",) and trace.header.logits
    assert trace.array("sequence_labels").tolist() == [-1, -1, 0, -1]
    assert set(trace.array("chunks")[:, 0]) == {1}
    with colibri.load(model_path) as model:
        ids = [id for text in ("Once upon", "The bird", "The cat", "Once") for id in model.prompt_ids(text)]
    assert trace.array("ids").tolist() == ids


def test_the_command_traces_a_streamed_model(
    call: Callable[..., Result], model_path: Path, tmp_path: Path
) -> None:
    """What routers choose does not depend on where experts are: equal files."""
    streamed = ["--expert-slots", 3, "--expert-policy", "lru", "--lanes", 2, "--prefetch"]
    for name, options in (("a", []), ("b", ["--residency", "streamed", *streamed])):
        found = call("trace", model_path, "--text", "Once upon a time", *options, "-o", tmp_path / name)
        assert found.status == 0, found.err
    assert all_but_times(tmp_path / "a") == all_but_times(tmp_path / "b")


def test_the_command_refuses(call: Callable[..., Result], model_path: Path, tmp_path: Path) -> None:
    out, lines, latin = tmp_path / "o.trace", tmp_path / "l.jsonl", tmp_path / "latin"
    lines.write_text('{"text": "a"}\n{"txt": 1}\n')
    latin.write_bytes(b"caf\xe9")
    for status, arguments, words in (
        (2, [], "no text: give one with --text"),
        (2, ["--text", "a", "--seed", 1], "--seed has no effect without --generate"),
        (2, ["--text", "a", "--threads", 0], "--threads: expected"),
        (2, ["--text", "a", "--expert-slots", 2, "--residency", "mapped"], "--expert-slots"),
        (2, ["--text", "a", "--generate", 99, "--context", 64], "--generate: expected 0 to 63"),
        (2, ["--jsonl", lines], "line 2: expected an object with a text named 'text', found 'txt'"),
        (2, ["--file", latin], "expected UTF-8, found byte 0xe9"),
        (1, ["--file", tmp_path / "none"], "Cannot read"),
    ):
        found = call("trace", model_path, *arguments, "-o", out)
        assert (found.status, found.out) == (status, ""), found.err
        assert words in found.err and "Traceback" not in found.err
    found = call("trace", model_path, "--text", "a", "-o", tmp_path / "none" / "a.trace")
    assert found.status == 1 and "there is no directory" in found.err
    assert left(tmp_path) == ["l.jsonl", "latin"]


def test_recording_changes_no_bit_and_says_what_it_lacks(make_model: Callable[..., Path]) -> None:
    """Too little room is an error before anything is evaluated; what failed leaves no rows."""
    with colibri.load(make_model("mixtral", "q8"), context=64) as model:
        ids = np.array([5 + n % 40 for n in range(20)], np.int32)
        expected = model.logits(ids)
        counts, used = model.config["n_experts"], model.config["n_experts_used"]
        room = native.Recording(30, sum(n > 0 for n in counts), used, max(counts), logits=True)
        with native.recorded(model._sequences.context, room) as take:
            assert model.logits(ids).tobytes() == expected.tobytes()
            with pytest.raises(
                ArgumentError, match="recording: 20 of 30 rows are taken and 20 more may come"
            ):
                model.logits(ids)
            found = take()
            assert found["ids"].tolist() == ids.tolist() and len(found["visit_ns"]) == len(
                found["visit_read"]
            )
            assert (found["visit_ns"] > 0).all() and not found["visit_read"].any()
            with pytest.raises(RuntimeError, match="enough"), model.observe(routing=_raise):
                model.logits(ids)
            assert len(take()["ids"]) == 0
            assert model.logits(ids).tobytes() == expected.tobytes()
        assert model.logits(ids).tobytes() == expected.tobytes()


def _raise(_view: object) -> None:
    raise RuntimeError("enough")


def test_arrays_that_are_missing_are_refused(make_model: Callable[..., Path]) -> None:
    with colibri.load(make_model("mixtral", "q8"), context=64) as model:
        empty = native.Recording(0, 1, 1, 1, logits=False)
        recorded_into = native.recorded(model._sequences.context, empty)
        with (
            pytest.raises(ArgumentError, match="recording: expected room for at least one row"),
            recorded_into,
        ):
            pass
        assert model.logits([5, 6]).shape[0] == 2
