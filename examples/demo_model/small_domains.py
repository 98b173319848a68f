"""The generated domains beside stories: arithmetic, rhyme, dictionary and chat.

Each ``make_*`` function returns one document; chat documents are lists of turns that
``render_chat`` marks up exactly as the tokenizer's chat template does.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import grammar
import words

Turn = tuple[str, str]


# ---------------------------------------------------------------- arithmetic


def _count(number: int, pair: tuple[str, str]) -> str:
    return f"{number} {pair[0] if number == 1 else pair[1]}"


def person(rng: random.Random) -> tuple[str, str, str]:
    male = rng.random() < 0.5
    return (
        rng.choice(words.BOYS if male else words.GIRLS),
        ("He" if male else "She"),
        ("his" if male else "her"),
    )


def add_problem(rng: random.Random) -> tuple[str, str]:
    """A small word problem and its last sentence."""
    name, he, _ = person(rng)
    pair = rng.choice(words.COUNTABLE)
    a, b = rng.randint(1, 10), rng.randint(1, 10)
    verb = rng.choice(["finds", "buys", "gets", "is given"])
    return (
        f"{name} has {_count(a, pair)}. {he} {verb} {b} more.",
        f"Now {he.lower()} has {_count(a + b, pair)}.",
    )


def take_problem(rng: random.Random) -> tuple[str, str]:
    """The same with something lost or given away."""
    name, he, _ = person(rng)
    pair = rng.choice(words.COUNTABLE)
    a = rng.randint(2, 15)
    b = rng.randint(1, min(a - 1, 10))
    verb = rng.choice(["loses", "gives away", "sells", "drops"])
    return f"{name} has {_count(a, pair)}. {he} {verb} {b}.", f"Now {he.lower()} has {_count(a - b, pair)}."


def _equation(rng: random.Random) -> str:
    kind = rng.choice("++--*")
    if kind == "+":
        a, b = rng.randint(0, 12), rng.randint(0, 12)
        return rng.choice([f"{a} + {b} = {a + b}", f"{a} plus {b} is {a + b}."])
    if kind == "-":
        a = rng.randint(0, 20)
        b = rng.randint(0, a)
        return rng.choice([f"{a} - {b} = {a - b}", f"{a} minus {b} is {a - b}."])
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    return rng.choice([f"{a} x {b} = {a * b}", f"{a} times {b} is {a * b}."])


def _sequence(rng: random.Random) -> str:
    start, step = rng.randint(0, 10), rng.choice([1, 1, 2, 5, 10])
    return "Count: " + ", ".join(str(start + step * i) for i in range(rng.randint(5, 9))) + "."


def make_arithmetic(rng: random.Random) -> str:
    """Word problems, bare equations, or counting."""
    lines = []
    style = rng.random()
    for _ in range(rng.randint(4, 9)):
        if style < 0.5:
            lines.append(" ".join(rng.choice([add_problem, take_problem])(rng)))
        elif style < 0.9:
            lines.append(_equation(rng))
        else:
            lines.append(_sequence(rng))
    return "\n".join(lines)


# --------------------------------------------------------------------- rhyme

# Lines grouped by their rhyme; any two lines of a group make a couplet.
RHYMES: dict[str, list[str]] = json.loads(Path(__file__).with_name("rhymes.json").read_text("utf-8"))


def make_rhyme(rng: random.Random) -> str:
    """One or more verses of two couplets, each couplet from one rhyme group."""
    verses = []
    for _ in range(rng.choice([1, 2, 2, 3])):
        lines: list[str] = []
        for group in rng.sample(sorted(RHYMES), 2):
            first, second = rng.sample(RHYMES[group], 2)
            lines += [first + ",", second + "."]
        verses.append("\n".join(lines))
    return "\n\n".join(verses)


# ---------------------------------------------------------------- dictionary


def definitions() -> list[tuple[str, str, str]]:
    """(word, kind, definition) of every dictionary entry."""
    rows = [line.split("|") for line in words.DEFINITIONS.strip().splitlines()]
    return [(row[0], row[1], row[2]) for row in rows]


def with_article(word: str, start: bool = False) -> str:
    """The word as a sentence would name it: ``a cat``, ``the sun``, ``bread``."""
    article = "" if word in words.NO_ARTICLE else "the " if word in words.THE_WORDS else "a "
    phrase = grammar.with_articles(article + word)
    return phrase[0].upper() + phrase[1:] if start else phrase


def make_dictionary(rng: random.Random) -> str:
    """A few entries, in one of three layouts."""
    style = rng.random()
    entries = rng.sample(definitions(), rng.randint(4, 8))
    if style < 0.2:
        return "\n".join(f"The opposite of {a} is {b}." for a, b in rng.sample(words.OPPOSITES, 6))
    if style < 0.6:
        return "\n".join(f"{word}: {grammar.with_articles(text)}." for word, _, text in sorted(entries))
    return "\n".join(f"{with_article(word, True)} is {text}." for word, _, text in entries)


# ---------------------------------------------------------------------- chat


def _greeting(rng: random.Random) -> list[Turn]:
    hello = rng.choice(["Hello!", "Hi!", "Hello", "Hi there!", "Good morning!", "Hey!", "Good evening!"])
    reply = rng.choice(
        [
            "Hello! How can I help you?",
            "Hi! What would you like to know?",
            "Hello! It is nice to meet you.",
            "Hi there! Shall I tell you a story?",
        ]
    )
    return [(hello, reply)]


def _how_are_you(rng: random.Random) -> list[Turn]:
    ask = rng.choice(["How are you?", "How are you today?", "Are you well?", "How do you feel today?"])
    return [
        (
            ask,
            rng.choice(
                [
                    "I am very well, thank you. How are you?",
                    "I am fine, thank you!",
                    "I feel great today. Thank you for asking.",
                ]
            ),
        )
    ]


def _who(rng: random.Random) -> list[Turn]:
    ask = rng.choice(["Who are you?", "What are you?", "What is your name?", "What can you do?"])
    return [
        (
            ask,
            rng.choice(
                [
                    "I am Colibri, a very small language model. I like to tell simple stories.",
                    "My name is Colibri. I am a tiny model with a few small experts inside.",
                    "I am Colibri. I can tell stories, add small numbers, and talk about simple things.",
                ]
            ),
        )
    ]


def _thanks(rng: random.Random) -> list[Turn]:
    ask = rng.choice(["Thank you!", "Thanks!", "Thank you very much.", "That was nice, thank you."])
    return [
        (
            ask,
            rng.choice(
                ["You are welcome!", "I am glad that I could help.", "You are welcome. Ask me again anytime."]
            ),
        )
    ]


def _bye(rng: random.Random) -> list[Turn]:
    ask = rng.choice(["Goodbye!", "Bye!", "Good night!", "See you tomorrow!"])
    return [
        (
            ask,
            rng.choice(["Goodbye! Have a nice day.", "Bye! It was nice to talk with you.", "See you soon!"]),
        )
    ]


def _color(rng: random.Random) -> list[Turn]:
    thing, color = rng.choice(words.THING_COLORS)
    ask = rng.choice(
        [f"What color is {thing}?", f"Which color is {thing}?", f"Tell me the color of {thing}."]
    )
    return [(ask, f"{thing[0].upper()}{thing[1:]} is {color}.")]


def _animal(rng: random.Random) -> list[Turn]:
    animal, sound, food, home = rng.choice(words.ANIMAL_FACTS)
    a = grammar.with_articles(f"a {animal}")
    big = a[0].upper() + a[1:]
    return [
        rng.choice(
            [
                (f"What does {a} say?", f"{big} says {sound}."),
                (f"What sound does {a} make?", f"{big} says {sound}."),
                (f"What does {a} eat?", f"{big} likes to eat {food}."),
                (f"Where does {a} live?", f"{big} lives {home}."),
            ]
        )
    ]


def _sum(rng: random.Random) -> list[Turn]:
    if rng.random() < 0.65:
        a, b = rng.randint(0, 12), rng.randint(0, 12)
        ask = rng.choice(
            [
                f"What is {a} plus {b}?",
                f"What is {a} + {b}?",
                f"Add {a} and {b}.",
                f"How much is {a} plus {b}?",
            ]
        )
        return [(ask, f"{a} plus {b} is {a + b}.")]
    a = rng.randint(1, 20)
    b = rng.randint(0, a)
    ask = rng.choice([f"What is {a} minus {b}?", f"What is {a} - {b}?", f"How much is {a} minus {b}?"])
    return [(ask, f"{a} minus {b} is {a - b}.")]


def _word_problem(rng: random.Random) -> list[Turn]:
    problem, answer = rng.choice([add_problem, take_problem])(rng)
    pronoun = problem.split(". ")[1].split(" ")[0].lower()
    return [(f"{problem} How many does {pronoun} have now?", answer)]


def _definition(rng: random.Random) -> list[Turn]:
    word, _, text = rng.choice(definitions())
    phrase = with_article(word)
    ask = rng.choice([f"What is {phrase}?", f"What does the word {word} mean?", f"Tell me what {phrase} is."])
    return [(ask, f"{with_article(word, True)} is {text}.")]


def _opposite(rng: random.Random) -> list[Turn]:
    a, b = rng.choice(words.OPPOSITES)
    return [
        (
            rng.choice([f"What is the opposite of {a}?", f"Tell me the opposite of {a}."]),
            f"The opposite of {a} is {b}.",
        )
    ]


def _story_request(rng: random.Random) -> list[Turn]:
    pick = rng.random()
    start = rng.choice(
        [
            "Tell me a story",
            "Please tell me a story",
            "Can you tell me a story",
            "Write a story",
            "I want to hear a story",
        ]
    )
    mark = "?" if start.startswith("Can") else "."
    if pick < 0.45:
        noun = rng.choice(words.ANIMALS if rng.random() < 0.8 else words.FANTASY)
        kind = "m" if noun in words.FANTASY else "a"
        return [(grammar.with_articles(f"{start} about a {noun}{mark}"), grammar.story(rng, kind, noun))]
    if pick < 0.6:
        noun = rng.choice(sorted(set(words.GROWN_MEN + words.GROWN_WOMEN)))
        return [(grammar.with_articles(f"{start} about a {noun}{mark}"), grammar.story(rng, "g", noun))]
    if pick < 0.8:
        male = rng.random() < 0.5
        name = rng.choice(words.BOYS if male else words.GIRLS)
        who = rng.choice([name, f"a {'boy' if male else 'girl'} named {name}"])
        return [(f"{start} about {who}{mark}", grammar.story(rng, "c", None, name))]
    return [(f"{start}{mark}", grammar.story(rng))]


def _rhyme_request(rng: random.Random) -> list[Turn]:
    ask = rng.choice(["Tell me a rhyme.", "Do you know a rhyme?", "Write a short poem.", "Sing me a song."])
    return [(ask, make_rhyme(rng).split("\n\n")[0])]


def _code_request(rng: random.Random) -> list[Turn]:
    name, sign = rng.choice([("add", "+"), ("subtract", "-"), ("multiply", "*")])
    return [(f"Write a Python function to {name} two numbers.", f"def {name}(a, b):\n    return a {sign} b")]


CHAT_MAKERS: list[tuple[Callable[[random.Random], list[Turn]], int]] = [
    (_greeting, 4),
    (_how_are_you, 2),
    (_who, 2),
    (_thanks, 1),
    (_bye, 1),
    (_color, 5),
    (_animal, 6),
    (_sum, 9),
    (_word_problem, 3),
    (_definition, 7),
    (_opposite, 3),
    (_story_request, 14),
    (_rhyme_request, 1),
    (_code_request, 1),
]


def render_chat(turns: list[Turn]) -> str:
    """The chat mark-up; must equal the chat_template in the tokenizer's configuration."""
    return "".join(f"<|user|>\n{ask}<|end|>\n<|assistant|>\n{reply}<|end|>\n" for ask, reply in turns)


def make_chat(rng: random.Random) -> str:
    """One to four exchanges; sometimes opened by a greeting."""
    makers, weights = zip(*CHAT_MAKERS, strict=True)
    turns: list[Turn] = _greeting(rng) if rng.random() < 0.15 else []
    for _ in range(rng.choice([1, 1, 2, 3, 4])):
        turns += rng.choices(makers, weights=weights)[0](rng)
        if len(turns[-1][1]) > 300:
            break  # a story fills the training window, so it ends the conversation
    if len(turns) > 1 and rng.random() < 0.15:
        turns += rng.choice([_thanks, _bye])(rng)
    return render_chat(turns)
