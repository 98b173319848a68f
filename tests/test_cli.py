"""The `colibri` command: what goes to which stream, exit codes, option combinations, Ctrl-C, pipes,
conversations."""

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import checkpoints
import colibri
from colibri.cli import main

PROMPT = "Once upon a time"


class Result(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs a command in this process, without a terminal."""

    def run(*arguments: object, stdin: bytes = b"") -> Result:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return Result(int(caught.value.code or 0), out, err)

    return run


@pytest.fixture(scope="session")
def endless(make_model: Callable[..., Path]) -> Path:
    """A model whose only end token is a padding row, so that it writes until it is stopped."""
    extra = {"max_position_embeddings": 2_000_000}
    path = make_model("mixtral", extra_rows=20, only_end=319, config_extra=extra)
    with colibri.load(path) as model:
        assert model.tokenizer.eos_ids == (319,)
    return path


def text_of(path: Path, prompt: str = PROMPT, **options: Any) -> str:
    with colibri.load(path) as model:
        return model.generate(prompt, **options).text


# --- run


def test_text_on_stdout_and_nothing_else(call: Callable[..., Result], model_path: Path) -> None:
    expected = text_of(model_path, max_tokens=12)
    assert call("run", model_path, PROMPT, "--max-tokens", 12) == (0, expected + "\n", "")


def test_options_mean_what_they_mean_in_python(call: Callable[..., Result], model_path: Path) -> None:
    options: dict[str, Any] = {
        "max_tokens": 20,
        "temperature": 0.9,
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "seed": 4,
    }
    arguments = [str(a) for name, value in options.items() for a in ("--" + name.replace("_", "-"), value)]
    whole = text_of(model_path, **options)
    assert call("run", model_path, PROMPT, *arguments).out == whole + "\n"
    assert len(whole) > 8
    cut = text_of(model_path, **options, stop=[whole[4], whole[6]])
    assert cut != whole
    assert (
        call("run", model_path, PROMPT, *arguments, "--stop", whole[4], "--stop", whole[6]).out == cut + "\n"
    )


@pytest.mark.parametrize("prompt", [["-"], []])
def test_the_prompt_comes_from_standard_input(
    call: Callable[..., Result], model_path: Path, prompt: list[str]
) -> None:
    expected = call("run", model_path, "é 歪", "--max-tokens", 5).out
    for stdin in ("é 歪", "é 歪\n", "é 歪\r\n"):
        assert call("run", model_path, *prompt, "--max-tokens", 5, stdin=stdin.encode()).out == expected


def test_statistics_go_to_stderr(call: Callable[..., Result], endless: Path) -> None:
    """The seed is drawn, so the model has no end token that could come early, and any character may come."""
    found = call("run", endless, PROMPT, "--max-tokens", 8, "--temperature", 1, "--stats", "--threads", 1)
    assert found.status == 0 and found.out.endswith("\n")
    for words in ("tok/s", "KV cache", "weights", "peak", "seed", "threads 1", "end: length"):
        assert words in found.err
    seed = found.err.partition("seed ")[2].split()[0]
    again = call("run", endless, PROMPT, "--max-tokens", 8, "--temperature", 1, "--seed", seed)
    assert again.out == found.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--temperature", "-1"], "temperature: expected a number from 0 to 100"),
        (["--temperature", "nan"], "temperature: expected"),
        (["--top-p", "0"], "--top-p: expected a number above 0"),
        (["--top-k", "-1"], "--top-k: expected"),
        (["--seed", "3"], "seed 3 has no effect at temperature 0"),
        (["--stop", ""], "stop: expected"),
        (["--threads", "0"], "threads: expected an integer from 1 to 256"),
        (["--threads", "257"], "threads: expected an integer from 1 to 256"),
        (["--context", "-5"], "context: expected an integer from 1"),
        (["--context", "100000000000"], "context: expected an integer from 1"),
        (["--context", "3"], "context holds 3"),
    ],
)
def test_wrong_values_are_one_message(
    call: Callable[..., Result], model_path: Path, arguments: list[str], words: str
) -> None:
    found = call("run", model_path, PROMPT, *arguments)
    status = 1 if words == "context holds 3" else 2  # a prompt that is too long is no wrong use of an option
    assert (found.status, found.out) == (status, "") and words in found.err
    assert found.err.startswith("colibri: ") and "Traceback" not in found.err and found.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--system", "x"], "--system has no effect without --chat"),
        (["--type", "q8"], "--type q8 has no effect"),
        (["--experts", "q4"], "--experts q4 has no effect"),
        (["--dense", "q8"], "--dense q8 has no effect"),
        (["--output", "bf16"], "--output bf16 has no effect"),
        (["--temperature", "warm"], "--temperature"),
        (["--top"], "--top"),
        (["--chat", "-"], "standard input"),
    ],
)
def test_wrong_use_has_status_two(
    call: Callable[..., Result], model_path: Path, arguments: list[str], words: str
) -> None:
    prompt = [] if "--chat" in arguments else [PROMPT]
    found = call("run", model_path, *prompt, *arguments)
    assert (found.status, found.out) == (2, "") and words in found.err and "Traceback" not in found.err


def test_commands_and_help(call: Callable[..., Result]) -> None:
    assert call("--version") == (0, f"colibri {colibri.__version__}\n", "")
    for arguments in (["--help"], ["run", "--help"], ["convert", "-h"], ["inspect", "--help"]):
        assert call(*arguments).status == 0
    assert call("fly").status == 2


def test_failures_of_files_and_prompts(call: Callable[..., Result], model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "müde 模型 x.colibri").write_bytes(model_path.read_bytes()[:-1])
    (tmp_path / "text").write_text("hello")
    for model in (tmp_path / "müde 模型 x.colibri", tmp_path / "text", tmp_path / "absent"):
        found = call("run", model, "a")
        assert (found.status, found.out) == (1, "") and str(model) in found.err
    found = call("run", model_path, stdin=b"\xff\xfe")
    assert found.status == 2 and "expected UTF-8, found byte 0xff at offset 0" in found.err


def test_a_checkpoint_is_converted_once_and_said_so(
    call: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLIBRI_CACHE", str(tmp_path / "cache"))
    source = checkpoints.mixtral(tmp_path / "a checkpoint")
    first = call("run", source, PROMPT, "--max-tokens", 4, "--type", "f32")
    assert first.status == 0 and str(source) in first.err
    second = call("run", source, PROMPT, "--max-tokens", 4, "--type", "f32")
    assert second == (0, first.out, "")
    assert len(list((tmp_path / "cache").iterdir())) == 1


# --- conversations


def test_a_conversation_keeps_its_history(call: Callable[..., Result], model_path: Path) -> None:
    with colibri.load(model_path) as model:
        messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": "one"}]
        answers = [model.chat(messages, max_tokens=5).text]
        messages += [{"role": "assistant", "content": answers[0]}, {"role": "user", "content": "two"}]
        answers.append(model.chat(messages, max_tokens=5).text)
    expected = "".join(answer if answer.endswith("\n") else answer + "\n" for answer in answers)
    arguments = ("--chat", "--system", "be short", "--max-tokens", 5)
    assert all(answers), "an empty answer would not enter the history"
    assert call("run", model_path, *arguments, stdin=b"one\n\ntwo\n") == (0, expected, "")
    assert call("run", model_path, "one", *arguments, stdin=b"two") == (0, expected, "")


def test_a_model_without_template_cannot_converse(call: Callable[..., Result], tmp_path: Path) -> None:
    source = checkpoints.llama(tmp_path / "base")
    checkpoints.edit_json(source / "tokenizer_config.json", {}, remove=["chat_template"])
    call("convert", source, tmp_path / "base.colibri")
    found = call("run", tmp_path / "base.colibri", "--chat", "hello")
    assert (found.status, found.out) == (1, "") and "no chat template" in found.err


# --- processes: signals, pipes, terminals


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "colibri", *map(str, arguments)]


@contextmanager
def started(*arguments: object, **pipes: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A command under way, which does not outlive the test."""
    process = subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, **pipes)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def test_ctrl_c_ends_a_text_with_what_was_written(endless: Path) -> None:
    with started("run", endless, PROMPT, "--context", 1_000_000) as process:
        assert process.stdout is not None
        assert process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (130, b"")


