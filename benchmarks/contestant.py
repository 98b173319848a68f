"""An engine in a comparison: its worker process, what it has measured, its line in the table and the CSV.

Owns: talking to worker.py, medians, formats. Refuses: who runs when, and against whom (decode.py,
compare.py)."""

from __future__ import annotations

import csv
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import machine

PAUSE = 0.3  # seconds between turns: the threads of the engine before have gone to sleep then

HEAD = (
    f"{'engine':13}{'setting':22}{'decode tok/s':>21}{'prefill tok/s':>15}{'first token':>13}{'start':>9}"
    f"{'peak MiB':>10}{'anonymous':>11}{'file':>7}"
)


class WorkerDied(SystemExit):
    """A worker ended before it answered. Not caught, it ends the program with its message."""


@dataclass
class Contestant:
    """A running worker and what it has measured."""

    engine: str
    name: str  # the setting, for people
    process: subprocess.Popen[str]
    setting: dict[str, Any] = field(default_factory=dict)
    start_seconds: float = 0.0  # from the start of the process to its first token, files in the page cache
    turns: list[dict[str, Any]] = field(default_factory=list)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Sends a request, waits for the answer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self.hear()

    def hear(self) -> dict[str, Any]:
        """The next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise WorkerDied(f"the worker of {self.engine} {self.name} died; its words are above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def turn(self, request: dict[str, Any]) -> dict[str, Any]:
        """One measurement, after a pause."""
        time.sleep(PAUSE)
        before, started = machine.ticks(self.process.pid), time.perf_counter()
        answer = self.ask(request)
        seconds, after = time.perf_counter() - started, machine.ticks(self.process.pid)
        others = (after[0] - before[0]) - (after[1] - before[1])
        answer["others"] = max(0, others) / os.sysconf("SC_CLK_TCK") / seconds
        answer["decode"] = answer["decoded"] / answer["decode_seconds"] if answer["decoded"] else 0.0
        answer["prefill"] = len(request["ids"]) / answer["first_seconds"]
        return answer

    def median(self, key: str) -> float:
        return float(statistics.median(turn[key] for turn in self.turns))

    def stop(self) -> None:
        """Ends the worker."""
        self.process.communicate()

    def kill(self) -> None:
        """Ends the worker wherever it is."""
        self.process.kill()
        self.process.communicate()


def start(
    engine: str, name: str, arguments: dict[str, Any], warm_up: dict[str, Any], python: str = sys.executable
) -> Contestant:
    """Starts a worker under an interpreter and lets it do one request, unmeasured but for the time until its
    first token."""
    started = time.time()
    worker = str(Path(__file__).with_name("worker.py"))
    command = [python, worker, engine, json.dumps(arguments)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    contestant = Contestant(engine, name, process)
    contestant.setting = contestant.hear()
    contestant.start_seconds = contestant.ask(warm_up)["first_at"] - started
    return contestant


def describe(one: Contestant) -> str:
    """A line of the table: medians, and the range of decode."""
    decode = [turn["decode"] for turn in one.turns]
    held = one.turns[-1]["memory"]
    span = f"({min(decode):.1f}-{max(decode):.1f})"
    return (
        f"{one.engine:13}{one.name:22}{one.median('decode'):8.1f} {span:>12}{one.median('prefill'):15.1f}"
        f"{1000 * one.median('first_seconds'):10.1f} ms{one.start_seconds:7.2f} s"
        f"{held['peak'] / machine.MIB:10.0f}{held['anonymous'] / machine.MIB:11.0f}"
        f"{held['file'] / machine.MIB:7.0f}"
    )


def write_csv(rows: list[tuple[str, Contestant]], facts: dict[str, Any]) -> None:
    """Appends a row for every contestant to the file of this processor."""
    path = machine.results_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        for part, one in rows:
            held = one.turns[-1]["memory"]
            row = facts | {
                "part": part,
                "engine": one.engine,
                "setting": one.name,
                "turns": len(one.turns),
                "decode_tok_s": f"{one.median('decode'):.2f}",
                "decode_min": f"{min(turn['decode'] for turn in one.turns):.2f}",
                "decode_max": f"{max(turn['decode'] for turn in one.turns):.2f}",
                "prefill_tok_s": f"{one.median('prefill'):.2f}",
                "first_token_ms": f"{1000 * one.median('first_seconds'):.2f}",
                "start_s": f"{one.start_seconds:.2f}",
                "peak_mib": f"{held['peak'] / machine.MIB:.1f}",
                "anonymous_mib": f"{held['anonymous'] / machine.MIB:.1f}",
                "file_mib": f"{held['file'] / machine.MIB:.1f}",
                "others": f"{one.median('others'):.2f}",
            }
            writer = csv.DictWriter(file, list(row), lineterminator="\n")
            if new:
                writer.writeheader()
                new = False
            writer.writerow(row)
    print(f"{len(rows)} rows appended to {path.relative_to(machine.ROOT)}")
