"""BPE merges from a vocabulary that has only priorities, as SentencePiece and tiktoken store it.

Owns: the one pair that each token is made of. Both encoders merge, again and again, the neighbours whose
concatenation has the best priority. While the pair that makes a token is found, nothing outside the token's
own symbols can have taken part; so it is the pair that the same procedure finds in the token alone, and no
other pair ever makes it. One merge per token, sorted by priority, then gives `tokenizers` the same ids.
Of equal priorities both encoders take the leftmost place first. Longer tokens before shorter ones does the
same for runs of one character (Llama's spaces): what was merged last grows first.
Refuses: vocabularies that would take minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

Token = TypeVar("Token", str, bytes)
_MOST_STEPS = 200_000_000  # a vocabulary of 262,144 real tokens takes some 10 million


def merges(
    priorities: Mapping[Token, float], symbols: Callable[[Token], Sequence[Token]]
) -> list[tuple[Token, Token]]:
    """Pairs, best first. priorities: the lower, the earlier; tokens that are made by no pair are left out.
    symbols: what a token is made of at the start."""
    steps = sum(len(token) ** 2 for token in priorities)
    if steps > _MOST_STEPS:
        raise ValueError(
            f"tokens of up to {max(map(len, priorities)):,} symbols; no real vocabulary has them"
        )
    made: list[tuple[float, tuple[Token, Token]]] = []
    for token, priority in priorities.items():
        parts = list(symbols(token))
        while len(parts) > 2:
            best, at = None, 0
            for left in range(len(parts) - 1):
                found = priorities.get(parts[left] + parts[left + 1])
                if found is not None and (best is None or found < best):
                    best, at = found, left
            if best is None:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            made.append((priority, (parts[0], parts[1])))
    made.sort(key=lambda merge: (merge[0], -len(merge[1][0]) - len(merge[1][1])))
    return [pair for _, pair in made]
