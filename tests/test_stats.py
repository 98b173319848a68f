"""`colibri run --stats` and --stats-json: the same figures as text and as data.

Owns: that, and the file. Refuses: what the figures mean (test_residency.py, test_engine.py).
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from colibri import aside
from colibri.errors import ModelIOError
from test_cli import PROMPT, Result, text_of
from test_cli import call as call


def test_statistics_are_written_as_json(
    call: Callable[..., Result], model_path: Path, tmp_path: Path
) -> None:
    """The same figures as on stderr, with those of layers; one file, whatever was there before."""
    file = tmp_path / "figures.json"
    file.write_text("older")
    options = ("--max-tokens", 6, "--expert-slots", 5, "--lanes", 1, "--stats-json", file)
    quiet = call("run", model_path, PROMPT, *options)
    assert (quiet.status, quiet.err) == (0, "") and [one.name for one in tmp_path.iterdir()] == [file.name]
    shown = call("run", model_path, PROMPT, *options, "--stats")
    assert shown.out == quiet.out == text_of(model_path, max_tokens=6) + "\n"
    found = json.loads(file.read_text())
    assert (found["residency"], found["experts"], found["expert_slots"]) == ("streamed", 8, 5)
    assert found["memory"]["total_bytes"] > 0 and found["peak_bytes"] > 0
    stats = found["stats"]
    uses = sum(stats["layers"]["hits"]) + sum(stats["layers"]["misses"])
    for words in (
        f"experts   5 of 8 in slots, hit rate {100 * stats['hit_rate']:.1f} % of {uses} uses",
        "layers    waited longest for: ",
        "prefetch  undecided: on in ",
        "planned (streamed)",
        f"answer    {found['answer']['tokens']} tokens",
    ):
        assert words in shown.err
    mapped = call("run", model_path, PROMPT, "--max-tokens", 6, "--stats", "--stats-json", file)
    assert "planned (mapped)" in mapped.err and "experts   " not in mapped.err
    assert json.loads(file.read_text())["stats"]["layers"]["hits"] == [0, 0]


def test_the_command_keeps_to_a_limit(call: Callable[..., Result], model_path: Path) -> None:
    expected = text_of(model_path, max_tokens=6) + "\n"
    streamed = call(
        "run", model_path, PROMPT, "--max-tokens", 6, "--memory", "4GiB", "--residency", "streamed"
    )
    assert streamed == (0, expected, "")
    found = call("run", model_path, PROMPT, "--memory", "1MiB")
    assert (found.status, found.out) == (1, "")
    assert "--memory: 1048576 bytes, needed are at least" in found.err and found.err.count("\n") == 1
    for arguments, words in (
        (("--memory", "x"), "--memory: expected a size"),
        (("--expert-slots", 9), "--expert-slots: expected 1 to 8"),
        (("--residency", "resident", "--lanes", 2), "--lanes 2 has no effect with --residency resident"),
        (("--expert-policy", "lru"), "--expert-policy lru has no effect"),
    ):
        found = call("run", model_path, PROMPT, *arguments)
        assert (found.status, found.out) == (2, "") and words in found.err, found.err


def test_statistics_that_cannot_be_written_are_told_first(
    call: Callable[..., Result], model_path: Path, tmp_path: Path
) -> None:
    for file in (tmp_path / "no" / "f.json", tmp_path, Path(os.devnull)):
        found = call("run", model_path, PROMPT, "--stats-json", file)
        assert (found.status, found.out) == (1, "") and f"Cannot write {file}" in found.err


def test_a_file_is_whole_or_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("older")
    link.symlink_to(file)

    def fail(_source: object, _target: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(ModelIOError, match="No space left"):
            aside.write_whole(link, "newer")
    assert file.read_text() == "older" and sorted(os.listdir(tmp_path)) == ["file", "link"]
    aside.write_whole(link, "newer")
    assert file.read_text() == "newer" and link.is_symlink()
