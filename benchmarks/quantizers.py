"""q4 beside llama.cpp's own Q4_K: the same matrices rounded by both, in our f32 engine, on the same text.

Owns: the roundings (quantise, dequantise; nothing else differs), the set of matrices (those that q4 packs, so
not routers, norms, biases), and equivalent models with other columns. Refuses: what is measured (quality.py),
speed, the rounding of activations.

Q4_K is ggml's without importances, the default of llama-quantize; Q4_K-long is the search that ggml makes if
there are importances, here all equal. Rows that are no multiple of 256 are padded with zeros for both.

    python benchmarks/quantizers.py CHECKPOINT TEXT [--columns outliers] [--prefix TOKEN] [--windows N]

Needs the packages llama-cpp-python, for ggml, and gguf. Memory: four models in f32.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.util
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import quality
from colibri.config import Config
from colibri.convert import convert
from colibri.entries import entry_class
from colibri.format import Container, Writer, read_blobs, read_container, read_entry
from colibri.quantize import matrix_bytes, pack, unpack

Floats = npt.NDArray[np.float32]
Tensors = dict[str, list[Floats]]  # by entry: [rows, cols]; an expert's gate, up, down; a vector as [1, n]
Rounding = Callable[[Floats], Floats]

Q4_K, BLOCK, BLOCK_BYTES = 12, 256, 144  # ggml's number of the type; weights and bytes of a block


def q4(matrix: Floats) -> Floats:
    """As `colibri convert --type q4` rounds it."""
    return unpack(pack(matrix, "q4"), len(matrix), matrix.shape[1], "q4")


def ggml_roundings() -> dict[str, Rounding]:
    """Both searches of ggml."""
    package = importlib.util.find_spec("llama_cpp")
    library = [] if package is None else list((Path(str(package.origin)).parent / "lib").glob("*ggml-base.*"))
    if not library or importlib.util.find_spec("gguf") is None:
        raise SystemExit("quantizers.py: ggml or gguf is not here: pip install llama-cpp-python gguf")
    quantize = ctypes.CDLL(str(library[0])).ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    quantize.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    gguf: Any = importlib.import_module("gguf")

    def rounded(matrix: Floats, importances: bool) -> Floats:
        padded = np.pad(matrix, ((0, 0), (0, -matrix.shape[1] % BLOCK)))
        rows, cols = padded.shape
        equal = np.ones(cols, np.float32)
        out = np.empty((rows, cols // BLOCK * BLOCK_BYTES), np.uint8)
        weights = equal.ctypes.data if importances else None
        size = quantize(Q4_K, padded.ctypes.data, out.ctypes.data, 0, rows, cols, weights)
        if size != out.nbytes:
            raise SystemExit(f"quantizers.py: expected {out.nbytes} bytes of Q4_K, ggml wrote {size}")
        values: Floats = gguf.quants.dequantize(out, gguf.GGMLQuantizationType.Q4_K)
        return np.ascontiguousarray(values[:, : matrix.shape[1]])

    return {"Q4_K": lambda m: rounded(m, False), "Q4_K-long": lambda m: rounded(m, True)}


def read_tensors(container: Container) -> Tensors:
    """Everything but blobs of an f32 file."""
    tensors: Tensors = {}
    for entry in container.entries:
        if entry.kind != "blob":
            data = memoryview(read_entry(container, entry.name))
            parts = tensors[entry.name] = []
            for rows, cols, _ in entry.matrices:
                size = matrix_bytes(rows, cols, "f32")
                parts.append(unpack(data[:size], rows, cols, "f32"))
                data = data[size:]
            if not entry.matrices:
                parts.append(np.frombuffer(data, "<f4").reshape(1, -1).copy())
    return tensors


def write_model(path: Path, like: Container, tensors: Tensors, rounding: Rounding | None = None) -> float:
    """Writes an f32 file; rounding is for what q4 packs. These matrices' mean relative squared error."""
    errors = []
    with Writer(path, like.config, "f32", read_blobs(like.path)) as writer:
        for entry in writer.tensors:
            parts = tensors[entry.name]
            if rounding is not None and entry.matrices and entry_class(entry) != "routers":
                exact, parts = parts, [rounding(part) for part in parts]
                errors += [((a - b) ** 2).sum() / (b**2).sum() for a, b in zip(parts, exact, strict=True)]
            chunks = [pack(part, "f32") if entry.matrices else part.tobytes() for part in parts]
            writer.write(entry.name, chunks)
    return float(np.mean(errors)) if errors else 0.0


