"""GPT-OSS checkpoints: tensors that all experts of a layer share, plain and in MXFP4.

Owns: that each value reaches its place, that MXFP4 is kept without loss or requantised on request, what is
      refused, and the engine's numbers on MXFP4.
Refuses: the mathematics of the plain spelling (test_parity.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import checkpoints
import oracle
from colibri import _native as native
from colibri import cache
from colibri.convert import convert
from colibri.entries import Entry
from colibri.errors import ArgumentError, ConversionError, ModelFileError
from colibri.format import Container, Writer, read_container, read_entry
from colibri.quantize import matrix_bytes, pack, panel_bytes, unpack
from fixtures import models
from fixtures.native import engine
from fixtures.variants import OTHERS
from oracle_experts import e2m1, separate
from test_parity import NEIGHBOURS, Q8_BOUND, Q8_EXACT_ROWS, ULP, q8_activations, q8_rounding

NAME = "gpt_oss_mxfp4"


def separated(source: Path) -> dict[str, oracle.Float32]:
    return separate(oracle.read_safetensors(source / "model.safetensors"))


def matrices(container: Container, entry: Entry) -> list[oracle.Float32]:
    data, found, at = read_entry(container, entry.name), [], 0
    for rows, cols, type in entry.matrices:
        size = matrix_bytes(rows, cols, type)
        found.append(unpack(data[at : at + size], rows, cols, type))
        at += size
    return found


def compare_experts(path: Path, source: Path, types: tuple[str, ...]) -> None:
    """Every expert of a file has the oracle's values, and the biases stand in the order of experts."""
    expected, container = separated(source), read_container(path)
    config, parts = container.config, ("gate", "up", "down")
    for entry in container.entries:
        if entry.kind != "expert":
            continue
        assert entry.types == types
        _, layer, _, expert = entry.name.split(".")
        at = f"model.layers.{layer}.mlp.experts.{expert}."
        for part, found in zip(parts, matrices(container, entry), strict=True):
            wanted = expected[f"{at}{part}_proj.weight"]
            assert found.tobytes() == wanted.tobytes(), (entry.name, part)
    for index in range(config["n_layers"]):
        at = f"model.layers.{index}.mlp.experts."
        for part in parts:
            found = np.frombuffer(read_entry(container, f"layers.{index}.experts_{part}_bias"), "<f4")
            all_experts = [expected[f"{at}{e}.{part}_proj.bias"] for e in range(config["n_experts"][index])]
            assert np.array_equal(found, np.concatenate(all_experts)), part


@pytest.mark.parametrize("n_ff", [96, 64, 32])  # 64: down is square; 32: gate and up together are
@pytest.mark.parametrize("storage", ["f32", "f16", "bf16"])
def test_every_value_reaches_its_place(tmp_path: Path, storage: str, n_ff: int) -> None:
    source = checkpoints.gpt_oss(tmp_path / "hf", storage=storage, n_ff=n_ff)
    report = convert(source, tmp_path / "m.colibri", "f32")
    compare_experts(report.path, source, ("f32",) * 3)
    found, tensors = read_container(report.path), checkpoints.read_tensors(source)
    for name, there in (
        ("attn_sinks", "self_attn.sinks"),
        ("router_logit_bias", "mlp.router.bias"),
        ("attn_out_bias", "self_attn.o_proj.bias"),
    ):
        value = np.frombuffer(read_entry(found, f"layers.1.{name}"), "<f4")
        assert np.array_equal(value, tensors[f"model.layers.1.{there}"])
    assert report.source_bytes == sum(v.size for v in tensors.values()) * (4 if storage == "f32" else 2)


def test_what_config_json_leaves_out_is_that_of_the_class(tmp_path: Path) -> None:
    absent = ["layer_types", "sliding_window", "swiglu_limit", "attention_bias"]
    source = checkpoints.gpt_oss(tmp_path / "hf", rope={}, config_remove=absent)
    report = convert(source, tmp_path / "m.colibri")
    container = read_container(report.path)
    assert container.config["window"] == [128, 0] and container.config["ffn_limit"] == 7
    assert container.config["ffn_alpha"] == pytest.approx(1.702) and container.config["ffn_up_offset"] == 1
    rope = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
    raw = checkpoints.read_config(source) | {"rope_scaling": rope}
    expected = oracle.rope_frequencies(raw, 16, 150000.0)
    assert np.allclose(np.frombuffer(read_entry(container, "rope_inv_freq"), "<f4"), expected, rtol=1e-6)
    assert container.config["rope_scale"] == pytest.approx(0.1 * np.log(32) + 1)
    assert set(report.defaults_used) >= {"rope_parameters", "sliding_window", "swiglu_limit", "swiglu_alpha"}


# ------------------------------------------------------------------ MXFP4


def test_the_sixteen_numbers() -> None:
    sizes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert [e2m1(code) for code in range(16)] == sizes + [-size for size in sizes]
    assert [panel_bytes(cols, "mxfp4") for cols in (1, 32, 33, 128, 129)] == [320, 320, 576, 1088, 1408]


