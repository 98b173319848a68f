"""The config section of a container: checked against the engine's field list, to bytes and back.

Owns: the records of docs/FORMAT.md section 2, bounds and defaults as core/config.h states them.
Refuses: fields that the field list lacks, and values out of bounds. What a field means is the engine's.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from colibri.errors import ConversionError, ModelFileError, UnsupportedError

Config = dict[str, Any]  # int, float, or a list of int with one value per layer

CONFIG_AT = 64  # byte where the config section begins
_RECORD = struct.Struct("<HBBI")
_FIELD_TYPES = {"int": 1, "float": 2}
_KINDS = {"int": "an integer", "float": "a number"}


def config_schema() -> list[dict[str, Any]]:
    """The field list of core/config.h."""
    from colibri import _native

    return _native.config_schema()


def complete_config(config: Mapping[str, Any], error: type[Exception] = ConversionError) -> Config:
    """Checks every field against the schema and adds defaults; floats are rounded to float32."""
    schema = config_schema()
    unknown = sorted(set(config) - {field["name"] for field in schema})
    if unknown:
        raise error(
            f"Config fields that this version does not know: {', '.join(unknown)}. Install a newer colibri."
        )
    missing = [field["name"] for field in schema if "default" not in field and field["name"] not in config]
    if missing:
        raise error(f"Required config fields are missing: {', '.join(missing)}. Convert the model again.")
    by_name = {field["name"]: field for field in schema}
    n_layers = _checked(by_name["n_layers"], config["n_layers"], error)
    full: Config = {}
    for name, field in by_name.items():
        if not field["per_layer"]:
            full[name] = _checked(field, config.get(name, field.get("default")), error)
            continue
        values = config.get(name, [field.get("default")] * int(n_layers))
        if not isinstance(values, list) or len(values) != n_layers:
            raise error(
                f"Config field {name}: expected {n_layers} values, one per layer, found {values!r:.80}."
            )
        full[name] = [_checked(field, value, error) for value in values]
    return full


def _checked(field: Mapping[str, Any], value: Any, error: type[Exception]) -> int | float:
    """The value in the field's type, or an error that names the field and its bounds."""
    number: int | float
    if field["type"] == "int":
        good = isinstance(value, int) and not isinstance(value, bool)
    else:
        good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 3.4e38
    if good:
        number = value if field["type"] == "int" else float(np.float32(value))
        # The engine compares the stored float32 with the bounds, so do the same here.
        if field["min"] <= number <= field["max"]:
            return number
    raise error(
        f"Config field {field['name']} ({field['doc']}): expected {_KINDS[field['type']]} from "
        f"{field['min']:.10g} to {field['max']:.10g}, found {value!r:.80}."
    )


def encode_config(config: Config) -> bytes:
    """Fields that differ from their defaults, so that an older engine reads a file that needs nothing new."""
    out = bytearray()
    for field in config_schema():
        value = config[field["name"]]
        values = value if field["per_layer"] else [value]
        if "default" in field and all(one == field["default"] for one in values):
            continue
        name = field["name"].encode()
        out += _RECORD.pack(len(name), _FIELD_TYPES[field["type"]], 0, len(values)) + name
        out += bytes(-len(name) % 8)
        out += struct.pack(f"<{len(values)}{'i' if field['type'] == 'int' else 'f'}", *values)
        out += bytes(-4 * len(values) % 8)
    return bytes(out)


def decode_config(data: bytes, path: Path) -> Config:
    config: Config = {}
    schema = {field["name"]: field for field in config_schema()}
    at = 0
    while at < len(data):
        start = at
        if len(data) - at < _RECORD.size:
            raise ModelFileError(
                f"{path}: config record at byte {CONFIG_AT + start} is cut off; the file is damaged."
            )
        name_bytes, number, zero, count = _RECORD.unpack_from(data, at)
        name = data[at + 8 : at + 8 + name_bytes].decode("utf-8", "replace")
        values_at = at + 8 + -(-name_bytes // 8) * 8
        at = values_at + -(-4 * count // 8) * 8
        if at > len(data) or zero or number not in (1, 2) or name in config:
            raise ModelFileError(
                f"{path}: config record {name!r:.80} at byte {CONFIG_AT + start} is cut off, repeated or of "
                "no known type; the file is damaged, convert the model again."
            )
        values = list(struct.unpack_from(f"<{count}{'i' if number == 1 else 'f'}", data, values_at))
        field = schema.get(name)
        if field is None:
            raise UnsupportedError(
                f"{path}: config field {name!r:.80} is not known to this version. Install a newer colibri."
            )
        if number != _FIELD_TYPES[field["type"]] or (count != 1 and not field["per_layer"]):
            raise ModelFileError(
                f"{path}: config field {name} has the wrong type or count; the file is damaged."
            )
        config[name] = values if field["per_layer"] else values[0]
    return complete_config(config, ModelFileError)
