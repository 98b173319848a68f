"""The binding against the header: layouts, enum values, prototypes and exports as the C compiler sees them,
then the library's own rules through the thin functions."""

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from colibri import _library, errors
from colibri import _native as native
from colibri.model_facts import config_of

ROOT = Path(__file__).parent.parent
HEADER = ROOT / "include" / "colibri.h"
CONFIG = ROOT / "core" / "config.h"
TEXT = HEADER.read_text(encoding="utf-8")
STRUCTS = (
    "colibri_error",
    "colibri_traffic",
    "colibri_gate",
    "colibri_model_info",
    "colibri_traffic",
    "colibri_params",
    "colibri_memory_plan",
    "colibri_routing",
    "colibri_expert",
    "colibri_observer",
    "colibri_profile",
    "colibri_recording",
    "colibri_input",
    "colibri_sampling",
)


def ffi() -> Any:
    return _library.load()[0]


def enum_values() -> list[str]:
    return re.findall(r"^\s+(COLIBRI_\w+)(?: = -?\d|,|$)", TEXT, re.MULTILINE)


def functions() -> set[str]:
    return set(re.findall(r"^[a-z][\w *]*?\b(colibri_\w+)\(", TEXT, re.MULTILINE))


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_ffi", ROOT / "tools" / "generate_ffi.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- the declarations


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler on this machine")
def test_layouts_and_enums_are_those_of_the_c_compiler(tmp_path: Path) -> None:
    """ABI mode believes its own parser; a struct laid out otherwise would be read as garbage."""
    lines = [f'printf("{name} %ld\\n", (long){name});' for name in enum_values()]
    for struct in STRUCTS:
        lines.append(f'printf("{struct} %zu\\n", sizeof({struct}));')
        for field, _ in ffi().typeof(struct).fields:
            what = f"offsetof({struct}, {field}), sizeof((({struct} *)0)->{field})"
            lines.append(f'printf("{struct}.{field} %zu %zu\\n", {what});')
    source = tmp_path / "layout.c"
    source.write_text(
        "#include <stddef.h>\n#include <stdio.h>\n#include <colibri.h>\nint main(void) {\n"
        + "\n".join(lines)
        + "\n}\n"
    )
    command = [
        "cc",
        "-std=c17",
        "-Wall",
        "-Werror",
        f"-I{HEADER.parent}",
        str(source),
        "-o",
        str(tmp_path / "layout"),
    ]
    subprocess.run(command, check=True)
    output = subprocess.run([tmp_path / "layout"], check=True, capture_output=True, text=True).stdout
    rows = (line.partition(" ") for line in output.splitlines())
    expected = {name: [int(number) for number in numbers.split()] for name, _, numbers in rows}

    constants = {
        name: value
        for kind in ("status", "phase", "residency", "expert_policy", "prefetch", "kv_type")
        for name, value in ffi().typeof(f"enum colibri_{kind}").relements.items()
    }
    found: dict[str, list[int]] = {name: [value] for name, value in constants.items()}
    for struct in STRUCTS:
        found[struct] = [ffi().sizeof(struct)]
        for field, type in ffi().typeof(struct).fields:
            found[f"{struct}.{field}"] = [type.offset, ffi().sizeof(type.type)]
    assert found == expected and len(enum_values()) == len(constants) > 9 + 2


def test_every_struct_of_the_header_is_compared() -> None:
    assert set(re.findall(r"^\} (colibri_\w+);", TEXT, re.MULTILINE)) == set(STRUCTS)


def test_every_status_has_its_exception() -> None:
    values = {value: name for name, value in ffi().typeof("enum colibri_status").relements.items()}
    assert set(values) == {0, *errors.FROM_STATUS}
    assert len(set(errors.FROM_STATUS.values())) == len(errors.FROM_STATUS)
    for status in values:
        assert native.status_text(status)
    assert isinstance(errors.from_status(-99, ""), errors.ColibriError)


