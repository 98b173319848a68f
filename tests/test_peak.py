"""The peak of resident memory stays within 3 % and 16 MB of the plan, in a process of its own.

Owns: that bound from above, for mapped, resident and streamed weights, with a long prompt and many tokens.
Refuses: what the plan's categories are (test_plan.py, test_residency.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from colibri import cache
from colibri.analysis import machine

# Prints what the plan says, slots, and the most that was resident.
CODE = """
import dataclasses, json, sys
import numpy as np
import colibri
from colibri.analysis.machine import process_bytes
from colibri.analysis.runs import Loops
path, n_prompt, n_decode, options = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
with colibri.load(path, **options) as model:
    loops = Loops(model, n_prompt, n_decode)
    loops.prefill()
    loops.decode()
    print(json.dumps([dataclasses.asdict(model.memory), model.residency, process_bytes()["peak"]]))
"""


def measured(path: Path, n_prompt: int, n_decode: int, **options: Any) -> tuple[dict[str, int], str, int]:
    if machine.process_bytes() is None:
        pytest.skip("the system does not tell how much a process holds")
    command = [sys.executable, "-c", CODE, str(path), str(n_prompt), str(n_decode), json.dumps(options)]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    plan, residency, peak = json.loads(found)
    assert peak <= plan["total_bytes"] * 1.03 + 16e6, f"{residency}: {peak:,} resident, planned {plan}"
    return plan, residency, peak


@pytest.mark.parametrize(
    "options",
    [
        {"residency": "mapped"},
        {"residency": "resident"},
        {"expert_slots": 1},
        {"expert_slots": 20, "lanes": 8},
        {"expert_slots": 40, "chunk": 32, "max_batch": 2},
    ],
)
def test_the_demo_stays_within_its_plan(options: dict[str, Any]) -> None:
    measured(cache.resolve("demo"), 900, 100, context=1000, **options)


@pytest.mark.parametrize("residency", ["mapped", "resident"])
def test_a_larger_model_stays_within_its_plan(larger: Path, residency: str) -> None:
    plan, _, _ = measured(larger, 300, 20, residency=residency, context=1000)
    assert plan["total_bytes"] > larger.stat().st_size


@pytest.mark.parametrize(
    "options",
    [
        {"residency": "mapped"},
        {"residency": "resident"},
        {"expert_slots": 1},
        {"expert_slots": 24},
        {"expert_slots": 96},
    ],
)
def test_no_untouched_byte_hides_another(larger: Path, options: dict[str, Any]) -> None:
    """Every planned byte is used: all positions, the whole chunk, every expert (in waves, where slots are
    few)."""
    plan, residency, peak = measured(larger, 300, 20, context=320, **options)
    slots = options.get("expert_slots", 192)
    assert residency == options.get("residency", "streamed")
    if slots < 96:
        assert peak < 0.6 * larger.stat().st_size and plan["total_bytes"] < 0.6 * larger.stat().st_size


def test_a_limit_bounds_the_peak(larger: Path) -> None:
    limit = 110 << 20
    plan, residency, peak = measured(larger, 300, 50, memory=limit, context=350)
    assert residency == "streamed" and 24 <= plan["expert_slots"] < 192
    assert peak <= limit * 1.03 + 16e6 and plan["total_bytes"] <= limit + (1 << 20)
