"""FP8 checkpoints (case 11): every name and shape of scales gives the numbers of the plain formula.

Owns: that the file is, byte for byte, that of the dequantised checkpoint; what is refused.
Refuses: the mathematics behind (test_parity.py).
"""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import checkpoints
import fp8_checkpoints
import oracle
from colibri.convert import convert
from colibri.errors import ConversionError
from colibri.format import read_container, read_entry
from colibri.quantize import unpack
from fixtures.native import engine
from fp8_checkpoints import to_fp8

BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "scale_fmt": "ue8m0",
    "weight_block_size": [32, 40],
    "modules_to_not_convert": ["lm_head"],
}
STATIC = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}


def groups(**weights: Any) -> dict[str, Any]:
    """compressed-tensors, as its tools write it."""
    args = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "observer": "minmax"}
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": args | weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"output_activations": None}},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "sparsity_config": {"format": "dense", "global_sparsity": 0.1, "targets": []},
        "transform_config": {},
        "version": "0.15.0",
    }


FORMS: dict[str, tuple[fp8_checkpoints.Form, dict[str, Any]]] = {
    "blocks": ((32, 40), {"settings": BLOCKS}),
    "blocks, no fmt": ((32, 40), {"settings": {"quant_method": "fp8", "weight_block_size": [32, 40]}}),
    "blocks of e8m0": ((32, 40), {"settings": BLOCKS, "scale": "e8m0"}),
    "blocks of bytes": ((32, 40), {"settings": BLOCKS, "scale": "u8", "naming": "scale"}),
    "blocks, default": ((128, 128), {"settings": {"quant_method": "fp8"}, "scale": "bf16"}),
    "nothing said, blocks": ((128, 128), {"naming": "scale_inv"}),
    "nothing said, outputs": ("channel", {"naming": "weight_scale", "short": True, "scale": "f16"}),
    "nothing said, tensors": ("tensor", {"naming": "qscale_weight"}),
    "static": ("tensor", {"settings": STATIC, "naming": "weight_scale", "short": True}),
    "static, [1, 1]": ("tensor", {"settings": STATIC, "naming": "weight_scale"}),
    "fbgemm": (
        "channel",
        {"settings": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "naming": "weight_scale"},
    ),
    "modelopt": (
        "tensor",
        {"settings": {"quant_method": "modelopt", "quant_algo": "FP8"}, "naming": "weight_scale"},
    ),
    "modelopt, groups": (
        "tensor",
        {
            "settings": {
                "quant_method": "modelopt",
                "quant_algo": "FP8",
                "config_groups": groups()["config_groups"],
                "producer": {"name": "modelopt", "version": "0.33"},
            },
            "naming": "weight_scale",
            "short": True,
        },
    ),
    "groups, outputs": ("channel", {"settings": groups(strategy="channel"), "naming": "weight_scale"}),
    "groups, tensor": ("tensor", {"settings": groups(strategy="tensor"), "naming": "weight_scale"}),
    "groups, size -1": ("channel", {"settings": groups(group_size=-1), "naming": "weight_scale"}),
    "groups of columns": (
        (1, 16),
        {"settings": groups(strategy="group", group_size=16), "naming": "weight_scale"},
    ),
    "groups, blocks": (
        (16, 24),
        {"settings": groups(strategy="block", block_structure="16x24"), "naming": "weight_scale"},
    ),
    "e5m2": ((32, 40), {"settings": BLOCKS | {"fmt": "float8_e5m2"}, "code": "e5m2"}),
}


def tensors_of(path: Path) -> list[bytes]:
    container = read_container(path)
    return [bytes(read_entry(container, entry.name)) for entry in container.entries if entry.kind != "blob"]


def compare(directory: Path, tmp_path: Path, types: tuple[str, ...] = ("f32", "q8")) -> None:
    """A checkpoint beside its twin in f32."""
    plain = directory.with_name(directory.name + "-plain")
    for type in types:
        report = convert(directory, tmp_path / "m.colibri", type)
        assert tensors_of(report.path) == tensors_of(convert(plain, tmp_path / "p.colibri", type).path)
        assert report.ignored_tensors == []
        header = json.loads(oracle_header(directory / "model.safetensors"))
        ends = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        assert report.source_bytes == max(end for _, end in ends)


