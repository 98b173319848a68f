"""Writes the README's tables of families, mechanisms and types, from the registry and the tests.

Owns: what stands between the marks. A family's row is its module's first sentence; a mechanism's row is its
field in core/config.h and the families whose tiny models (tests/fixtures/variants.py and
tests/encoder_checkpoints.py) set it; how a family was checked is counted in the tests. Refuses: a type whose
tests are not there.

    python tools/model_table.py
"""

from __future__ import annotations

import ast
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, cast

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from colibri.config import config_schema  # noqa: E402
from colibri.convert import float8, fp8, rope  # noqa: E402
from colibri.convert.checkpoint import open_checkpoint  # noqa: E402
from colibri.convert.keys import Keys  # noqa: E402
from colibri.convert.registry import known  # noqa: E402
from colibri.quantize import KEPT, TYPE_NAMES  # noqa: E402
from encoder_checkpoints import VARIANTS as ENCODERS  # noqa: E402
from fixtures.variants import OTHERS, VARIANTS  # noqa: E402

README = ROOT / "README.md"
BEGIN, END = "<!-- written by tools/model_table.py -->", "<!-- end of what it writes -->"
FIXTURES = ROOT / "tests" / "fixtures"
SAVED = ROOT / "tests" / "live" / "test_live_transformers.py"
# Tests that hold types and spellings to the oracle; each names what it checks.
TESTS = {
    "weights": "tests/test_parity.py",
    "bits": "tests/test_bits.py",
    KEPT: "tests/test_convert_gpt_oss.py",
    "rope": "tests/test_rope.py",
    "fp8": "tests/test_convert_fp8.py",
}


def tables() -> str:
    """All of it between the marks."""
    parts = (families(), mechanisms(), types())
    return "\n\n".join([BEGIN, *("\n".join(part) for part in parts), END])


def modules() -> dict[str, list[str]]:
    """Model types by the name of their family's module."""
    found: dict[str, list[str]] = {}
    for model_type, family in sorted(known().items()):
        found.setdefault(cast(ModuleType, family).__name__.rpartition(".")[2], []).append(model_type)
    return found


def families() -> Iterator[str]:
    yield "| family (`model_type`) | what it computes | checked against |"
    yield "|---|---|---|"
    saved = saved_models()
    for module, model_types in modules().items():
        text = cast(ModuleType, known()[model_types[0]]).__doc__ or ""
        sentence = " ".join(text.split("\n\n")[0].split()).rstrip(".")
        version = re.search(r"Transformers (\d+(?:\.\d+)+)", text)
        answers = [
            name
            for name, one in (VARIANTS | ENCODERS).items()
            if one.family in (module, *model_types) and (FIXTURES / f"{name}.npz").is_file()
        ]
        checks = ["numpy oracle"]
        if answers and version:
            checks.append(f"{len(answers)} models of Transformers {version[1]}")
        if of_class := saved.count(module):
            checks.append(f"{of_class} that its `save_pretrained` wrote")
        yield f"| {', '.join(f'`{one}`' for one in model_types)} | {sentence} | {', '.join(checks)} |"


def saved_models() -> list[str]:
    """The family of each model that the live tests let Transformers write."""
    for node in ast.parse(SAVED.read_text("utf-8")).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "SAVED":
            keys = cast(ast.Dict, node.value).keys
            return [re.split(r"\W", str(cast(ast.Constant, key).value))[0] for key in keys]
    raise SystemExit(f"{SAVED} has no SAVED: say where the models are now")


def mechanisms() -> Iterator[str]:
    yield "| field of the file | what it does | families whose test models set it |"
    yield "|---|---|---|"
    used = users()
    for field in config_schema():
        if "default" in field:
            names = ", ".join(f"`{name}`" for name in modules() if name in used[field["name"]])
            yield f"| `{field['name']}` | {field['doc']} | {names} |"


def users() -> dict[str, set[str]]:
    """Families by field, as their tiny models set it."""
    defaults: dict[str, Any] = {field["name"]: field.get("default") for field in config_schema()}
    found: dict[str, set[str]] = {name: set() for name in defaults}
    with tempfile.TemporaryDirectory() as temporary:
        for name, variant in (VARIANTS | OTHERS | ENCODERS).items():
            checkpoint = open_checkpoint(variant.write(Path(temporary) / name))
            family = known()[checkpoint.config["model_type"]]
            config = family.read_config(Keys(checkpoint.config, checkpoint.path)).config
            for field, value in config.items():
                values = value if isinstance(value, list) else [value]
                if any(one != defaults[field] for one in values):
                    found[field].add(cast(ModuleType, family).__name__.rpartition(".")[2])
    return found


def types() -> Iterator[str]:
    rows = {
        "weights in a file": (", ".join(TYPE_NAMES.values()), "weights", "bits", KEPT),
        "weights in a checkpoint": (
            ", ".join(["F32, F16, BF16, MXFP4 of experts", *float8.WEIGHTS]),
            KEPT,
            "fp8",
        ),
        "FP8 scales (`quant_method`)": (
            f"{', '.join(sorted(fp8.FIELDS))}: one for a tensor, an output, or a block of any size",
            "fp8",
        ),
        "RoPE": (f"{', '.join(rope.SETTINGS)}; of a whole head or a part", "rope"),
    }
    yield "| types | known | checked by |"
    yield "|---|---|---|"
    for title, (text, *tests) in rows.items():
        paths = [TESTS[test] for test in tests]
        if missing := [path for path in paths if not (ROOT / path).is_file()]:
            raise SystemExit(f"{missing[0]} is not there: which test checks {title}?")
        links = ", ".join(f"[{Path(path).name}]({path})" for path in paths)
        yield f"| {title} | {text} | {links} |"


def main() -> int:
    text = README.read_text("utf-8")
    begin, end = text.index(BEGIN), text.index(END) + len(END)
    README.write_text(text[:begin] + tables() + text[end:], "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