@pytest.mark.parametrize("shape", [{}, {"hidden": 160, "n_ff": 32, "n_experts": 3}, {"n_ff": 288}])
def test_mxfp4_is_kept_as_it_is(tmp_path: Path, shape: dict[str, Any]) -> None:
    source = checkpoints.gpt_oss(tmp_path / "hf", mxfp4=True, **shape)
    report = convert(source, tmp_path / "m.colibri", "q8")
    assert report.type == "mxfp4 experts, q8 dense, q8 output" and report.ignored_tensors == []
    compare_experts(report.path, source, ("mxfp4",) * 3)
    tensors = load_file(source / "model.safetensors")
    assert report.source_bytes == sum(value.nbytes for value in tensors.values())
    assert cache.resolve(source).read_bytes() == report.path.read_bytes()


def test_mxfp4_is_kept_although_config_json_does_not_say_it(tmp_path: Path) -> None:
    """Copies exist that have lost their quantization_config."""
    source = checkpoints.gpt_oss(tmp_path / "hf", mxfp4=True)
    told = convert(source, tmp_path / "told.colibri")
    checkpoints.edit_json(source / "config.json", {}, remove=["quantization_config"])
    untold = convert(source, tmp_path / "untold.colibri")
    assert untold.type == told.type == "mxfp4 experts, q8 dense, q8 output"
    compare_experts(untold.path, source, ("mxfp4",) * 3)
    assert cache.resolve(source).read_bytes() == untold.path.read_bytes()


def test_every_scale_and_number_survives(tmp_path: Path) -> None:
    """Scales from 2^-127, which is subnormal, to the largest that f32 can hold; the engine reads rows too."""
    source = checkpoints.gpt_oss(tmp_path / "hf", mxfp4=True, n_layers=1)
    name = "model.layers.0.mlp.experts.gate_up_proj_scales"
    scales = load_file(source / "model.safetensors")[name]
    scales.reshape(-1)[:253] = np.arange(253)
    checkpoints.edit_tensors(source, {name: scales})
    path = convert(source, tmp_path / "m.colibri", experts=None).path
    compare_experts(path, source, ("mxfp4",) * 3)
    compare_experts(convert(source, path, experts="f32").path, source, ("f32",) * 3)


def test_another_type_on_request_is_that_of_the_values(tmp_path: Path) -> None:
    """--experts TYPE: the bytes are those of the dequantised checkpoint."""
    source = checkpoints.gpt_oss(tmp_path / "hf", mxfp4=True)
    expected = separated(source)
    for type in ("f32", "bf16", "q8", "q4"):
        report = convert(source, tmp_path / f"{type}.colibri", "q8", experts=type)
        container = read_container(report.path)
        for entry in (entry for entry in container.entries if entry.kind == "expert"):
            _, layer, _, expert = entry.name.split(".")
            at = f"model.layers.{layer}.mlp.experts.{expert}."
            parts = [bytes(pack(expected[f"{at}{p}_proj.weight"], type)) for p in ("gate", "up", "down")]
            assert bytes(read_entry(container, entry.name)) == b"".join(parts)


def test_the_engine_reads_rows_of_mxfp4(tmp_path: Path) -> None:
    """An embedding of that type, written by hand: the first layer's input is its row, exactly."""
    config: dict[str, Any] = {
        "n_vocab": 40, "n_vocab_used": 40, "n_layers": 1, "n_embd": 72, "n_heads": 1, "n_kv_heads": 1,
        "head_dim": 8, "rope_dim": 0, "context_length": 64, "norm_eps": 1e-6, "attn_scale": 1.0, "n_ff": 16,
    }  # fmt: skip
    random = np.random.default_rng(2)
    panels = random.integers(0, 256, matrix_bytes(40, 72, "mxfp4"), np.uint8).reshape(3, -1)
    panels[:, 3 * 256 :] = random.integers(120, 130, (3, 64))
    values = unpack(panels, 40, 72, "mxfp4").astype(np.float64)

    def types(name: str) -> tuple[str, ...]:
        return ("mxfp4" if name == "embedding" else "f32",) * 3

    output = random.standard_normal((40, 72)).astype(np.float32)
    with Writer(tmp_path / "m.colibri", config, types, {}) as writer:
        for entry in writer.tensors:
            data: Any = np.zeros(entry.bytes, np.uint8)
            if entry.name == "embedding":
                data = panels.reshape(-1)
            elif entry.name == "output":
                data = pack(output, "f32")
            elif entry.name == "output_norm":
                data = np.ones(72, np.float32).view(np.uint8)
            writer.write(entry.name, [bytes(data)])
    with engine(tmp_path / "m.colibri") as run:
        found = run.feed(range(40))
    normed = values / np.sqrt(np.mean(values**2, axis=1, keepdims=True) + 1e-6)
    assert np.abs(found - normed @ output.T.astype(np.float64)).max() < 1e-4


