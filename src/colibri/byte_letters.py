"""The 256 characters that stand for bytes in byte-level vocabularies: printable Latin-1 characters stand for
themselves, the other bytes, in order, for the characters from U+0100 on.

Owns: that table, both ways. Refuses: nothing."""

from __future__ import annotations

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]

BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + at): byte for at, byte in enumerate(_OTHERS)
}
LETTER_OF = {byte: letter for letter, byte in BYTE_OF.items()}
