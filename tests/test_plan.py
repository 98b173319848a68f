"""colibri.plan and `colibri plan`: bytes are those that load() takes, the least limit is one that works, what
is expected follows from what was measured.

Owns: the plan, the disk probe, the command. Refuses: whether a speed comes true (benchmarks/), and residency
itself (test_residency.py).
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import checkpoints
import colibri
from colibri import cache
from colibri.analysis import bandwidth, disk
from colibri.analysis import plan as planning
from colibri.analysis.cost import cost
from colibri.errors import ArgumentError, MemoryPlanError, ModelIOError
from test_cli import Result
from test_cli import call as call

MIB = 1 << 20


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arithmetic is looked at, not speed."""
    monkeypatch.setattr(bandwidth, "buffer_bytes", lambda: 4 << 20)
    monkeypatch.setattr(disk, "_MOST_BYTES", 8 << 20)


def without_process(plan: colibri.MemoryPlan) -> dict[str, int]:
    found = dataclasses.asdict(plan)
    return {name: found[name] for name in planning._CATEGORIES if name != "process"}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"residency": "resident", "context": 100},
        {"residency": "streamed", "chunk": 16},
        {"expert_slots": 7, "max_batch": 3, "threads": 1},
        {"expert_slots": 40, "expert_policy": "lru", "lanes": 1},
    ],
)
def test_the_plan_is_what_load_takes(options: dict[str, Any]) -> None:
    found = colibri.plan("demo", measure=False, **options)
    assert sum(found.categories.values()) == found.planned_bytes
    with colibri.load("demo", **options) as model:
        categories = dict(found.categories)
        process = categories.pop("process")
        assert categories == without_process(model.memory)
        assert abs(process - model.memory.process) < 16 * MIB
        assert (found.residency, found.expert_slots) == (model.residency, model.memory.expert_slots)
        assert (found.threads, found.context, found.max_batch, found.chunk) == (
            model.threads,
            model.context,
            model.max_batch,
            model.chunk,
        )
    json.dumps(found.as_dict())


def test_a_plan_leaves_nothing_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    path = str(cache.resolve("demo"))
    colibri.plan("demo", measure=False)
    with pytest.raises(MemoryPlanError):
        colibri.plan("demo", measure=False, memory=1000)
    assert len(os.listdir("/proc/self/fd")) == before and path not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("options", [{"residency": "streamed"}, {}, {"residency": "mapped"}])
def test_below_the_floor_the_number_is_named_and_works(options: dict[str, Any]) -> None:
    """The process may have grown a little between two questions: then the next number is asked for."""
    needed, found = 1000, None
    for _ in range(5):
        try:
            found = colibri.plan("demo", memory=needed, measure=False, **options)
            break
        except MemoryPlanError as error:
            assert str(error).startswith("memory: ")
            needed = max(numbers(str(error)))
    assert found is not None and needed > MIB
    assert found.planned_bytes <= needed and found.floor_bytes <= needed
    if options.get("residency") == "streamed":
        assert found.expert_slots == 1


@pytest.mark.parametrize(
    "options", [{"residency": "mapped"}, {"residency": "resident"}, {"expert_slots": 20}]
)
def test_the_floor_is_that_of_what_was_asked_for(options: dict[str, Any]) -> None:
    floor = colibri.plan("demo", measure=False, **options).floor_bytes
    assert colibri.plan("demo", memory=floor + MIB, measure=False, **options).planned_bytes <= floor + MIB


def numbers(text: str) -> list[int]:
    """All numbers of a text; thousands may be set apart."""
    words = text.replace(",", "").replace(";", " ").split()
    return [int(word) for word in words if word.isdigit()]


