"""Checks that includes of the C core and imports of the Python package point only downwards.

Owns: the two tables below, which are the architecture. Refuses: a file without a place in its table, an edge
that points up or sideways, a second module that touches the native library. Exit status 1 if there is any.

    python tools/check_layers.py [--root DIR]
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

Table = list[tuple[str, ...]]

# Outside in. A module may include or import those of later lines only; names on one line do not know each
# other. A name that ends with / stands for a whole folder.
CORE: Table = [
    ("evaluate",),
    ("session",),
    ("forward",),
    ("attention", "router", "ffn", "record"),
    ("latent", "delta"),
    ("layer",),
    ("product",),
    ("chunk",),
    ("experts", "cache", "sample", "quantize"),
    ("weights",),
    ("container",),
    ("config",),
    ("profile",),
    ("threads",),
    ("arena",),
    ("os",),
    ("kernels/dispatch",),
    ("kernels/avx2_vnni", "kernels/neon_dotprod"),
    ("kernels/scalar", "kernels/avx2", "kernels/avx512", "kernels/neon", "kernels/wasm"),
    ("kernels/body",),
    ("kernels/matmul", "kernels/elementwise", "kernels/attend", "kernels/delta_rule"),
    ("kernels/lanes",),
    ("kernels/kernels",),
    ("status", "rope", "topk"),
    ("include/colibri",),
]
PYTHON: Table = [
    ("__main__",),
    ("cli/",),
    ("server/",),
    ("__init__",),
    ("lm_eval",),
    ("analysis/",),
    ("async_engine",),
    ("profiling",),
    ("engine",),
    ("prompts", "scheduler"),
    ("drawing",),
    ("constraints", "generate", "sequences"),
    ("inspection", "cache", "residency", "opened"),
    ("cached",),
    ("arguments",),
    ("convert",),
    ("convert/pipeline", "convert/explain"),
    ("convert/prepare", "convert/source"),
    ("convert/gguf/layout", "convert/gguf/architectures", "convert/gguf/vocabulary"),
    ("convert/gguf/records", "convert/gguf/relaid", "convert/gguf/tokenizer_models"),
    (
        "convert/gguf/peculiarities",
        "convert/gguf/names",
        "convert/gguf/token_lists",
        "convert/gguf/pre_tokenizers",
    ),
    ("convert/tensors", "convert/types", "convert/origins", "convert/trial"),
    ("convert/registry",),
    ("convert/families/",),
    ("convert/routing", "convert/latent", "convert/delta", "convert/sandwich", "convert/encoders"),
    ("convert/decoder", "convert/embedded", "convert/targets", "convert/mxfp4", "convert/fp8"),
    ("convert/rope", "convert/windows", "convert/tokenizer_files"),
    ("convert/sentencepiece_model", "convert/tiktoken_file", "convert/added_tokens", "convert/generation"),
    ("convert/protobuf", "convert/merges"),
    ("convert/gguf/rotation",),
    ("convert/gguf/metadata", "convert/gguf/regrid"),
    ("convert/gguf/regrid_q4",),
    ("convert/keys", "convert/checkpoint", "convert/gguf/grids"),
    ("convert/gguf/container", "convert/gguf/repack"),
    ("convert/gguf/blocks",),
    ("convert/float8", "convert/shards", "convert/source_tensor", "convert/gguf"),
    ("model_facts",),
    ("sampling", "tokenizer", "sources"),
    ("chat", "normalizer", "byte_letters"),
    ("format",),
    ("layout",),
    ("entries", "expert_bits"),
    ("config",),
    ("quantize",),
    ("panels",),
    ("_native",),
    ("_library",),
    ("_records", "_ffi", "memory", "placement", "aside", "paths"),
    ("errors",),
]
# Who alone may import a module, whatever the layers allow.
ONLY: dict[str, tuple[str, ...]] = {"_ffi": ("_library",), "_library": ("_native",)}

# Declares functions of other modules, each named after its own: a call of one is an edge to that module.
SHARED_HEADERS = ("layer.h",)

PROTOTYPE = re.compile(r"^\w[\w *]*?\b(([a-z]+)_\w+)\(", re.MULTILINE)
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"')
Edge = tuple[int, str, str]  # line, what is written there, target module


def place(module: str, table: Table) -> tuple[int, str] | None:
    """Layer (0 is outermost) and table entry of a module."""
    for layer, names in enumerate(table):
        for name in names:
            if module == name.rstrip("/") or (name.endswith("/") and module.startswith(name)):
                return layer, name.rstrip("/")
    return None


def c_edges(path: Path, core: Path) -> Iterator[Edge]:
    """Quoted includes of a C file, found beside it, in core/ or in include/, and calls of SHARED_HEADERS."""
    texts = [p.read_text(encoding="utf-8") for p in (core / name for name in SHARED_HEADERS) if p.exists()]
    shared = dict(pair for text in texts for pair in PROTOTYPE.findall(text)) if path.suffix == ".c" else {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        match = INCLUDE.match(line)
        if match:
            name = match[1]
            candidates = [path.parent / name, core / name, core.parent / "include" / name]
            target = next((c.resolve() for c in candidates if c.exists()), (core / name).resolve())
            base = core if target.is_relative_to(core) else core.parent
            shown = target.relative_to(base) if target.is_relative_to(base) else Path(name)
            yield number, f'includes "{name}"', shown.with_suffix("").as_posix()
        for name in re.findall(r"\b(\w+)\(", line):
            if name in shared:
                yield number, f"calls {name}", shared[name]


def python_edges(path: Path, package: Path) -> Iterator[Edge]:
    """Imports of the package's own modules anywhere in one Python file, also inside functions."""
    here = ["colibri", *path.relative_to(package).parent.parts]
    edges: set[Edge] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            names = [[*base, alias.name] for alias in node.names]
        else:
            continue
        targets = {python_module(package, name[1:]) for name in names if name[0] == "colibri"}
        edges |= {(node.lineno, f"imports {target}", target) for target in targets}
    yield from sorted(edges)


