"""Where everything of a `.colibri` file lies (docs/FORMAT.md section 1 and 3), and the bytes of its head.

Owns: the structs of header and directory, alignments, the offsets of entries.
Refuses: names that a directory entry cannot hold. Files are format.py's, the list of tensors entries.py's.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from colibri.config import CONFIG_AT, Config, complete_config, encode_config
from colibri.entries import KIND_IDS, Entry, Types, expected_entries
from colibri.errors import ConversionError
from colibri.quantize import STORED_IDS

MAGIC = b"COLIBRI\0"
LAYOUT_VERSION = 1
PAGE = 4096
ALIGNMENT = 64
HEADER = struct.Struct("<8sIIQQQII16s")  # 64 bytes
CRC_AT = 44
ENTRY = struct.Struct("<64sQQIIB3sI32s")  # 128 bytes


@dataclass(frozen=True, slots=True)
class Layout:
    config: Config  # complete
    config_bytes: bytes
    entries: tuple[Entry, ...]  # tensors, then blobs, with offsets
    n_tensors: int
    directory: int  # its offset
    data: int  # offset behind the directory
    bytes: int  # of the file


def lay_out(config: Mapping[str, Any], types: Types, blobs: Mapping[str, bytes]) -> Layout:
    """Places the tensors that follow from the config, then the blobs."""
    full = complete_config(config)
    tensors = expected_entries(full, types)
    entries = tensors + [Entry(name, "blob", 0, 0, (), len(data)) for name, data in blobs.items()]
    for entry in entries:
        if len(entry.name.encode()) > 63:
            raise ConversionError(f"Entry name {entry.name!r} is longer than 63 bytes.")
    config_bytes = encode_config(full)
    directory = aligned(CONFIG_AT + len(config_bytes), 64)
    end = data = directory + ENTRY.size * len(entries)
    for i, entry in enumerate(entries):
        entries[i] = replace(entry, offset=aligned(end, PAGE if entry.kind == "expert" else ALIGNMENT))
        end = entries[i].offset + entry.bytes
        end = aligned(end, PAGE) if entry.kind == "expert" else end
    return Layout(full, config_bytes, tuple(entries), len(tensors), directory, data, end)


def head_bytes(layout: Layout, entries: Sequence[Entry]) -> bytes:
    """Header, config and directory; `entries`: those of the layout with their checksums."""
    head = bytearray(
        HEADER.pack(
            MAGIC,
            0x01020304,
            LAYOUT_VERSION,
            layout.bytes,
            len(layout.config_bytes),
            layout.directory,
            len(entries),
            0,
            bytes(16),
        )
    )
    head += layout.config_bytes
    head += bytes(layout.directory - len(head))
    head += b"".join(map(_encode_entry, entries))
    struct.pack_into("<I", head, CRC_AT, zlib.crc32(head))
    return bytes(head)


def aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _encode_entry(entry: Entry) -> bytes:
    types = bytes(STORED_IDS[type] if type else 0 for type in entry.types)
    return ENTRY.pack(
        entry.name.encode(),
        entry.offset,
        entry.bytes,
        entry.rows,
        entry.cols,
        KIND_IDS[entry.kind],
        types,
        entry.crc,
        bytes(32),
    )
