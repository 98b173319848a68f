"""Reads the wire format of protocol buffers: the fields of one message, strictly.

Owns: varints, lengths, 32-bit floats. Refuses: what leaves the message, overlong varints, groups. Which field
means what is sentencepiece_model.py's. A reader of our own because the package of that name would be a
dependency for every user, and here every length of a hostile file is checked in forty lines.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

Value = int | memoryview  # a varint, or the bytes of a length-delimited or fixed-width field
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def fields(message: memoryview) -> Iterator[tuple[int, int, Value]]:
    """(number, wire type, value) of each field, in order. A ValueError says at which byte it ends."""
    at = 0
    while at < len(message):
        start = at
        key, at = _varint(message, at)
        number, wire = key >> 3, key & 7
        if number == 0:
            raise ValueError(f"field number 0 at byte {start}")
        if wire == VARINT:
            value, at = _varint(message, at)
            yield number, wire, value
            continue
        if wire == BYTES:
            size, at = _varint(message, at)
        elif wire in (FIXED32, FIXED64):
            size = 4 if wire == FIXED32 else 8
        else:
            raise ValueError(f"field {number} at byte {start} has wire type {wire}")
        if size > len(message) - at:
            raise ValueError(f"field {number} at byte {start} has {size} bytes, {len(message) - at} are left")
        yield number, wire, message[at : at + size]
        at += size


def as_float(value: Value) -> float:
    if not isinstance(value, memoryview) or len(value) != 4:
        raise ValueError("a number that is no 32-bit float")
    return float(struct.unpack("<f", value)[0])


def as_text(value: Value) -> str:
    if not isinstance(value, memoryview):
        raise ValueError("a number in the place of a text")
    return bytes(value).decode("utf-8")


def as_integer(value: Value) -> int:
    """An int32 or enum: negative ones are stored in 64 bits."""
    if not isinstance(value, int):
        raise ValueError("bytes in the place of an integer")
    return value - 2**64 if value >= 2**63 else value


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            raise ValueError(f"the file ends inside a number at byte {at}")
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            if value >= 2**64:
                break
            return value, at
    raise ValueError(f"a number of more than 64 bits at byte {at}")
