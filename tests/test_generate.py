"""From tokens to text with scripted tokens (stop texts, characters, end tokens: cases 17, 19, 23), then the
same rules and the lengths of case 27 with the real engine."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import tokenizer_json
from colibri import ArgumentError
from colibri.generate import Answer, NoText, StopFilter, Stream
from colibri.tokenizer import Tokenizer

ALPHABET = "A B C D E F G comma 🦙 歪 👨\u200d👩\u200d👧 hum"


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(tokenizer_json(), bos_id=1, eos_ids=[2, 4])


def scripted(ids: list[int]) -> Callable[[list[int]], int]:
    """A model that writes these ids, then its end token."""
    return lambda generated: ([*ids, 2])[len(generated)]


def stream(ids: list[int], stops: list[str] | None = None, limit: int = 1000) -> Stream:
    return Stream(
        scripted(ids),
        Answer(tokenizer().decoder(start=True), limit=limit, end_ids=[2, 4], stops=stops or []),
        n_prompt=3,
    )


def until(text: str, stops: list[str]) -> str:
    """What the stop rule leaves of a text: cut before the stop text that is complete first."""
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return text[: min(ends)[1]] if ends else text


# --- stop texts


@pytest.mark.parametrize(
    ("stops", "left"),
    [
        (["D E"], "A B C "),
        (["E F", "D"], "A B C "),
        (["mm"], "A B C D E F G co"),
        (["A"], ""),
        (["A B C"], ""),
        (["zz", "yy", "F", "G"], "A B C D E "),
        (["D E F G x", "E"], "A B C D "),
        (["B C", "A B C"], ""),
        (["歪"], "A B C D E F G comma 🦙 "),
        (["hum!"], ALPHABET),
    ],
)
@pytest.mark.parametrize("one_token_each", [True, False])
def test_cut_exactly_before_the_stop_text(stops: list[str], left: str, one_token_each: bool) -> None:
    encode = tokenizer().encode
    ids = [id for character in ALPHABET for id in encode(character)] if one_token_each else encode(ALPHABET)
    found = stream(ids, stops)
    shown = ""
    for piece in found:
        assert piece, "no empty pieces"
        shown += piece
        assert left.startswith(shown), "something of the stop text leaked"
    assert shown == left == found.result.text == until(ALPHABET, stops)
    assert found.result.finish_reason == "stop"


def test_a_stop_text_inside_one_token() -> None:
    id, text = next((id, text) for id in range(261, 300) if len(text := tokenizer().decode([id])) >= 3)
    found = stream([id], [text[1]])
    assert "".join(found) == text[0] and found.result.finish_reason == "stop"


def test_a_beginning_that_is_no_stop_text_comes_out() -> None:
    text = "A B C"
    found = stream(tokenizer().encode(text), ["B D", "C!"])
    assert "".join(found) == text and found.result.finish_reason == "stop"
    assert "".join(stream(tokenizer().encode(text), ["C!"], limit=5)) == text[: len(text)]


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
@settings(max_examples=300, deadline=None)
def test_the_cut_does_not_depend_on_the_pieces(text: str, stops: list[str], data: Any) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))) | {0, len(text)})
    stop_filter = StopFilter(stops)
    shown = ""
    for start, end in pairwise(cuts):
        shown += stop_filter.push(text[start:end])
        if stop_filter.stopped:
            break
        assert until(text, stops).startswith(shown)
    assert shown + stop_filter.finish() == until(text, stops)


# --- characters, ends, limits


def test_pieces_are_whole_characters_and_join_to_the_text() -> None:
    found = stream(tokenizer().encode(ALPHABET))
    pieces = list(found)
    assert "".join(pieces) == ALPHABET == found.result.text and "\ufffd" not in found.result.text
    assert all(piece.encode() for piece in pieces)


@pytest.mark.parametrize("limit", range(1, 12))
def test_a_limit_inside_a_character_leaves_one_mark(limit: int) -> None:
    ids = tokenizer().encode("a🦙歪b")
    found = stream(ids, limit=limit)
    text = "".join(found)
    assert text == found.result.text == tokenizer().decode(ids[:limit])
    assert text.count("\ufffd") <= 1 and text.rstrip("\ufffd") == "a🦙歪b"[: len(text.rstrip("\ufffd"))]


def test_a_stop_text_can_be_completed_by_the_mark() -> None:
    found = stream(tokenizer().encode("a🦙")[:-1], ["\ufffd"])
    assert "".join(found) == "a" and found.result.finish_reason == "stop"


@pytest.mark.parametrize("end", [2, 4])
def test_every_end_token_ends_and_leaves_no_text(end: int) -> None:
    ids = tokenizer().encode("A B")
    found = Stream(
        lambda done: ([*ids, end, 99])[len(done)],
        Answer(tokenizer().decoder(start=True), limit=9, end_ids=[2, 4]),
        n_prompt=1,
    )
    assert "".join(found) == "A B"
    assert found.result.finish_reason == "stop" and found.result.ids == ids


def test_a_turn_start_token_is_no_end() -> None:
    ids = [*tokenizer().encode("A"), 3, *tokenizer().encode("B")]
    found = stream(ids)
    assert "".join(found) == "AB" and found.result.ids == ids


def test_limits_give_length() -> None:
    ids = tokenizer().encode("A B C")
    for limit in range(len(ids)):
        found = stream(ids, limit=limit)
        assert "".join(found) == tokenizer().decode(ids[:limit])
        assert (found.result.finish_reason, found.result.n_generated) == ("length", limit)


def test_a_result_before_the_end_is_an_error_and_closing_ends() -> None:
    found = stream(tokenizer().encode("A B C"))
    first = next(found)
    with pytest.raises(ArgumentError, match="not at its end"):
        _ = found.result
    found.close()
    assert list(found) == [] and found.text == first
    with pytest.raises(ArgumentError):
        _ = found.result


def test_without_a_tokenizer_there_are_ids_only() -> None:
    found = Stream(scripted([7, 8]), Answer(NoText(), limit=9, end_ids=[2]), n_prompt=1)
    assert list(found) == [] and found.result.ids == [7, 8]