def oracle_header(file: Path) -> bytes:
    raw = file.read_bytes()
    return raw[8 : 8 + int.from_bytes(raw[:8], "little")]


@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_the_bytes_of_the_dequantised_checkpoint(name: str, tmp_path: Path) -> None:
    """Widths of 64, 96 and 56 rows: blocks of 32 x 40 end raggedly."""
    form, options = FORMS[name]
    source = checkpoints.qwen3_moe(tmp_path / "hf", storage="f32", n_ff_expert=56, mlp_only_layers=[1])
    compare(to_fp8(source, tmp_path / "fp8", form, **options), tmp_path)


@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral", "qwen2_moe"])
def test_families_with_other_names_and_cuts(family: str, tmp_path: Path) -> None:
    """Latent attention is cut by head, transposed and permuted; its scales follow."""
    source = checkpoints.FAMILIES[family](tmp_path / "hf", storage="f32")
    settings = {"quant_method": "fp8", "weight_block_size": [24, 20]}
    compare(to_fp8(source, tmp_path / "fp8", (24, 20), settings=settings), tmp_path, ("f32", "q4"))


@pytest.mark.parametrize("layout", ["stacked", "switch_mlp"])
@pytest.mark.parametrize("form", [(32, 40), "tensor", "channel", "tensor, short", "channel, short"])
def test_stacked_experts_with_stacked_scales(layout: str, form: fp8_checkpoints.Form, tmp_path: Path) -> None:
    source = checkpoints.qwen3_moe(tmp_path / "hf", storage="f32", experts=layout)
    if isinstance(form, tuple):
        directory = to_fp8(source, tmp_path / "fp8", form, settings=BLOCKS)
    else:
        form, *short = form.split(", ")
        naming = "stack.weight_scale" if short else "weight_scale"
        directory = to_fp8(source, tmp_path / "fp8", form, naming=naming, short=bool(short))
    compare(directory, tmp_path)


@pytest.mark.parametrize("form", [(32, 40), "tensor", "channel", "all"])
def test_stacks_that_lie_transposed(form: fp8_checkpoints.Form, tmp_path: Path) -> None:
    """Scales lie as the stack does: blocks of stored rows and columns, one for each stored column."""
    source = checkpoints.qwen3_moe(tmp_path / "hf", storage="f32", experts="stacked_transposed", n_layers=1)
    settings = BLOCKS if isinstance(form, tuple) else None
    tensors = checkpoints.read_tensors(source)
    stored: dict[str, Any] = dict(tensors)
    for part in ("gate_up_proj", "down_proj"):
        name = f"model.layers.0.mlp.experts.{part}"
        grid = fp8_checkpoints.grid_of(tensors[name].shape, form, transposed=True)
        scales = np.random.default_rng(1).uniform(0.001, 0.01, grid).astype(np.float32)
        full = fp8_checkpoints.spread(scales, tensors[name].shape, form)
        codes = np.clip(tensors[name] / full, -400, 400).astype(ml_dtypes.float8_e4m3fn)
        stored |= {name: codes, f"{name}_scale": scales}
        tensors[name] = codes.astype(np.float32) * full
    plain = checkpoints.qwen3_moe(tmp_path / "plain", storage="f32", n_layers=1)
    save_file(stored, source / "model.safetensors")
    save_file(tensors, plain / "model.safetensors")
    checkpoints.edit_json(source / "config.json", {"quantization_config": settings})
    found, wanted = (
        tensors_of(convert(one, tmp_path / f"{one.name}.colibri", "f32").path) for one in (source, plain)
    )
    assert found == wanted


