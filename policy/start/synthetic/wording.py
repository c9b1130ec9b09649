"""Wording of training questions: other sentences for the arena's questions, noise, and questions of no kind it knows.

A conductor must not know a kind of question by two sentences. Three things vary: some twenty sentences for each kind,
other words for the plain ones in them (`reword`), and words that are lost (`add_noise`). The arena's workers cannot
read these; labels come from the question as the arena wrote it. No sentence shares four words in a row with a held-out
phrasing of the arena, before or after its words are exchanged (tests/policy/test_start_synthetic.py).

The sentences and words are data: `phrases/*.toml`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib.resources import files
from random import Random
from string import Formatter
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from policy.simulators.arena.families.family import Family
from policy.simulators.arena.families.tasks import FAMILIES, Problem, understand

Message = dict[str, Any]

EXCHANGED_SHARE = 0.6  # of reworded questions have some of their plain words exchanged
EXCHANGED_MAX = 0.6  # of the words that have others, at most
NOISY_SHARE = 0.5  # of arena questions lose or swap some words, so that no single word gives a kind away
DROP_MAX = 0.4  # of the plain words of a noisy question, at most
SYSTEM_SHARE, EARLIER_SHARE, WRAPPED_SHARE = 0.12, 0.04, 0.15
OPTIONAL_SLOTS = {"who", "who1"}  # names; a sentence may do without them


# ---------------------------------------------------------------- the data


def _lines(text: str) -> tuple[str, ...]:
    return tuple(text.strip().splitlines())


def _different(values: tuple[str, ...]) -> tuple[str, ...]:
    if not values or len(set(values)) < len(values):
        raise ValueError("must hold lines, each once")
    return values


Lines = Annotated[tuple[str, ...], BeforeValidator(_lines), AfterValidator(_different)]
Words = Annotated[
    tuple[str, ...], BeforeValidator(str.split), Field(min_length=1)
]  # a word twice is drawn twice as often


class Phrases(BaseModel):
    """`phrases/words.toml`. A line of `exchanges` is a group of words that may stand for each other in a question:
    grammar may suffer, the kind of question may not."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    two_questions: Lines
    exchanges: Lines
    filler: Words
    topics: Words
    openers: Lines
    closers: Lines
    systems: Lines
    short: Lines
    long: tuple[str, ...]


def _content(name: str) -> dict[str, Any]:
    return tomllib.loads(files("policy.start.synthetic").joinpath("phrases", name).read_text(encoding="utf-8"))


