"""The account of `colibri convert --explain` as text, and the class defaults as one line.

Owns: which tensors share a line. Refuses: knowing what becomes of what (colibri.convert.explain).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from colibri.cli.report import bytes_text, counted

if TYPE_CHECKING:
    from colibri.convert import Explanation
    from colibri.convert.explain import KeyRow, TensorRow

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.| |$)")
_AT_MOST = 6  # defaults in one line
_TITLES = ("config.json", "keys that config.json leaves out, with the defaults of the family's config class")
_TITLES_GGUF = (
    "metadata; by its name in config.json what several keys, tensors or the architecture say together",
    "what the architecture always has",
)


def as_text(found: Explanation) -> Iterator[str]:
    """Lines for people; the same in full is JSON."""
    yield f"{found.source}: {found.model_type}, read by families/{found.family}.py"
    gguf = any(row.gguf_key for row in found.keys)
    titles = _TITLES_GGUF if gguf else _TITLES
    yield from _section(titles[0], [_key_line(row) for row in found.keys])
    yield from _section(
        titles[1],
        [_key_line(row) for row in found.defaults],
    )
    yield from _section(
        "fields that no key decides", [(name, text) for name, text in found.other_fields.items()]
    )
    yield from _section("tensors", list(_grouped([row for row in found.tensors if row.slots])))
    yield from _section("tensors left out", list(_grouped([row for row in found.tensors if not row.slots])))
    yield from _section("made here", [(name, "") for name in found.made])
    yield from _section("notes", [(note, "") for note in found.notes])
    yield ""
    yield f"{found.type}: {bytes_text(found.bytes)} of tensors. Nothing was written."


def defaults_line(defaults: Mapping[str, Any]) -> str:
    """Keys that config.json left out and what stands in for them."""
    shown = [f"{name} {_value(value)}" for name, value in list(defaults.items())[:_AT_MOST]]
    more = len(defaults) - len(shown)
    rest = f" and {more} more (--explain lists them)" if more else ""
    keys = counted(len(defaults), "key")
    return f"config.json leaves out {keys}, class defaults hold: {', '.join(shown)}{rest}"


def _section(title: str, rows: list[tuple[str, str]]) -> Iterator[str]:
    """A title and two columns; nothing if there are no rows."""
    if not rows:
        return
    width = min(max(len(left) for left, _ in rows), 72)
    yield ""
    yield title
    for left, right in rows:
        yield f"  {left:{width}}  {right}".rstrip()


def _key_line(row: KeyRow) -> tuple[str, str]:
    fields = ", ".join(f"{name} {_value(value)}".rstrip() for name, value in row.fields.items())
    told = f"-> {fields}" if fields else row.why
    return (
        f"{row.gguf_key or row.key} = {_value(row.value)}",
        f"{told}; {row.why}" if fields and row.why else told,
    )


def _value(value: Any) -> str:
    text = value if isinstance(value, str) and (" " in value or not value) else repr(value)
    return text if len(text) <= 48 else text[:45] + "..."


def _grouped(rows: list[TensorRow]) -> Iterator[tuple[str, str]]:
    """Tensors of the same role, type and shape share a line: layers.{0-3}.attn_q."""
    groups: dict[tuple[str, ...], list[TensorRow]] = {}
    for row in rows:
        slots = ", ".join(dict.fromkeys(_NUMBER.sub("*", slot) for slot in row.slots))
        shape = " x ".join(map(str, row.shape)) or "one number"
        key = (_NUMBER.sub("*", row.name), f"{row.dtype} {shape}", slots, row.why)
        groups.setdefault(key, []).append(row)
    for (_, what, to, why), members in groups.items():
        yield f"{_ranged([row.name for row in members])}  {what}", f"-> {to}" if to else why


def _ranged(names: list[str]) -> str:
    """Names that differ in numbers alone, as one: the numbers at each place as a range or a list."""
    places = zip(*(map(int, _NUMBER.findall(name)) for name in names), strict=True)
    texts = []
    for place in places:
        numbers = sorted(set(place))
        if len(numbers) == 1:
            texts.append(str(numbers[0]))
        elif numbers == list(range(numbers[0], numbers[-1] + 1)):
            texts.append(f"{{{numbers[0]}-{numbers[-1]}}}")
        else:
            texts.append("{" + ",".join(map(str, numbers[:6])) + (",..." if len(numbers) > 6 else "") + "}")
    remaining = iter(texts)
    return _NUMBER.sub(lambda _: next(remaining), names[0])
