"""Holds our reading of GGUF to llama.cpp: the same tiny model by three ways.

A random checkpoint of each architecture (tests/checkpoints.py) is written as GGUF by llama.cpp's own
converter. Then (1) our conversion of that file must have the config fields and the bytes of our conversion of
the checkpoint, and (2) our logits must be those that llama.cpp computes from the same file.

Owns: those cases, and where the three are known to differ. Refuses: large models; files are made and removed.

    pip install llama-cpp-python gguf ml_dtypes        # beside this package
    git clone https://github.com/ggml-org/llama.cpp    # or the source package of llama-cpp-python, vendor/
    python tools/compare_gguf_with_llama_cpp.py llama.cpp [--python PYTHON] [--markdown] [case ...]

PYTHON is one with torch and transformers, for the converter; that of this script by default. Tokenizers of
tiny models are none that the converter knows, so its check of the vocabulary is left out.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import checkpoints  # noqa: E402
from colibri.convert import convert  # noqa: E402
from colibri.format import read_container, read_entry  # noqa: E402
from fixtures.native import engine  # noqa: E402
from gguf_settings import GEMMA3, LINEAR, LLAMA3, LLAMA4, LONGROPE, same, yarn  # noqa: E402

POSITIONS = 256
Logits = npt.NDArray[np.float32]


class Case(NamedTuple):
    """`differs`: why our logits are not llama.cpp's on purpose; "" where they must be. `fused`: queries, keys
    and values in one matrix."""

    family: str
    options: dict[str, Any] = {}
    differs: str = ""
    fused: bool = False


# 96 wide: two thirds of 144, as files from before the plain spelling have it.
LFM2 = {
    "intermediate_size": 144,
    "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 32,
}
PHI = {"architectures": ["PhiMoEForCausalLM"]}
SIGMOID = {"scoring_func": "sigmoid"}
SPARSE_MIXER = "llama.cpp takes a softmax of all for SparseMixer"

CASES: dict[str, Case] = {
    "llama": Case("llama"),
    "llama, biases": Case("llama", {"qkv_bias": True}),
    "llama, biases, fused": Case("llama", {"qkv_bias": True}, fused=True),
    "llama, tied": Case("llama", {"tied": True}),
    "llama, llama3 RoPE": Case("llama", {"rope": LLAMA3}),
    "llama, linear RoPE": Case("llama", {"rope": LINEAR}),
    "mistral as llama": Case("mistral"),
    "mixtral as llama": Case("mixtral"),
    "mixtral as llama, wide heads": Case("mixtral", {"head_dim": 24}),
    "qwen2": Case("qwen2"),
    "qwen3": Case("qwen3"),
    "qwen2moe": Case("qwen2_moe"),
    "qwen3moe": Case("qwen3_moe"),
    "qwen3moe, tied": Case("qwen3_moe", {"tied": True}),
    "qwen3moe, YaRN": Case("qwen3_moe", {"rope": yarn(4.0, 128)}),
    "olmoe": Case("olmoe"),
    "deepseek2, V2": Case("deepseek_v2"),
    "deepseek2, V2 Lite": Case(
        "deepseek_v2",
        {"q_rank": None, "first_dense": 1, "n_layers": 26},  # by which llama.cpp knows it
    ),
    "deepseek2, V2, groups": Case(
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "groups": (4, 2)},
        "llama.cpp ranks V2's groups as V3's",
    ),
    "deepseek2, V2, YaRN with mscale": Case(
        "deepseek_v2",
        {"first_dense": 1, "rope": yarn(8.0, 64, mscale=0.707, mscale_all_dim=0.707)},
    ),
    "deepseek2, V3": Case(
        "deepseek_v3", {"first_dense": 1, "groups": (4, 2), "scale": 2.5, "config_extra": SIGMOID}
    ),
    "deepseek2, V3, YaRN with mscale": Case(
        "deepseek_v3",
        {
            "first_dense": 1,
            "rope": yarn(40.0, 64, mscale=1.0, mscale_all_dim=1.0),
            "config_extra": SIGMOID,
        },
    ),
    "gpt-oss": Case(
        "gpt_oss",
        {"config_extra": {"swiglu_limit": 7.0}},
        "llama.cpp rounds the ends of YaRN's ramp, which this model does not",
    ),
    "gpt-oss, plain RoPE": Case(
        "gpt_oss",
        {
            "config_extra": {"swiglu_limit": 7.0},
            "rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}},
        },
    ),
    "gpt-oss, MXFP4, plain RoPE": Case(
        "gpt_oss",
        {
            "mxfp4": True,
            "config_extra": {"swiglu_limit": 7.0},
            "rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}},
        },
        "both round what MXFP4 multiplies to 8 bits, each its own way",
    ),
    "glm4moe": Case("glm4_moe", {"first_dense": 1}),
    "glm4moe, no norm, no biases": Case("glm4_moe", {"qk_norm": False, "qkv_bias": False}),
    "dots1": Case("dots1", {"first_dense": 1, "config_extra": SIGMOID}),
    "granitemoe": Case("granitemoe"),
    "phimoe": Case(
        "phimoe",
        {"noise": 0.01, "config_extra": PHI | {"original_max_position_embeddings": 512}},
        SPARSE_MIXER,
    ),
    "phimoe, longrope": Case(
        "phimoe",
        {
            "noise": 0.01,
            "config_extra": PHI,
            "rope": LONGROPE,
        },
        SPARSE_MIXER,
    ),
    # Its converter takes n_ff / n_kv_heads for the width of the shared experts.
    "ernie4_5-moe": Case("ernie4_5_moe", {"n_ff": 192}),
    "minimax-m2": Case("minimax_m2", {"config_extra": SIGMOID}),
    "gemma3": Case("gemma3_text", {"n_layers": 6, "config_extra": GEMMA3}),
    "gemma4": Case(
        "gemma4_text", {"n_layers": 6}, "the table of GELU tips the choice of experts that are near"
    ),
    "gemma4, all experts": Case("gemma4_text", {"n_layers": 6, "n_experts_used": 6}),
    "gemma4, dense, values apart": Case("gemma4_text", {"moe": False, "same": False}),
    "gemma4, dense, fused": Case("gemma4_text", {"moe": False}, fused=True),
    "llama4": Case("llama4_text", {"chunk": 8192, "config_extra": LLAMA4}),
    "qwen3next": Case("qwen3_next", {"delta": (2, 4, 16, 16)}),
    "qwen3next, fused": Case("qwen3_next", {"delta": (2, 4, 16, 16)}, fused=True),
    "qwen35moe": Case("qwen3_5_moe", {"delta": (2, 6, 16, 16)}),
    "lfm2": Case("lfm2", {"config_extra": LFM2}),
    "lfm2, fused": Case("lfm2", {"config_extra": LFM2}, fused=True),
    "lfm2, no adjusted width": Case(
        "lfm2", {"n_ff": 144, "config_extra": LFM2 | {"block_auto_adjust_ff_dim": False}}
    ),
    "lfm2moe": Case("lfm2_moe"),
}

# Run by the Python of the converter: source, checkpoint, file to write, "fused" or "".
CONVERTER = """
import logging, sys
from pathlib import Path
source, checkpoint, out = map(Path, sys.argv[1:4])
sys.path[:0] = [str(source), str(source / "gguf-py")]
import gguf, torch, transformers
from conversion import ModelBase, ModelType, get_model_architecture, get_model_class
from conversion.base import TextModel
logging.disable(logging.INFO)
fast = transformers.PreTrainedTokenizerFast
transformers.AutoTokenizer.from_pretrained = lambda path, **_: fast.from_pretrained(path)
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
cls = get_model_class(get_model_architecture(ModelBase.load_hparams(checkpoint, False), ModelType.TEXT))
cls.no_mtp = True
cls.set_vocab = lambda self: self._set_vocab_gpt2()
with torch.inference_mode():
    fused = sys.argv[4] == "fused"
    cls(checkpoint, gguf.LlamaFileType.ALL_F32, out, eager=True, fuse_qkv=fused).write()
