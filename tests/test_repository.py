"""The repository agrees with itself: versions, flags and editor set-up match; text rules of the design hold.

Owns: what can be checked by reading files. Refuses: running the engine (other tests) and judging sizes or
layers (tests/test_tools.py). Words that the rules forbid are spelled in two pieces, so that they hold here.
"""

import importlib.metadata
import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
HEADER = (ROOT / "include" / "colibri.h").read_text(encoding="utf-8")
MADE = {"build", "dist", "__pycache__", "_ffi.py"}  # by builds and tools
FAMILIES = (
    "mixtral|qwen|olmoe|deepseek|gpt[-_]?oss|granite|phi[-_]?moe|ernie|switch[-_]transformer|llama|jamba|dbrx"
    "|nllb|glm|dots1|kimi|mistral|ministral|minimax|gemma|lfm"
)
ENGINE = ("engine", "drawing", "sequences", "sources", "generate", "sampling", "tokenizer", "chat", "_native")


def sources(*folders: str, suffixes: tuple[str, ...] = (".c", ".h", ".py")) -> list[Path]:
    """Source files below some folders of the repository."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes)
    return sorted(path for path in found if not MADE & set(path.relative_to(ROOT).parts))


def text_files() -> Iterator[Path]:
    """Every text file of the repository that a person wrote."""
    tops = [p for p in ROOT.iterdir() if p.name not in MADE and not p.name.startswith(".")]
    tops += [ROOT / ".ci", ROOT / ".vscode"]
    for path in (path for top in tops for path in ([top] if top.is_file() else top.rglob("*"))):
        made = MADE & set(path.relative_to(ROOT).parts)
        if path.is_file() and not made and b"\0" not in path.read_bytes()[:65536]:
            yield path


def code(path: Path) -> str:
    """Text of a C file without comments and string literals, lines kept."""
    text = path.read_text(encoding="utf-8")
    pattern = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', re.DOTALL)
    return pattern.sub(lambda match: "\n" * match[0].count("\n"), text)


def hits(pattern: str, text: str, path: Path, flags: int = 0) -> list[str]:
    """Where a pattern is found, as file:line: match."""
    name = path.relative_to(ROOT).as_posix()
    return [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"
        for match in re.finditer(pattern, text, flags)
    ]


def read_json(name: str) -> Any:
    """A JSON file of the repository."""
    return json.loads((ROOT / name).read_text(encoding="utf-8"))


# --- versions


def test_versions_agree() -> None:
    match = re.search(r'^#define COLIBRI_VERSION "(\d+\.\d+\.\d+)"$', HEADER, re.MULTILINE)
    assert match is not None, 'include/colibri.h needs one line #define COLIBRI_VERSION "x.y.z"'
    version = match[1]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" in project["project"]["dynamic"] and "version" not in project["project"]
    provider = project["tool"]["scikit-build"]["metadata"]["version"]
    assert provider["input"] == "include/colibri.h"
    read = re.search(provider["regex"], HEADER)
    assert read is not None and read["value"] == version
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None and newest[1] == version, "the newest entry of CHANGELOG.md is another version"
    assert importlib.metadata.version("colibri-moe") == version, "the installed package is of another version"


# --- editor set-up and build flags


@pytest.mark.parametrize("name", [*(p.name for p in sorted((ROOT / ".vscode").glob("*.json"))), "presets"])
def test_json_parses(name: str) -> None:
    assert read_json("CMakePresets.json" if name == "presets" else f".vscode/{name}")


def test_launch_builds_and_runs_what_exists() -> None:
    tasks = {task["label"]: task for task in read_json(".vscode/tasks.json")["tasks"]}
    launches = {c["name"]: c for c in read_json(".vscode/launch.json")["configurations"]}
    launch = next(c for name, c in launches.items() if name.startswith("colibri_test"))
    task = tasks[launch["preLaunchTask"]]
    assert task["problemMatcher"]["base"] == "$gcc"
    built = make_commands(*task["args"])
    assert launch["program"].removeprefix("${workspaceFolder}/") in built and "-O0" in built


def make_commands(*targets: str) -> str:
    """What make would run to build targets from nothing."""
    command = ["make", "--dry-run", "--always-make", *targets]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def make_flags(target: str) -> set[str]:
    """Flags with which the Makefile compiles core/evaluate.c for a target."""
    command = next(line for line in make_commands(target).splitlines() if " -c core/evaluate.c " in line)
    return flags(command.split())


def flags(words: list[str]) -> set[str]:
    """Flags of a compile command that can change what comes out."""
    return {w for w in words if re.match(r"-[DOWfgps]", w)}


@pytest.mark.parametrize(("configuration", "target"), [("debug", "debug"), ("release", "lib")])
def test_editor_defines_match_make(configuration: str, target: str) -> None:
    listed = read_json(".vscode/c_cpp_properties.json")["configurations"]
    editor = next(c for c in listed if c["name"] == configuration)
    made = make_flags(target)
    assert {f"-D{name}" for name in editor["defines"]} == {flag for flag in made if flag.startswith("-D")}
    assert set(editor["compilerArgs"]) <= made and f"-std={editor['cStandard']}" in made


@pytest.mark.parametrize(("preset", "target"), [("debug", "debug"), ("release", "lib")])
def test_cmake_flags_match_make(preset: str, target: str, tmp_path: Path) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("no cmake on this machine; the flags of the Makefile stay uncompared")
    command = ["cmake", "--preset", preset, "-B", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    commands = json.loads((tmp_path / "compile_commands.json").read_text(encoding="utf-8"))
    compiled = {entry["file"]: flags(entry["command"].split()) for entry in commands}
    assert compiled[str(ROOT / "core" / "evaluate.c")] == make_flags(target)
    core = {str(path) for path in sources("core", suffixes=(".c",))}
    assert core <= set(compiled), "CMake compiles other files of core/ than there are"


# --- the library: what it shows and what it calls

EXITS = r"\b(?:_?exit|_Exit|abort|printf|fprintf|vprintf|vfprintf|puts|fputs|putchar|perror)\s*\("
HEAP = r"\b(?:malloc|calloc|realloc|free|strdup|aligned_alloc|posix_memalign|alloca)\s*\("
LIBM = r"\b(?:exp2?|expm1|log(?:2|10|1p)?|pow|a?sin|a?cos|a?tan|atan2|sinh|cosh|tanh|erf)[fl]?\s*\("


@pytest.mark.parametrize(
    ("rule", "pattern", "folder"),
    [
        ("the library never exits, aborts or prints", EXITS, "core"),
        ("the library makes one reservation and no heap call", HEAP, "core"),
        ("kernels use our own polynomials, never libm", LIBM, "core/kernels"),
    ],
)
def test_core_calls_nothing_forbidden(rule: str, pattern: str, folder: str) -> None:
    found = [hit for path in sources(folder) for hit in hits(pattern, code(path), path)]
    assert found == [], rule


@pytest.mark.parametrize("line", ["  exit(1);", 'fprintf (stderr, "");', "p = malloc(3);", "y = expf(x);"])
def test_the_patterns_find_calls(line: str) -> None:
    assert re.search(f"{EXITS}|{HEAP}|{LIBM}", line)


@pytest.mark.parametrize("line", ["snprintf(s, n, f);", "colibri_free(c);", "simd_exp(x);", "exit_code(x);"])
def test_the_patterns_let_others_pass(line: str) -> None:
    assert not re.search(f"{EXITS}|{HEAP}|{LIBM}", line)


def symbols(*options: str) -> set[str]:
    """Dynamic symbols of the installed library, without their versions."""
    if shutil.which("nm") is None:
        pytest.skip("no nm on this machine")
    library = str(files("colibri") / "libcolibri.so")
    command = ["nm", "--dynamic", "--format=posix", *options, library]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {line.split()[0].split("@")[0] for line in output.splitlines()}


def test_library_exports_the_header_and_nothing_else() -> None:
    declared = set(re.findall(r"^[a-z][\w *]*?\b(colibri_\w+)\(", HEADER, re.MULTILINE))
    assert symbols("--defined-only", "--extern-only") == declared


def test_library_needs_nothing_that_exits_prints_or_allocates() -> None:
    needed = symbols("--undefined-only")
    assert not {name for name in needed if re.fullmatch(f"{EXITS}|{HEAP}", name + "(")}


def test_installed_header_is_the_header() -> None:
    installed = files("colibri") / "include" / "colibri.h"
    assert installed.read_text(encoding="utf-8") == HEADER


# --- text rules


def test_core_and_engine_know_no_family() -> None:
    engine = [ROOT / "src" / "colibri" / f"{name}.py" for name in ENGINE]
    paths = [*sources("core", "include"), *sources("src/colibri/server"), *engine]
    found = [hit for path in paths for hit in hits(FAMILIES, path.read_text(encoding="utf-8"), path, re.I)]
    assert found == [], "the core knows mechanisms, never models"


def test_nothing_is_left_open() -> None:
    # Each word ends in a class of one letter, so that this line does not find itself.
    pattern = r"\b(?:TOD[O]|FIXM[E]|XX[X]|HAC[K])\b|NotImplementedErro[r]|not implemented ye[t]"
    paths = sources("core", "include", "src", "tests", "tools", "benchmarks", "examples")
    assert [hit for path in paths for hit in hits(pattern, path.read_text(encoding="utf-8"), path)] == []


def test_no_flag_changes_arithmetic() -> None:
    pattern = "-f?fast-mat[h]|-funsafe-mat[h]|-march=nativ[e]|-Ofas[t]"
    paths = [ROOT / name for name in ("Makefile", "CMakeLists.txt", "CMakePresets.json", "pyproject.toml")]
    paths += sources("core", "tests", "benchmarks", "examples", ".ci", "cmake")
    assert [hit for path in paths for hit in hits(pattern, path.read_text(encoding="utf-8"), path)] == []


def test_no_path_of_one_machine() -> None:
    pattern = r"(?<![\w./])/(?:wo" r"rk|opt/w|ro" r"ot|ho" r"me/[a-z]\w*)/"
    assert [hit for p in text_files() for hit in hits(pattern, p.read_text(encoding="utf-8"), p)] == []


def test_file_names_say_something() -> None:
    empty = {"util", "utils", "helper", "helpers", "common", "misc"}
    paths = (path.relative_to(ROOT) for path in text_files())
    assert [p.as_posix() for p in paths if empty & {part.split(".")[0].lower() for part in p.parts}] == []


def test_sources_open_with_their_role() -> None:
    paths = sources("core", "include", "src", "tests", "tools", "benchmarks", "examples")
    opened = ("/*", '"""', 'r"""', "#!", "#")
    assert [p.name for p in paths if not p.read_text(encoding="utf-8").lstrip().startswith(opened)] == []
