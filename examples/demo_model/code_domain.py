"""The generated code domain: small Python snippets. Owns their shapes; nothing of them is run."""

from __future__ import annotations

import random
from collections.abc import Callable

import small_domains
import words

_VARIABLES = ["x", "n", "count", "total", "number", "value", "size", "age", "score", "price"]
_LISTS = ["numbers", "items", "names", "words", "animals", "values", "colors"]


LIST_FUNCTIONS = {
    "largest": """def largest(NAME):
    best = NAME[0]
    for item in NAME:
        if item > best:
            best = item
    return best""",
    "sum_of": """def sum_of(NAME):
    total = 0
    for item in NAME:
        total = total + item
    return total""",
    "count": """def count(NAME, wanted):
    found = 0
    for item in NAME:
        if item == wanted:
            found += 1
    return found""",
    "evens": """def evens(NAME):
    return [item for item in NAME if item % 2 == 0]""",
    "squares": """def squares(NAME):
    return [item * item for item in NAME]""",
}


def _function(rng: random.Random) -> str:
    a, b = rng.sample(["a", "b", "x", "y", "n", "m"], 2)
    name, sign = rng.choice([("add", "+"), ("subtract", "-"), ("multiply", "*")])
    doc = {"add": "sum", "subtract": "difference", "multiply": "product"}[name]
    one, two = rng.randint(1, 9), rng.randint(1, 9)
    body = f'    """Return the {doc} of {a} and {b}."""\n    return {a} {sign} {b}'
    return f"def {name}({a}, {b}):\n{body}\n\n\nprint({name}({one}, {two}))"


def _loop(rng: random.Random) -> str:
    item = rng.choice(["i", "n", "number"])
    body = rng.choice([f"print({item})", f"print({item} * {rng.randint(2, 5)})", f"total += {item}"])
    start = "total = 0\n" if "total" in body else ""
    end = "\nprint(total)" if start else ""
    return f"{start}for {item} in range({rng.choice(['5', '10', '1, 11', '100', '3'])}):\n    {body}{end}"


def _list_code(rng: random.Random) -> str:
    things = rng.sample(words.ANIMALS, 3) if rng.random() < 0.5 else rng.sample(words.COLORS, 3)
    name, item = rng.choice([("items", "item"), ("names", "name"), ("words", "word")])
    listed = ", ".join(f'"{thing}"' for thing in things)
    body = rng.choice([f"print({item})", f"print(len({item}))", f"print({item}.upper())"])
    return f"{name} = [{listed}]\nfor {item} in {name}:\n    {body}"


def _condition(rng: random.Random) -> str:
    var, limit = rng.choice(_VARIABLES), rng.randint(1, 50)
    one, two = rng.choice([("big", "small"), ("high", "low"), ("yes", "no")])
    return f'{var} = {rng.randint(1, 60)}\nif {var} > {limit}:\n    print("{one}")\nelse:\n    print("{two}")'


def _list_function(rng: random.Random) -> str:
    name = rng.choice(_LISTS[:3])
    kind = rng.choice(["largest", "sum_of", "count", "evens", "squares"])
    return LIST_FUNCTIONS[kind].replace("NAME", name)


def _class_code(rng: random.Random) -> str:
    animal, sound, _, _ = rng.choice(words.ANIMAL_FACTS)
    title, name = animal.capitalize(), rng.choice(words.PET_NAMES_HE)
    return (
        f"class {title}:\n    def __init__(self, name):\n        self.name = name\n\n"
        f'    def speak(self):\n        return "{sound}"\n\n\n'
        f'pet = {title}("{name}")\nprint(pet.name, pet.speak())'
    )


def _greet(rng: random.Random) -> str:
    word = rng.choice(["Hello", "Hi", "Good morning", "Welcome"])
    name = small_domains.person(rng)[0]
    return f'def greet(name):\n    return f"{word}, {{name}}!"\n\n\nprint(greet("{name}"))'


def _while_code(rng: random.Random) -> str:
    var, start = rng.choice(["n", "count", "number"]), rng.randint(3, 10)
    return f'{var} = {start}\nwhile {var} > 0:\n    print({var})\n    {var} -= 1\nprint("Go!")'


def _recursion(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return "def factorial(n):\n    if n <= 1:\n        return 1\n    return n * factorial(n - 1)"
    return (
        "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)"
    )


def _dict_code(rng: random.Random) -> str:
    rows = rng.sample(words.ANIMAL_FACTS, 2)
    inner = ", ".join(f'"{row[0]}": "{row[1]}"' for row in rows)
    return f"sounds = {{{inner}}}\nfor animal, sound in sounds.items():\n    print(animal, sound)"


CODE_MAKERS: list[Callable[[random.Random], str]] = [
    _function,
    _loop,
    _list_code,
    _condition,
    _list_function,
    _class_code,
    _greet,
    _while_code,
    _recursion,
    _dict_code,
]


def make_code(rng: random.Random) -> str:
    """One or two small Python snippets."""
    return "\n\n\n".join(rng.choice(CODE_MAKERS)(rng) for _ in range(rng.choice([1, 2, 2])))
