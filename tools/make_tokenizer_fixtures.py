"""Writes tests/fixtures/tokenizers/: tiny vocabularies as checkpoints bring them, and what SentencePiece and
tiktoken make of the texts of fixtures/tokenizer_cases.py.

Role: run by hand when a case is added; needs sentencepiece and tiktoken (the everyday tests do not).
Owns: the files and the expected ids. Refuses: nothing.

    python tools/make_tokenizer_fixtures.py
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path.insert(0, str(TESTS))

from colibri.byte_letters import BYTE_OF  # noqa: E402
from colibri.convert.tiktoken_file import rule_of  # noqa: E402
from fixtures.tokenizer_cases import CORPUS, DIRECTORY, RULES, SETTINGS, texts  # noqa: E402

N_RANKS = 340
# The first is made by no merge, only of a word that is this token; the second of a letter and a part of a Han
# character, which are never in one word.
ODD = (b"qzj", b"B\xe9")


def trained(settings: dict[str, Any]) -> bytes:
    """A SentencePiece model; nothing in it says where it was trained."""
    import sentencepiece

    settings = dict(settings)
    model = io.BytesIO()
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        if settings.pop("rules", False):
            rules = "".join(f"{_points(a)}\t{_points(b)}\n" for a, b in RULES.items())
            Path("rules.tsv").write_text(rules, "utf-8")
            settings["normalization_rule_tsv"] = "rules.tsv"
        else:
            settings.setdefault("normalization_rule_name", "identity")
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS * 3), model_writer=model, **settings
        )
    return model.getvalue()


def _points(text: str) -> str:
    return " ".join(f"{ord(character):X}" for character in text)


def ranks() -> dict[bytes, int]:
    """A byte-level BPE in the order of its merges, on words as Kimi cuts them."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(rule_of("TikTokenTokenizer").pattern), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=N_RANKS - len(ODD), show_progress=False, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    table = {bytes(BYTE_OF[c] for c in token): id for token, id in tokenizer.get_vocab().items()}
    return table | {token: len(table) + at for at, token in enumerate(ODD)}


def tiktoken_lines(table: dict[bytes, int]) -> bytes:
    ordered = sorted(table, key=lambda token: table[token])
    return b"".join(base64.b64encode(token) + b" %d\n" % table[token] for token in ordered)


def main() -> None:
    import sentencepiece
    import tiktoken

    DIRECTORY.mkdir(exist_ok=True)
    expected: dict[str, Any] = {"texts": texts(), "ids": {}, "decoded": {}}
    for name, settings in SETTINGS.items():
        data = trained(settings)
        (DIRECTORY / f"{name}.model").write_bytes(data)
        model = sentencepiece.SentencePieceProcessor(model_proto=data)
        expected["ids"][name] = model.encode(texts())
        expected["decoded"][name] = [model.decode(ids) for ids in expected["ids"][name]]
    table = ranks()
    (DIRECTORY / "kimi.tiktoken").write_bytes(tiktoken_lines(table))
    pattern = rule_of("TikTokenTokenizer").pattern
    encoding = tiktoken.Encoding("tiny", pat_str=pattern, mergeable_ranks=table, special_tokens={})
    expected["ids"]["kimi"] = [encoding.encode_ordinary(text) for text in texts()]
    expected["decoded"]["kimi"] = texts()
    (DIRECTORY / "expected.json").write_text(
        json.dumps(expected, ensure_ascii=True, separators=(",", ":")) + "\n", "utf-8"
    )


if __name__ == "__main__":
    main()
