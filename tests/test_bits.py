"""Invariant 2: the logits are the same bytes whatever path computes them.

Owns:    the engine against itself, for every family and weight type, with prompts over three KV blocks (128
         positions each): instruction sets, threads, chunking, batches, forks and rewinds, context sizes; and
         what an evaluation must leave alone: the heap, and every sequence when it fails or is cancelled.
Refuses: whether the numbers are right (test_parity.py); the kernels one by one (tests/c/).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import platform
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from colibri import _native as native
from colibri.convert import convert
from colibri.errors import ArgumentError, CancelledError, ContextFullError, UnsupportedError
from encoder_checkpoints import MAKERS
from fixtures import models
from fixtures.native import Engine, engine

ROOT = Path(__file__).resolve().parent.parent
N_IDS = 300  # blocks 0 and 1 full, block 2 begun
MODELS = (
    "mixtral_bf16",
    "qwen3_moe_odd",
    "olmoe_clip",
    "qwen2_moe_dense_layers",
    "llama_llama3",
    "qwen3_tied",
    "glm4_moe_groups",
    "qwen2_moe_window",
    "gpt_oss_odd",
    "granitemoe_odd",
    "phimoe",
    "llama4_text_odd",
    "gemma3_text_odd",
    "gemma4_text",
    "deepseek_v3_odd",
    "deepseek_v3_heads",
    "qwen3_next_odd",
    "qwen3_5_moe_bf16",
    "lfm2_moe_odd",
)
CASES = [(name, type) for name in MODELS for type in ("f32", "bf16", "q8", "q6", "q4")]
CASES.append(("gpt_oss_mxfp4", "q8"))  # whose experts stay as they are
ISAS = ("scalar", "avx2", "avx2-vnni", "avx512", "neon", "neon-dotprod")


def ids_of(length: int, seed: int = 0) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(5, 295, length)]


@functools.cache
def alone(name: str, type: str, seed: int = 0, length: int = N_IDS) -> bytes:
    """Logits of all positions: one sequence, one call, one chunk, one thread, the machine's best kernels."""
    with engine(models.converted(name, type), threads=1, chunk=N_IDS) as run:
        return run.feed(ids_of(length, seed)).tobytes()


def pieces(run: Engine, ids: Sequence[int], sizes: Sequence[int], sequence: int = 0) -> bytes:
    """The ids in separate calls of the given sizes, the last size repeated to the end."""
    found: list[npt.NDArray[np.float32]] = []
    start = 0
    while start < len(ids):
        size = sizes[min(len(found), len(sizes) - 1)]
        found.append(run.feed(ids[start : start + size], sequence))
        start += size
    return np.concatenate(found).tobytes()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("name", "type"), CASES)
