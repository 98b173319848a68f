"""Checkpoints that must convert: every family, every spelling of the same model, every settled ambiguity.

Numbers refer to the public reports that the cases were taken from (shared experts, RoPE settings, tied
embeddings ...); logits are compared with an oracle elsewhere. Here bytes are compared with the source
tensors.
"""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import checkpoints
from colibri import inspection
from colibri.convert import ConversionReport, convert
from colibri.entries import Entry
from colibri.format import read_blobs, read_container, read_entry
from colibri.quantize import matrix_bytes, unpack

Floats = npt.NDArray[np.float32]


def load(path: Path) -> dict[str, Floats]:
    """Every tensor of a .colibri file as float32; experts as NAME.gate, NAME.up and NAME.down."""
    container = read_container(path)
    found: dict[str, Floats] = {}
    for entry in container.entries:
        data = read_entry(container, entry.name)
        if entry.kind == "vector":
            found[entry.name] = np.frombuffer(data, "<f4")
        elif entry.kind == "matrix":
            found[entry.name] = unpack(data, entry.rows, entry.cols, entry.types[0])
        elif entry.kind == "expert":
            found |= split_expert(entry, data)
    return found


def split_expert(entry: Entry, data: bytes) -> dict[str, Floats]:
    parts, at = {}, 0
    for part, (rows, cols, type) in zip(("gate", "up", "down"), entry.matrices, strict=True):
        size = matrix_bytes(rows, cols, type)
        parts[f"{entry.name}.{part}"] = unpack(data[at : at + size], rows, cols, type)
        at += size
    return parts


def tensors_only(path: Path) -> bytes:
    """The file's tensor bytes, for comparing two conversions."""
    container = read_container(path)
    return b"".join(read_entry(container, e.name) for e in container.entries if e.kind != "blob")


def renamed(family: str, source: dict[str, Floats]) -> dict[str, Floats]:
    """What the target must hold, from the names in a per-expert checkpoint: written independently of
    convert/."""
    parts = {
        "w1": "gate",
        "w3": "up",
        "w2": "down",
        "gate_proj": "gate",
        "up_proj": "up",
        "down_proj": "down",
    }
    attention = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_out"}
    found = {}
    for name, value in source.items():
        words = name.removeprefix("model.").split(".")
        if words[0] != "layers":
            target = {"embed_tokens": "embedding", "norm": "output_norm", "lm_head": "output"}[words[0]]
            found[target] = value
            continue
        at, rest = f"layers.{words[1]}.", words[2:]
        if rest[0] in ("input_layernorm", "post_attention_layernorm"):
            target = "attn_norm" if rest[0].startswith("input") else "ffn_norm"
        elif rest[0] == "self_attn" and rest[1].endswith("norm"):
            target = f"attn_{rest[1]}"
        elif rest[0] == "self_attn":
            target = attention[rest[1]] + ("_bias" if rest[2] == "bias" else "")
        elif rest[1] == "experts":
            target = f"experts.{rest[2]}.{parts[rest[3]]}"
        elif rest[1] == "gate":
            target = "router" if rest[2] == "weight" else "router_bias"
        elif rest[1] in ("shared_expert", "shared_experts"):
            target = f"shared_{parts[rest[2]]}"
        elif rest[1] == "shared_expert_gate":
            target, value = "shared_router", value[0]
        else:
            target = f"ffn_{parts[rest[1]]}"
        found[at + target] = value
    return found


