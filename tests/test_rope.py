"""RoPE settings from config.json to logits: every type in every place and spelling (case 8), and up to which
length one vector of frequencies serves.

Owns: types and spellings through the whole engine beside the numpy oracle. Refuses: what is refused
(test_convert_bad_config.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import checkpoints
import colibri
import oracle
from colibri.convert import ConversionReport, convert
from colibri.errors import ArgumentError
from colibri.format import read_container, read_entry
from fixtures.native import engine
from fixtures.variants import LLAMA3, LONGROPE, YARN

IDS = [int(i) for i in np.random.default_rng(8).integers(3, 295, 160)]  # 2.5 times the original length of 64
ORIGINAL = 64
DYNAMIC = {"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 4.0}}
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    "llama3": dict(LLAMA3["rope_scaling"]),  # type: ignore[call-overload]
    "yarn": dict(YARN["rope_scaling"]),  # type: ignore[call-overload]
    "longrope": dict(LONGROPE["rope_scaling"]),  # type: ignore[call-overload]
}


def make(path: Path, rope: dict[str, Any], **options: Any) -> Path:
    return checkpoints.llama(path, rope=rope, storage="f32", tokenizer=False, head_dim=32, **options)


def made(tmp_path: Path, source: Path, context: int | None = None) -> ConversionReport:
    return convert(source, tmp_path / "m.colibri", "f32", context=context, require_tokenizer=False)


def frequencies(report: ConversionReport) -> oracle.Float32:
    return np.frombuffer(read_entry(read_container(report.path), "rope_inv_freq"), "<f4")


@pytest.mark.parametrize("kind", KINDS)
def test_case_8_every_place_and_spelling_gives_the_same_file(kind: str, tmp_path: Path) -> None:
    """rope_theta at the top or inside; rope_scaling or rope_parameters; type or rope_type."""
    settings = {key: value for key, value in KINDS[kind].items() if key not in ("type", "rope_type")}
    found = []
    for name in ("type", "rope_type"):
        for outer in ("rope_scaling", "rope_parameters"):
            for theta in ("top", "inside", "both"):
                inner = {name: kind} | settings | ({} if theta == "top" else {"rope_theta": 1e6})
                rope = {outer: inner} | ({} if theta == "inside" else {"rope_theta": 1e6})
                report = made(tmp_path, make(tmp_path / "hf", rope, n_layers=1), context=512)
                container = read_container(report.path)
                found.append((container.config, frequencies(report).tobytes()))
    assert all(one == found[0] for one in found)
    raw = checkpoints.read_config(tmp_path / "hf")
    expected = oracle.rope_frequencies(raw, 32, 1e4, is_long=True)
    assert np.allclose(frequencies(report), expected, rtol=1e-6)
    assert not np.allclose(expected, oracle.rope_frequencies({"rope_theta": 1e4}, 32, 1e4))


@pytest.mark.parametrize("kind", KINDS)
def test_case_8_logits_beyond_the_original_length(kind: str, tmp_path: Path) -> None:
    rope = {"rope_theta": 1e4, "rope_scaling": KINDS[kind]}
    source = make(tmp_path / "hf", rope)
    path = made(tmp_path, source, context=512).path
    with engine(path) as run:
        found = run.feed(IDS)
    model, raw = oracle.load(source), checkpoints.read_config(source)
    long = oracle.rope_frequencies(raw, 32, 1e4, is_long=True)
    model = model._replace(config=replace(model.config, inv_freq=long))
    assert np.abs(found - oracle.forward(model, IDS)[0]).max() < 1e-4
    if kind not in ("default", "dynamic"):  # read and applied
        plain = oracle.load(make(tmp_path / "plain", {"rope_theta": 1e4}))
        assert np.abs(found - oracle.forward(plain, IDS)[0]).max() > 1e-2


def test_dynamic_is_default_and_says_so(tmp_path: Path) -> None:
    report = made(tmp_path, make(tmp_path / "hf", DYNAMIC))
    plain = made(tmp_path, make(tmp_path / "plain", {"rope_theta": 1e4}))
    assert np.array_equal(frequencies(report), frequencies(plain))
    assert any("'dynamic'" in note and "up to max_position_embeddings = 512" in note for note in report.notes)
    assert not any("'dynamic'" in note for note in plain.notes)


def test_longrope_is_short_unless_more_is_asked_for(tmp_path: Path) -> None:
    """A file is for texts on one side of the original length, as its context_length says."""
    source, divisors = make(tmp_path / "hf", LONGROPE), KINDS["longrope"]
    plain = oracle.rope_frequencies({"rope_theta": 1e4}, 32, 1e4)
    for context, length, name, said in (
        (None, ORIGINAL, "short_factor", "context=512 makes one for longer"),
        (ORIGINAL, ORIGINAL, "short_factor", ""),
        (40, 40, "short_factor", ""),
        (65, 65, "long_factor", "The model has others for shorter texts"),
        (512, 512, "long_factor", "The model has others for shorter texts"),
    ):
        report = made(tmp_path, source, context)
        assert np.allclose(frequencies(report), plain / np.array(divisors[name], np.float32), rtol=1e-6)
        config = read_container(report.path).config
        assert config["context_length"] == length
        assert config["rope_scale"] == pytest.approx(np.sqrt(1 + np.log(8) / np.log(64)))
        notes = [note for note in report.notes if "'longrope'" in note]
        assert len(notes) == bool(said) and said in "".join(notes)
    with engine(made(tmp_path, source).path) as run:  # the short side, through the engine
        found = run.feed(IDS[:ORIGINAL])
    assert np.abs(found - oracle.forward(oracle.load(source), IDS[:ORIGINAL])[0]).max() < 1e-4


@pytest.mark.parametrize("family", ["phimoe", "llama"])
def test_what_transformers_does_otherwise_is_said_where_it_does(family: str, tmp_path: Path) -> None:
    """PhimoeRotaryEmbedding of Transformers 5.24 asks for the frequencies of no length, which are the short
    ones, at every length; others take the long ones beyond the original."""
    settings = LONGROPE["rope_scaling"] | {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}  # type: ignore[operator]
    settings |= {"short_mscale": 1.2, "long_mscale": 1.2} if family == "phimoe" else {}
    rope = {"rope_theta": 1e4, "rope_scaling": settings}
    source = checkpoints.FAMILIES[family](tmp_path / "hf", rope=rope)
    for context, is_long in ((None, False), (ORIGINAL, False), (ORIGINAL + 1, True)):
        report = made(tmp_path, source, context)
        assert np.isclose(frequencies(report)[0], 0.5 if is_long else 1.0)
        text = "; ".join(report.notes)
        assert ("Transformers 5.24 ignores long_factor" in text) == (is_long and family == "phimoe")
        assert "Transformers takes" not in text


def test_longrope_scale_comes_from_the_first_of_three(tmp_path: Path) -> None:
    """attention_factor, factor, or the ratio of the lengths; the top level's original length wins."""
    settings = KINDS["longrope"]
    for changes, top, expected in (
        ({"attention_factor": 1.5}, {}, 1.5),
        ({"factor": 2.0}, {}, np.sqrt(1 + np.log(2) / np.log(64))),
        ({"factor": 0.5}, {}, 1.0),
        ({}, {"original_max_position_embeddings": 128}, np.sqrt(1 + np.log(4) / np.log(128))),
    ):
        rope = {"rope_scaling": settings | changes}
        report = made(tmp_path, make(tmp_path / "hf", rope, config_extra=top))
        assert read_container(report.path).config["rope_scale"] == pytest.approx(expected)


def test_yarn_with_a_null_factor_takes_the_ratio_of_the_lengths(tmp_path: Path) -> None:
    given, null = ({"rope_scaling": KINDS["yarn"] | {"factor": factor}} for factor in (8.0, None))
    files = [made(tmp_path, make(tmp_path / "hf", rope)) for rope in (given, null)]
    assert np.array_equal(frequencies(files[0]), frequencies(files[1]))


def test_the_context_of_a_file_may_be_shorter_and_never_longer(tmp_path: Path) -> None:
    source = make(tmp_path / "hf", {"rope_theta": 1e4})
    path = made(tmp_path, source, context=100).path
    with colibri.load(path, threads=1) as model:
        assert model.context == 100
    for wrong in (0, -1, 513):
        with pytest.raises(ArgumentError, match=f"context={wrong} must be from 1 to .* 512"):
            made(tmp_path, source, context=wrong)
