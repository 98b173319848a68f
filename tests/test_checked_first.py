"""Wrong arguments of commands: all are told with status 2, in the words of the command line, before anything
is converted, written or measured; what a chart may be written over."""

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import checkpoints
import colibri
from colibri import _native
from colibri.analysis import bench, chart, phases, synthetic
from colibri.arguments import Opening, physical_cores
from colibri.cli.report import for_command_line
from colibri.convert import convert
from colibri.errors import ModelIOError
from test_cli import Result
from test_cli import call as call

THREE = ["--type", "f32", "--experts", "q4", "--dense", "q4", "--output", "q4"]
OPENING = [
    (["--residency", "foo"], "--residency: expected one of"),
    (["--threads", "0"], "--threads: expected"),
    (["--threads", "257"], "--threads: expected"),
    (["--pin", "--threads", "1"], "--pin has no effect with --threads 1"),
    (["--pin", "--threads", str(physical_cores() + 1)], "--pin: expected at most"),
]
TYPES = [
    (["--type", "q5"], "'q5' is not known"),
    (["--type", ""], "'' is not known"),
    (["--experts", "foo"], "'foo' is not known"),
    (["--dense", ""], "'' is not known"),
    (THREE, "--type f32 has no effect"),
]
COMMANDS = {
    "convert": TYPES,
    "run": [
        *OPENING,
        *TYPES,
        (["--context", "0"], "--context: expected"),
        (
            ["--residency", "resident", "--no-prefetch"],
            "--no-prefetch has no effect with --residency resident",
        ),
    ],
    "bench": [
        *OPENING,
        *TYPES,
        (["--repeat", "0"], "--repeat: expected"),
        (["--prompt", "0"], "--prompt: expected"),
        (["--decode", "-1"], "--decode: expected"),
    ],
    "bench --synthetic": [
        *OPENING,
        *TYPES,
        (["--repeat", "0"], "--repeat: expected"),
        (["--prompt", "4096"], "--prompt: 4096 tokens and 1 decoded are"),
        (["--decode", "5000"], "trained for 4096 positions"),
    ],
    "profile": [
        *OPENING,
        (["--prompt", "0"], "--prompt: expected"),
        (["--chart", "c.txt"], "--chart: expected a file"),
    ],
}


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that would be converted; nothing expensive may begin."""

    def begun(*_: object, **__: object) -> None:
        raise AssertionError("expensive work has begun")

    monkeypatch.setenv("COLIBRI_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("colibri.convert.pipeline.open_source", begun)
    monkeypatch.setattr("colibri.cache.cached_name", begun)
    monkeypatch.setattr(synthetic, "write", begun)
    monkeypatch.setattr(bench, "bench", begun)
    monkeypatch.setattr(phases, "profile", begun)
    return checkpoints.mixtral(tmp_path / "hf")


@pytest.mark.parametrize(
    ("command", "options", "words"), [(name, *case) for name, cases in COMMANDS.items() for case in cases]
)
def test_wrong_arguments_are_told_first(
    call: Callable[..., Result], checkpoint: Path, command: str, options: list[str], words: str
) -> None:
    name, *rest = command.split()
    of = ["mixtral-tiny"] if rest else [str(checkpoint)]
    more = {"convert": [str(checkpoint.parent / "o.colibri")], "run": ["Hello"]}.get(name, [])
    found = call(name, *rest, *of, *more, *options)
    assert (found.status, found.out) == (2, "") and words in found.err, found.err
    assert os.listdir(checkpoint.parent) == ["hf"]


def test_tools_and_places_are_looked_for_first(
    call: Callable[..., Result], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda _name: None)
    found = call("profile", checkpoint, "--instructions")
    assert found.status == 1 and "Install valgrind" in found.err
    found = call("profile", checkpoint, "--chart", checkpoint / "none" / "c.svg")
    assert found.status == 1 and "Cannot write" in found.err


def test_experts_of_a_dense_model_are_refused(call: Callable[..., Result], tmp_path: Path) -> None:
    source = checkpoints.llama(tmp_path / "dense")
    found = call("convert", source, tmp_path / "o.colibri", "--experts", "q4")
    assert found.status == 2 and "--experts q4 has no effect" in found.err
    assert os.listdir(tmp_path) == ["dense"]


def test_texts_name_options_where_there_are_some() -> None:
    options = {
        "threads": "--threads",
        "top_p": "--top-p",
        "pin": "--pin",
        "prefetch": "--prefetch",
        "context": "--context",
    }
    for text, shown in (
        ("threads: expected", "--threads: expected"),
        ("top_p: expected", "--top-p: expected"),
        ("pin=True has no effect with threads=1", "--pin has no effect with --threads 1"),
        ("prefetch=False with residency='x'", "--no-prefetch with residency='x'"),
        ("load it with context=65 or more", "load it with --context 65 or more"),
        ("prompt: it is empty", "prompt: it is empty"),
        ("/a/threads: no model", "/a/threads: no model"),
    ):
        assert for_command_line(text, options) == shown


@pytest.mark.parametrize("command", [["run"], ["bench"], ["inspect"], ["profile"]])
def test_a_pipe_is_no_model(call: Callable[..., Result], tmp_path: Path, command: list[str]) -> None:
    os.mkfifo(tmp_path / "pipe.colibri")
    found = call(*command, tmp_path / "pipe.colibri", *(["Hello"] if command == ["run"] else []))
    assert (found.status, found.out) == (1, "") and "not a regular file" in found.err
    started = time.monotonic()
    with pytest.raises(ModelIOError, match="not a regular file"):
        _native.open_model(tmp_path / "pipe.colibri")
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("command", ["run", "bench", "inspect", "plan", "convert"])
def test_what_the_system_does_not_say_of_a_path_is_told_with_the_path(
    call: Callable[..., Result], tmp_path: Path, command: str
) -> None:
    """A name that is too long stands for a folder above without permission, which root always has."""
    long = tmp_path / ("x" * 300)
    more = {"run": "Hello", "convert": str(tmp_path / "out.colibri")}
    found = call(command, long / "a.gguf", *filter(None, [more.get(command)]))
    assert found.status in (1, 2) and found.out == ""
    assert command == "convert" or f"Cannot read {long}/a.gguf: File name too long." in found.err
    for start in (colibri.load, lambda path: convert(path, tmp_path / "out.colibri")):
        with pytest.raises(ModelIOError, match=r"Cannot read .*x/a\.gguf: File name too long"):
            start(long / "a.gguf")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("mode", [0o000, 0o111, 0o444])
def test_a_folder_without_permission_is_not_taken_for_empty(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "a.gguf").write_bytes(b"GGUF")
    folder.chmod(mode)
    try:
        with pytest.raises(ModelIOError, match=r"Cannot read .*models.*: Permission denied"):
            colibri.load(folder)
    finally:
        folder.chmod(0o755)


def test_a_cache_that_cannot_be_listed_is_not_empty(
    call: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COLIBRI_CACHE", str(tmp_path / "file"))
    found = call("cache")
    assert found.status == 1 and f"Cannot read {tmp_path / 'file'}: Not a directory." in found.err
    monkeypatch.setenv("COLIBRI_CACHE", str(tmp_path / "none"))
    assert call("cache").status == 0


@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "standard output"])
def test_an_output_that_is_no_file_is_refused_before_the_work(tmp_path: Path, kind: str) -> None:
    source = checkpoints.llama(tmp_path / "hf")
    out = tmp_path / "out"
    read, write = os.pipe()
    if kind == "standard output":
        out = Path(f"/proc/self/fd/{write}")
    else:
        os.mkfifo(tmp_path / "pipe")
        out.symlink_to("pipe") if kind == "link to a pipe" else (tmp_path / "pipe").rename(out)
    with pytest.raises(ModelIOError, match="is a pipe or a device; give the name of a file"):
        convert(source, out)
    os.close(read)
    os.close(write)


def test_a_file_that_may_not_grow_is_told_by_name(tmp_path: Path) -> None:
    source = checkpoints.llama(tmp_path / "hf")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(ModelIOError, match=r"Cannot write .*out\.colibri: File too large"):
            convert(source, tmp_path / "out.colibri")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == ["hf"]


# --- charts


@pytest.mark.parametrize("kind", ["model", "link to the model", "text", "directory", "pipe"])
def test_a_chart_replaces_nothing_but_a_chart(
    call: Callable[..., Result], model_path: Path, tmp_path: Path, kind: str
) -> None:
    model, file = tmp_path / "model.svg", tmp_path / "chart.svg"
    model.write_bytes(model_path.read_bytes())
    if kind == "link to the model":
        file.symlink_to(model)
    elif kind == "text":
        file.write_text("notes of a month")
    elif kind == "directory":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    chosen = model if kind == "model" else file
    found = call("profile", model, "--prompt", 4, "--decode", 2, "--threads", 1, "--chart", chosen)
    assert (found.status, found.out) == (2, "") and "not an SVG picture" in found.err
    assert model.read_bytes() == model_path.read_bytes()
    assert kind != "text" or file.read_text() == "notes of a month"


def test_a_chart_is_whole_or_the_older_one(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strange = tmp_path / os.fsdecode(b"m\xff\x01<&.colibri")  # not UTF-8, and not XML's
    strange.write_bytes(model_path.read_bytes())
    report = phases.profile(strange, Opening(threads=1), 4, 2)
    file, older = tmp_path / "c.svg", '<?xml version="1.0"?>\n<svg/>'
    for before in (None, "", older):
        if before is not None:
            file.write_text(before)
        chart.draw(report, file)
        assert (
            file.read_text(encoding="utf-8").startswith("<svg") and "m??&lt;&amp;.colibri" in file.read_text()
        )
    file.write_text(older)

    def fail(_source: object, _target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(ModelIOError, match="No space left"):
        chart.draw(report, file)
    assert file.read_text() == older and sorted(os.listdir(tmp_path)) == sorted([strange.name, "c.svg"])
