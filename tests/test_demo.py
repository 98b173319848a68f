"""The bundled model: it writes its story, and its logits have one digest on every machine.

The digest pins the arithmetic itself (order of experts, of sums, of roundings): comparing an engine with
itself cannot see a change that is made everywhere alike. A new model changes both literals."""

import os
import subprocess
import sys

import pytest

import colibri

DIGEST = "5fb43c70550321eff183b9045e2ad06c944bf45f9d31f8ffd41c676b2ea942a3"
STORY = (
    ", there was a tiny girl named Tina. Tina lived in a house with a red door. Tina had a new hat. It w"
    "as green and very shiny. Everyone wanted to see it. Tina"
)
PROGRAM = """
import hashlib, colibri
with colibri.load("demo", threads=1) as model:
    ids = model.tokenizer.encode("Once upon a time, there was a little bird. It lived in a tall tree. " * 10)
    print(model.isa, len(ids), hashlib.sha256(model.logits(ids).tobytes()).hexdigest())
"""


def test_the_demo_writes_a_story() -> None:
    with colibri.load("demo") as model:
        assert model.generate("Once upon a time", max_tokens=40, temperature=0).text == STORY
        again = [model.generate("The cat", max_tokens=30, temperature=0.8, seed=7).text for _ in range(2)]
        assert again[0] == again[1] and len(again[0]) > 20


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx2-vnni", "avx512", "neon", "neon-dotprod"])
def test_logits_have_the_same_digest_on_every_machine(isa: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "COLIBRI_ISA": isa},
        capture_output=True,
        text=True,
        check=False,
    )
    if "is not a kernel set of this machine" in run.stderr:
        pytest.skip(f"no {isa} here")
    assert run.returncode == 0, run.stderr
    found, n_ids, digest = run.stdout.split()
    assert (found, digest) == (isa, DIGEST) and int(n_ids) > 128  # more than one block of the KV cache