@pytest.mark.parametrize("storage", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("family", [f for f in checkpoints.FIRST if f[:3] not in ("dee", "gpt")])
def test_f32_holds_every_source_value(tmp_path: Path, family: str, storage: str) -> None:
    source = checkpoints.FAMILIES[family](tmp_path / "hf", storage=storage)
    report = convert(source, tmp_path / "m.colibri", "f32")
    found, expected = load(report.path), renamed(family, checkpoints.read_tensors(source))
    rope = found.pop("rope_inv_freq")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(found[name], value), name
    dim = 8 if family == "glm4_moe" else 16
    powers = 10000.0 ** (np.arange(0, dim, 2) / dim)
    assert np.allclose(rope, 1 / powers, rtol=1e-7)
    assert report.ignored_tensors == [] and report.notes == [] and report.model_type == family
    assert report.bytes == report.path.stat().st_size
    assert report.source_bytes == sum(v.size for v in expected.values()) * (4 if storage == "f32" else 2)


def test_types_apply_to_matrices_and_spare_router_and_norms(tmp_path: Path) -> None:
    source = checkpoints.qwen2_moe(tmp_path / "hf", storage="f32")
    expected = renamed("qwen2_moe", checkpoints.read_tensors(source))
    steps = {"q8": 200, "q4": 12}  # the largest error, as a part of the largest value
    for type in ("bf16", "q8", "q4"):
        found = load(convert(source, tmp_path / f"{type}.colibri", type).path)
        for name, value in expected.items():
            exact = "norm" in name or "bias" in name or "router" in name
            if exact:
                assert np.array_equal(found[name], value), name
            elif type == "bf16":
                assert np.array_equal(found[name], value.astype(ml_dtypes.bfloat16).astype(np.float32)), name
            else:
                assert 0 < np.abs(found[name] - value).max() < np.abs(value).max() / steps[type], name
    described = inspection.describe(tmp_path / "q8.colibri")
    experts = [entry for entry in described.entries if entry.kind == "expert"]
    assert {entry.types for entry in experts} == {("q8", "q8", "q8")}
    assert described.bytes_by_class["experts"] < sum(
        value.nbytes for name, value in expected.items() if ".experts." in name
    )  # quantised: a quarter of f32, plus padding to 16 rows


LATENT_FIELDS = {
    "n_kv_heads": 1, "head_dim": 32, "rope_dim": 8, "kv_latent_dim": 32, "q_latent_dim": 40, "value_dim": 16,
    "latent_norm_eps": float(np.float32(1e-6)), "attn_scale": float(np.float32(32**-0.5)), "n_ff_shared": 48,
}  # fmt: skip
EXPECTED_FIELDS: dict[str, dict[str, Any]] = {
    "mixtral": {"router_norm": 1, "qk_norm": 0, "n_experts": [4, 4], "n_ff_expert": 96, "n_ff": 0},
    "qwen3_moe": {"router_norm": 1, "qk_norm": 1, "n_experts": [8, 8], "n_ff_expert": 48, "n_ff": 0},
    "olmoe": {"router_norm": 0, "qk_norm": 2, "qkv_clip": 0.0, "n_experts_used": 2, "n_kv_heads": 4},
    "qwen2_moe": {"n_ff_shared": 80, "shared_gate": 1, "attn_qkv_bias": 1, "attn_out_bias": 0},
    "llama": {"n_experts": [0, 0], "n_ff": 96, "n_experts_used": 0, "n_ff_expert": 0},
    "qwen3": {"n_experts": [0, 0], "n_ff": 96, "qk_norm": 1},
    "glm4_moe": {
        "rope_dim": 8,
        "qk_norm": 1,
        "attn_qkv_bias": 1,
        "attn_out_bias": 0,
        "n_ff_shared": 48,
        "shared_gate": 0,
        "router_score": 1,
        "router_bias": 1,
        "router_norm": 1,
        "router_scale": 1.0,
        "n_expert_groups": 0,
    },
    "gpt_oss": {"attn_sinks": 1, "window": [128, 0], "ffn_limit": 1.5, "expert_bias": 1, "router_norm": 1},
    "deepseek_v2": LATENT_FIELDS | {"router_score": 0, "router_bias": 0, "router_norm": 0},
    "deepseek_v3": LATENT_FIELDS | {"router_score": 1, "router_bias": 1, "router_norm": 1},
    "dots1": {"qk_norm": 1, "attn_qkv_bias": 0, "n_ff": 0, "router_score": 1, "router_bias": 1},
}


@pytest.mark.parametrize("family", checkpoints.FIRST)
def test_fields_of_each_family(tmp_path: Path, family: str) -> None:
    source = checkpoints.FAMILIES[family](tmp_path / "hf")
    config = read_container(convert(source, tmp_path / "m.colibri").path).config
    shared: dict[str, Any] = {
        "n_vocab": 300,
        "n_vocab_used": 300,
        "n_layers": 2,
        "n_embd": 64,
        "n_heads": 4,
        "head_dim": 16,
        "attn_scale": 0.25,
    }
    shared |= {"rope_dim": 16, "context_length": 512, "tied_output": 0}
    expected = shared | EXPECTED_FIELDS[family]
    assert {name: config[name] for name in expected} == expected


def test_switches_of_the_config_reach_the_file(tmp_path: Path) -> None:
    source = checkpoints.olmoe(tmp_path / "hf", clip_qkv=0.75, norm_topk_prob=True, qkv_bias=True)
    config = read_container(convert(source, tmp_path / "m.colibri").path).config
    assert (config["qkv_clip"], config["router_norm"]) == (0.75, 1)
    assert (config["attn_qkv_bias"], config["attn_out_bias"]) == (1, 1)


def test_class_defaults_are_used_and_reported(tmp_path: Path) -> None:
    """Left-out keys mean what Transformers' classes say: no renormalisation, biases in Qwen2-MoE."""
    remove = ["norm_topk_prob", "qkv_bias", "rms_norm_eps", "rope_theta", "tie_word_embeddings"]
    source = checkpoints.qwen2_moe(tmp_path / "hf", config_remove=remove)
    report = convert(source, tmp_path / "m.colibri")
    config = read_container(report.path).config
    assert (config["router_norm"], config["attn_qkv_bias"], config["tied_output"]) == (0, 1, 0)
    assert {name: report.defaults_used[name] for name in remove} == {
        "norm_topk_prob": False, "qkv_bias": True, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }  # fmt: skip


# --- case 3: tied embeddings


def test_tied_without_a_head_keeps_the_weights_once(tmp_path: Path) -> None:
    report = convert(checkpoints.qwen3_moe(tmp_path / "hf", tied=True), tmp_path / "m.colibri", "f32")
    assert read_container(report.path).config["tied_output"] == 1
    assert "output" not in load(report.path)


def test_tied_with_an_equal_head_ignores_and_lists_it(tmp_path: Path) -> None:
    source = checkpoints.qwen3_moe(tmp_path / "hf", tied=True)
    embedding = checkpoints.read_tensors(source)["model.embed_tokens.weight"].astype(ml_dtypes.bfloat16)
    checkpoints.edit_tensors(source, {"lm_head.weight": embedding})
    report = convert(source, tmp_path / "m.colibri")
    assert report.ignored_tensors == ["lm_head.weight"]
    assert "output" not in load(report.path)


def test_tied_with_another_head_follows_the_weights(tmp_path: Path) -> None:
    """Transformers 5 does not tie then; the note says so."""
    source = checkpoints.qwen3_moe(tmp_path / "hf", tied=True, lm_head=True)
    report = convert(source, tmp_path / "m.colibri", "f32")
    head = checkpoints.read_tensors(source)["lm_head.weight"]
    assert np.array_equal(load(report.path)["output"], head)
    assert "lm_head.weight differs" in report.notes[0]


def test_tied_with_only_a_head_takes_it_as_embedding(tmp_path: Path) -> None:
    source = checkpoints.qwen3_moe(tmp_path / "hf", tied=True, lm_head=True)
    checkpoints.edit_tensors(source, {}, remove=["model.embed_tokens.weight"])
    found = load(convert(source, tmp_path / "m.colibri", "f32").path)
    assert np.array_equal(found["embedding"], checkpoints.read_tensors(source)["lm_head.weight"])
    assert "output" not in found


# --- case 8: RoPE settings


def inv_freq(tmp_path: Path, name: str, **options: Any) -> Floats:
    source = checkpoints.llama(tmp_path / name, **options)
    return load(convert(source, tmp_path / f"{name}.colibri").path)["rope_inv_freq"]


def test_rope_theta_may_stand_in_either_place(tmp_path: Path) -> None:
    spellings: list[dict[str, Any]] = [
        {"rope_theta": 1e6},
        {"rope_theta": 1e6, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"rope_theta": 1e6, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_theta": 1000000}},
        {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 1e6}},
    ]
    found = [inv_freq(tmp_path, f"m{i}", rope=rope) for i, rope in enumerate(spellings)]
    assert np.allclose(found[0], 1e6 ** (-np.arange(0, 16, 2) / 16), rtol=1e-6)
    assert all(np.array_equal(found[0], other) for other in found[1:])


def test_linear_scaling_in_both_spellings(tmp_path: Path) -> None:
    plain = inv_freq(tmp_path, "plain")
    for key in ("type", "rope_type"):
        scaled = inv_freq(tmp_path, key, rope={"rope_scaling": {key: "linear", "factor": 4.0}})
        assert np.array_equal(scaled, plain / 4)


def test_llama3_scaling_slows_long_waves_only(tmp_path: Path) -> None:
    settings = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64}  # fmt: skip
    plain = inv_freq(tmp_path, "plain", head_dim=32)
    scaled = inv_freq(tmp_path, "scaled", head_dim=32, rope={"rope_theta": 1e4, "rope_scaling": settings})
    wave = 2 * np.pi / plain.astype(np.float64)
    expected = []
    for frequency, length in zip(plain.astype(np.float64), wave, strict=True):
        blend = (64 / length - 1) / (4 - 1)
        between = (1 - blend) * frequency / 8 + blend * frequency
        expected.append(frequency / 8 if length > 64 else frequency if length < 16 else between)
    assert np.allclose(scaled, expected, rtol=1e-6)
    assert (wave > 64).any() and (wave < 16).any() and ((wave > 16) & (wave < 64)).any()