def test_more_memory_gives_more_slots_and_none_is_passed() -> None:
    one = colibri.plan("demo", expert_slots=1, measure=False)
    slots = []
    for more in (0, 3, 9, 20, 30, 60):
        limit = one.planned_bytes + MIB + more * (one.slot_bytes + 100)
        found = colibri.plan("demo", residency="streamed", memory=limit, measure=False)
        assert found.planned_bytes <= limit == found.memory_limit
        slots.append(found.expert_slots)
    assert slots == sorted(slots) and slots[0] < slots[3] and slots[-1] == one.n_experts == 40


def test_sizes_are_those_worth_considering() -> None:
    found = colibri.plan("demo", measure=False)
    assert found.experts_per_token == 10
    by_name = {name: size for size in found.sizes for name in size.name.split(", ")}
    expected = {"one slot": 1, "one token of all layers": 10, "25 %": 10, "50 %": 20, "all experts": 40}
    assert {name: size.expert_slots for name, size in by_name.items()} == expected
    totals = [size.total_bytes for size in found.sizes]
    assert totals == sorted(totals)
    assert [size.hit_rate for size in found.sizes] == [0, 0.25, 0.5, 1]
    assert all(size.tok_per_s is None for size in found.sizes) and found.speeds is None


def test_fewer_slots_than_a_token_uses_give_no_hits() -> None:
    expected = {1: 0, 9: 0, 10: 0.25, 30: 0.75, 40: 1}
    for slots, rate in expected.items():
        assert colibri.plan("demo", expert_slots=slots, measure=False).hit_rate == rate
    assert colibri.plan("demo", measure=False).hit_rate is None
    told = colibri.plan("demo", expert_slots=9, measure=False, hit_rate=lambda slots: slots / 100)
    assert told.hit_rate == 0.09 and told.sizes[0].hit_rate == 0.01


def test_speed_follows_from_the_bandwidths(monkeypatch: pytest.MonkeyPatch) -> None:
    disks: list[tuple[int, int]] = []

    def read(_path: Path, lanes: int, piece: int) -> disk.Disk:
        disks.append((lanes, piece))
        return disk.Disk(0.5, lanes, piece, 1, True)

    monkeypatch.setattr(disk, "measure", read)
    monkeypatch.setattr(bandwidth.Probe, "read", lambda _probe, n: bandwidth.Reading(n, 10, 30))
    price = cost(cache.resolve("demo"))
    found = colibri.plan("demo", context=200, lanes=2, expert_slots=20, threads=1)
    seconds = price.decode_bytes(100) / 10e9 + 0.5 * price.experts_bytes / 0.5e9
    assert found.tok_per_s == pytest.approx(1 / seconds) and disks == [(2, found.slot_bytes)]
    assert (found.bytes_per_token, found.expert_bytes_per_token) == (
        price.decode_bytes(100),
        price.experts_bytes,
    )
    mapped = colibri.plan("demo", context=200)
    assert mapped.tok_per_s == pytest.approx(10e9 / price.decode_bytes(100)) == mapped.sizes[-1].tok_per_s
    monkeypatch.setattr(planning, "available_bytes", lambda: 1000)
    short = colibri.plan("demo", context=200, residency="mapped")
    seconds = price.decode_bytes(100) / 10e9 + price.decode_bytes(0) / 0.5e9
    assert short.tok_per_s == pytest.approx(1 / seconds) and short.available_bytes == 1000


def test_a_dense_model_has_no_sizes(make_model: Callable[..., Path]) -> None:
    found = colibri.plan(make_model("llama"))
    assert (found.residency, found.sizes, found.n_experts, found.slot_bytes) == ("mapped", (), 0, 0)
    assert found.floor_bytes == found.planned_bytes and (found.tok_per_s or 0) > 0
    with pytest.raises(ArgumentError, match="no routed experts"):
        colibri.plan(make_model("llama"), residency="streamed")


def test_wrong_choices_are_those_of_load() -> None:
    wrong: dict[str, Any]
    for wrong in ({"residency": "cloud"}, {"lanes": 0}, {"memory": "much"}, {"type": "q8"}, {"context": 0}):
        with pytest.raises(ArgumentError) as ours:
            colibri.plan("demo", **wrong)
        with pytest.raises(ArgumentError) as theirs:
            colibri.load("demo", **wrong)
        assert str(ours.value) == str(theirs.value)