def test_numbers_equal_the_oracle_that_rounds_activations() -> None:
    """Experts exact, everything else q8. As in test_parity.py: up to the first row on a boundary."""
    ids = OTHERS[NAME].prompt
    with engine(models.converted(NAME, "q8", "f32")) as run:
        logits = run.feed(ids)

    def rounding(name: str, matrix: oracle.Float32) -> oracle.Float32:
        return matrix if ".experts." in name else q8_rounding(name, matrix)

    agreed = []
    for draw in range(NEIGHBOURS):
        noise = np.random.default_rng(draw)

        def activations(
            x: oracle.Array, noise: np.random.Generator = noise, size: float = draw and ULP
        ) -> oracle.Array:
            return q8_activations(x * (1 + size * noise.standard_normal(x.shape)))

        rounded = oracle.load(models.checkpoint(NAME, "f32"), rounding, activations)
        errors = np.abs(logits - oracle.forward(rounded, ids)[0]).max(axis=-1)
        agreed.append(int(np.argmax(np.append(errors >= Q8_BOUND, True))))
        if agreed[-1] >= Q8_EXACT_ROWS:
            return
    raise AssertionError(f"rows that agree with each of the oracles: {agreed} of {len(ids)}")


def test_dequantised_experts_equal_the_oracle(tmp_path: Path) -> None:
    ids = OTHERS[NAME].prompt
    path = convert(models.checkpoint(NAME), tmp_path / "m.colibri", "f32", experts="f32").path
    with engine(path) as run:
        assert np.abs(run.feed(ids) - oracle.forward(models.model(NAME), ids)[0]).max() < 1e-4


# ------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config.*mxfp4"),
        ({"swiglu_limit": 0}, "swiglu_limit = 0"),
        ({"experts_per_token": 3}, "num_experts_per_tok = 2; expected the same"),
        ({"layer_types": ["chunked_attention", "full_attention"]}, "chunked_attention"),
        (
            {"quantization_config": {"quant_method": "mxfp4"}},
            "experts are mxfp4.*gate_up_proj is BF16",
        ),
    ],
)
def test_settings_are_refused_by_name(tmp_path: Path, extra: dict[str, Any], match: str) -> None:
    source = checkpoints.gpt_oss(tmp_path / "hf", config_extra=extra)
    with pytest.raises(ConversionError, match=match):
        convert(source, tmp_path / "m.colibri")


@pytest.mark.parametrize("part", ["type", "dense", "output"])
def test_mxfp4_cannot_be_made(tmp_path: Path, part: str) -> None:
    source = checkpoints.gpt_oss(tmp_path / "hf", mxfp4=True)
    with pytest.raises(ConversionError, match="mxfp4 is for experts alone"):
        convert(source, tmp_path / "m.colibri", **{part: "mxfp4"})  # type: ignore[arg-type]
    plain = checkpoints.mixtral(tmp_path / "plain")
    with pytest.raises(ConversionError, match="only where the checkpoint stores them so"):
        convert(plain, tmp_path / "m.colibri", experts="mxfp4")
    with pytest.raises(ArgumentError, match="'mxfp4' is not known"):
        pack(np.zeros((16, 32), np.float32), "mxfp4")


def test_damaged_mxfp4_is_refused(tmp_path: Path) -> None:
    source = checkpoints.gpt_oss(tmp_path / "hf", mxfp4=True, n_layers=1)
    name = "model.layers.0.mlp.experts.down_proj_scales"
    good = load_file(source / "model.safetensors")[name]
    bad = good.copy()
    bad[1, 40, 2] = 255
    for value, match in (
        (bad, r"down_proj_blocks\[1\]\[40\]: the scale of group 2 is 255"),
        (good[..., :1].copy(), r"down_proj_scales .* has shape \[4, 64, 1\]"),
        (good.astype(np.int32), "down_proj_scales .* is I32; expected U8"),
    ):
        checkpoints.edit_tensors(source, {name: value})
        with pytest.raises(ConversionError, match=match):
            convert(source, tmp_path / "m.colibri")
    checkpoints.edit_tensors(source, {}, remove=[name])
    with pytest.raises(ConversionError, match="1 tensor is absent: .*down_proj_scales"):
        convert(source, tmp_path / "m.colibri")


def test_a_type_between_the_known_ones_is_refused(tmp_path: Path) -> None:
    """Type 3 stands between them, and 8 behind them."""
    path = convert(checkpoints.gpt_oss(tmp_path / "hf", mxfp4=True), tmp_path / "m.colibri").path
    data = bytearray(path.read_bytes())
    at = data.index(b"layers.0.experts.0\0") + 89
    for type in (3, 8):
        data[at : at + 3] = bytes([type] * 3)
        path.write_bytes(data)
        with pytest.raises(ModelFileError):
            native.open_model(path)