def change_columns(tensors: Tensors, config: Config, factors: Callable[[int], Floats]) -> None:
    """Multiplies columns by factors(n) and divides what feeds them: the model computes the same. Norms feed
    q, k, v and gate, up, routers; rows of v feed columns of attn_out; rows of up those of down."""
    for layer in range(config["n_layers"]):
        at = f"layers.{layer}."
        part = {name.removeprefix(at): found for name, found in tensors.items() if name.startswith(at)}
        gated = [found for name, found in part.items() if name.startswith("experts.")]
        for kind in ("ffn", "shared"):
            if f"{kind}_gate" in part:
                gated.append([part[f"{kind}_{name}"][0] for name in ("gate", "up", "down")])
        readers = [matrix for gate, up, _ in gated for matrix in (gate, up)]
        readers += [part[name][0] for name in ("router", "shared_router") if name in part]
        for norm, fed in (("attn_norm", [part[f"attn_{i}"][0] for i in "qkv"]), ("ffn_norm", readers)):
            by = factors(config["n_embd"])
            for matrix in fed:
                matrix *= by
            part[norm][0][:] /= by
        heads = factors(config["n_kv_heads"] * config["head_dim"]).reshape(config["n_kv_heads"], -1)
        part["attn_v"][0][:] /= heads.reshape(-1, 1)
        if "attn_v_bias" in part:
            part["attn_v_bias"][0][:] /= heads.reshape(1, -1)
        part["attn_out"][0][:] *= heads.repeat(config["n_heads"] // config["n_kv_heads"], axis=0).reshape(-1)
        for _, up, down in gated:
            by = factors(len(up))
            up /= by[:, None]
            down *= by


def drawn(kind: str, seed: int) -> Callable[[int], Floats]:
    """outliers: one column of 48 by 8 or 16 (powers of two: not a bit of the logits changes). spread: every
    column by 0.7 to 1.4, so that no group stays on the grid of an earlier quantisation."""
    rng = np.random.default_rng(seed)

    def outliers(n: int) -> Floats:
        by = np.ones(n, np.float32)
        chosen = rng.choice(n, max(1, n // 48), replace=False)
        by[chosen] = rng.choice([8, 16], len(chosen))
        return by

    def spread(n: int) -> Floats:
        return np.exp(rng.uniform(np.log(0.7), np.log(1.4), n)).astype(np.float32)

    return outliers if kind == "outliers" else spread


def evaluate(args: argparse.Namespace, seed: int, work: Path) -> dict[str, quality.Figures]:
    """Figures of every rounding over the whole text; "unrounded" is the model before its columns changed."""
    original = read_container(convert(args.checkpoint, work / "original.colibri", "f32").path)
    tensors = read_tensors(original)
    files, reference = dict[str, Path](), original.path
    if args.columns != "same":
        change_columns(tensors, original.config, drawn(args.columns, seed))
        files["unrounded"], reference = original.path, work / "reference.colibri"
        write_model(reference, original, tensors)
    for name, rounding in ({"q4": q4} | ggml_roundings()).items():
        files[name] = work / f"{name}.colibri"
        error = write_model(files[name], original, tensors, rounding)
        print(f"{name:10} relative squared error of a matrix {error:.6f}", flush=True)
    del tensors
    found = quality.report(quality.compare(reference, files, args))
    return {name: domains["all"] for name, domains in found.items()}


def show(found: dict[str, quality.Figures]) -> None:
    """The table of one model."""
    print("\nrounding     tokens       ppl    change    KL nats  same best  KL / q4")
    for name, f in found.items():
        print(
            f"{name:11}{f['tokens']:8}{f['perplexity']:10.4f}{100 * f['change']:+9.3f}%{f['kl']:11.6f}"
            f"{100 * f['same_best']:10.2f}%{f['kl'] / found['q4']['kl']:9.4f}",
            flush=True,
        )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Compares the q4 quantiser with ggml's Q4_K.")
    quality.add_arguments(parser)
    parser.add_argument("--columns", choices=("same", "outliers", "spread"), default="same")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the changed columns")
    args = parser.parse_args()
    runs = []
    for seed in args.seeds if args.columns != "same" else [0]:
        with tempfile.TemporaryDirectory(dir=args.work) as work:
            runs.append(evaluate(args, seed, Path(work)))
        show(runs[-1])
    for name in runs[0] if len(runs) > 1 else ():
        ratios = np.array([found[name]["kl"] / found["q4"]["kl"] for found in runs])
        error = ratios.std(ddof=1) / len(runs) ** 0.5
        print(f"{name:11}KL / q4 {ratios.mean():.4f} +- {error:.4f} over {len(runs)} seeds")
    if args.json is not None:
        args.json.write_text(json.dumps(runs, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