"""


class Result(NamedTuple):
    """`unequal`: fields and entries of the two conversions that differ; the rest compares logits."""

    unequal: list[str]
    same_top: int
    kl_median: float
    kl_most: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("llama_cpp", type=Path, help="source tree with convert_hf_to_gguf.py")
    parser.add_argument("--python", default=sys.executable, help="that has torch and transformers")
    parser.add_argument("--markdown", action="store_true", help="print a table for the docs")
    parser.add_argument("cases", nargs="*", metavar="case", help="; ".join(CASES))
    arguments = parser.parse_intermixed_args()
    if unknown := [name for name in arguments.cases if name not in CASES]:
        parser.error(f"no such case: {', '.join(unknown)}")
    failed = 0
    if arguments.markdown:
        print("| Architecture | Bytes | Same best id | KL median | KL largest | |")
        print("|---|---|---:|---:|---:|---|")
    for name in arguments.cases or CASES:
        with tempfile.TemporaryDirectory() as directory:
            result = compare(CASES[name], Path(directory), arguments)
        wrong = bool(result.unequal) or (not CASES[name].differs and result.same_top < POSITIONS)
        failed += wrong
        bytes = "; ".join(result.unequal[:3]) or "equal"
        cells = [name, bytes, f"{result.same_top} of {POSITIONS}", f"{result.kl_median:.1e}"]
        cells += [f"{result.kl_most:.1e}", CASES[name].differs]
        line = f"| {' | '.join(cells)} |" if arguments.markdown else "  ".join(cells)
        print(line + ("  WRONG" if wrong and not arguments.markdown else ""), flush=True)
    return int(failed > 0)


def compare(case: Case, directory: Path, arguments: argparse.Namespace) -> Result:
    hf, gguf = directory / "hf", directory / "model.gguf"
    checkpoints.FAMILIES[case.family](hf, storage="f32", **case.options)
    command = [arguments.python, "-c", CONVERTER, arguments.llama_cpp, hf, gguf]
    command.append("fused" if case.fused else "")
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"llama.cpp's converter failed on {case.family}:\n{done.stderr[-2000:]}")
    ours = {source: directory / f"{source.stem}.colibri" for source in (hf, gguf)}
    for source, out in ours.items():
        convert(source, out, "f32", require_tokenizer=False)
    ids = np.random.default_rng(1).integers(5, 300, POSITIONS).tolist()
    with engine(ours[gguf], context=POSITIONS) as run:
        found = run.feed(ids)
    expected = llama_cpp_logits(gguf, ids)
    kl = divergence(expected, found)
    same = int((expected.argmax(axis=1) == found.argmax(axis=1)).sum())
    return Result(unequal(ours[hf], ours[gguf]), same, float(np.median(kl)), float(kl.max()))


def unequal(hf: Path, gguf: Path) -> list[str]:
    """n_vocab_used follows from tokenizers, which are compared elsewhere."""
    first, other = read_container(hf), read_container(gguf)
    fields = [name for name in first.config if first.config[name] != other.config.get(name)]
    names = [entry.name for entry in first.entries if entry.kind != "blob"]
    if names != [entry.name for entry in other.entries if entry.kind != "blob"]:
        return [*fields, "the list of entries"]
    entries = [name for name in names if not same(name, read_entry(first, name), read_entry(other, name))]
    return [name for name in fields if name != "n_vocab_used"] + entries


def llama_cpp_logits(path: Path, ids: list[int]) -> Logits:
    """In f32 throughout, but for what its kernels round."""
    import llama_cpp

    llama = llama_cpp.Llama(
        str(path),
        n_ctx=POSITIONS,
        n_batch=POSITIONS,
        logits_all=True,
        verbose=False,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
    )
    llama.eval(ids)
    return np.array(llama.scores[: len(ids)], dtype=np.float32)


def divergence(expected: Logits, found: Logits) -> npt.NDArray[np.float64]:
    """Kullback-Leibler divergence of each position, in nats."""
    p, q = (log_softmax(logits.astype(np.float64)) for logits in (expected, found))
    kl: npt.NDArray[np.float64] = np.maximum((np.exp(p) * (p - q)).sum(axis=1), 0.0)
    return kl


def log_softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted: npt.NDArray[np.float64] = logits - logits.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


if __name__ == "__main__":
    sys.exit(main())
