"""Tables of a comparison: lines for the terminal while it runs, markdown for the README from the CSV.

Owns: the CSV, which rows count (a cell's latest run) and how they read. Refuses: measuring (compare.py).
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import machine

Row = dict[str, Any]
OURS, TRANSFORMERS = "colibri", "transformers"
BEGIN, END = "<!-- table of {} -->", "<!-- end of table -->"  # around it where it is shown


def results() -> Path:
    """The CSV of this processor."""
    return machine.results_file("-compare")


def read(path: Path) -> list[Row]:
    """All rows, oldest first."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def append(rows: list[Row]) -> None:
    """To the CSV of this processor."""
    path = results()
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def marked(path: Path) -> str:
    """The table of a CSV between its marks, to be pasted whole."""
    return "\n".join([BEGIN.format(path.name), "", markdown(read(path)), "", END])


def cell_lines(rows: Iterable[Row]) -> list[str]:
    """For the terminal: a head, then a line for each contestant."""
    head = ["engine", "prefill tok/s", "ours is", "decode tok/s", "ours is", "peak MiB", "start s", "others"]
    lines = [head]
    for row in rows:
        values = [row["engine"]]
        for key in ("prefill", "decode"):
            ratio = row[f"ours_to_this_{key}"]
            values += [row[f"{key}_tok_s"] or "-", f"{ratio} x" if ratio else "-"]
        lines.append([*values, row["peak_mib"], row["start_s"], row["others"]])
    return ["".join([first.ljust(20), *(value.rjust(14) for value in rest)]) for first, *rest in lines]


def latest(rows: list[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """Rows by (shape, type, threads), for each contestant, prompt and group those of its cell's last run."""
    found: dict[tuple[str, str, str], dict[tuple[str, str, str], Row]] = {}
    last: dict[tuple[str, ...], str] = {}
    for row in rows:
        last[row["shape"], row["type"], row["threads"], row["prompt"]] = row["run"]
    for row in rows:
        cell = row["shape"], row["type"], row["threads"]
        if last[(*cell, row["prompt"])] == row["run"]:
            found.setdefault(cell, {})[row["engine"], row["prompt"], row["group"]] = row
    return {cell: list(of.values()) for cell, of in found.items()}


def markdown(rows: list[Row]) -> str:
    """The README's table. A ratio is ours to the fastest peer's, each in the group where both ran; it is also
    shown beside Transformers alone, whose types are one column with the better figure of them."""
    cells = latest(rows)
    found = [column(row) for of in cells.values() for row in of if row["engine"] != OURS]
    others = sorted(dict.fromkeys(found), key=lambda name: (not is_ours(name), name == TRANSFORMERS))
    head = ["shape, type, threads", "", OURS, *others, "against the best"]
    head += [f"against {TRANSFORMERS}"] if TRANSFORMERS in others else []
    lines = ["| " + " | ".join(head) + " |", "|---|---|" + "---:|" * (len(head) - 2)]
    for (shape, type, threads), of in cells.items():
        label = f"{shape} {type}, {threads}"
        for title, key, chosen in measures(of):
            lines.append("| " + " | ".join([label, title, *figures(chosen, key, others)]) + " |")
            label = ""
    return "\n".join(lines)


def measures(rows: list[Row]) -> list[tuple[str, str, list[Row]]]:
    """Title, column and rows of each line of a cell. The long prompt has no peers and no decoding."""
    with_decode = [row for row in rows if int(row["decode"])]
    alone = [row for row in rows if not int(row["decode"])]
    made = [(f"prefill {row['prompt']}, tok/s", "prefill_tok_s", [row]) for row in alone[:1]]
    if with_decode:
        first = with_decode[0]
        made = [
            (f"prefill {first['prompt']}, tok/s", "prefill_tok_s", with_decode),
            *made,
            (f"decode {first['decode']}, tok/s", "decode_tok_s", with_decode),
            ("peak memory, MiB", "peak_mib", with_decode),
        ]
    return made


def figures(rows: list[Row], key: str, others: list[str]) -> list[str]:
    """Ours, the better of each column, and the ratios of ours to the peer that is best at it."""
    ours = {row["group"]: float(row[key]) for row in rows if row["engine"] == OURS}
    theirs = [row for row in rows if row["engine"] != OURS]
    better, closest = (min, max) if key == "peak_mib" else (max, min)
    shown = [next(iter(ours.values()), None)]
    for name in others:
        shown.append(better((float(row[key]) for row in theirs if column(row) == name), default=None))
    peers = [row for row in theirs if not is_ours(row["engine"]) and row["group"] in ours]
    judged = [peers]
    if TRANSFORMERS in others:
        judged.append([row for row in peers if column(row) == TRANSFORMERS])
    ratios = [[ours[row["group"]] / float(row[key]) for row in of] for of in judged]
    return [*map(number, shown), *(f"{closest(of):.2f} ×" if of else "" for of in ratios)]


def column(row: Row) -> str:
    """The column of a contestant."""
    name: str = row["engine"]
    return TRANSFORMERS if name.startswith(TRANSFORMERS) else name


def is_ours(name: str) -> bool:
    """Colibri itself, in any setting: no peer."""
    return name.startswith(OURS)


def number(value: float | None) -> str:
    """Three digits, or all of a whole number."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