# --- case 9: head_dim


@pytest.mark.parametrize(("head_dim", "expected"), [(16, 16), (24, 24), (None, 32)])
def test_head_dim_is_explicit_or_derived(tmp_path: Path, head_dim: int | None, expected: int) -> None:
    hidden = 192 if head_dim is None else 64
    source = checkpoints.qwen3_moe(tmp_path / "hf", hidden=hidden, n_heads=6, n_kv_heads=3, head_dim=head_dim)
    config = read_container(convert(source, tmp_path / "m.colibri").path).config
    assert config["head_dim"] == expected
    assert config["attn_scale"] == pytest.approx(expected**-0.5)


def test_an_absent_head_dim_is_128_in_qwen3_and_derived_elsewhere(tmp_path: Path) -> None:
    dense = checkpoints.qwen3(tmp_path / "dense", head_dim=128, config_remove=["head_dim"])
    routed = checkpoints.qwen3_moe(tmp_path / "routed", head_dim=16, config_remove=["head_dim"])
    assert read_container(convert(dense, tmp_path / "1.colibri").path).config["head_dim"] == 128
    assert read_container(convert(routed, tmp_path / "2.colibri").path).config["head_dim"] == 16


# --- case 10: embedding rows and tokens


def test_rows_beyond_the_tokenizer_are_never_sampled(tmp_path: Path) -> None:
    report = convert(checkpoints.mixtral(tmp_path / "hf", extra_rows=20), tmp_path / "m.colibri")
    config = read_container(report.path).config
    assert (config["n_vocab"], config["n_vocab_used"]) == (320, 300)
    assert "20 embedding rows" in report.notes[0]


