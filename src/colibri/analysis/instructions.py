"""Instructions of a decoded token: by hardware counters where the machine has them (perf), else simulated
(callgrind of valgrind), which also tells the functions.

Owns: the child process that decodes and nothing else (python -m colibri.analysis.instructions MODEL TOKENS),
and reading what the tools say. One thread: waiting threads would count too.
Refuses: installing tools; what is missing is named.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colibri.errors import ColibriError, UnsupportedError

_CONTEXT = 64
_TOP = 12  # functions shown


@dataclass(frozen=True, slots=True)
class Instructions:
    """Of one decoded token, on average."""

    tool: str  # "perf" or "callgrind"
    tokens: int  # decoded to find out
    per_token: float
    # (name, instructions a token of its own), most first; perf: none
    functions: tuple[tuple[str, float], ...]
    note: str

    @property
    def others(self) -> float:
        """Of a token, in functions that are not listed."""
        return self.per_token - sum(own for _, own in self.functions)

    def data(self) -> dict[str, Any]:
        return {
            "tool": self.tool,
            "tokens": self.tokens,
            "instructions_per_token": self.per_token,
            "functions": [{"name": name, "instructions_per_token": own} for name, own in self.functions],
            "other_instructions_per_token": self.others,
            "note": self.note,
        }


def count(path: Path, tokens: int) -> Instructions:
    """Decodes so many tokens (at most 63) in child processes."""
    tokens = min(tokens, _CONTEXT - 1)
    perf, valgrind, why = tools()
    if perf is not None:
        return _by_counters(perf, path, tokens)
    assert valgrind is not None
    return _by_simulation(valgrind, path, tokens, why)


def tools() -> tuple[str | None, str | None, str]:
    """perf if it counts here, valgrind, and why it is not perf; an error if it is neither. Quick: to be asked
    before anything is measured."""
    perf, valgrind = shutil.which("perf"), shutil.which("valgrind")
    why = "perf is not installed"
    if perf is not None:
        why = "perf sees no instruction counter here"
        if _counted(perf, ["sleep", "0"]) is not None:
            return perf, valgrind, ""
    if valgrind is None:
        raise UnsupportedError(
            f"--instructions: {why}, and valgrind is not installed. Install valgrind (it needs no hardware "
            "counters), or perf on a machine that lets you read them."
        )
    return None, valgrind, why


def _child(path: Path, tokens: int) -> list[str]:
    return [sys.executable, "-P", "-m", "colibri.analysis.instructions", str(path), str(tokens)]


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONHASHSEED": "0", "LC_ALL": "C"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL)


def _counted(perf: str, command: list[str]) -> int | None:
    done = _run([perf, "stat", "-x", ",", "-e", "instructions:u", "--", *command])
    match = re.search(r"^(\d+),[^,]*,instructions", done.stderr, re.MULTILINE)
    return None if match is None or done.returncode else int(match[1])


def _by_counters(perf: str, path: Path, tokens: int) -> Instructions:
    """The difference of a run with one token and one with more, so that Python's own start does not count."""
    first, last = (_counted(perf, _child(path, n)) for n in (1, 1 + tokens))
    if first is None or last is None:
        raise ColibriError("perf failed to count the instructions of decoding, which it counts elsewhere")
    per_token = (last - first) / tokens
    return Instructions("perf", tokens, per_token, (), "user space, the loop in Python included")


def _by_simulation(valgrind: str, path: Path, tokens: int, why: str) -> Instructions:
    """The library's own instructions: again the difference of two runs, so that opening does not count."""
    costs, isa = [], ""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "callgrind.out"
        for n in (1, 1 + tokens):
            options = ["--tool=callgrind", f"--callgrind-out-file={out}"]
            done = _run([valgrind, *options, *_child(path, n)])
            if done.returncode or not out.exists():
                raise ColibriError(f"valgrind failed with status {done.returncode}:\n{done.stderr[-2000:]}")
            isa = done.stdout.strip()
            costs.append(function_costs(out.read_text(encoding="utf-8", errors="replace").splitlines()))
            out.unlink()
    own = {name: (cost - costs[0].get(name, 0)) / tokens for name, cost in costs[1].items()}
    functions = sorted(own.items(), key=lambda item: -item[1])[:_TOP]
    note = f"simulated with the {isa} kernels, since {why}"
    return Instructions("callgrind", tokens, sum(own.values()), tuple(functions), note)


def function_costs(lines: Iterable[str]) -> dict[str, int]:
    """Own instructions of each function of libcolibri in a callgrind.out file. Names are written once and
    then by number; the line after "calls=" is what the callee cost, which counts there."""
    names: dict[str, str] = {}
    costs: dict[str, int] = {}
    inside, function, skip = False, "", False

    def named(kind: str, text: str) -> str:
        number, _, name = text.partition(" ")
        return names.setdefault(kind + number, name) if name else names.get(kind + number, number)

    for line in lines:
        key, _, text = line.partition("=")
        if key == "ob":
            inside = "libcolibri" in named("ob", text)
        elif key in ("cob", "cfn"):
            named(key[1:], text)  # the first use of a name may be as a callee
        elif key == "fn":
            function = named("fn", text)
        elif key == "calls":
            skip = True
        elif re.match(r"[\d+*-]", line):
            words = line.split()
            if inside and not skip and len(words) > 1:
                costs[function] = costs.get(function, 0) + int(words[1])
            skip = False
    return costs


def main() -> None:
    """Decodes TOKENS ids of MODEL; prints the kernel set. The library's thin functions only: a simulated
    Python is slow."""
    import numpy as np

    from colibri import _native as native
    from colibri.config import decode_config

    path, tokens = Path(sys.argv[1]), int(sys.argv[2])
    model = native.open_model(path)
    info = native.info(model)
    defaults = native.default_params(model)
    values = {name: getattr(defaults, name) for name in defaults.__slots__}
    context = native.init(model, native.Params(**values | {"context": _CONTEXT, "threads": 1, "chunk": 1}))
    ids = np.random.default_rng(0).integers(0, info.n_vocab_used, tokens, dtype=np.int32)
    logits = np.empty(info.n_vocab, np.float32)
    if decode_config(native.config_bytes(model), path)["n_encoder_layers"]:
        native.encode(context, 0, ids[:1])
    for at in range(tokens):
        native.run_inference(context, ids[at : at + 1], logits)
    native.free(context)
    native.close_model(model)
    print(info.isa)


if __name__ == "__main__":
    main()
