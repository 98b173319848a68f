"""The container: canonical entries, byte offsets of docs/FORMAT.md, whole-or-untouched writing, strict
reading."""

from __future__ import annotations

import os
import random
import shutil
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from colibri import inspection
from colibri.config import complete_config
from colibri.entries import bytes_by_class
from colibri.errors import ColibriError, ConversionError, ModelFileError, ModelIOError, UnsupportedError
from colibri.format import (
    Writer,
    expected_entries,
    read_blobs,
    read_container,
    read_entry,
    read_json_blob,
)
from colibri.quantize import matrix_bytes

CONFIG: dict[str, Any] = {
    "n_vocab": 20,
    "n_vocab_used": 19,
    "n_layers": 2,
    "n_embd": 8,
    "n_heads": 2,
    "n_kv_heads": 1,
    "head_dim": 4,
    "rope_dim": 4,
    "context_length": 64,
    "norm_eps": 1e-6,
    "attn_scale": 0.5,
    "n_ff": 12,
    "n_experts": [0, 2],
    "n_experts_used": 1,
    "n_ff_expert": 6,
    "n_ff_shared": 10,
    "shared_gate": 1,
    "qk_norm": 1,
    "attn_qkv_bias": 1,
    "attn_out_bias": 1,
}
BLOBS = {"tokenizer.json": b'{"a": 1}', "source.json": b"{}"}