def sentences_of(families: tuple[Family, ...], contents: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """The sentences of each family by its name. Raises ValueError on a family that lacks them, on an unknown one, and
    on a sentence whose slots are not those of its family's own phrasings."""
    if different := {family.name for family in families} ^ set(contents):
        raise ValueError(f"phrases: families that are not in both the arena and the files: {sorted(different)}")
    sentences = {family.name: _different(_lines(contents[family.name])) for family in families}
    for family in families:
        slots = {slot for phrasing in family.train for slot in _slots(phrasing.pattern)}
        for sentence in sentences[family.name]:
            if not slots - OPTIONAL_SLOTS <= _slots(sentence) <= slots:
                raise ValueError(f"phrases: {family.name}: {sentence!r} must use the slots {sorted(slots)}")
    return sentences


def _slots(pattern: str) -> set[str]:
    return {slot for _, slot, _, _ in Formatter().parse(pattern) if slot}


def _others(groups: tuple[tuple[str, ...], ...]) -> dict[str, tuple[str, ...]]:
    return {
        word: tuple({other: None for group in groups if word in group for other in group if other != word})
        for word in sorted({word for group in groups for word in group})
    }


SENTENCES: Mapping[str, tuple[str, ...]] = sentences_of(
    FAMILIES, _content("singles.toml") | _content("chains.toml") | _content("hard.toml")
)
PHRASES = Phrases.model_validate(_content("words.toml"))
OTHERS: Mapping[str, tuple[str, ...]] = _others(tuple(tuple(line.split()) for line in PHRASES.exchanges))


# ---------------------------------------------------------------- questions of the arena


def reword(rng: Random, text: str) -> str:
    """An arena question in another wording of the same meaning; a text of no known kind as it is."""
    problem = understand(text)
    if problem is None:
        return text
    if problem.parts:
        first, second = (_sentence(rng, part) for part in problem.parts[:2])
        return rng.choice(PHRASES.two_questions).format(a=first, b=second)
    return _sentence(rng, problem)


def _sentence(rng: Random, problem: Problem) -> str:
    family = problem.family
    if family is None:
        return ""
    own = [phrasing.pattern for phrasing in family.train]
    return exchange_words(rng, rng.choice([*own, *SENTENCES[family.name]])).format_map(problem.slots)


def exchange_words(rng: Random, pattern: str) -> str:
    """The sentence with some of its plain words exchanged for others of their group; slots and signs stay."""
    if rng.random() >= EXCHANGED_SHARE:
        return pattern
    rate = rng.uniform(0.0, EXCHANGED_MAX)
    return " ".join(_other(rng, word) if rng.random() < rate else word for word in pattern.split(" "))


def _other(rng: Random, word: str) -> str:
    plain = word.rstrip(".,?:;")
    others = OTHERS.get(plain)
    return rng.choice(others) + word[len(plain) :] if others else word


# ---------------------------------------------------------------- noise, and other questions


def add_noise(rng: Random, text: str) -> str:
    """The text with some plain words dropped, or others put in their place. Names, numbers and lists stay."""
    if rng.random() >= NOISY_SHARE:
        return text
    rate = rng.uniform(0.0, DROP_MAX)
    words: list[str] = []
    for word in text.split(" "):
        plain = word.isalpha() and word.islower()
        if plain and rng.random() < rate:
            if rng.random() < 0.5:
                words.append(rng.choice(PHRASES.filler))
        else:
            words.append(word)
    return " ".join(words)


def add_courtesy(rng: Random, text: str) -> str:
    """The text, sometimes with a greeting before it or thanks behind it."""
    if rng.random() >= WRAPPED_SHARE:
        return text
    if rng.random() < 0.5:
        return f"{rng.choice(PHRASES.openers)} {text}"
    return f"{text} {rng.choice(PHRASES.closers)}"


def conversation(rng: Random, text: str) -> list[Message]:
    """The text as the last user message, sometimes behind a system message or an earlier exchange."""
    messages: list[Message] = []
    if rng.random() < SYSTEM_SHARE:
        messages.append({"role": "system", "content": rng.choice(PHRASES.systems)})
    if rng.random() < EARLIER_SHARE:
        messages.append({"role": "user", "content": general_question(rng, long=False)})
        messages.append({"role": "assistant", "content": _filler(rng, 4, 20) + "."})
    return [*messages, {"role": "user", "content": text}]


def general_question(rng: Random, *, long: bool) -> str:
    """A question of none of the arena's kinds: a line, or with `long` a story, a program or an equation."""
    a, b = rng.sample(PHRASES.topics, 2)
    x, y = rng.sample("abcdknpqxyz", 2)
    slots = {f"n{i}": str(rng.randint(2, 10 ** rng.randint(1, 4))) for i in (1, 2, 3)}
    text = rng.choice(PHRASES.long if long else PHRASES.short)
    while "{filler}" in text:
        text = text.replace("{filler}", _filler(rng, 3, 90).capitalize(), 1)
    return text.format(a=a, b=b, x=x, y=y, who=rng.choice(("Sam", "Lucy", "Tom", "Nina", "Raj")), **slots)


def _filler(rng: Random, low: int, high: int) -> str:
    return " ".join(rng.choices(PHRASES.filler, k=rng.randint(low, high)))
