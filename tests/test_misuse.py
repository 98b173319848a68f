"""What a user of the API may do wrong while something runs: callbacks that call back in, forks, closed
streams, names that are no model, contexts beyond what a model knows."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import colibri
from colibri import ArgumentError, ConversionError, Model, NumericError, UnsupportedError
from colibri import _native as native

PROMPT = "Once upon a time there was"
CLI = [sys.executable, "-m", "colibri"]


@pytest.fixture
def model() -> Model:
    return colibri.load("demo", threads=2, context=128)


CALLS: dict[str, Callable[[Model], object]] = {
    "generate": lambda model: model.generate("zebra", max_tokens=1),
    "logits": lambda model: model.logits([1, 2]),
    "close": lambda model: model.close(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_callback_that_calls_back_in_is_refused_and_harms_nothing(model: Model, call: str) -> None:
    expected = model.generate(PROMPT, max_tokens=12, temperature=0).text
    with pytest.raises(ArgumentError, match="evaluating"):
        model.generate("a b c", max_tokens=2, progress=lambda done, total: CALLS[call](model))
    assert model.generate(PROMPT, max_tokens=12, temperature=0).text == expected
    model.close()


def test_the_library_refuses_it_too(model: Model) -> None:
    context = model._sequences.context
    found: list[str] = []

    def observer(done: int, total: int) -> None:
        with pytest.raises(ArgumentError, match="evaluating"):
            native.rewind(context, 0, 0)
        with pytest.raises(ArgumentError, match="evaluating"):
            native.fork(context, 0, 0)
        found.append("refused")

    logits = np.empty((1, model.n_vocab), np.float32)
    ids = np.array([1, 2, 3], np.int32)
    native.evaluate(context, [native.Input(0, ids, logits)], model.n_vocab, progress=observer)
    assert len(found) == model.config["n_layers"]


@pytest.mark.parametrize("options", ["", ", expert_slots=5"])
def test_a_forked_child_ends_and_closes(model: Model, options: str) -> None:
    program = (
        "import colibri, os, sys\n"
        f"model = colibri.load('demo', threads=2, context=128{options})\n"
        "text = model.generate('Once', max_tokens=4, temperature=0).text\n"
        "for close in (False, True):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        same = model.generate('Once', max_tokens=4, temperature=0).text == text\n"
        "        if close: model.close()\n"
        "        sys.exit(0 if same else 3)\n"
        "    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize("fill", [np.nan, np.inf])
def test_sampling_names_the_logit_that_is_no_number(model: Model, fill: float) -> None:
    logits = np.zeros(model.n_vocab, np.float32)
    logits[7] = fill
    with pytest.raises(NumericError, match=r"logits\[7\]"):
        native.sample(model._sequences.context, logits, _sampler(0.5), None, 0)


def test_minus_infinity_masks_an_id(model: Model) -> None:
    logits = np.full(model.n_vocab, -np.inf, np.float32)
    logits[[5, 9]] = 0, -3
    for temperature in (0.0, 0.01, 100.0):
        drawn = {
            native.sample(model._sequences.context, logits, _sampler(temperature), None, at)
            for at in range(40)
        }
        assert drawn <= {5, 9} and 5 in drawn
    logits[[5, 9]] = -np.inf
    with pytest.raises(NumericError, match="every id is masked"):
        native.sample(model._sequences.context, logits, _sampler(1.0), None, 0)


def _sampler(temperature: float) -> object:
    return native.sampler(native.Sampler(temperature, 0, 1.0, 0.0, 1.0, 1))


def test_a_context_beyond_the_trained_length_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "colibri"), colibri.load("demo", context=1025):
        assert "context 1025 is longer than the 1024 positions" in caplog.text


def test_an_empty_name_is_no_directory() -> None:
    with pytest.raises(ConversionError, match="MODEL is empty"):
        colibri.load("")


def test_the_demo_refuses_a_role_that_its_template_has_no_place_for(model: Model) -> None:
    with pytest.raises(colibri.ChatTemplateError, match="system"):
        model.chat([{"role": "system", "content": "x"}, {"role": "user", "content": "y"}])


@pytest.mark.parametrize(("closed", "status", "says"), [(0, 0, ""), (1, 1, "standard output is closed")])
def test_closed_streams_are_no_traceback(closed: int, status: int, says: str) -> None:
    command = [*CLI, "run", "demo", "Once", "--max-tokens", "2", "--temperature", "0"]
    run = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}{"<" if closed == 0 else ">"}&-', "sh", *command],
        capture_output=True,
        text=True,
        env=os.environ,
        check=False,
    )
    assert run.returncode == status and says in run.stderr and "Traceback" not in run.stderr


def test_a_reservation_that_the_process_limit_forbids_is_told_apart() -> None:
    program = "import colibri\ncolibri.load('demo', context=400000)"
    run = subprocess.run(
        ["sh", "-c", 'ulimit -v 800000; exec "$@"', "sh", sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        check=False,
    )
    assert "ulimit -v" in run.stderr and "MemoryPlanError" in run.stderr


def test_a_file_that_the_process_limit_forbids_to_map_says_what_to_raise(tmp_path: Path) -> None:
    with (tmp_path / "large.colibri").open("wb") as file:
        file.truncate(4 << 30)
    program = "import sys, pathlib, colibri._native as n; n.open_model(pathlib.Path(sys.argv[1]))"
    run = subprocess.run(
        ["sh", "-c", 'ulimit -v 2000000; exec "$@"', "sh", sys.executable, "-c", program, file.name],
        capture_output=True,
        text=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        check=False,
    )
    assert "cannot map" in run.stderr and "ulimit -v" in run.stderr and "ModelIOError" in run.stderr


def test_unknown_kernel_sets_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLIBRI_ISA", "mmx")
    with pytest.raises(UnsupportedError, match="scalar"):
        colibri.load("demo")
