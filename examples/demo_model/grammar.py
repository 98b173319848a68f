"""Story grammar of the demo corpus: expands plot shapes with a consistent cast.

A story is an opening, an optional aside, one plot (problem, attempt, solution), an
optional second scene, and an ending.  Every choice comes from one ``random.Random``,
so a seed reproduces the corpus exactly.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

import plots
import words

_CHOICE = re.compile(r"\{([^{}]*)\}")
_SLOT = re.compile(r"<(\w+)>")
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiouAEIOU])(?!uni|one\b|use)")
_SENTENCE = re.compile(r"([.!?]\s+)([a-z])")


@dataclass(frozen=True)
class Being:
    """One member of the cast: name, common noun, pronouns and kind."""

    name: str
    noun: str
    male: bool
    kind: str  # c child, a animal, g grown-up, m magical being

    def pronouns(self, prefix: str) -> dict[str, str]:
        """Pronoun slots; the friend's carry the prefix ``f``."""
        he, him, his = ("he", "him", "his") if self.male else ("she", "her", "her")
        slots = {"he": he, "him": him, "his": his}
        out = {prefix + key: value for key, value in slots.items()}
        for key in slots:
            out[(prefix + key).capitalize() if prefix else key.capitalize()] = slots[key].capitalize()
            out[prefix + key.capitalize()] = slots[key].capitalize()
        return out


def with_articles(text: str) -> str:
    """Turn ``a apple`` into ``an apple``."""
    return _ARTICLE.sub(r"\1n ", text)


def tidy(text: str) -> str:
    """Articles, sentence capitals and stray spaces after expansion."""
    text = re.sub(r"[ \t]+", " ", with_articles(text))
    text = re.sub(r" ([.,!?])", r"\1", text)
    text = _SENTENCE.sub(lambda m: m.group(1) + m.group(2).upper(), text)
    text = text.strip()
    return text[:1].upper() + text[1:]


def expand(rng: random.Random, text: str, slots: dict[str, str]) -> str:
    """Resolve choices innermost first, then slots, until none is left."""
    while True:
        picked = _CHOICE.sub(lambda m: rng.choice(m.group(1).split("|")), text)
        if picked == text:
            # Only the first slot, so that the choices inside a fragment are free again.
            picked = _SLOT.sub(lambda m: _slot(m.group(1), slots), text)
            if picked == text:
                return text
        text = picked


def _slot(name: str, slots: dict[str, str]) -> str:
    if name in slots:
        return slots[name]
    return plots.FRAGMENTS[name]


def make_being(rng: random.Random, kind: str, noun: str | None = None) -> Being:
    """A being of the given kind; ``noun`` fixes the animal or job."""
    male = rng.random() < 0.5
    if kind == "c":
        return Being(rng.choice(words.BOYS if male else words.GIRLS), "boy" if male else "girl", male, kind)
    if kind == "g":
        noun = noun or rng.choice(words.GROWN_MEN if male else words.GROWN_WOMEN)
        male = {"king": True, "queen": False, "fisherman": True}.get(noun, male)
        return Being(rng.choice(words.BOYS if male else words.GIRLS), noun, male, kind)
    noun = noun or rng.choice(words.FANTASY if kind == "m" else words.ANIMALS)
    male = {"cow": False, "hen": False, "lion": True}.get(noun, male)
    if rng.random() < 0.25:
        return Being(rng.choice(words.BOYS if male else words.GIRLS), noun, male, kind)
    return Being(rng.choice(words.PET_NAMES_HE if male else words.PET_NAMES_SHE), noun, male, kind)


def _friend(rng: random.Random, hero: Being) -> Being:
    """A friend that differs in name, noun and (mostly) gender, so pronouns stay clear."""
    if hero.kind == "c":
        kind = rng.choice("ccca")
    elif hero.kind == "g":
        kind = rng.choice("ga")
    elif hero.kind == "m":
        kind = rng.choice("cam")
    else:
        kind = "a"
    while True:
        noun = rng.choice(words.FOREST_FOLK) if kind == "a" and rng.random() < 0.7 else None
        friend = make_being(rng, kind, noun)
        same_noun = friend.noun == hero.noun and friend.kind != "c"
        different = friend.name != hero.name and not same_noun
        # The same gender only now and then: two persons called "he" are hard to tell apart.
        if different and (friend.male != hero.male or rng.random() < 0.15):
            return friend


def _describe(rng: random.Random, being: Being) -> str:
    """Indefinite introduction, e.g. ``a small brown rabbit``."""
    words_before = [rng.choice(words.SIZES), rng.choice(words.TRAITS)]
    if being.kind == "a" and rng.random() < 0.3:
        words_before[1] = rng.choice(["brown", "white", "gray", "black"])
    if being.kind == "g":
        words_before = [rng.choice(["old", "young", "kind", "tall", "poor"])]
    chosen = words_before[: rng.choice([1, 1, 2])] if rng.random() < 0.7 else words_before[1:]
    return with_articles(f"a {' '.join([*chosen, being.noun])}")