def test_the_library_has_every_function_and_no_other() -> None:
    library = _library.load()[1]
    declared = functions()
    assert 15 <= len(declared) <= 25
    assert {name for name in dir(library) if name.startswith("colibri_")} == declared
    if shutil.which("nm"):
        path = str(files("colibri") / _library.LIBRARY)
        command = ["nm", "--dynamic", "--defined-only", "--extern-only", "--format=posix", path]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        assert {line.split()[0] for line in output.splitlines()} == declared


def test_every_function_is_wrapped() -> None:
    source = Path(native.__file__).read_text(encoding="utf-8")
    assert set(re.findall(r"\.(colibri_\w+)\(", source)) == functions()


def test_versions_are_one() -> None:
    assert native.version() == native.declared_version() == generator().version(TEXT)


def test_the_generated_module_is_that_of_the_header(tmp_path: Path) -> None:
    generator().main([str(HEADER), str(CONFIG), str(tmp_path / "new" / "_ffi.py")])
    made = (tmp_path / "new" / "_ffi.py").read_text(encoding="utf-8")
    spec = importlib.util.spec_from_file_location("made_ffi", tmp_path / "new" / "_ffi.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.version == native.version() and "colibri_evaluate" in made
    assert module.config_fields == native.config_schema()
    assert module.ffi.sizeof("colibri_input") == ffi().sizeof("colibri_input")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["_ffi.py"], "nothing else is left"


@pytest.mark.parametrize(
    "text", ["", "/* [declarations] x */ int a;", "/* [end of declarations] */ /* [declarations] */"]
)
def test_a_header_without_marks_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "h.h").write_text(text)
    with pytest.raises(SystemExit, match="generate_ffi.py: expected"):
        generator().main([str(tmp_path / "h.h"), str(CONFIG), str(tmp_path / "o.py")])
    assert not (tmp_path / "o.py").exists()


def test_a_field_that_the_generator_cannot_read_is_refused(tmp_path: Path) -> None:
    text = CONFIG.read_text(encoding="utf-8")
    for wrong in (
        "",
        text.replace("    INT(n_embd, 1,", "    INT(n_embd, 1 + 1,"),
        text.replace("LAYER(", "EACH("),
    ):
        (tmp_path / "c.h").write_text(wrong)
        with pytest.raises(SystemExit, match="generate_ffi.py: expected #define CONFIG_FIELDS"):
            generator().main([str(HEADER), str(tmp_path / "c.h"), str(tmp_path / "o.py")])
    assert not (tmp_path / "o.py").exists()


