"""`colibri batch`: answers in the order of the requests, those of the model; a run that is cut goes on."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import colibri

pytest.importorskip("fastapi")

PROMPTS = ["Once upon a time", "The dog", "A", "One day, a girl", "It was", "The cat sat"]


def command(source: Path, out: Path, *more: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "colibri",
        "batch",
        str(source),
        str(out),
        "--model",
        "demo",
        "--context",
        "128",
        *more,
    ]


def run(source: Path, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(source, out, *more), capture_output=True, text=True, timeout=120)


def requests(n: int) -> list[dict[str, Any]]:
    return [
        {
            "custom_id": f"r{at}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": PROMPTS[at % len(PROMPTS)], "temperature": 1, "seed": at, "max_tokens": 12},
        }
        for at in range(n)
    ]


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_answers_are_those_of_the_model_in_order(tmp_path: Path) -> None:
    asked = requests(14)
    source, out = write(tmp_path / "in.jsonl", asked), tmp_path / "out.jsonl"
    done = run(source, out, "--max-batch", "3")
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [one["custom_id"] for one in found] == [one["custom_id"] for one in asked]
    with colibri.load("demo", context=128) as model:
        for one, request in zip(found, asked, strict=True):
            body = request["body"]
            expected = model.generate(body["prompt"], temperature=1, seed=body["seed"], max_tokens=12).text
            assert one["response"]["status_code"] == 200
            assert one["response"]["body"]["choices"][0]["text"] == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_bodies_alone_and_failures_have_their_line(tmp_path: Path) -> None:
    lines: list[Any] = [
        {
            "messages": [{"role": "user", "content": "What color is the sky?"}],
            "temperature": 0,
            "max_tokens": 9,
        },
        {"prompt": "a", "temperature": 77777},
        "no json",
        [1],
        {"custom_id": "x", "url": "/v1/nothing", "body": {}},
        {
            "custom_id": "m",
            "url": "/v1/messages",
            "body": {"model": "demo", "max_tokens": 3, "messages": [{"role": "user", "content": "a"}]},
        },
        {"prompt": "a", "stream": True},
    ]
    out = tmp_path / "out.jsonl"
    assert run(write(tmp_path / "in.jsonl", lines), out).returncode == 0
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [one["response"]["status_code"] for one in found] == [200, 400, 400, 400, 400, 200, 400]
    assert "temperature" in found[1]["response"]["body"]["error"]["message"]


def test_a_run_that_was_cut_goes_on(tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", requests(200)), tmp_path / "out.jsonl"
    part = tmp_path / "out.jsonl.part"
    process = subprocess.Popen(command(source, out), stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while time.monotonic() < end and (not part.exists() or part.read_text().count("\n") < 5):
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    process.wait(60)
    if not out.exists():
        before = part.read_text()
        part.write_text(before + '{"custom_id": "cut')
        done = run(source, out)
        assert done.returncode == 0 and "by an earlier run" in done.stderr
        assert out.read_text().startswith(before[: before.rfind("\n") + 1])
    first = [json.loads(line)["response"]["body"]["choices"] for line in out.read_text().splitlines()]
    again = tmp_path / "again.jsonl"
    assert run(source, again, "--max-batch", "2").returncode == 0
    assert [
        json.loads(line)["response"]["body"]["choices"] for line in again.read_text().splitlines()
    ] == first
    assert not part.exists() and len(first) == 200


def test_a_part_of_something_else_is_left_alone(tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", requests(2)), tmp_path / "out.jsonl"
    part = write(tmp_path / "out.jsonl.part", [{"other": 1}])
    done = run(source, out)
    assert done.returncode == 2 and "another batch" in done.stderr and part.exists()


def test_files_that_are_not_there(tmp_path: Path) -> None:
    assert run(tmp_path / "none.jsonl", tmp_path / "out.jsonl").returncode == 1
    assert run(write(tmp_path / "in.jsonl", []), tmp_path / "none" / "out.jsonl").returncode == 1
