"""/v1/experts: where a model's experts are and what their streaming costs.

Owns: the body. Refuses: measuring (the engine counts).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from colibri.server.served import Served


def describe(served: Served) -> dict[str, Any]:
    """Experts by layer, residency, hits and reads so far, memory in bytes."""
    model = served.model
    return {
        "model": served.name,
        "n_experts": model.config["n_experts"],
        "n_experts_used": model.config["n_experts_used"],
        "residency": model.residency,
        "expert_slots": model.memory.expert_slots,
        "stats": model.stats.as_dict(),
        "memory": asdict(model.memory),
    }
