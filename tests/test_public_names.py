"""The public names of the package, how fast it is imported, and its tree of exceptions."""

import subprocess
import sys
from typing import Any

import pytest

import colibri

NAMES = [
    "ArgumentError",
    "AsyncEngine",
    "AsyncStream",
    "CancelledError",
    "ChatTemplateError",
    "ColibriError",
    "ContextFullError",
    "ConversionError",
    "Generation",
    "Logprobs",
    "MemoryPlan",
    "MemoryPlanError",
    "Model",
    "ModelFileError",
    "ModelIOError",
    "NumericError",
    "Plan",
    "Profile",
    "QueueFullError",
    "Routing",
    "Sampling",
    "Stream",
    "Tokenizer",
    "TraceError",
    "UnsupportedError",
    "__version__",
    "load",
    "measure",
    "plan",
]
MODEL = [
    "batch_logits",
    "cancel",
    "chat",
    "chat_ids",
    "close",
    "generate",
    "logits",
    "observe",
    "position",
    "prompt_ids",
    "router_logits",
    "routing",
    "start_ids",
    "stats",
    "stream",
    "stream_chat",
    "tokenizer",
]
MODEL_VALUES = [
    "chat_template",
    "chunk",
    "config",
    "context",
    "isa",
    "max_batch",
    "memory",
    "n_vocab",
    "path",
    "residency",
    "threads",
]


def python(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_names_are_pinned() -> None:
    assert sorted(colibri.__all__) == sorted(NAMES)
    for name in NAMES:
        assert getattr(colibri, name) is not None
    assert set(NAMES) <= set(dir(colibri))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = colibri.nothing


def test_the_names_of_a_model_are_pinned(model: colibri.Model) -> None:
    assert sorted(name for name in vars(colibri.Model) if not name.startswith("_")) == MODEL
    assert sorted(name for name in vars(model) if not name.startswith("_")) == MODEL_VALUES


def test_the_version_is_the_librarys() -> None:
    from colibri import _native

    assert colibri.__version__ == _native.version()


def test_import_is_quick_and_brings_nothing_heavy() -> None:
    code = "import sys, time; t = time.perf_counter(); import colibri; print(time.perf_counter() - t, "
    code += "*sys.modules)"
    runs = [python(code).split() for _ in range(3)]
    assert min(float(run[0]) for run in runs) < 0.25
    heavy = {"numpy", "tokenizers", "jinja2", "typer", "rich", "cffi", "safetensors", "ml_dtypes"}
    assert not heavy & set(runs[0])


def test_opening_a_model_needs_no_terminal_packages() -> None:
    found = python("import sys, colibri; colibri.load; print(*sys.modules)").split()
    assert not {"typer", "rich", "jinja2", "torch", "transformers"} & set(found)


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("ArgumentError", ValueError),
        ("ModelIOError", OSError),
        ("MemoryPlanError", MemoryError),
        *((name, Exception) for name in NAMES if name.endswith("Error")),
    ],
)
def test_every_error_is_a_colibri_error(name: str, base: Any) -> None:
    kind = getattr(colibri, name)
    assert issubclass(kind, colibri.ColibriError) and issubclass(kind, base)
    assert str(kind("words")) == "words"
    assert name in (colibri.errors.__doc__ or ""), "the tree in errors.py draws every one"