def test_a_missing_or_foreign_library_says_how_to_build(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def loads_from(directory: Path) -> None:
        _library.load.cache_clear()
        monkeypatch.setattr("importlib.resources.files", lambda _: directory)
        _library.load()

    try:
        with pytest.raises(errors.ColibriError, match="library is missing: .*pip install"):
            loads_from(tmp_path)
        (tmp_path / _library.LIBRARY).write_bytes(b"no library")
        with pytest.raises(errors.ColibriError, match="cannot be loaded: .*pip install"):
            loads_from(tmp_path)
        if shutil.which("cc"):
            source = tmp_path / "other.c"
            source.write_text('const char *colibri_version(void) { return "9.9.9"; }\n')
            (tmp_path / _library.LIBRARY).unlink()
            subprocess.run(
                ["cc", "-shared", "-fPIC", str(source), "-o", str(tmp_path / _library.LIBRARY)], check=True
            )
            with pytest.raises(
                errors.ColibriError, match=r"version 9.9.9, but .* declares version \d.*pip install"
            ):
                loads_from(tmp_path)
    finally:
        _library.load.cache_clear()


# --- the library through the thin functions


@pytest.fixture
def handle(model_path: Path) -> Iterator[native.ModelHandle]:
    opened = native.open_model(model_path)
    yield opened
    native.close_model(opened)


@pytest.fixture
def context(handle: native.ModelHandle) -> Iterator[native.ContextHandle]:
    opened = native.init(handle, native.Params(context=32, max_batch=3, threads=2, chunk=5))
    yield opened
    native.free(opened)


def ids(*values: int) -> native.Ids:
    return np.array(values, np.int32)


def test_the_schema_describes_every_value(handle: native.ModelHandle) -> None:
    fields = native.config_schema()
    config = config_of(handle)
    assert list(config) == [field["name"] for field in fields]
    assert {"n_vocab", "n_experts", "router_norm"} <= {field["name"] for field in fields}
    for field in fields:
        value = config[field["name"]]
        for one in value if field["per_layer"] else [value]:
            assert field["min"] <= one <= field["max"] and type(one).__name__ == field["type"]
        assert field["doc"]
    assert config["n_experts"][1] == 4


ISAS = ("scalar", "avx2", "avx2-vnni", "avx512", "neon", "neon-dotprod")


def test_info_and_defaults(handle: native.ModelHandle, model_path: Path) -> None:
    info = native.info(handle)
    assert (info.n_vocab, info.n_vocab_used, info.n_layers, info.n_embd) == (320, 300, 2, 64)
    assert (info.n_experts, info.n_experts_used, info.context_length) == (4, 2, 512)
    assert info.file_bytes == model_path.stat().st_size and info.isa in ISAS
    params = native.default_params(handle)
    assert (params.context, params.max_batch, params.chunk) == (512, 1, 1024) and params.threads >= 1


def test_run_inference_and_evaluate_agree(context: native.ContextHandle) -> None:
    one, all_rows = np.empty(320, np.float32), np.empty((4, 320), np.float32)
    native.run_inference(context, ids(1, 9, 8, 7), one)
    assert native.position(context) == 4
    native.evaluate(context, [native.Input(1, ids(1, 9, 8, 7), all_rows)], 320)
    assert one.tobytes() == all_rows[3].tobytes() and native.position(context, 1) == 4


def test_rewind_and_fork(context: native.ContextHandle) -> None:
    rows = {name: np.empty(320, np.float32) for name in ("straight", "rewound", "forked")}
    native.evaluate(context, [native.Input(0, ids(1, 2, 3, 4), rows["straight"])], 320)
    native.evaluate(context, [native.Input(1, ids(1, 2, 9, 9, 9), None)], 320)
    native.fork(context, 1, 2)
    for sequence, name in ((1, "rewound"), (2, "forked")):
        native.rewind(context, sequence, 2)
        native.evaluate(context, [native.Input(sequence, ids(3, 4), rows[name])], 320)
        assert rows[name].tobytes() == rows["straight"].tobytes()
    native.rewind(context, 0, 0)
    assert native.position(context, 0) == 0 and native.position(context, 2) == 4


def test_failures_carry_the_librarys_text(context: native.ContextHandle, tmp_path: Path) -> None:
    logits = np.empty(320, np.float32)
    with pytest.raises(errors.ContextFullError, match="32"):
        native.run_inference(context, np.ones(33, np.int32), logits)
    assert native.last_error(context)[0] == -6 and native.position(context) == 0
    with pytest.raises(errors.ArgumentError):
        native.run_inference(context, ids(320), logits)
    for wrong in (3, -1):
        with pytest.raises(errors.ArgumentError):
            native.position(context, wrong)
    with pytest.raises(errors.ArgumentError):
        native.rewind(context, 0, 1)
    with pytest.raises(errors.ModelIOError, match="absent"):
        native.open_model(tmp_path / "absent")
    with pytest.raises(errors.ArgumentError, match="NUL"):
        native.open_model(Path("a\0b"))


@pytest.mark.parametrize(
    "array",
    [np.ones(3, np.int64), np.ones((1, 3), np.int32), np.ones(6, np.int32)[::2]],
    ids=["int64", "2-D", "strided"],
)
def test_arrays_of_another_shape_are_refused(context: native.ContextHandle, array: Any) -> None:
    with pytest.raises(errors.ArgumentError, match="contiguous int32"):
        native.run_inference(context, array, np.empty(320, np.float32))


def test_a_row_of_the_wrong_type_or_read_only_is_refused(context: native.ContextHandle) -> None:
    with pytest.raises(errors.ArgumentError, match="contiguous float32"):
        native.run_inference(context, ids(1), np.empty(320, np.float64))
    locked = np.empty(320, np.float32)
    locked.flags.writeable = False
    with pytest.raises((ValueError, BufferError)):
        native.run_inference(context, ids(1), locked)


def test_routing_rows_belong_to_their_sequences(context: native.ContextHandle) -> None:
    seen: list[native.RoutingRows] = []
    inputs = [native.Input(0, ids(1, 2, 3), None), native.Input(2, ids(4, 5, 6, 7), None)]
    native.evaluate(context, inputs, 320, routing=lambda view: seen.append(view.rows()))
    for layer in (0, 1):
        rows = [row for row in seen if row.layer == layer]
        where = sorted(
            (int(s), int(p)) for row in rows for s, p in zip(row.sequences, row.positions, strict=True)
        )
        assert where == [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1), (2, 2), (2, 3)]
        assert len(rows) == 2 and all(row.logits.shape[1] == 4 and row.experts.shape[1] == 2 for row in rows)