def test_a_checkpoint_without_tokenizer_is_allowed_on_request(tmp_path: Path) -> None:
    source = checkpoints.mixtral(tmp_path / "hf", tokenizer=False)
    report = convert(source, tmp_path / "m.colibri", require_tokenizer=False)
    assert "tokenizer.json" not in read_blobs(report.path)
    assert read_container(report.path).config["n_vocab_used"] == 300
    assert "no tokenizer.json" in report.notes[0]


# --- case 12: spellings of experts

MOE = ("mixtral", "qwen3_moe", "olmoe", "qwen2_moe", "glm4_moe", "dots1", "deepseek_v3")


@pytest.mark.parametrize("family", MOE)
def test_every_spelling_of_the_same_model_gives_the_same_bytes(tmp_path: Path, family: str) -> None:
    make = checkpoints.FAMILIES[family]
    spellings: list[dict[str, Any]] = [{"experts": layout} for layout in checkpoints.EXPERT_LAYOUTS]
    spellings += [{"prefix": "language_model."}, {"prefix": "model.language_model.", "experts": "stacked"}]
    spellings += [{"shards": 3}, {"shards": 5, "experts": "stacked_transposed"}]
    bytes_of = []
    for i, options in enumerate(spellings):
        source = make(tmp_path / f"hf{i}", **options)
        bytes_of.append(tensors_only(convert(source, tmp_path / f"{i}.colibri", "q8").path))
    assert all(other == bytes_of[0] for other in bytes_of[1:])


def test_a_bare_decoder_without_its_wrapper_converts(tmp_path: Path) -> None:
    source = checkpoints.qwen3_moe(tmp_path / "hf", tied=True)
    bare = {name.removeprefix("model."): value for name, value in checkpoints.read_tensors(source).items()}
    checkpoints.edit_tensors(source, bare, remove=["model." + name for name in bare])
    assert convert(source, tmp_path / "m.colibri").entries == 41


# --- case 13: layers unlike their neighbours


