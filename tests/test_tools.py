"""tools/check_layers.py and tools/check_sizes.py: the tree passes, and a tree that breaks a rule is found."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


def tool(name: str) -> ModuleType:
    """A script of tools/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(root: Path, files: dict[str, str]) -> None:
    """A small source tree."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


SOUND = {
    "include/colibri.h": "int32_t colibri_open(const char *path);\n",
    "core/evaluate.c": '#include "../include/colibri.h"\n#include "session.h"\n#include "os.h"\n',
    "core/session.h": '#include "kernels/kernels.h"\n',
    "core/os.h": "",
    "core/kernels/kernels.h": "",
    "core/kernels/avx2.c": '#include "body.h"\n#include "kernels.h"\n',
    "core/kernels/body.h": '#include "kernels.h"\n',
    "src/colibri/__init__.py": "from .engine import load\n",
    "src/colibri/engine.py": "from . import _native, errors\n",
    "src/colibri/_native.py": "from colibri import _library\nfrom .errors import E\n",
    "src/colibri/_library.py": "from colibri import _ffi\n",
    "src/colibri/errors.py": "",
    "src/colibri/cli/__init__.py": "import colibri\nfrom .run import run\n",
    "src/colibri/cli/run.py": "from colibri.engine import load\n",
    "src/colibri/convert/__init__.py": "from .registry import find\n",
    "src/colibri/convert/registry.py": "from .families import a\n",
    "src/colibri/convert/families/__init__.py": "",
    "src/colibri/convert/families/a.py": "from ...errors import E\n",
}


def test_tree_is_layered(capsys: pytest.CaptureFixture[str]) -> None:
    status = tool("check_layers").main([])
    assert status == 0, capsys.readouterr().out


def test_tree_keeps_its_budgets(capsys: pytest.CaptureFixture[str]) -> None:
    status = tool("check_sizes").main([])
    assert status == 0, capsys.readouterr().out


def test_layers_accept_a_sound_tree(tmp_path: Path) -> None:
    write(tmp_path, SOUND)
    assert tool("check_layers").check(tmp_path) == []


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("core/os.h", '#include "session.h"\n', "core/os.h:1: .*upward edge from os .* to session"),
        ("core/kernels/body.h", '\n#  include "../os.h"\n', "body.h:2: .*upward edge from kernels/body"),
        ("core/router.c", '#include "ffn.h"\n', "router.c:1: .*sideways edge from router .* to ffn"),
        ("core/new.c", "", "core/new.c: new has no place in the table"),
        ("core/evaluate.c", '#include "missing.h"\n', "evaluate.c:1: .*missing.h.*no place in the table"),
        ("src/colibri/errors.py", "import colibri.engine\n", "errors.py:1: .*upward edge from errors"),
        ("src/colibri/errors.py", "def f():\n    from . import cli\n", "errors.py:2: .*errors .* to cli"),
        ("src/colibri/engine.py", "from colibri import load\n", "engine.py:1: .*engine .* to __init__"),
        ("src/colibri/engine.py", "from ._ffi import ffi\n", "engine.py:1: .*only _library may do that"),
        ("src/colibri/new.py", "", "src/colibri/new.py: new has no place in the table"),
        ("src/colibri/convert/families/a.py", "from ..registry import x\n", "a.py:1: .*upward edge"),
    ],
)
def test_layers_name_the_edge(tmp_path: Path, file: str, text: str, message: str) -> None:
    write(tmp_path, SOUND | {"core/ffn.h": "", file: text})
    found = tool("check_layers").check(tmp_path)
    assert len(found) == 1 and re.search(message, found[0]), found
    assert tool("check_layers").main(["--root", str(tmp_path)]) == 1


def c_function(lines: int) -> str:
    """A C function of so many lines, signature and braces included."""
    return "static int f(int a,\n             int b)\n{\n" + "    a += b;\n" * (lines - 4) + "}\n"


@pytest.mark.parametrize(
    ("file", "text", "row"),
    [
        ("include/colibri.h", "\n" * 401, "colibri.h"),
        ("core/ffn.c", "\n" * 601, "C file"),
        ("core/ffn.c", c_function(61), "C function"),
        ("examples/c/minimal.c", "int main(void) {\n" + "    ;\n" * 60 + "}\n", "C function"),
        ("core/kernels/neon.c", "\n" * 401, "ISA file"),
        ("src/colibri/convert/families/a.py", "\n" * 161, "family module"),
        ("src/colibri/engine.py", "\n" * 451, "Python module"),
        ("core/ffn.c", "\n" * 6001, "core total"),
        ("include/colibri.h", "".join(f"void colibri_{i}(void);\n" for i in range(26)), "exported functions"),
        ("src/colibri/engine.py", "".join(f'get("COLIBRI_{c}")\n' for c in "ABCDE"), "environment variables"),
    ],
)
def test_sizes_find_what_is_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, text: str, row: str
) -> None:
    write(tmp_path, SOUND | {file: text})
    assert tool("check_sizes").main(["--root", str(tmp_path)]) == 1
    assert f"OVER THE HARD LIMIT: {row} " in capsys.readouterr().out


def test_sizes_accept_what_is_just_within(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = "static const int t[] = {\n" + "    1,\n" * 100 + "};\n"
    table += "struct s {\n" + "    int a;\n" * 80 + "};\n"
    prototype = "int g(int a,\n      int b);\n\n"
    write(tmp_path, SOUND | {"core/ffn.c": prototype + table + c_function(60) + c_function(60)})
    assert tool("check_sizes").main(["--root", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "OVER" not in output and "C function                 60     60     60" in output