@pytest.mark.parametrize("error", [KeyError("x"), KeyboardInterrupt(), SystemExit(3)])
def test_what_an_observer_raises_comes_out(context: native.ContextHandle, error: BaseException) -> None:
    def fail(*_: object) -> None:
        raise error

    expert = native.ExpertObserver(fail, np.empty((512, 64), np.float32))
    observers: list[dict[str, Any]] = [{"progress": fail}, {"routing": fail}, {"expert": expert}]
    for observer in observers:
        with pytest.raises(type(error)) as caught:
            native.evaluate(context, [native.Input(0, ids(1, 2), None)], 320, **observer)
        assert caught.value is error and native.position(context) == 0


def test_cancel_ends_the_next_evaluation_once(context: native.ContextHandle) -> None:
    native.cancel(context)
    with pytest.raises(errors.CancelledError):
        native.evaluate(context, [native.Input(0, ids(1, 2), None)], 320)
    assert native.position(context) == 0
    native.evaluate(context, [native.Input(0, ids(1, 2), None)], 320)
    assert native.position(context) == 2


def test_sampling_through_the_library(context: native.ContextHandle) -> None:
    logits = np.zeros(320, np.float32)
    logits[[7, 5]] = 2.0
    logits[310] = 9.0  # a padding row
    greedy = native.sampler(native.Sampler(0, 0, 1, 0, 1, 0))
    assert native.sample(context, logits, greedy, None, 3) == 5, (
        "ties go to the lowest id; padding is never drawn"
    )
    penalised = native.sampler(native.Sampler(0, 0, 1, 0, 4.0, 0))
    assert native.sample(context, logits, penalised, ids(5), 3) == 7
    warm = native.sampler(native.Sampler(1.0, 0, 1, 0, 1, 11))
    draws = [native.sample(context, logits, warm, None, at) for at in range(200)]
    assert draws == [native.sample(context, logits, warm, None, at) for at in range(200)]
    assert len(set(draws)) > 50 and max(draws) < 300
    logits[3] = np.nan
    with pytest.raises(errors.NumericError):
        native.sample(context, logits, greedy, None, 3)


def test_topk_select() -> None:
    values = np.array([1, 5, 5, -np.inf, np.nan, 3], np.float32)
    assert native.topk_select(values, 4).tolist() == [1, 2, 5, 0]
    assert native.topk_select(values, 6).tolist()[:4] == [1, 2, 5, 0]
    for wrong in (0, 7, -1):
        with pytest.raises(errors.ArgumentError, match="k: expected 1 to 6"):
            native.topk_select(values, wrong)
