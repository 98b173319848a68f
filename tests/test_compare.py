"""benchmarks/compare.py without running an engine: blocks it writes, who fits in memory, the README's table.

Owns: what can be checked on made-up rows and small blocks. Refuses: speed and other engines.
"""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MARKED = re.compile(r"<!-- table of (\S+) -->\n.*?<!-- end of table -->", re.DOTALL)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a script's module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module


def test_q8_0_blocks(module: Any) -> None:
    blocks = module("gguf_writer").q8_0(np.random.default_rng(0), 16, 128, 0.02).reshape(16, 4, 34)
    scale = blocks[..., :2].copy().view("<f2").astype(np.float32)
    weights = scale * blocks[..., 2:].view(np.int8)
    assert weights.std() == pytest.approx(0.02, rel=0.1) and abs(weights.mean()) < 0.002


def test_q4_k_blocks(module: Any) -> None:
    blocks = module("gguf_writer").q4_k(np.random.default_rng(0), 16, 512, 0.02).reshape(16, 2, 144)
    d, dmin = (blocks[..., at : at + 2].copy().view("<f2").astype(np.float32) for at in (0, 2))
    packed, nibbles = blocks[..., 4:16], blocks[..., 16:].reshape(16, 2, 4, 32)
    scales = np.concatenate([packed[..., :4] & 63, packed[..., 8:] & 15], -1)
    minima = np.concatenate([packed[..., 4:8] & 63, packed[..., 8:] >> 4], -1)
    low_high = np.stack([nibbles & 15, nibbles >> 4], 3).reshape(16, 2, 8, 32)
    weights = (d * scales)[..., None] * low_high - (dmin * minima)[..., None]
    assert weights.std() == pytest.approx(0.02, rel=0.1) and abs(weights.mean()) < 0.002


def test_every_matrix_is_in_the_file(module: Any) -> None:
    from colibri.analysis.shapes import SHAPES

    for shape in SHAPES.values():
        found = sum(
            int(np.prod(size)) for _, _, size in module("gguf_writer").tensors(shape) if len(size) > 1
        )
        assert found == shape.parameters(shape.n_experts)


def test_who_copies_the_file_waits_if_memory_is_short(module: Any, tmp_path: Path) -> None:
    lineup = module("lineup")
    by_name = {one.name: one for one in lineup.ENTRANTS}
    ours, theirs = tmp_path / "a", tmp_path / "b"
    for path in (ours, theirs):
        path.write_bytes(bytes(1000))
    names = ("llama.cpp", "ik_llama.cpp", "ik_llama.cpp-rtr", "transformers-f32")
    file, drawn = lineup.Source(theirs, 1000), lineup.Source(None, 2000)
    pairs = [(lineup.OURS, lineup.Source(ours, 1000))]
    pairs += [(by_name[name], drawn if name == "transformers-f32" else file) for name in names]

    def groups(total: int | None, of: Any = pairs) -> tuple[list[list[str]], list[str]]:
        made, left = lineup.groups(of, "q8", total)
        return [[one.name for one in group] for group in made], [one.name for one, _ in left]

    everybody = ["colibri", *names]
    assert groups(None) == ([everybody], []) and groups(6000) == ([everybody], [])
    mapped = ["colibri", "llama.cpp", "ik_llama.cpp"]
    assert groups(2400) == ([mapped, ["colibri", "ik_llama.cpp-rtr"]], ["transformers-f32"])
    assert groups(3600) == ([everybody[:-1], ["colibri", "transformers-f32"]], [])
    assert groups(3000, [pairs[0], pairs[-1]]) == ([["colibri"]], ["transformers-f32"])
    assert groups(3600, [pairs[0], pairs[-1]]) == ([["colibri", "transformers-f32"]], [])


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_transformers_evaluates_the_ids_it_is_given(module: Any, tmp_path: Path, dtype: str) -> None:
    lineup, name = module("lineup"), f"transformers-{dtype}"
    entrant = next(one for one in lineup.ENTRANTS if one.name == name)
    if not entrant.installed():
        pytest.skip("needs torch and transformers")
    given = lineup.arguments(entrant, lineup.source(entrant, "mixtral-tiny", "q8"), "mixtral-tiny", 1, 6, 3)
    ids, then = [7, 100, 511, 0, 30, 200], [5, 400, 9]
    warm_up, python = {"ids": [1, 2], "then": [3]}, lineup.interpreter(entrant)
    one = module("contestant").start(entrant.engine, name, given, warm_up, python)
    try:
        answer = one.turn({"ids": ids, "then": then})
        one.ask({"ids": [*ids, *then], "logits": str(tmp_path / "logits.npy")})
    finally:
        one.kill()
    logits = np.load(tmp_path / "logits.npy")[len(ids) - 1 :]
    assert logits.shape == (4, 512) and 2 < logits.std() < 4
    # the greedy choices behind the cache are those of the ids as one prompt (bf16: but for rounding)
    chosen = np.take_along_axis(logits, np.array(answer["ids"])[:, None], 1)[:, 0]
    assert (logits.max(-1) - chosen <= (0.3 if dtype == "bf16" else 1e-3)).all()
    assert answer["decoded"] == 3 and one.setting["cache"] == "static"