def test_dense_layers_among_routed_ones(tmp_path: Path) -> None:
    source = checkpoints.qwen2_moe(tmp_path / "hf", n_layers=6, mlp_only_layers=[3], decoder_sparse_step=2)
    path = convert(source, tmp_path / "m.colibri", "f32").path
    config, found = read_container(path).config, load(path)
    assert config["n_experts"] == [0, 8, 0, 0, 0, 8]
    assert config["n_ff"] == 96
    assert found["layers.3.ffn_gate"].shape == (96, 64)
    assert found["layers.5.shared_router"].shape == (64,)
    expected = renamed("qwen2_moe", checkpoints.read_tensors(source))
    assert all(np.array_equal(found[name], value) for name, value in expected.items())


def test_a_routed_family_with_no_routed_layer(tmp_path: Path) -> None:
    source = checkpoints.qwen2_moe(tmp_path / "hf", mlp_only_layers=[0, 1])
    config = read_container(convert(source, tmp_path / "m.colibri").path).config
    assert (config["n_experts"], config["n_ff_shared"], config["shared_gate"]) == ([0, 0], 0, 0)


# --- case 16: awkward paths


def test_awkward_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoints.mixtral("müde 模型 x")
    checkpoints.mixtral("-dash", shards=2)
    Path("link").symlink_to("müde 模型 x")
    expected = tensors_only(convert("müde 模型 x", "aus gabe 模.colibri").path)
    assert tensors_only(convert("-dash", "-out.colibri").path) == expected
    assert tensors_only(convert("link", "l.colibri").path) == expected
    assert inspection.describe("l.colibri").source["name"] == "müde 模型 x"


def test_shards_may_be_links_as_in_a_download_cache(tmp_path: Path) -> None:
    source = checkpoints.mixtral(tmp_path / "blobs", shards=2)
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in source.iterdir():
        (snapshot / file.name).symlink_to(file)
    assert convert(snapshot, tmp_path / "m.colibri").entries == 30


def test_the_same_source_gives_the_same_file(tmp_path: Path) -> None:
    source = checkpoints.mixtral(tmp_path / "hf")
    first = convert(source, tmp_path / "1.colibri").path.read_bytes()
    assert convert(source, tmp_path / "2.colibri").path.read_bytes() == first


def test_rotary_buffers_are_ignored_and_listed(tmp_path: Path) -> None:
    source = checkpoints.llama(tmp_path / "hf")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    checkpoints.edit_tensors(source, {name: np.ones(8, np.float32)})
    assert convert(source, tmp_path / "m.colibri").ignored_tensors == [name]


# --- progress and memory


def test_progress_runs_to_the_end(tmp_path: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    source = checkpoints.mixtral(tmp_path / "hf")
    report = convert(source, tmp_path / "m.colibri", progress=lambda *call: calls.append(call))
    done = [call[0] for call in calls]
    assert done == sorted(done) and done[-1] == calls[-1][1]
    assert done[-1] == report.bytes_by_class["experts"] + sum(
        size for name, size in report.bytes_by_class.items() if name not in ("experts", "blobs")
    )
    assert len({call[2] for call in calls}) == report.entries - 4  # all but the blobs


def peak_of(action: Callable[[], ConversionReport]) -> int:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_stays_far_below_one_tensor(tmp_path: Path) -> None:
    """Stacked experts of 48 MiB (as f32), transposed, so that every block is gathered; numpy is traced."""
    source = checkpoints.qwen3_moe(
        tmp_path / "hf", n_layers=1, hidden=1024, n_heads=4, n_kv_heads=2, n_ff_expert=768, n_experts=8,
        experts="stacked_transposed", tied=True,
    )  # fmt: skip
    convert(checkpoints.qwen3_moe(tmp_path / "tiny"), tmp_path / "warm.colibri")  # imports are not counted
    for type in ("q8", "f32"):
        peak = peak_of(lambda type=type: convert(source, tmp_path / "m.colibri", type))  # type: ignore[misc]
        assert peak < 24 << 20, f"{type}: {peak >> 20} MiB"


def test_an_older_output_is_replaced_whole(tmp_path: Path) -> None:
    out = tmp_path / "m.colibri"
    convert(checkpoints.llama(tmp_path / "1"), out)
    report = convert(checkpoints.mixtral(tmp_path / "2"), out)
    assert read_container(out).config["n_experts"] == [4, 4]
    assert report.path == out and sorted(os.listdir(tmp_path)) == ["1", "2", "m.colibri"]
