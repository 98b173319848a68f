"""Answers that must match a JSON schema, a regular expression or a grammar, from a model that would
never write such a thing by itself; alone and in a batch."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import colibri
from colibri import AsyncEngine, Model
from colibri.errors import ArgumentError, UnsupportedError

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with colibri.load("demo", max_batch=4, context=256) as opened:
        yield opened


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_a_schema_is_kept(model: Model, temperature: float) -> None:
    for seed in range(5):
        seeded: dict[str, Any] = {} if temperature == 0 else {"seed": seed}
        found = model.generate(
            "Her name is", max_tokens=200, temperature=temperature, json_schema=SCHEMA, **seeded
        )
        answer = json.loads(found.text)
        assert found.finish_reason == "stop"
        assert set(answer) == {"name", "age"} and 0 <= answer["age"] <= 99 and len(answer["name"]) <= 8


@pytest.mark.parametrize("pattern", ["(yes|no)", "[0-9]{3}-[a-f]{2}", "🦙+ok", "(歪|A )B"])
def test_a_regular_expression_is_kept(model: Model, pattern: str) -> None:
    for seed in range(4):
        found = model.generate("It is", max_tokens=64, temperature=1.5, seed=seed, regex=pattern)
        if found.finish_reason == "stop":
            assert re.fullmatch(pattern, found.text), found.text


def test_a_grammar_is_kept(model: Model) -> None:
    grammar = 'start: item ("," item)*\nitem: /[a-c]{1,3}/'
    found = model.generate("Letters:", max_tokens=40, temperature=1, seed=2, grammar=grammar)
    assert re.match(r"[a-c]{1,3}(,[a-c]{0,3})*", found.text)


def test_streams_batches_and_single_texts_agree(model: Model) -> None:
    prompts = ["Her name is", "One day", "The dog is called", "A", "The cat"]
    options: dict[str, Any] = {"max_tokens": 100, "temperature": 0.0, "json_schema": SCHEMA}
    alone = [model.generate(prompt, **options).ids for prompt in prompts]
    assert [("".join(model.stream(prompt, **options))) for prompt in prompts] == [
        model.generate(prompt, **options).text for prompt in prompts
    ]

    async def together() -> list[list[int]]:
        async with AsyncEngine(model) as engine:
            found = await asyncio.gather(*(engine.generate(prompt, **options) for prompt in prompts))
        return [one.ids for one in found]

    assert asyncio.run(together()) == alone


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"regex": "((("}, "regex"),
        ({"regex": ""}, "not empty"),
        ({"regex": 7}, "regex"),
        ({"grammar": "start: nothing_of_that"}, "grammar"),
        ({"json_schema": {"type": "strange"}}, "json_schema"),
        ({"json_schema": False}, "json_schema"),
        ({"json_schema": [1]}, "json_schema"),
        ({"json_schema": {"const": float("nan")}}, "json_schema"),
        ({"json_schema": {"$ref": "https://example.org/schema.json"}}, "json_schema"),
        ({"json_schema": True, "regex": "a"}, "leave one out"),
    ],
)
def test_what_cannot_be_is_an_error_before_anything_is_evaluated(
    model: Model, wrong: dict[str, Any], says: str
) -> None:
    before = model._sequences.rows
    with pytest.raises(ArgumentError, match=says):
        model.generate("a", **wrong)
    assert model._sequences.rows == before


def test_the_command_line_takes_them(tmp_path: Path) -> None:
    schema, stats = tmp_path / "schema.json", tmp_path / "stats.json"
    schema.write_text(json.dumps(SCHEMA))
    done = subprocess.run(
        [sys.executable, "-m", "colibri", "run", "demo", "Her name is", "--json-schema", str(schema)]
        + [
            "--logprobs",
            "2",
            "--stats-json",
            str(stats),
            "--frequency-penalty",
            "0.5",
            "--logit-bias",
            "11=1",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(json.loads(done.stdout)) == {"name", "age"}
    tokens = json.loads(stats.read_text())["logprobs"]
    assert "".join(one["token"] for one in tokens) == done.stdout.rstrip("\n")
    assert all(len(one["top"]) == 2 for one in tokens)


def test_without_llguidance_the_next_step_is_named(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UnsupportedError, match="pip install"):
        model.generate("a", regex="b")
