"""Writes the fixtures of models with an encoder: what Hugging Face Transformers answers for the tiny models
of tests/encoder_checkpoints.py.

Role: run by hand when a variant is added; needs torch, and transformers 5.24 for switch_transformers, 4.57.1
for nllb_moe. Owns: tests/fixtures/NAME.npz of these. Refuses: variants whose family the installed version
computes wrongly, near ties among greedy ids.

    python tools/make_encoder_fixtures.py [NAME ...]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path.insert(0, str(TESTS))

import oracle_encoders as oracle  # noqa: E402
from encoder_checkpoints import VARIANTS  # noqa: E402
from fixtures.encoder_reference import answers, usable  # noqa: E402
from fixtures.models import digest  # noqa: E402

LEAD = 1e-3  # of the best logit at every greedy step
ROWS = 16


def make(name: str) -> bool:
    """One fixture; False (and nothing written) if an id is nearly a tie."""
    variant = VARIANTS[name]
    with tempfile.TemporaryDirectory() as temporary:
        directory = variant.write(Path(temporary) / name)
        logits, written = answers(directory, variant.source, variant.ids)
        model = oracle.load(directory)
        _, lead = oracle.greedy(model, variant.source, [model.config["decoder_start_token_id"]], len(written))
        ours, _ = oracle.forward(model, variant.source, variant.ids)
        sha = digest(directory)
    print(
        f"{name:14} std {logits.std():.2f}  oracle off by {np.abs(ours - logits).max():.1e}  lead {lead:.1e}"
    )
    if lead < LEAD:
        return False
    rows = np.linspace(0, len(logits) - 1, min(ROWS, len(logits))).round().astype(np.int32)
    np.savez_compressed(
        TESTS / "fixtures" / f"{name}.npz",
        allow_pickle=False,
        rows=rows,
        logits=logits[rows].astype(np.float32),
        greedy=np.array(written, np.int32),
        digest=np.array(sha),
    )
    return True


def main() -> int:
    asked = sys.argv[1:] or list(VARIANTS)
    names = [name for name in asked if usable(VARIANTS[name].family)]
    made = [make(name) for name in names]
    print(f"{sum(made)} of {len(names)} written")
    return 0 if all(made) else 1


if __name__ == "__main__":
    sys.exit(main())