def python_module(package: Path, parts: list[str]) -> str:
    """The module that `colibri.<parts>` names: trailing names that are no files are its attributes."""
    while parts:
        path = package.joinpath(*parts)
        if path.with_suffix(".py").exists() or path.is_dir() or parts == ["_ffi"]:
            return "/".join(parts)
        parts = parts[:-1]
    return "__init__"


def module_of(path: Path, base: Path) -> str:
    """Name of a file in its table: no suffix; a package's __init__ is the package."""
    parts = list(path.relative_to(base).with_suffix("").parts)
    return "/".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def faults(module: str, path: str, edges: Iterator[Edge], table: Table) -> Iterator[str]:
    """What is wrong with one file, one line each."""
    here = place(module, table)
    if here is None:
        yield f"{path}: {module} has no place in the table of tools/check_layers.py; give it one"
        return
    for line, written, target in edges:
        there = place(target, table)
        if there is None:
            yield f"{path}:{line}: {written}, which has no place in the table of tools/check_layers.py"
        elif there[1] != here[1] and there[0] <= here[0]:
            way = "upward" if there[0] < here[0] else "sideways"
            yield (
                f"{path}:{line}: {written}: {way} edge from {here[1]} (layer {here[0]}) to {there[1]}"
                f" (layer {there[0]}); move what is shared below both, or pass it in as a parameter"
            )
        elif module not in ONLY.get(target, (module,)):
            yield f"{path}:{line}: {written}: only {' and '.join(ONLY[target])} may do that"


def check(root: Path) -> list[str]:
    """All faults of a source tree."""
    core, package = root / "core", root / "src" / "colibri"
    found: list[str] = []
    for path in sorted([*core.rglob("*.c"), *core.rglob("*.h")]):
        name = path.relative_to(root).as_posix()
        found += faults(module_of(path, core), name, c_edges(path, core), CORE)
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        found += faults(module_of(path, package), name, python_edges(path, package), PYTHON)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Prints the faults; 1 if there is any."""
    parser = argparse.ArgumentParser(description="Check the include and import order.")
    parser.add_argument("--root", type=Path, default=Path(__file__).parent.parent, help="source tree")
    found = check(parser.parse_args(arguments).root.resolve())
    for fault in found:
        print(fault)
    print(f"layers: {len(found)} faults" if found else "layers: every include and import points downwards")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