# --- the disk


def test_the_probe_reads_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(3 * MIB + 77))
    for lanes, piece in ((1, MIB), (3, 5000), (16, 1)):
        found = disk.measure(path, lanes, piece)
        assert found.gb_per_s > 0 and found.bytes >= 8 * MIB and found.lanes == lanes
        assert found.piece_bytes == max(1, piece // 4096) * 4096 and str(found.piece_bytes) in found.method
    path.write_bytes(bytes(5000))
    assert disk.measure(path, 4).piece_bytes == 4096
    path.write_bytes(bytes(4095))
    with pytest.raises(ModelIOError, match="at least 4096 bytes, found 4095"):
        disk.measure(path, 4)
    with pytest.raises(ModelIOError, match="Cannot read"):
        disk.measure(tmp_path / "absent", 4)


def test_where_direct_reads_are_refused_the_page_cache_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(MIB))
    really = os.open

    def refuse(name: Any, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return really(name, flags)

    monkeypatch.setattr(os, "open", refuse)
    found = disk.measure(path, 2)
    assert not found.direct and found.bytes >= 8 * MIB and "page cache" in found.method


# --- the command


def test_the_command_prints_tables(call: Callable[..., Result]) -> None:
    found = call("plan", "demo", "--expert-slots", 20, "--context", 100)
    assert found.status == 0 and found.err == ""
    assert found.out.startswith("demo.colibri: streamed, 20 of 40 experts in slots\n")
    for words in ("expert cache", "KV cache", "least that works", "50 %", "hit rate 50.0%", "GB/s", "tok/s"):
        assert words in found.out
    quick = call("plan", "demo", "--no-measure")
    assert quick.status == 0 and quick.out.startswith("demo.colibri: mapped\n") and "GB/s" not in quick.out


def test_the_command_prints_json(call: Callable[..., Result]) -> None:
    found = json.loads(call("plan", "demo", "--memory", "4GiB", "--max-batch", 2, "--json").out)
    assert set(found) == {field.name for field in dataclasses.fields(colibri.Plan)}
    assert found["planned_bytes"] == sum(found["categories"].values()) >= found["floor_bytes"] > MIB
    assert (found["memory_limit"], found["max_batch"], found["residency"]) == (4 << 30, 2, "mapped")
    assert found["speeds"]["disk_gb_per_s"] > 0 and len(found["sizes"]) == 4


def test_the_command_refuses(call: Callable[..., Result]) -> None:
    for status, arguments, words in (
        (1, ["demo", "--memory", "1MiB"], "--memory: 1048576 bytes, needed are at least"),
        (1, ["demo", "--memory", "1MiB", "--residency", "mapped"], "--residency mapped needs"),
        (2, ["demo", "--memory", "x"], "--memory: expected a size"),
        (2, ["demo", "--lanes", "17"], "--lanes: expected"),
        (2, ["demo", "--residency", "mapped", "--lanes", "2"], "--lanes 2 has no effect"),
        (1, ["absent"], "No model 'absent'"),
    ):
        found = call("plan", *arguments)
        assert (found.status, found.out) == (status, ""), found.err
        assert words in found.err and "Traceback" not in found.err


def test_a_checkpoint_is_converted_first_and_said_so(
    call: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLIBRI_CACHE", str(tmp_path / "cache"))
    source = checkpoints.mixtral(tmp_path / "hf")
    found = call("plan", source, "--type", "q4", "--no-measure", "--json")
    assert found.status == 0 and "Converting" in found.err
    path = Path(json.loads(found.out)["path"])
    assert path.parent == tmp_path / "cache" and "q4" in path.name
    assert colibri.plan(source, type="q4", measure=False).path == path
