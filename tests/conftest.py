"""Tiny converted models that tests of the Python face share. Each is made once for a whole run."""

import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import checkpoints
import colibri
from colibri.analysis import synthetic
from colibri.analysis.shapes import SHAPES
from colibri.convert import convert
from colibri.entries import weight_types

END_IDS = [2, 4]  # </s> and <|im_end|>
# A shell starts background jobs with Ctrl-C ignored, and children inherit that: tests of Ctrl-C need it back.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make_model(family, type="f32", **options of tests/checkpoints.py) -> a .colibri file."""
    made: dict[str, Path] = {}

    def make(family: str = "mixtral", type: str = "f32", **options: Any) -> Path:
        key = repr((family, type, sorted(options.items())))
        if key not in made:
            directory = tmp_path_factory.mktemp(family)
            source = checkpoints.FAMILIES[family](directory / "checkpoint", **options)
            tokenizer = options.get("tokenizer", True)
            made[key] = convert(source, directory / "model.colibri", type, require_tokenizer=tokenizer).path
        return made[key]

    return make


@pytest.fixture(scope="session")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """160 MB in 6 layers of 32 experts, random weights: what no slack of a process hides."""
    shape = replace(
        SHAPES["mixtral-tiny"], n_layers=6, n_embd=512, n_experts=32, n_experts_used=4, n_ff_expert=512
    )
    path = tmp_path_factory.mktemp("larger") / "larger.colibri"
    synthetic.write("larger", path, weight_types("q8"), shape=shape)
    return path


@pytest.fixture(scope="session")
def model_path(make_model: Callable[..., Path]) -> Path:
    """A two-layer mixture of four experts with 300 tokens, 20 padding rows, two end tokens, a chat
    template."""
    generation = {"bos_token_id": 1, "eos_token_id": END_IDS}
    return make_model("mixtral", extra_rows=20, adds_bos=True, generation=generation)


@pytest.fixture
def model(model_path: Path) -> Iterator[colibri.Model]:
    """The model, freshly opened."""
    with colibri.load(model_path, threads=2, context=64) as opened:
        yield opened


@pytest.fixture(scope="module")
def served() -> Iterator[Any]:
    """The demo, as a server holds it."""
    pytest.importorskip("fastapi")
    from colibri.server.served import Served

    with colibri.load("demo", max_batch=4, context=256) as model:
        engine = colibri.AsyncEngine(model)
        yield Served("demo", model, engine)
        engine.close()


@pytest.fixture(scope="module")
def client(served: Any) -> Any:
    """A client of a server of the demo."""
    from colibri.server.app import create_app
    from server_client import Client

    return Client(create_app([served]))