def _cast_slots(rng: random.Random, hero: Being, friend: Being) -> dict[str, str]:
    """All slots that stay the same within one story."""
    toys = rng.sample(words.TOYS, 3)
    places = rng.sample(words.PLACES, 2)
    spots = rng.sample(words.HIDING_SPOTS, 2)
    traits = rng.sample(words.TRAITS, 2)
    used = {hero.noun, friend.noun}
    animal = rng.choice([a for a in words.ANIMALS if a not in used])
    parent = rng.choice(
        ["mom", "mom", "dad", "dad", "grandma", "grandpa", "mother", "father", "aunt", "uncle"]
    )
    parent_he = "he" if parent in {"dad", "grandpa", "father", "uncle"} else "she"
    wild = hero.kind == "a"
    described = _describe(rng, friend)
    slots = {
        "h": hero.name, "noun": hero.noun, "f": friend.name, "fnoun": friend.noun,
        "fintro": described, "fintroC": described[0].upper() + described[1:],
        "p": parent, "phe": parent_he, "toy": toys[0], "toy2": toys[1],
        "a_toy": with_articles(f"a {rng.choice(words.COLORS)} {toys[2]}"),
        "place": places[0], "place3": places[1], "spot": spots[0], "spot2": spots[1],
        "spot3": rng.choice(words.SEATS),
        "home": rng.choice(words.WILD_HOMES if wild else words.HOMES),
        "home2": rng.choice(["the village", "the little town", "the valley"]) if not wild else "the forest",
        "col": rng.choice(words.COLORS), "food": rng.choice(words.FOODS), "fruit": rng.choice(words.FRUITS),
        "animal": animal, "trait": traits[0], "trait2": traits[1], "weather": rng.choice(words.WEATHER),
        "small": rng.choice(words.SMALL_THINGS), "skill": rng.choice(plots.SKILLS),
        "wear": rng.choice(["hat", "scarf"]), "size": rng.choice(words.SIZES),
        "his_p": f"my {parent}", "all_day2": "{for a long time|until the moon went down}",
        "looked_down": "{looked at the floor|looked down at <his> feet|was quiet for a moment}",
        "was_surprised": "{was very surprised|could not believe it|almost fell into the water}",
        "fwas_glad": "{was very happy|smiled|felt much better|was so glad}",
        "thanks2": "{Thank you so much!|Thank you, <f>!|You are a good friend!}",
    }  # fmt: skip
    slots.update(hero.pronouns(""))
    slots.update(friend.pronouns("f"))
    return slots


def _plot_text(rng: random.Random, kind: str) -> tuple[str, str]:
    fitting = [(lesson, text) for kinds, lesson, text in plots.PLOTS.values() if kind in kinds]
    lesson, text = rng.choice(fitting)
    return lesson, text.strip()


def _ending(rng: random.Random, lesson: str) -> str:
    parts = [rng.choice(["<end_home>", "<end_friends>"])] if rng.random() < 0.75 else []
    if lesson and (not parts or rng.random() < 0.6):
        parts.insert(rng.randrange(len(parts) + 1), plots.LESSONS[lesson])
    return " ".join([*parts, "<close>"]).strip()


def story(
    rng: random.Random, kind: str | None = None, noun: str | None = None, name: str | None = None
) -> str:
    """One whole story; kind, noun and name may be fixed by the caller."""
    kind = kind or rng.choices("cagm", weights=[44, 36, 12, 8])[0]
    hero = make_being(rng, kind, noun)
    if name is not None:
        hero = Being(name, hero.noun, name in words.BOYS, kind)
    friend = _friend(rng, hero)
    slots = _cast_slots(rng, hero, friend)
    lesson, plot = _plot_text(rng, kind)
    opening = rng.choice(plots.CHILD_OPENINGS[:4] if rng.random() < 0.5 else plots.CHILD_OPENINGS)
    if rng.random() < 0.35:
        opening += " " + rng.choice(plots.ASIDES)
    parts = [opening, plot]
    if rng.random() < 0.2:
        parts.append(rng.choice(plots.SECOND_DAY))
    parts.append(_ending(rng, lesson))
    text = expand(rng, "\n\n".join(parts), slots)
    paragraphs = [tidy(" ".join(part.split())) for part in text.split("\n\n") if part.strip()]
    return ("\n" if rng.random() < 0.5 else " ").join(paragraphs)


if __name__ == "__main__":
    demo = random.Random(0)
    for _ in range(6):
        print(story(demo), end="\n\n")
