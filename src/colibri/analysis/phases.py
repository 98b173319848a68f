"""Where a model's time goes: prefill and decode by phase, layer and expert.

Owns: the runs, and the figures as data. Refuses: tables (cli/profile.py) and drawing (chart.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from colibri import _native as native
from colibri.analysis import machine
from colibri.analysis.runs import Loops, Timed, lengths, outside_matrices_ns, wait_share
from colibri.arguments import Opening
from colibri.engine import Model
from colibri.format import read_container

_WARM_UP_TOKENS = 8
Rows = npt.NDArray[np.int64]  # [n_layers, n_experts]


@dataclass(frozen=True, slots=True)
class Expert:
    """One expert of a layer in one part. Times are those of all threads."""

    number: int
    rows: int  # tokens that chose it
    ns: int
    share: float  # of all experts of the layer


@dataclass(frozen=True, slots=True)
class Part:
    """Prefill or decode."""

    name: str
    timed: Timed
    rows: Rows

    @property
    def ns(self) -> int:
        """Of all tokens, as the caller sees it."""
        return round(self.timed.seconds * 1e9)

    @property
    def engine_ns(self) -> int:
        """Of these, inside the engine: the sum of all phases."""
        return int(self.timed.profile.phase_ns.sum())

    @property
    def outside_engine_ns(self) -> int:
        """The rest: Python, and the choice of the next id."""
        return max(0, self.ns - self.engine_ns)

    def experts(self, layer: int) -> list[Expert]:
        """Those that were chosen, slowest first."""
        ns = self.timed.profile.expert_ns[layer]
        total = int(ns.sum()) or 1
        found = [
            Expert(number, int(self.rows[layer, number]), int(ns[number]), int(ns[number]) / total)
            for number in range(len(ns))
            if ns[number] or self.rows[layer, number]
        ]
        return sorted(found, key=lambda expert: (-expert.ns, expert.number))

    def data(self) -> dict[str, Any]:
        """Units are in the key names; lists have an item for each layer, and one for what belongs to none."""
        profile, tokens = self.timed.profile, self.timed.tokens
        return {
            "tokens": tokens,
            "seconds": self.timed.seconds,
            "us_per_token": self.timed.seconds / tokens * 1e6,
            "tok_per_s": tokens / self.timed.seconds,
            "measured_ns": self.engine_ns,
            "outside_engine_ns": self.outside_engine_ns,
            "outside_matrices_us_per_token": outside_matrices_ns(profile) / tokens / 1e3,
            "barrier_wait_share": wait_share(profile),
            "phases": {
                name: {
                    "ns": int(profile.phase_ns[:, at].sum()),
                    "wait_ns": int(profile.wait_ns[:, at].sum()),
                    "ns_by_layer": profile.phase_ns[:, at].tolist(),
                    "wait_ns_by_layer": profile.wait_ns[:, at].tolist(),
                }
                for at, name in enumerate(profile.phases)
            },
            "experts": [
                [
                    {"expert": one.number, "rows": one.rows, "ns": one.ns, "share": one.share}
                    for one in self.experts(layer)
                ]
                for layer in range(len(profile.expert_ns))
            ],
        }


@dataclass(frozen=True, slots=True)
class Report:
    """Both parts of one run."""

    path: Path
    isa: str
    threads: int
    n_layers: int
    n_experts: int  # the largest of all layers
    parts: tuple[Part, Part]  # prefill, decode
    residency: str  # that was chosen
    expert_slots: int  # 0: no expert is streamed
    pin: bool
    machine: dict[str, Any]

    def data(self) -> dict[str, Any]:
        """One JSON object."""
        return {
            "version": native.version(),
            "machine": self.machine,
            "model": {"path": str(self.path), "n_layers": self.n_layers, "n_experts": self.n_experts},
            "threads": self.threads,
            "isa": self.isa,
            "residency": self.residency,
            "expert_slots": self.expert_slots,
            "pin": self.pin,
            **{part.name: part.data() | self._streaming(part) for part in self.parts},
        }

    def _streaming(self, part: Part) -> dict[str, Any]:
        """What streamed experts cost; None where none was streamed."""
        return {"streaming": part.timed.traffic.as_dict() if self.residency == "streamed" else None}


def profile(path: Path, opening: Opening, n_prompt: int | None = None, n_decode: int | None = None) -> Report:
    """Evaluates a prompt of random ids and decodes after it, once as a warm-up and once measured. Without
    numbers 64 and 64 tokens, or less where the model has fewer positions; opening's context is ignored."""
    limit = read_container(path).config["context_length"]
    n_prompt, n_decode = lengths(limit, n_prompt, n_decode, default_prompt=64, default_decode=64)
    with Model(path, replace(opening, context=n_prompt + n_decode)) as model:
        described = machine.describe()
        loops = Loops(model, n_prompt, n_decode)
        loops.prefill()
        loops.decode(min(_WARM_UP_TOKENS, n_decode))
        loops.renew()
        prefill, decode = loops.timed()
        rows = _rows(model, loops)
        return Report(
            path,
            model.isa,
            model.threads,
            model.config["n_layers"],
            max(model.config["n_experts"]),
            (Part("prefill", prefill, rows[0]), Part("decode", decode, rows[1])),
            model.residency,
            model.memory.expert_slots,
            opening.pin,
            described,
        )


def _rows(model: Model, loops: Loops) -> tuple[Rows, Rows]:
    """How many tokens of the prompt, and of those decoded, chose each expert: asked of a second evaluation,
    which decides alike, so that watching costs the measured one nothing."""
    shape = (model.config["n_layers"], max(model.config["n_experts"]))
    found = np.zeros((2, *shape), np.int64)
    if shape[1]:
        n_encoder = model.config["n_encoder_layers"]
        ids, cut = (loops.ids[loops.n_prompt - 1 :], 1) if n_encoder else (loops.ids, loops.n_prompt)
        for layer, routing in model.routing(ids, loops.source).items():
            rows = len(routing.experts) if layer < n_encoder else cut
            for at, chosen in enumerate((routing.experts[:rows], routing.experts[rows:])):
                found[at, layer] = np.bincount(chosen.ravel(), minlength=shape[1])
    return found[0], found[1]