def test_instruction_sets(name: str, type: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once with one thread, and in chunks of 7 with two: the register tiles differ."""
    expected = alone(name, type)
    monkeypatch.setenv("COLIBRI_ISA", isa)
    path = models.converted(name, type)
    try:
        with engine(path, threads=1, chunk=N_IDS) as run:
            assert run.isa == isa
            assert run.feed(ids_of(N_IDS)).tobytes() == expected
    except UnsupportedError as error:
        pytest.skip(f"this machine cannot run {isa}: {error}")
    with engine(path, threads=2, chunk=7) as run:
        assert run.feed(ids_of(N_IDS)).tobytes() == expected


@pytest.mark.parametrize("threads", [2, 3, 8])
@pytest.mark.parametrize(("name", "type"), CASES)
def test_threads(name: str, type: str, threads: int) -> None:
    with engine(models.converted(name, type), threads=threads, chunk=N_IDS) as run:
        assert run.feed(ids_of(N_IDS)).tobytes() == alone(name, type)


@pytest.mark.parametrize("chunk", [1, 7, 128])
@pytest.mark.parametrize(("name", "type"), CASES)
def test_chunks_inside_one_call(name: str, type: str, chunk: int) -> None:
    with engine(models.converted(name, type), chunk=chunk) as run:
        assert run.feed(ids_of(N_IDS)).tobytes() == alone(name, type)


@pytest.mark.parametrize("sizes", [[1], [7], [100, 28, 1, 130, 2]], ids=["token by token", "sevens", "mixed"])
@pytest.mark.parametrize(("name", "type"), CASES)
def test_separate_calls(name: str, type: str, sizes: list[int]) -> None:
    with engine(models.converted(name, type), threads=1 + len(sizes) % 2) as run:
        assert pieces(run, ids_of(N_IDS), sizes) == alone(name, type)


@pytest.mark.parametrize("chunk", [2048, 33])
@pytest.mark.parametrize(("name", "type"), CASES)
def test_batch_of_four_with_different_lengths(name: str, type: str, chunk: int) -> None:
    """Two calls; each sequence gets an uneven share of its text in the first and the rest in the second."""
    lengths, first = {3: N_IDS, 0: 131, 2: 5, 1: 260}, {3: 129, 0: 130, 2: 1, 1: 7}
    with engine(models.converted(name, type), max_batch=4, chunk=chunk) as run:
        texts = {s: ids_of(length, seed=s) for s, length in lengths.items()}
        heads = run.feed_all({s: texts[s][:n] for s, n in first.items()})
        tails = run.feed_all({s: texts[s][first[s] :] for s in (0, 1, 2, 3)})
    for s, length in lengths.items():
        assert np.concatenate([heads[s], tails[s]]).tobytes() == alone(name, type, s, length)


@pytest.mark.parametrize("cut", [1, 127, 128, 200])
@pytest.mark.parametrize(("name", "type"), CASES)
def test_fork_and_rewind(name: str, type: str, cut: int) -> None:
    """A fork goes on with another text, in turns with its source, and neither notices; a rewind forgets."""
    ids, other = ids_of(N_IDS), ids_of(N_IDS, seed=9)
    path = models.converted(name, type)
    with engine(path) as run:
        branch = run.feed(ids[:cut] + other[cut:]).tobytes()
    with engine(path, max_batch=3) as run:
        head = run.feed(ids[:cut], sequence=2)
        native.fork(run.context, 2, 0)
        ours, theirs = [head], [head]
        for start in range(cut, N_IDS, 60):
            both = run.feed_all({0: other[start : start + 60], 2: ids[start : start + 60]})
            ours.append(both[2])
            theirs.append(both[0])
        assert np.concatenate(ours).tobytes() == alone(name, type)
        assert np.concatenate(theirs).tobytes() == branch
        native.rewind(run.context, 0, cut)
        assert native.position(run.context, 0) == cut
        again = run.feed(ids[cut:], sequence=0)
        assert np.concatenate([head, again]).tobytes() == alone(name, type)
        native.rewind(run.context, 2, 0)
        assert run.feed(ids, sequence=2).tobytes() == alone(name, type)


def test_fork_survives_its_source() -> None:
    name, type, ids = "qwen3_moe_odd", "f32", ids_of(N_IDS)
    with engine(models.converted(name, type), max_batch=4) as run:
        head = run.feed(ids[:150], sequence=1)
        for target in (0, 2, 3):
            native.fork(run.context, 1, target)
        native.rewind(run.context, 1, 0)
        run.feed(ids_of(N_IDS, seed=5), sequence=1)
        for target in (3, 0, 2):
            rest = pieces(run, ids[150:], [1, 40], target)
            assert head.tobytes() + rest == alone(name, type)


@pytest.mark.parametrize(("name", "type"), CASES)
def test_context_size_and_repetition(name: str, type: str) -> None:
    """A context of just the needed positions, and the same context used again."""
    ids = ids_of(N_IDS)
    with engine(models.converted(name, type), context=N_IDS) as run:
        assert run.feed(ids).tobytes() == alone(name, type)
        native.rewind(run.context, 0, 0)
        assert run.feed(ids).tobytes() == alone(name, type)
    with engine(models.converted(name, type), context=37) as run:
        assert run.feed(ids[:37]).tobytes() == alone(name, type)[: 37 * run.n_vocab * 4]


def test_fewer_logits_rows_and_run_inference_give_the_same_bytes() -> None:
    ids, path = np.array(ids_of(40), np.int32), models.converted("mixtral_bf16", "q8")
    with engine(path) as run:
        rows = run.feed(ids)
        native.rewind(run.context, 0, 0)
        last = np.empty((3, run.n_vocab), np.float32)
        native.evaluate(run.context, [native.Input(0, ids, last)], run.n_vocab)
        assert last.tobytes() == rows[-3:].tobytes()
        native.rewind(run.context, 0, 0)
        native.evaluate(run.context, [native.Input(0, ids[:-1], None)], run.n_vocab)
        native.run_inference(run.context, ids[-1:], last[0])
        assert last[0].tobytes() == rows[-1].tobytes()


# ------------------------------------------------------------------ AVX-512 without such a machine


def supports(isa: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    with monkeypatch.context() as patch:
        patch.setenv("COLIBRI_ISA", isa)
        try:
            native.close_model(native.open_model(models.converted(*CASES[0])))
        except UnsupportedError:
            return False
    return True


def test_avx512_emulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The AVX-512 source compiled against emulated intrinsics, for every model and type; where the machine
    has AVX-512, test_instruction_sets runs the real thing instead."""
    if platform.machine() != "x86_64" or not supports("avx2", monkeypatch) or shutil.which("cc") is None:
        pytest.skip("needs x86-64 with AVX2 and FMA, and a C compiler")
    if supports("avx512", monkeypatch):
        pytest.skip("this machine has AVX-512: test_instruction_sets ran it")
    if not any(Path(p, "simde/x86/avx512.h").exists() for p in ("/usr/include", "/usr/local/include")):
        pytest.skip("neither AVX-512 nor SIMDe (Debian: libsimde-dev) is here: AVX-512 stays unchecked")
    package = tmp_path / "colibri"
    installed = Path(str(importlib.resources.files("colibri")))
    shutil.copytree(installed, package, ignore=shutil.ignore_patterns("*.so"))
    emulated, library = ROOT / "core/kernels/avx512.c", package / "libcolibri.so"
    others = {*ROOT.glob("core/*.c"), *ROOT.glob("core/kernels/*.c")} - {emulated}
    header = f'-DCOLIBRI_AVX512_HEADER="{ROOT}/tests/c/avx512_emulated.h"'
    flags = ["-std=c17", "-ffp-contract=off", "-fvisibility=hidden", "-fPIC", "-pthread", "-w", header]
    flags += ["-mavx2", "-mfma", "-mf16c", f"-I{ROOT}/include", f"-I{ROOT}/core"]
    built = tmp_path / "avx512.o"  # -O1 where it counts; the rest only has to be compiled fast
    subprocess.run(["cc", *flags, "-O1", "-c", str(emulated), "-o", str(built)], check=True)
    subprocess.run(
        ["cc", *flags, "-O0", "-shared", *map(str, others), str(built), "-o", str(library), "-lm"], check=True
    )
    paths = [str(models.converted(name, type)) for name, type in CASES]
    script = (
        "import sys, hashlib\nfrom pathlib import Path\nimport test_bits\n"
        "for path in sys.argv[1:]:\n"
        "    with test_bits.engine(Path(path), chunk=100) as run:\n"
        "        print(run.isa, hashlib.sha256(run.feed(test_bits.ids_of(test_bits.N_IDS))).hexdigest())\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", script, *paths],
        env={"PYTHONPATH": f"{tmp_path}:{ROOT / 'tests'}", "COLIBRI_ISA": "avx512"},
        check=True,
        capture_output=True,
        text=True,
    )
    digests = [f"avx512 {hashlib.sha256(alone(name, type)).hexdigest()}" for name, type in CASES]
    assert found.stdout.splitlines() == digests


