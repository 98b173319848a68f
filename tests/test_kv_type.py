"""A KV cache of halves: the same bits everywhere, half the memory, logits of keys and values that are rounded
to the nearest half."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import checkpoints
import colibri
import oracle
from colibri import ArgumentError, NumericError
from colibri.cli import main
from colibri.convert import convert
from test_convert_delta import CONFIG, write

FAMILIES = ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "gemma4_text", "llama4_text", "qwen3_next"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_bits_are_the_same(make_model: Callable[..., Path], family: str) -> None:
    """For any threads, chunks, batch and kernels, after rewinds and in forks."""
    path = make_model(family, "q8")
    ids = [5 + n * n % 40 for n in range(150)]
    with colibri.load(path, kv_type="f16", threads=1, context=160) as model:
        expected = model.logits(ids)
    with colibri.load(path, context=160) as exact:
        assert exact.logits(ids).tobytes() != expected.tobytes()
    for threads, chunk in itertools.product((1, 2), (1, 7, 160)):
        with colibri.load(
            path, kv_type="f16", threads=threads, chunk=chunk, context=160, max_batch=2
        ) as model:
            assert model.logits(ids).tobytes() == expected.tobytes(), (threads, chunk)
            pair = model.batch_logits([ids, ids[:40]])
            assert pair[0].tobytes() == expected.tobytes()
            assert pair[1].tobytes() == expected[:40].tobytes()
    with colibri.load(path, kv_type="f16", context=160, max_batch=2) as model:
        texts = [model.generate(ids[:n], max_tokens=4, temperature=0).ids for n in (100, 60, 140)]
    with colibri.load(path, kv_type="f16", context=160, max_batch=1, threads=1) as model:
        assert [model.generate(ids[:n], max_tokens=4, temperature=0).ids for n in (100, 60, 140)] == texts


@pytest.mark.parametrize("family", FAMILIES)
def test_kernel_sets_agree(
    make_model: Callable[..., Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, found = make_model(family, "q8"), set()
    for isa in ("scalar", ""):
        monkeypatch.setenv("COLIBRI_ISA", isa)
        with colibri.load(path, kv_type="f16", context=160) as model:
            found.add(model.logits([5 + n % 40 for n in range(140)]).tobytes())
    assert len(found) == 1


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "deepseek_v3", "qwen3_next"])
def test_logits_are_those_of_rounded_keys_and_values(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoints.FAMILIES[family](tmp_path / "checkpoint")
    path = convert(source, tmp_path / "model.colibri", "f32", require_tokenizer=False).path
    ids = [5 + n % 40 for n in range(60)]
    model = oracle.load(source)
    exact = oracle.forward(model, ids)[0]
    monkeypatch.setattr(oracle, "held", lambda y: y.astype(np.float32).astype(np.float16).astype(np.float64))
    expected = oracle.forward(model, ids)[0]
    with colibri.load(path, kv_type="f16", context=64) as opened:
        found = opened.logits(ids)
    # Where a key lies between two halves, the oracle's, in float64, may take the other one.
    off, rounding = np.abs(found - expected), np.abs(exact - expected)
    assert np.quantile(off, 0.9) < 1e-4 and off.mean() < rounding.mean() / 20


def test_the_plan_halves(make_model: Callable[..., Path]) -> None:
    path = make_model("mixtral", "q8")
    one, other = (colibri.plan(path, context=4096, kv_type=kind, measure=False) for kind in ("f32", "f16"))
    ids = 4 * 4096
    assert abs((one.categories["kv_cache"] - ids) - 2 * (other.categories["kv_cache"] - ids)) < 8192
    assert (one.kv_type, other.kv_type) == ("f32", "f16")
    assert one.floor_bytes - other.floor_bytes >= other.categories["kv_cache"] // 2
    assert one.bytes_per_token > other.bytes_per_token


@pytest.mark.parametrize("kind", ["f64", "", "F16", 16, None])
def test_other_types_are_refused(make_model: Callable[..., Path], kind: Any) -> None:
    with pytest.raises(ArgumentError, match="kv_type: expected one of f32, f16"):
        colibri.load(make_model("mixtral", "q8"), kv_type=kind)


def test_a_model_without_keys_has_no_use_for_it(tmp_path: Path) -> None:
    path = write(tmp_path / "m.colibri", CONFIG | {"mixer": [1, 1]})
    with pytest.raises(ArgumentError, match="kv_type: no layer of the model has keys and values"):
        colibri.load(path, kv_type="f16")
    with colibri.load(write(tmp_path / "n.colibri", CONFIG), kv_type="f16", context=64) as model:
        assert not model.logits([1, 2, 3]).any()


def test_what_has_no_half_is_an_error(tmp_path: Path) -> None:
    """Keys beyond 65,519 become infinite; the logits are checked."""
    source = checkpoints.FAMILIES["mixtral"](tmp_path / "checkpoint")
    name = "model.layers.0.self_attn.v_proj.weight"
    matrix = oracle.load(source).weights[name]
    checkpoints.edit_tensors(source, {name: (matrix * 1e7).astype(np.float32)})
    path = convert(source, tmp_path / "model.colibri", "f32", require_tokenizer=False).path
    with colibri.load(path, context=64) as model:
        assert np.isfinite(model.logits([5, 6, 7])).all()
    with colibri.load(path, context=64, kv_type="f16") as model, pytest.raises(NumericError):
        model.logits([5, 6, 7])


@pytest.mark.parametrize("command", ["run", "bench", "profile", "plan", "trace", "eval"])
def test_every_command_takes_it(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = {
        "run": ["a", "--max-tokens", "3", "--stats-json", str(tmp_path / "stats.json")],
        "bench": ["--prompt", "8", "--decode", "4", "--repeat", "1", "--json"],
        "profile": ["--prompt", "8", "--decode", "4", "--json"],
        "plan": ["--no-measure", "--json"],
        "eval": ["--text", str(tmp_path / "a.txt"), "--json"],
        "trace": ["--text", "a b c", "-o", str(tmp_path / "run.trace")],
    }[command]
    (tmp_path / "a.txt").write_text("Once upon a time, there was a dog.")
    for kind, code in (("f16", 0), ("f8", 2)):
        with pytest.raises(SystemExit) as ended:
            main([command, "demo", *more, "--kv-type", kind])
        assert ended.value.code == code
    assert "--kv-type: expected one of f32, f16" in capsys.readouterr().err