def test_ctrl_c_ends_a_long_prompt(endless: Path) -> None:
    long = ("run", endless, "-", "--context", 300_000, "--threads", 1)
    with started(*long, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(b"a b " * 70_000)
        process.stdin.close()
        process.stdin = None
        time.sleep(3)
        assert process.poll() is None, "the prompt must still be under way for this test to mean anything"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 130 and out in (b"", b"\n") and b"Traceback" not in err


def test_a_closed_pipe_is_quiet(endless: Path) -> None:
    with started("run", endless, PROMPT, "--context", 1_000_000) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.wait(timeout=60) != 0
        assert process.stderr.read() == b""


class Terminal:
    """A process on a pseudo-terminal."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process, self._master, self.shown = process, master, ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, words: str) -> None:
        """Reads until the words have been shown; what was shown before them is forgotten."""
        self._read_until(lambda shown: words in shown, repr(words))
        self.shown = self.shown.partition(words)[2]

    def wait_for_length(self, length: int) -> None:
        """Reads until so many characters have been shown."""
        self._read_until(lambda shown: len(shown) >= length, f"{length} characters")

    def interrupt_until(self, words: str) -> None:
        """Ctrl-C until the words are shown: one just before a line editor waits is seen only with the next
        key."""
        for _ in range(20):
            self.process.send_signal(signal.SIGINT)
            end = time.monotonic() + 3
            while words not in self.shown and (left := end - time.monotonic()) > 0:
                if select.select([self._master], [], [], left)[0]:
                    self.shown += os.read(self._master, 65536).decode("utf-8", "replace")
            if words in self.shown:
                break
        self.wait_for(words)

    def _read_until(self, done: Callable[[str], bool], what: str) -> None:
        end = time.monotonic() + 60
        while not done(self.shown):
            ready, _, _ = select.select([self._master], [], [], max(0, end - time.monotonic()))
            assert ready, f"expected {what}, shown was {self.shown[-200:]!r}"
            self.shown += os.read(self._master, 65536).decode("utf-8", "replace")


@contextmanager
def terminal(*arguments: object) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "dumb"}
    process = subprocess.Popen(
        command(*arguments), stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env=environment
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        process.kill()
        process.wait()
        os.close(master)


def test_a_conversation_on_a_terminal(endless: Path) -> None:
    """Ctrl-C stops an answer and keeps the conversation, Ctrl-D ends it."""
    with terminal("run", endless, "--chat", "--context", 100_000) as screen:
        screen.wait_for("> ")
        screen.type("hello\n")
        screen.wait_for_length(200)
        screen.interrupt_until("[stopped]")
        screen.wait_for("> ")
        screen.interrupt_until("Ctrl-D ends the conversation")
        screen.wait_for("> ")
        screen.type("\x04")
        assert screen.process.wait(timeout=30) == 0


def test_without_prompt_on_a_terminal_the_use_is_told(endless: Path) -> None:
    with terminal("run", endless) as screen:
        screen.wait_for("no prompt")
        assert screen.process.wait(timeout=30) == 2


# --- convert and inspect


def test_convert_writes_one_file_and_reports_on_stderr(call: Callable[..., Result], tmp_path: Path) -> None:
    source = checkpoints.olmoe(tmp_path / "source")
    found = call("convert", source, tmp_path / "o.colibri", "--type", "bf16")
    assert (found.status, found.out) == (0, "") and "bf16" in found.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["o.colibri", "source"]
    for arguments in ([source, tmp_path / "no" / "o.colibri"], [tmp_path / "none", tmp_path / "p.colibri"]):
        failed = call("convert", *arguments)
        assert (failed.status, failed.out) == (1, "") and failed.err.startswith("colibri: ")
    assert call("convert", source, tmp_path / "q.colibri", "--type", "q1").status == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["o.colibri", "source"]


def test_ctrl_c_while_converting_leaves_nothing(
    call: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoints.olmoe(tmp_path / "source")
    seen: list[int] = []

    @contextmanager
    def interrupted(_what: str) -> Iterator[Callable[[int, int, str], None]]:
        def progress(done: int, _total: int, _name: str) -> None:
            seen.append(done)
            if len(seen) == 5:
                raise KeyboardInterrupt

        yield progress

    monkeypatch.setattr("colibri.cli.convert.progress_bar", interrupted)
    found = call("convert", source, tmp_path / "o.colibri")
    assert found.status == 130 and len(seen) == 5 and "nothing was written" in found.err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_types_may_be_mixed(
    call: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into a file, whose inspection shows them, and in the cache, where each choice has its own file."""
    monkeypatch.setenv("COLIBRI_CACHE", str(tmp_path / "cache"))
    source = checkpoints.mixtral(tmp_path / "source")
    mixed = ["--type", "q8", "--experts", "q4", "--output", "bf16"]
    found = call("convert", source, tmp_path / "m.colibri", *mixed)
    assert (found.status, found.out) == (0, "") and "q4 experts, q8 dense, bf16 output" in found.err
    shown = call("inspect", tmp_path / "m.colibri").out
    assert "q4 experts, q8 dense, bf16 output" in shown
    assert all(f"as {type} " in shown for type in ("q4", "q8", "bf16", "f32"))
    data = json.loads(call("inspect", tmp_path / "m.colibri", "--json").out)
    assert data["source"]["type"] == "q4 experts, q8 dense, bf16 output"
    for options in (["--type", "f32"], ["--type", "f32", "--experts", "bf16"], ["--dense", "f32"]):
        answer = call("run", source, PROMPT, "--max-tokens", 2, *options)
        assert answer.status == 0 and "Converting" in answer.err
    names = sorted(path.name.rpartition("-")[0] for path in (tmp_path / "cache").iterdir())
    expected = ["bf16_experts-f32_dense-f32_output", "f32", "q8_experts-f32_dense-q8_output"]
    assert names == [f"source-{name}" for name in expected]
    failed = call("convert", source, tmp_path / "n.colibri", "--experts", "q1")
    assert failed.status == 2 and "'q1' is not known" in failed.err


def test_inspect_shows_config_bytes_and_tensors(call: Callable[..., Result], model_path: Path) -> None:
    found = call("inspect", model_path, "--verify")
    assert (found.status, found.err) == (0, "")
    for words in ("n_experts", "layers.0.experts.0 to 3", "embedding", "tokenizer.json", "verified: all"):
        assert words in found.out
    data = json.loads(call("inspect", model_path, "--json").out)
    assert data["config"]["n_experts"] == [4, 4] and data["bytes"] == model_path.stat().st_size
    assert sum(data["bytes_by_class"].values()) <= data["bytes"] and data["source"]["model_type"] == "mixtral"
    assert len([entry for entry in data["entries"] if entry["kind"] == "expert"]) == 8


def test_inspect_names_damage(call: Callable[..., Result], model_path: Path, tmp_path: Path) -> None:
    data = bytearray(model_path.read_bytes())
    entries = {e["name"]: e for e in json.loads(call("inspect", model_path, "--json").out)["entries"]}
    data[entries["layers.1.experts.2"]["offset"] + 7] ^= 1
    path = tmp_path / "damaged.colibri"
    path.write_bytes(data)
    assert call("inspect", path).status == 0
    found = call("inspect", path, "--verify", "--json")
    assert found.status == 1 and "layers.1.experts.2" in found.err
    assert json.loads(found.out)["damaged"] == ["layers.1.experts.2"]
