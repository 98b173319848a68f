"""Looks at an installed package from outside its sources: contents, import time, a C program linked to it.

Run by .ci/run with the Python of a fresh environment: python installed.py examples/c/minimal.c
"""

import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

IMPORT_LIMIT_MS = 250
PARTS = ("libcolibri.so", "include/colibri.h", "py.typed", "demo.colibri", "_ffi.py")


def import_ms() -> float:
    """Wall time of `import colibri` in a new process with warm files: the best of five runs."""
    program = "import time; t = time.perf_counter(); import colibri; print((time.perf_counter() - t) * 1e3)"
    command = [sys.executable, "-c", program]
    return min(float(subprocess.run(command, capture_output=True, check=True).stdout) for _ in range(5))


def main(example: Path) -> None:
    """Prints what it finds; fails on a missing part, a slow import or an example that does not run."""
    package = Path(str(files("colibri")))
    for part in PARTS:
        path = package / part
        print(f"{part}: {path.stat().st_size} bytes" if path.exists() else f"{part}: MISSING in {package}")
    if not all((package / part).exists() for part in PARTS):
        raise SystemExit(1)
    spent = import_ms()
    print(f"import colibri: {spent:.0f} ms (limit {IMPORT_LIMIT_MS})")
    if spent > IMPORT_LIMIT_MS:
        raise SystemExit("import colibri is too slow: something heavy is imported at the top of a module")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "minimal"
        search = [f"-I{package / 'include'}", f"-L{package}", f"-Wl,-rpath,{package}"]
        subprocess.run(["cc", str(example), *search, "-lcolibri", "-o", str(program)], check=True)
        subprocess.run([str(program), str(package / "demo.colibri"), "1", "2", "3"], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