def row(engine: str, prefill: float, decode: float, **changes: str) -> dict[str, str]:
    """A row of the CSV, as far as a table needs it."""
    made = {"run": "1", "shape": "s", "type": "q8", "threads": "2", "prompt": "512", "decode": "64"}
    made |= {"group": "1", "engine": engine, "peak_mib": "1000"}
    return made | {"prefill_tok_s": str(prefill), "decode_tok_s": str(decode)} | changes


def test_the_table_compares_inside_a_group_and_shows_the_last_run(module: Any) -> None:
    rows = [
        row("colibri", 1, 1, run="0"),
        row("colibri", 300, 40),
        row("a", 100, 20),
        row("colibri", 200, 30, group="2"),
        row("b", 100, 25, group="2", peak_mib="500"),
        row("colibri-resident", 200, 50, group="2"),
        row("colibri", 250, 0, prompt="4096") | {"decode": "0", "decode_tok_s": ""},
    ]
    assert module("table").markdown(rows).splitlines() == [
        "| shape, type, threads |  | colibri | colibri-resident | a | b | against the best |",
        "|---|---|---:|---:|---:|---:|---:|",
        "| s q8, 2 | prefill 512, tok/s | 300 | 200 | 100 | 100 | 2.00 × |",
        "|  | prefill 4096, tok/s | 250 |  |  |  |  |",
        "|  | decode 64, tok/s | 40.0 | 50.0 | 20.0 | 25.0 | 1.20 × |",
        "|  | peak memory, MiB | 1,000 | 1,000 | 1,000 | 500 | 2.00 × |",
    ]


def test_transformers_is_one_column_with_a_ratio_of_its_own(module: Any) -> None:
    rows = [
        row("colibri", 300, 40),
        row("transformers-bf16", 20, 10, peak_mib="2000"),
        row("transformers-f32", 100, 5, peak_mib="4000"),
        row("a", 150, 80, peak_mib="500"),
    ]
    assert module("table").markdown(rows).splitlines() == [
        "| shape, type, threads |  | colibri | a | transformers | against the best | against transformers |",
        "|---|---|---:|---:|---:|---:|---:|",
        "| s q8, 2 | prefill 512, tok/s | 300 | 150 | 100 | 2.00 × | 3.00 × |",
        "|  | decode 64, tok/s | 40.0 | 80.0 | 10.0 | 0.50 × | 4.00 × |",
        "|  | peak memory, MiB | 1,000 | 500 | 2,000 | 2.00 × | 0.50 × |",
    ]


@pytest.mark.parametrize("name", ["README.md", "docs/PERFORMANCE.md"])
def test_tables_are_those_of_the_results(module: Any, name: str) -> None:
    for match in MARKED.finditer((ROOT / name).read_text(encoding="utf-8")):
        assert match[0] == module("table").marked(RESULTS / match[1]), (
            f"python benchmarks/compare.py --table: {name}"
        )