def test_case_11_ragged_edges(tmp_path: Path) -> None:
    """Weights of 200 x 330 with 2 x 3 scales: every number is its code times the scale of its block."""
    source = checkpoints.llama(
        tmp_path / "hf", storage="f32", hidden=330, n_heads=10, n_kv_heads=10, head_dim=20, n_layers=1
    )
    directory = to_fp8(source, tmp_path / "fp8", settings={"quant_method": "fp8", "fmt": "e4m3"})
    report = convert(directory, tmp_path / "m.colibri", "f32")
    assert report.ignored_tensors == []
    assert report.notes[-1] == "7 tensors in FP8 are multiplied with their scales and stored as f32"
    raw = oracle.read_safetensors(directory / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert raw[name].shape == (200, 330) and raw[name + "_scale_inv"].shape == (2, 3)
    codes, scales = raw[name], raw[name + "_scale_inv"]
    expected = np.empty((200, 330), np.float32)
    for i in range(200):
        for j in range(330):
            expected[i, j] = codes[i, j] * scales[i // 128, j // 128]
    container = read_container(report.path)
    entry = next(one for one in container.entries if one.name == "layers.0.attn_q")
    assert np.array_equal(unpack(read_entry(container, entry.name), 200, 330, "f32"), expected)
    compare(directory, tmp_path)


def test_logits_are_those_of_the_oracle(tmp_path: Path) -> None:
    source = checkpoints.deepseek_v3(tmp_path / "hf", storage="f32")
    directory = to_fp8(source, tmp_path / "fp8", (32, 40), settings=BLOCKS)
    ids = range(20, 60)
    with engine(convert(directory, tmp_path / "m.colibri", "f32").path) as run:
        found = run.feed(ids)
    assert np.abs(found - oracle.forward(oracle.load(directory), ids)[0]).max() < 1e-4
    assert np.abs(found - oracle.forward(oracle.load(source), ids)[0]).max() > 1e-2


def test_embedding_and_head_in_fp8_are_compared_by_value(tmp_path: Path) -> None:
    """Both are stored with other scales, but are worth the same: kept once."""
    source = checkpoints.qwen3_moe(tmp_path / "hf", tied=True, lm_head=True, storage="f32")
    codes = np.random.default_rng(0).integers(-8, 9, (300, 64)).astype(np.float32)
    stored: dict[str, Any] = dict(checkpoints.read_tensors(source))
    for name, scale in (("model.embed_tokens", 0.5), ("lm_head", 0.25)):
        stored[f"{name}.weight"] = (codes * 0.125 / scale).astype(ml_dtypes.float8_e4m3fn)
        stored[f"{name}.weight_scale"] = np.array([scale], np.float32)
    save_file(stored, source / "model.safetensors")
    report = convert(source, tmp_path / "m.colibri", "f32")
    assert "output" not in [entry.name for entry in read_container(report.path).entries]
    assert report.ignored_tensors == ["lm_head.weight", "lm_head.weight_scale"]


def test_scales_of_activations_are_left_out_and_listed(tmp_path: Path) -> None:
    source = checkpoints.mixtral(tmp_path / "hf", storage="f32")
    directory = to_fp8(source, tmp_path / "fp8", "tensor", settings=STATIC, naming="weight_scale")
    at = "model.layers.1.self_attn."
    extra = {f"{at}{name}": np.ones(1, np.float32) for name in ("q_proj.input_scale", "k_proj.k_scale")}
    extra["model.layers.0.block_sparse_moe.experts.1.w1.activation_scale"] = np.ones((), np.float32)
    edit(directory, extra)
    report = convert(directory, tmp_path / "m.colibri")
    assert sorted(report.ignored_tensors) == sorted(extra)


def test_memory_stays_far_below_one_tensor(tmp_path: Path) -> None:
    """Stacked experts of 24 MiB in FP8, 96 MiB as f32, of which the blocks that are worked on stay."""
    source = checkpoints.qwen3_moe(tmp_path / "hf", n_layers=1, hidden=512, n_experts=1, experts="stacked")
    shapes = {"gate_up_proj": (8, 6144, 512), "down_proj": (8, 512, 3072)}
    stored: dict[str, Any] = dict(checkpoints.read_tensors(source))
    stored["model.layers.0.mlp.gate.weight"] = np.ones((8, 512), np.float32)
    for part, shape in shapes.items():
        name = f"model.layers.0.mlp.experts.{part}"
        stored[name] = np.ones(shape, ml_dtypes.float8_e4m3fn)
        stored[name + "_scale_inv"] = np.ones((8, shape[1] // 128, shape[2] // 128), np.float32)
    save_file(stored, source / "model.safetensors")
    shape_keys = {"num_experts": 8, "moe_intermediate_size": 3072}
    checkpoints.edit_json(
        source / "config.json", shape_keys | {"quantization_config": {"quant_method": "fp8"}}
    )
    del stored
    convert(checkpoints.qwen3_moe(tmp_path / "tiny"), tmp_path / "warm.colibri")  # imports are not counted
    for type in ("q8", "f32"):
        tracemalloc.start()
        convert(source, tmp_path / "m.colibri", type)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 24 << 20, f"{type}: {peak >> 20} MiB"


# ------------------------------------------------------------------ refused


NAME = "model.layers.1.self_attn.k_proj.weight"  # [32, 64]


def edit(directory: Path, changes: dict[str, Any], remove: tuple[str, ...] = ()) -> None:
    """Like checkpoints.edit_tensors, for FP8, which the numpy face of safetensors writes but cannot read."""
    file = directory / "model.safetensors"
    raw, header = file.read_bytes(), json.loads(oracle_header(file))
    at = 8 + int.from_bytes(raw[:8], "little")
    dtypes = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E8M0": ml_dtypes.float8_e8m0fnu, "F32": np.float32}
    tensors: dict[str, Any] = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            values = np.frombuffer(raw[at + begin : at + end], dtypes[entry["dtype"]])
            tensors[name] = values.reshape(entry["shape"])
    tensors |= changes
    save_file({name: value for name, value in tensors.items() if name not in remove}, file)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    source = checkpoints.qwen3_moe(tmp_path / "hf", storage="f32")
    return to_fp8(source, tmp_path / "fp8", (32, 40), settings=BLOCKS)


def refused(directory: Path, tmp_path: Path, match: str) -> None:
    with pytest.raises(ConversionError, match=match):
        convert(directory, tmp_path / "m.colibri")
    assert not (tmp_path / "m.colibri").exists()


def test_a_weight_without_its_scale_names_both(directory: Path, tmp_path: Path) -> None:
    edit(directory, {}, (NAME + "_scale_inv",))
    refused(directory, tmp_path, f"{NAME} in .* is FP8 .F8_E4M3., but its scale {NAME}_scale_inv .* absent")


@pytest.mark.parametrize("shape", [(1, 3), (2, 1), (1,), (), (32, 1), (1, 2, 1)])
def test_a_scale_of_another_shape_is_refused(directory: Path, tmp_path: Path, shape: tuple[int, ...]) -> None:
    edit(directory, {NAME + "_scale_inv": np.ones(shape, np.float32)})
    refused(directory, tmp_path, r"k_proj.weight_scale_inv .* has shape .*\[32, 64\] needs \[1, 2\]")


@pytest.mark.parametrize("settings", [None, {"quant_method": "fp8"}])
def test_without_a_block_in_config_json_the_text_asks_for_one(
    directory: Path, tmp_path: Path, settings: dict[str, Any] | None
) -> None:
    checkpoints.edit_json(directory / "config.json", {"quantization_config": settings})
    wanted = r"needs \[\] or \[1\] or \[1, 1\] or \[64\] or \[64, 1\]\. .* says no block.*weight_block_size"
    refused(directory, tmp_path, wanted)


@pytest.mark.parametrize("dtype", ["F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "U8"])
def test_other_types_of_8_bits_are_named_before_their_scales(
    directory: Path, tmp_path: Path, dtype: str
) -> None:
    """Scales that belong to no FP8 tensor would be unknown tensors."""
    file = directory / "model.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size].replace(b'"F8_E4M3"', f'"{dtype}"'.encode())
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])
    refused(directory, tmp_path, rf"is stored as {dtype}; expected .*FP8 \(F8_E4M3, F8_E5M2\) with scales")


def test_two_scales_a_stray_scale_and_wrong_dtypes_are_refused(directory: Path, tmp_path: Path) -> None:
    scale = np.ones((1, 2), np.float32)
    edit(directory, {NAME + "_scale": scale})
    refused(directory, tmp_path, f"{NAME} has two scales")
    edit(directory, {"model.norm.weight_scale": np.ones(1, np.float32)}, (NAME + "_scale",))
    refused(directory, tmp_path, "1 tensor is not part of the model .*model.norm.weight_scale")
    edit(directory, {NAME + "_scale_inv": scale.astype(np.int32)}, ("model.norm.weight_scale",))
    refused(directory, tmp_path, "k_proj.weight_scale_inv .* is I32")


@pytest.mark.parametrize("value", [np.nan, np.inf, "e8m0"])
def test_scales_and_codes_must_be_finite(directory: Path, tmp_path: Path, value: float | str) -> None:
    scales: Any = np.array([[1, np.nan if value == "e8m0" else value]], np.float32)
    scales = scales.astype(ml_dtypes.float8_e8m0fnu) if value == "e8m0" else scales
    edit(directory, {NAME + "_scale_inv": scales})
    refused(directory, tmp_path, "k_proj.weight_scale_inv .* not finite")
    codes = np.ones((32, 64), np.float32)
    codes[5, 7] = np.nan  # e4m3 has no infinity
    edit(
        directory,
        {NAME: codes.astype(ml_dtypes.float8_e4m3fn), NAME + "_scale_inv": np.ones((1, 2), np.float32)},
    )
    refused(directory, tmp_path, r"k_proj.weight\[5.*finite")


def test_a_vector_in_fp8_is_refused(directory: Path, tmp_path: Path) -> None:
    name = "model.norm.weight"
    edit(directory, {name: np.ones(64, np.float32).astype(ml_dtypes.float8_e4m3fn)})
    refused(directory, tmp_path, f"{name} .* is stored as F8_E4M3")


SETTINGS: list[tuple[dict[str, Any], str]] = [
    (BLOCKS | {"weight_block_size": [128]}, "weight_block_size = .128.; expected two numbers"),
    (BLOCKS | {"weight_block_size": [0, 128]}, "weight_block_size"),
    (BLOCKS | {"expert_dtype": "fp4"}, "quantization_config.expert_dtype = 'fp4'; expected 'fp8'"),
    (BLOCKS | {"fmt": "e3m4"}, "quantization_config.fmt = 'e3m4'"),
    (BLOCKS | {"fmt": "e4m3fnuz"}, "fmt = 'e4m3fnuz'.*of types e4m3fn and e5m2"),
    (BLOCKS | {"rotation": "hadamard"}, "quantization_config.rotation = 'hadamard'"),
    ({"quant_method": "awq"}, "quant_method.*'awq'.*compressed-tensors"),
    ({"bits": 8}, "quantization_config = .*bits"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo = 'NVFP4'"),
    (groups(num_bits=4), "config_groups.group_0.weights.num_bits = 4; expected 8"),
    (groups(type="int"), "group_0.weights.type = 'int'; expected 'float'"),
    (groups(symmetric=False), "symmetric = False"),
    (groups(actorder="weight"), "actorder = 'weight'"),
    (groups(strategy="tensor_group"), "strategy = 'tensor_group'"),
    (groups(strategy="block"), "block_structure = None"),
    (groups(strategy="block", block_structure="9" * 5000), "block_structure = '9+"),
    (groups() | {"transform_config": {"config_groups": {"u": 1}}}, "transform_config.config_groups"),
    (groups() | {"sparsity_config": {"format": "sparse-bitmask"}}, "sparsity_config.format"),
    (groups() | {"format": "pack-quantized"}, "quantization_config.format = 'pack-quantized'"),
    (groups() | {"config_groups": {"g": {"weights": None, "order": 2}}}, "config_groups.g.order = 2"),
    (groups() | {"config_groups": [1]}, "config_groups = .1.; expected an object"),
    (groups() | {"config_groups": {"g": 1}}, "config_groups.g = 1; expected an object"),
]


@pytest.mark.parametrize(("settings", "match"), SETTINGS, ids=[match[:40] for _, match in SETTINGS])
def test_settings_that_change_the_numbers_are_refused_by_name(
    directory: Path, tmp_path: Path, settings: dict[str, Any], match: str
) -> None:
    checkpoints.edit_json(directory / "config.json", {"quantization_config": settings})
    refused(directory, tmp_path, match)
