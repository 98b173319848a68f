"""Trains the demo tokenizer: byte-level BPE, 2048 ids, with a chat template.

The split pattern is the one used by the model family whose architecture the demo
follows, so the files need no special support in an engine.  The four special tokens
take the last ids.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 2048
SPECIALS = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"]
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Only user and assistant turns exist; a system turn is left out because none was trained on.
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message['role'] not in ['user', 'assistant'] %}"
    "{{- raise_exception('this model knows the roles user and assistant only, not ' + message['role']) }}"
    "{%- endif %}"
    "{{- '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}"
)


def training_texts(path: Path) -> Iterator[str]:
    """Document texts without the chat mark-up, which is never merged into words."""
    with path.open(encoding="utf-8") as handle:
        for line in handle:
            text = json.loads(line)["text"]
            for special in SPECIALS:
                text = text.replace(special, "\n")
            yield text


def train_tokenizer(path: Path) -> Tokenizer:
    """Learn the merges and append the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_texts(path), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return tokenizer


def write_configuration(folder: Path, max_length: int) -> None:
    """tokenizer_config.json with the chat template."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "additional_special_tokens": ["<|user|>", "<|assistant|>"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True, help="train.jsonl of build_corpus.py")
    parser.add_argument("--out", type=Path, required=True, help="folder for the tokenizer files")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(args.corpus)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    tokenizer.save(str(args.out / "tokenizer.json"))
    write_configuration(args.out, 1024)
    print(f"wrote {VOCAB_SIZE} ids to {args.out}")


if __name__ == "__main__":
    main()