# ------------------------------------------------------------------ what an evaluation leaves alone


def test_no_heap_call_after_init(tmp_path: Path) -> None:
    """A C program that counts every allocation of the process (fixtures/heap_calls.c) evaluates, decodes,
    forks, rewinds, fails, is cancelled, samples, selects: zero calls, and the counter is shown to count."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    library = Path(str(importlib.resources.files("colibri"))) / "libcolibri.so"
    program = tmp_path / "heap_calls"
    source = ROOT / "tests/fixtures/heap_calls.c"
    arguments = [
        "-std=c17",
        "-O1",
        f"-I{ROOT}/include",
        str(source),
        str(library),
        f"-Wl,-rpath,{library.parent}",
    ]
    subprocess.run(["cc", *arguments, "-pthread", "-o", str(program)], check=True)
    cases = [("qwen2_moe_dense_layers", "q8"), ("mixtral_bf16", "f32"), ("olmoe_clip", "bf16")]
    paths = [
        models.converted(name, type)
        for name, type in [
            *cases,
            ("deepseek_v3_odd", "q8"),
            ("qwen3_next_odd", "q8"),
            ("lfm2_moe_odd", "q8"),
        ]
    ]
    encoder = convert(MAKERS["switch_transformers"](tmp_path / "hf"), tmp_path / "encoder.colibri", "q8").path
    for path, *more in [*((str(path),) for path in paths), (str(encoder), "with a source")]:
        found = subprocess.run([str(program), path, *more], check=True, capture_output=True, text=True)
        assert found.stdout.split() == ["counted", "1", "evaluating", "0"], found.stderr


def test_progress_is_monotone_and_complete() -> None:
    with engine(models.converted("qwen3_moe_odd", "f32"), max_batch=2, chunk=50) as run:
        seen: list[tuple[int, int]] = []
        batch = {0: ids_of(120), 1: ids_of(33)}
        run.feed_all(batch, progress=lambda done, total: seen.append((done, total)))
    layers = 2
    assert {total for _, total in seen} == {153 * layers}
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1][0] == 153 * layers
    assert len(seen) >= 4 * layers  # four chunks of at most 50 rows, told layer by layer


@pytest.mark.parametrize("when", ["first layer", "later chunk"])
def test_cancel_from_another_thread_leaves_the_sequence_as_it_was(when: str) -> None:
    name, type, ids = "mixtral_bf16", "q8", ids_of(N_IDS)
    with engine(models.converted(name, type), max_batch=2, chunk=32) as run:
        head = run.feed(ids[:140])
        reached, cancelled = threading.Event(), threading.Event()

        def cancel() -> None:
            reached.wait(10)
            native.cancel(run.context)
            cancelled.set()

        def progress(done: int, total: int) -> None:
            if when == "first layer" or done > total // 2:
                reached.set()
                cancelled.wait(10)

        other = threading.Thread(target=cancel)
        other.start()
        with pytest.raises(CancelledError):
            run.feed_all({0: ids_of(200, seed=4), 1: ids_of(60, seed=5)}, progress=progress)
        other.join()
        assert [native.position(run.context, s) for s in (0, 1)] == [140, 0]
        rest = run.feed(ids[140:])  # the cancellation is spent
        assert np.concatenate([head, rest]).tobytes() == alone(name, type)


def test_cancel_before_an_evaluation_ends_the_next_one_only() -> None:
    with engine(models.converted("qwen3_tied", "f32")) as run:
        native.cancel(run.context)
        with pytest.raises(CancelledError):
            run.feed(ids_of(10))
        assert native.position(run.context) == 0
        assert run.feed(ids_of(N_IDS)).tobytes() == alone("qwen3_tied", "f32")


@pytest.mark.parametrize("observer", ["progress", "routing"])
def test_an_exception_in_an_observer_leaves_the_sequence_as_it_was(observer: str) -> None:
    def fail(*_: object) -> None:
        raise LookupError("stop here")

    with engine(models.converted("olmoe_clip", "f32")) as run:
        head = run.feed(ids_of(N_IDS)[:20])
        watch: dict[str, Any] = {observer: fail}
        with pytest.raises(LookupError, match="stop here"):
            run.feed(ids_of(60, seed=3), **watch)
        assert native.position(run.context) == 20
        rest = run.feed(ids_of(N_IDS)[20:])
        assert np.concatenate([head, rest]).tobytes() == alone("olmoe_clip", "f32")


def test_a_refused_batch_changes_nothing() -> None:
    """An id out of range, a full context, a sequence twice: the good inputs beside them are not evaluated."""
    with engine(models.converted("qwen3_moe_odd", "q8"), max_batch=2, context=N_IDS) as run:
        head = run.feed(ids_of(N_IDS)[:250])
        good = np.array(ids_of(10), np.int32)
        for ids, sequence, error in (
            (np.array([5, run.n_vocab], np.int32), 1, ArgumentError),
            (np.array([-1], np.int32), 1, ArgumentError),
            (np.array(ids_of(301), np.int32), 1, ContextFullError),
            (good, 0, ArgumentError),
            (good, 2, ArgumentError),
        ):
            inputs = [native.Input(0, good, None), native.Input(sequence, ids, None)]
            with pytest.raises(error):
                native.evaluate(run.context, inputs, run.n_vocab)
            assert [native.position(run.context, s) for s in (0, 1)] == [250, 0]
        rest = run.feed(ids_of(N_IDS)[250:])
        assert np.concatenate([head, rest]).tobytes() == alone("qwen3_moe_odd", "q8")
