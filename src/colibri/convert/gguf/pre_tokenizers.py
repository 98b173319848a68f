"""How a GGUF vocabulary of kind "gpt2" cuts texts into words, by the name in tokenizer.ggml.pre.

Owns: the names, the patterns of each, whether a word that is a token is taken apart, whether a BOS is the
rule. Patterns are applied one after the other, each to the pieces that the one before left; what matches and
what lies between are words. Facts: llama.cpp's names and its comments, the models' own tokenizer.json.
Refuses: names that it does not know, by name.

Where llama.cpp's expressions only approximate what a model was trained with, the model's own stands here: no
difference of upper and lower case beyond ASCII and marks outside words (gpt-4o, tekken, kimi-k2, youtu,
tiny_aya), white space beyond ASCII outside ranges of characters (deepseek-llm, deepseek-coder), a range that
a normalized source file has moved (afmoe)."""

from __future__ import annotations

from difflib import get_close_matches
from typing import NamedTuple

_SUFFIXES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+|" + _SIGNS + r"|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _plain(digits: str) -> str:
    """Llama 3's kind: letters with one sign before them."""
    return f"{_SUFFIXES}|{_WORD}|{digits}|{_SIGNS}" + r"[\r\n]*" + _SPACES


def _cased(digits: str, suffix: str, signs: str = r"[\r\n/]*", without: str = "") -> str:
    """o200k's kind: a word also ends before an upper-case letter behind lower-case ones."""
    upper, lower, sign = f"[{_UPPER}{without}]", f"[{_LOWER}{without}]", r"[^\r\n\p{L}\p{N}]?"
    words = f"{sign}{upper}*{lower}+{suffix}|{sign}{upper}+{lower}*{suffix}"
    return f"{words}|{digits}|{_SIGNS}{signs}" + _SPACES


_LLAMA3, _QWEN2 = _plain(r"\p{N}{1,3}"), _plain(r"\p{N}")
_O200K = _cased(r"\p{N}{1,3}", f"{_SUFFIXES}?")
_KIMI = r"\p{Han}+|" + _cased(r"\p{N}{1,3}", f"{_SUFFIXES}?", r"[\r\n]*", r"&&[^\p{Han}]")
_MARKED = (  # words with marks, after one ASCII sign or what is no sign at all
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"""
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
)
_CHINESE = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_CHINESE = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK3 = (r"\p{N}{1,3}", _CHINESE, _MARKED + r"[\r\n]*" + _SPACES)
_THREES = r"{1,3}(?=(?:%s{3})*(?!%s))"  # digits in threes from the right
_SENTENCE = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_CASED_LETTERS = """
    41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386
    388-38A 38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA
    1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59
    1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC
    1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139
    213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B
    A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F
    104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943
"""


def _letters(ranges: str) -> str:
    ends = [[chr(int(end, 16)) for end in one.split("-")] for one in ranges.split()]
    return "".join(["-".join(one) for one in ends])


class Pre(NamedTuple):
    """spaces: spaces become U+2581 and characters stay characters, with <0xXX> for what is no token; else
    words are bytes, written as letters."""

    patterns: tuple[str, ...]
    whole_words: bool = False  # a word that is a token is not taken apart
    add_bos: bool = False
    spaces: bool = False


DEFAULT = Pre((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
_LINES = Pre((r"\n+",), spaces=True)
_BY_NAMES: dict[str, Pre] = {
    "default": DEFAULT,
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": Pre(
        (_LLAMA3,), whole_words=True, add_bos=True
    ),
    "dbrx smaug-bpe chatglm-bpe": Pre((_LLAMA3,)),
    "glm4 glm5": Pre((_LLAMA3,), whole_words=True),
    "minicpm5": Pre((r"\p{N}{1,3}", _plain(r"\p{N}+")), whole_words=True),
    "jais-2": Pre(
        (
            f"{_SUFFIXES}|{_WORD}|" + r"\p{N}{1,3}|" + _SIGNS + r"[\r\n]*|\s*[\r\n]+|"
            r"\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|"
            r"\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}",
        )
    ),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": Pre((_QWEN2,)),
    "laguna": Pre((r"\n+", _QWEN2)),
    "ufakzeka": Pre((_QWEN2.removeprefix(_SUFFIXES + "|"),)),
    "qwen35": Pre(
        (_SUFFIXES + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _SPACES,)
    ),
    "bailingmoe bailingmoe2 llada-moe": Pre(
        (r"'(?i:[sdmt]|ll|ve|re)|" + _WORD + r"|\p{N}|" + _SIGNS + r"[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",)
    ),
    "seed-coder": Pre((f"{_SUFFIXES}|{_WORD}" + r"|\p{N}| ?[^\s\p{L}\p{N}\r\n]+" + _SPACES,)),
    "exaone-moe": Pre(
        (
            _SUFFIXES
            + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}|"
            + _SIGNS
            + r"[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": Pre(_DEEPSEEK3),
    "spark2_5": Pre((*_DEEPSEEK3[:2], _MARKED + r"|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")),
    "deepseek-llm": Pre(
        (
            r"[\r\n]",
            rf"\s?[{_letters(_CASED_LETTERS)}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _DEEPSEEK_CHINESE,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": Pre((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CHINESE, r"\p{N}")),
    "gpt-4o llama4 kanana2 talkie minimax-m2": Pre((_O200K,)),
    "granite-embed-multi-97m": Pre((_O200K,), whole_words=True),
    "tekken": Pre((_cased(r"\p{N}", ""),), whole_words=True, add_bos=True),
    "tiny_aya cohere2moe": Pre((r"\d{1,3}(?=(?:\d{3})*\b)", _O200K)),
    "kimi-k2": Pre((_KIMI,)),
    "youtu": Pre(
        (
            "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c"
            f"\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|{_CHINESE}",
            _cased(r"\p{N}", f"{_SUFFIXES}?"),
        ),
        whole_words=True,
    ),
    "afmoe": Pre(
        (
            r"\p{N}" + _THREES % (r"\p{N}", r"\p{N}"),
            "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
            "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
            "\u1100-\u11ff]+",
            _DEEPSEEK3[2],
        )
    ),
    "superbpe": Pre((r"\p{N}+", "[0-9]" + _THREES % ("[0-9]", "[0-9]"))),
    "falcon": Pre((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": Pre((r"\p{N}", _GPT2)),
    "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jina-v1-en "
    "jina-v2-code roberta-bpe mpt olmo jais trillion granite-docling exaone4": Pre((_GPT2,)),
    "poro-chat bloom gpt3-finnish": Pre((_SENTENCE,)),
    "viking": Pre((_SENTENCE, r"\p{N}")),
    "chameleon": Pre(
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        add_bos=True,
    ),
    "gemma4 granite-embed-multi-311m": _LINES._replace(add_bos=True),
    "sarvam-moe": _LINES,
}
OF_NAME = {name: pre for names, pre in _BY_NAMES.items() for name in names.split()}


def pre_of(name: str) -> Pre:
    """A ValueError names one that is not known, and those that are spelled most like it."""
    pre = OF_NAME.get(name)
    if pre is None:
        alike = get_close_matches(name[:60], OF_NAME, n=4, cutoff=0.5)
        known = f"; the nearest of the {len(OF_NAME)} names that are known: {', '.join(alike)}"
        raise ValueError(
            f"tokenizer.ggml.pre = {name!r:.60}, a way to cut texts into words that is not known here"
            f"{known if alike else ''} (all of them: docs/GGUF.md, Pre-tokenizers)"
        )
    return pre
