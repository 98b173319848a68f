"""Trains the tokenizer that both sides share: byte-pair merges inside words.

A space is part of the word behind it, marks stand alone, </s> ends every text.

    python make_tokenizer.py --pairs train.jsonl --out CHECKPOINT
"""

from __future__ import annotations

import argparse
import json
import string
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

VOCAB_SIZE = 3072
PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"


def training_texts(path: Path) -> Iterator[str]:
    """Every source, and every target once."""
    before = None
    with path.open(encoding="utf-8") as handle:
        for line in handle:
            pair = json.loads(line)
            yield pair["source"]
            if pair["target"] != before:
                yield pair["target"]
            before = pair["target"]


def train_tokenizer(path: Path) -> Tokenizer:
    """Learn the merges; 0 pads and begins a target, 1 ends a text, as in T5."""
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace("’", "'"), normalizers.Strip()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Metaspace(prepend_scheme="always"),
            pre_tokenizers.Punctuation(behavior="isolated"),
        ]
    )
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, END, UNKNOWN],
        initial_alphabet=[letter for letter in string.printable if not letter.isspace()],
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_texts(path), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", pair=f"$A {END} $B {END}", special_tokens=[(END, tokenizer.token_to_id(END))]
    )
    return tokenizer


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=Path, required=True, help="train.jsonl of build_pairs.py")
    parser.add_argument("--out", type=Path, required=True, help="folder for the tokenizer files")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(args.pairs)
    tokenizer.save(str(args.out / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": END,
        "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
    (args.out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    print(f"wrote {tokenizer.get_vocab_size()} ids to {args.out}")


if __name__ == "__main__":
    main()