def write(path: Path, config: dict[str, Any] = CONFIG, type: str = "q8", seed: int = 1) -> Path:
    """A file of arbitrary but valid bytes."""
    rng = np.random.default_rng(seed)
    with Writer(path, config, type, BLOBS) as writer:
        for entry in writer.tensors:
            if entry.kind == "vector" or "f32" in entry.types:
                data = rng.standard_normal(entry.bytes // 4).astype("<f4").tobytes()
            else:
                data = rng.integers(1, 60, entry.bytes, dtype=np.uint8).tobytes()
            writer.write(entry.name, [data[: len(data) // 2], data[len(data) // 2 :]])
    return path


def test_entries_come_in_the_canonical_order() -> None:
    config = complete_config(CONFIG)
    found = [(entry.name, entry.kind, entry.rows, entry.cols) for entry in expected_entries(config, "bf16")]
    attention = [
        ("attn_norm", "vector", 1, 8), ("attn_q", "matrix", 8, 8), ("attn_k", "matrix", 4, 8),
        ("attn_v", "matrix", 4, 8), ("attn_q_bias", "vector", 1, 8), ("attn_k_bias", "vector", 1, 4),
        ("attn_v_bias", "vector", 1, 4), ("attn_q_norm", "vector", 1, 4), ("attn_k_norm", "vector", 1, 4),
        ("attn_out", "matrix", 8, 8), ("attn_out_bias", "vector", 1, 8), ("ffn_norm", "vector", 1, 8),
    ]  # fmt: skip
    dense = [("ffn_gate", "matrix", 12, 8), ("ffn_up", "matrix", 12, 8), ("ffn_down", "matrix", 8, 12)]
    routed = [
        ("router", "matrix", 2, 8), ("shared_router", "vector", 1, 8), ("shared_gate", "matrix", 10, 8),
        ("shared_up", "matrix", 10, 8), ("shared_down", "matrix", 8, 10), ("experts.0", "expert", 6, 8),
        ("experts.1", "expert", 6, 8),
    ]  # fmt: skip
    head = [
        ("embedding", "matrix", 20, 8), ("output", "matrix", 20, 8), ("output_norm", "vector", 1, 8),
        ("rope_inv_freq", "vector", 1, 2),
    ]  # fmt: skip
    layers = [(f"layers.0.{name}", *rest) for name, *rest in attention + dense]
    layers += [(f"layers.1.{name}", *rest) for name, *rest in attention + routed]
    assert found == head + layers


def test_options_of_the_config_change_the_entries() -> None:
    config = complete_config(CONFIG | {"qk_norm": 2, "tied_output": 1, "rope_dim": 0, "attn_qkv_bias": 0})
    found = {entry.name: entry for entry in expected_entries(config, "q8")}
    assert "output" not in found and "rope_inv_freq" not in found and "layers.0.attn_q_bias" not in found
    assert (found["layers.0.attn_q_norm"].cols, found["layers.0.attn_k_norm"].cols) == (8, 4)
    assert found["layers.1.router"].types == ("f32",)
    assert found["layers.1.experts.0"].bytes == 2 * matrix_bytes(6, 8, "q8") + matrix_bytes(8, 6, "q8")


def test_each_entry_may_have_its_own_type() -> None:
    def types(name: str) -> tuple[str, ...]:
        return ("q8", "bf16", "f32") if ".experts." in name else ("bf16",)

    entries = {entry.name: entry for entry in expected_entries(complete_config(CONFIG), types)}
    assert entries["layers.1.experts.1"].matrices == ((6, 8, "q8"), (6, 8, "bf16"), (8, 6, "f32"))
    assert entries["embedding"].types == ("bf16",)


def test_classes_cover_every_byte() -> None:
    entries = expected_entries(complete_config(CONFIG), "q8")
    sums = bytes_by_class(entries)
    assert sum(sums.values()) == sum(entry.bytes for entry in entries)
    assert sums["experts"] == sum(entry.bytes for entry in entries if entry.kind == "expert")
    assert all(sums[name] for name in sums if name != "blobs")


def test_bytes_lie_where_the_document_says(tmp_path: Path) -> None:
    data = write(tmp_path / "m.colibri").read_bytes()
    assert data[:8] == b"COLIBRI\0"
    assert struct.unpack_from("<II", data, 8) == (0x01020304, 1)
    size, config_bytes, directory = struct.unpack_from("<QQQ", data, 16)
    n_entries, crc = struct.unpack_from("<II", data, 40)
    assert size == len(data) and directory == (64 + config_bytes + 63) // 64 * 64 and not any(data[48:64])
    head = bytearray(data[: directory + 128 * n_entries])
    head[44:48] = bytes(4)
    assert zlib.crc32(head) == crc
    name_bytes, type_id, zero, count = struct.unpack_from("<HBBI", data, 64)
    assert (data[72 : 72 + name_bytes], type_id, zero, count) == (b"n_vocab", 1, 0, 1)
    assert struct.unpack_from("<i", data, 80) == (20,)
    end = directory + 128 * n_entries
    for i in range(n_entries):
        at = directory + 128 * i
        name = data[at : at + 64].rstrip(b"\0").decode()
        offset, n_bytes, _, _ = struct.unpack_from("<QQII", data, at + 64)
        kind, types, entry_crc = struct.unpack_from("<B3sI", data, at + 88)
        assert offset >= end and not any(data[end:offset])
        assert offset % (4096 if kind == 3 else 64) == 0, name
        assert zlib.crc32(data[offset : offset + n_bytes]) == entry_crc
        assert types == {1: b"\1\0\0", 3: b"\4\4\4", 4: b"\0\0\0"}.get(kind, types)
        end = offset + n_bytes
        if kind == 3:
            assert not any(data[end : (end + 4095) // 4096 * 4096])


def test_file_that_ends_with_an_expert_is_padded_to_a_page(tmp_path: Path) -> None:
    path = tmp_path / "m.colibri"
    with Writer(path, CONFIG, "q8") as writer:
        for entry in writer.tensors:
            writer.write(entry.name, [bytes(entry.bytes)])
    assert path.stat().st_size % 4096 == 0
    assert read_container(path).bytes == path.stat().st_size


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "m.colibri")
    container = read_container(path)
    assert container.config == complete_config(CONFIG)
    assert container.config["norm_eps"] == float(np.float32(1e-6))
    assert read_blobs(path) == BLOBS
    assert read_json_blob(read_blobs(path), "tokenizer.json") == {"a": 1}
    assert read_json_blob({}, "absent") == {}
    assert len(read_entry(container, "embedding")) == matrix_bytes(20, 8, "q8")
    assert inspection.verify(path).damaged == []
    with pytest.raises(ModelFileError, match="no entry 'nothing'"):
        read_entry(container, "nothing")


def test_the_engine_reads_it_too(tmp_path: Path) -> None:
    from colibri import _native

    path = write(tmp_path / "m.colibri", type="f32")
    handle = _native.open_model(path)
    assert _native.info(handle).n_vocab == 20
    _native.close_model(handle)


def test_fields_at_their_default_are_not_written(tmp_path: Path) -> None:
    config = {
        name: value
        for name, value in CONFIG.items()
        if name not in ("n_experts", "shared_gate", "n_ff_shared")
    }
    data = write(tmp_path / "m.colibri", config | {"n_experts": [0, 0], "rope_scale": 1.0}).read_bytes()
    assert b"n_experts\0" not in data and b"rope_scale" not in data
    assert read_container(tmp_path / "m.colibri").config["n_experts"] == [0, 0]


# --- writing: whole or untouched


@pytest.fixture
def old(tmp_path: Path) -> Iterator[Path]:
    """A target that exists; afterwards it must be the same and alone."""
    path = write(tmp_path / "m.colibri", seed=7)
    before = path.read_bytes()
    yield path
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["m.colibri"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_nothing_is_left_after_an_error(old: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), Writer(old, CONFIG, "q8") as writer:
        writer.write("embedding", [bytes(writer.tensors[0].bytes)])
        assert len(os.listdir(old.parent)) == 2
        raise error


def test_nothing_is_left_after_an_interrupt_while_finishing(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(old)


def test_a_missing_entry_or_wrong_order_or_size_is_refused(old: Path) -> None:
    with pytest.raises(ConversionError, match="embedding was never written"), Writer(old, CONFIG, "q8"):
        pass
    with (
        pytest.raises(ConversionError, match="expected embedding, got output"),
        Writer(old, CONFIG, "q8") as writer,
    ):
        writer.write("output", [b""])
    for size in (-64, 64):
        with pytest.raises(ConversionError, match="were announced"), Writer(old, CONFIG, "q8") as writer:
            writer.write("embedding", [bytes(writer.tensors[0].bytes + size)])


def test_a_full_disk_is_said_before_and_while_writing(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
        with pytest.raises(ModelIOError, match="only 10 are free"):
            write(old)

    def full() -> Iterator[bytes]:
        raise OSError(28, "No space left on device")
        yield b""

    with pytest.raises(ModelIOError, match="No space left"), Writer(old, CONFIG, "q8") as writer:
        writer.write("embedding", full())


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelIOError, match="Cannot write"):
        write(tmp_path / "file" / "m.colibri")
    with pytest.raises(ModelIOError, match="No such file"):
        write(tmp_path / "absent" / "m.colibri")


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link.colibri").symlink_to(tmp_path / "real.colibri")
    write(tmp_path / "link.colibri")
    assert (tmp_path / "link.colibri").is_symlink()
    assert read_container(tmp_path / "real.colibri").bytes > 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"n_heads": 0}, "n_heads.*1 to 4096"),
        ({"n_heads": 2.0}, "n_heads.*expected an integer"),
        ({"n_heads": True}, "n_heads"),
        ({"norm_eps": float("nan")}, "norm_eps"),
        ({"attn_scale": float("inf")}, "attn_scale"),
        ({"n_experts": [0]}, "n_experts.*2 values"),
        ({"n_experts": 4}, "n_experts.*2 values"),
        ({"n_experts": [0, -1]}, "n_experts"),
        ({"router_kind": 1}, "router_kind"),
    ],
)
def test_config_fields_are_checked_against_the_schema(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConversionError, match=text):
        complete_config(CONFIG | change)


def test_a_missing_required_field_is_named() -> None:
    with pytest.raises(ConversionError, match="context_length, norm_eps"):
        complete_config({k: v for k, v in CONFIG.items() if k not in ("norm_eps", "context_length")})


# --- reading: strict


@pytest.mark.parametrize("keep", [0.99, 0.5, 0.0])
def test_a_truncated_file_looks_incomplete(tmp_path: Path, keep: float) -> None:
    path = write(tmp_path / "m.colibri")
    size = path.stat().st_size
    os.truncate(path, int(size * keep) or 64)
    with pytest.raises(ModelFileError, match=f"looks incomplete: its header says {size:,}"):
        read_container(path)


@pytest.mark.parametrize("size", [0, 7, 8, 63])
def test_a_file_shorter_than_a_header(tmp_path: Path, size: int) -> None:
    path = write(tmp_path / "m.colibri")
    os.truncate(path, size)
    with pytest.raises(ModelFileError, match="incomplete|not a .colibri file"):
        read_container(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelFileError, match="not a .colibri file: it begins with b'GGUF"):
        read_container(tmp_path / "x")
    with pytest.raises(ModelIOError, match="No such file"):
        read_container(tmp_path / "absent")
    with pytest.raises(ModelIOError, match="directory"):
        read_container(tmp_path)


def test_any_flipped_byte_of_the_head_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "m.colibri")
    good = path.read_bytes()
    directory, n_entries = struct.unpack_from("<QI", good, 32)
    rng = random.Random(0)
    for at in [*range(64), *rng.sample(range(64, directory + 128 * n_entries), 200)]:
        bad = bytearray(good)
        bad[at] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        with pytest.raises((ModelFileError, UnsupportedError)):
            read_container(path)


def forge(path: Path, at: int, value: bytes) -> None:
    """Changes bytes of the head and makes the checksum fit again."""
    data = bytearray(path.read_bytes())
    data[at : at + len(value)] = value
    directory, n_entries = struct.unpack_from("<QI", data, 32)
    data[44:48] = bytes(4)
    end = min(directory + 128 * n_entries, len(data))
    data[44:48] = struct.pack("<I", zlib.crc32(data[:end]))
    path.write_bytes(data)


FORGED = [
    ("offset overlaps", 1, 64, struct.pack("<Q", 64), "output .* overlaps"),
    ("offset unaligned", 1, 64, struct.pack("<Q", 2**14 + 1), "not aligned|overlaps"),
    ("offset outside", 1, 64, struct.pack("<Q", 2**63), "leaves the file"),
    ("bytes outside", 1, 72, struct.pack("<Q", 2**64 - 64), "leaves the file"),
    ("bytes wrong", 1, 72, struct.pack("<Q", 64), "should be matrix output"),
    ("rows wrong", 1, 80, struct.pack("<I", 2**31), "should be matrix output"),
    ("kind unknown", 1, 88, b"\7", "broken name, kind"),
    ("type unknown", 1, 89, b"\3", "weight type"),
    ("second type", 1, 90, b"\4", "weight type"),
    ("reserved", 1, 127, b"\1", "broken"),
    ("name repeated", 1, 0, b"embedding".ljust(64, b"\0"), "repeated"),
    ("name other", 1, 0, b"outputs".ljust(64, b"\0"), "should be matrix output"),
    ("name unended", 1, 0, b"x" * 64, "broken name"),
    ("name not UTF-8", 1, 0, b"\xff\xfe", "broken name"),
    ("name with NUL inside", 1, 0, b"out\0put", "broken name"),
]


@pytest.mark.parametrize(
    ("entry", "at", "value", "text"), [row[1:] for row in FORGED], ids=[row[0] for row in FORGED]
)
def test_a_forged_directory_is_refused(tmp_path: Path, entry: int, at: int, value: bytes, text: str) -> None:
    path = write(tmp_path / "m.colibri")
    directory = struct.unpack_from("<Q", path.read_bytes(), 32)[0]
    forge(path, directory + 128 * entry + at, value)
    with pytest.raises(ModelFileError, match=text):
        read_container(path)


@pytest.mark.parametrize(
    ("at", "value", "text"),
    [
        (72, b"n_vocaX", "n_vocaX.*not known"),
        (66, b"\2", "wrong type"),
        (66, b"\3", "no\\s+known type"),
        (68, struct.pack("<I", 2), "."),
        (68, struct.pack("<I", 2**32 - 1), "cut off"),
        (64, struct.pack("<H", 65535), "cut off"),
        (80, struct.pack("<i", -5), "n_vocab.*from 1"),
        (80, struct.pack("<i", 21), "should be matrix embedding"),
        (24, struct.pack("<Q", 2**63), "outside the file"),
        (40, struct.pack("<I", 2**31), "outside the file"),
    ],
)
def test_a_forged_config_is_refused(tmp_path: Path, at: int, value: bytes, text: str) -> None:
    path = write(tmp_path / "m.colibri")
    forge(path, at, value)
    with pytest.raises((ModelFileError, UnsupportedError), match=text):
        read_container(path)


def test_random_forgeries_end_in_our_errors(tmp_path: Path) -> None:
    path = write(tmp_path / "m.colibri")
    good = path.read_bytes()
    directory, n_entries = struct.unpack_from("<QI", good, 32)
    rng = random.Random(1)
    for _ in range(150):
        path.write_bytes(good)
        at = rng.randrange(64, directory + 128 * n_entries)
        forge(path, at, rng.randbytes(rng.choice((1, 2, 8))))
        try:
            read_container(path)
        except ColibriError:
            continue


def test_damaged_data_is_found_and_named(tmp_path: Path) -> None:
    path = write(tmp_path / "m.colibri")
    container = read_container(path)
    entry = next(entry for entry in container.entries if entry.name == "layers.1.experts.1")
    with path.open("r+b") as file:
        file.seek(entry.offset + entry.bytes - 1)
        byte = file.read(1)
        file.seek(entry.offset + entry.bytes - 1)
        file.write(bytes([byte[0] ^ 1]))
    calls: list[tuple[int, int, str]] = []
    assert inspection.verify(path, lambda *call: calls.append(call)).damaged == ["layers.1.experts.1"]
    assert calls[-1][0] == calls[-1][1] == sum(entry.bytes for entry in container.entries)
    with pytest.raises(ModelFileError, match="1 of .* layers.1.experts.1"):
        inspection.require_intact(path)
    with pytest.raises(ModelFileError, match="experts.1 does not match"):
        read_entry(container, "layers.1.experts.1")


def test_broken_json_blobs_are_named() -> None:
    for text in (b"{", b"[]"):
        with pytest.raises(ModelFileError, match="generation.json"):
            read_json_blob({"generation.json": text}, "generation.json")


def test_description_counts_weights(tmp_path: Path) -> None:
    found = inspection.describe(write(tmp_path / "m.colibri"))
    attention = 8 + 8 * 8 + 4 * 8 * 2 + 8 + 4 + 4 + 4 + 4 + 8 * 8 + 8 + 8
    expert = 3 * 6 * 8
    routed = attention + 2 * 8 + 8 + 3 * 10 * 8
    total = 2 * 20 * 8 + 8 + attention + 3 * 12 * 8 + routed
    assert found.parameters == total + 2 * expert
    assert found.active_parameters == total + expert
    assert sum(found.types.values()) == sum(entry.bytes for entry in found.entries if entry.kind != "blob")
    assert found.source == {}
