"""Words around and inside the questions: noise for arena questions, and questions that are none of its kinds."""

from __future__ import annotations

from random import Random
from typing import Any

from policy.simulators.arena.families.phrasing import split_words

Message = dict[str, Any]

NOISY_SHARE = 0.5  # of arena questions lose or swap some words, so that no single word is all that a kind is known by
DROP_MAX = 0.4  # of the plain words of a noisy question, at most
SYSTEM_SHARE, EARLIER_SHARE, WRAPPED_SHARE = 0.12, 0.04, 0.15

FILLER = split_words(
    "about above across after again all almost along also always and any around as away back be because been before "
    "below best between big both box bring but buy call came can card carry case chair change check city class clear "
    "close cold come could country course cut day deep did door down draw drive each early end enough even every eye "
    "face fact far fast feel few field fill final find fire first floor follow food form found four free from front "
    "full game gave get give glad go gold gone good great green ground group grow had half hand hard has have head "
    "hear heat help her here high hold home hope horse hot hour house how idea if in is it job join just keep kind "
    "king know land large last late lay lead learn leave left less let letter life light like line list little live "
    "long look lot love low made mail main make many map mark may mean meet mile mind miss more morning most move much "
    "must name near need never new next night note now number of off often old on once one only open or order other "
    "our out over own page paper park part pass past pay people person place plan play point press print proper put "
    "question quick quite rain ran reach read ready real rest ride right ring river road rock room round row run safe "
    "said same sat saw say school sea second see seem send sent set shape she ship shop short should show side sign "
    "simple since sit size sleep slow small snow so some son song soon sound speak stand star start state stay step "
    "still stone stop store story street strong such sun sure table take talk tell ten than that the their then there "
    "these they thing think this those thought three through time to today told too took top town train travel tree "
    "true try turn two under until up upon us use very visit voice wait walk wall want warm was watch water way we "
    "week well went were what when where which while white who whole why wide will wind wish with word work world "
    "would write year yes yet you young your"
)
OPENERS = ("Hi!", "Please help me.", "Quick question.", "Good morning.", "I need this today.", "Here is my task.")
CLOSERS = ("Thanks!", "Thank you.", "Be brief.", "Reply with the result only.", "No long words please.")
SYSTEMS = ("You are a helpful assistant.", "Be brief.", "Answer in English.", "You work for a small shop.")
TOPICS = split_words(
    "music rivers history bread sailing medicine gardens bridges poetry football history physics cheese trains law "
    "painting weather banks robots chess language birds volcanoes cotton glass marriage taxes sleep networks democracy"
)
SHORT = (
    "Write a short poem about {a}.",
    "Explain {a} to a child of eight.",
    "What do {a} and {b} have in common?",
    "Translate into French: we talked about {a} all {b} long.",
    "Give me five good names for a shop that sells {a}.",
    "Hello, how are you?",
    "Summarise the main ideas behind {a} in three sentences.",
    "Is it true that {a} was invented before {b}? Answer yes or no.",
    "Write a polite email to my landlord about {a}.",
    "Fix this sentence: me and him was talking of {a}.",
    "Who wrote the first book about {a}?",
    "Plan a lesson on {a} and {b} for beginners.",
)
LONG = (
    "{who} sells {n1} {a} in April and half as many in May. Each one costs ${n2}. {who} also pays ${n3} for {b} every "
    "month and saves the rest. {filler}. How many dollars are left altogether?",
    "You are given the function below. What does it return?\n\ndef f({x}, {y}):\n    out = []\n"
    "    for i in range({n1}):\n        if i % {n2} == 0:\n            out.append({x} + {y} * i)\n"
    "    return out[{n3} % len(out)]\n\n{filler}.",
    "Let $f({x}) = {n1}{x}^2 + {n2}{x} - {n3}$. Find the sum of all {y} such that $f(f({y})) = 0$. {filler}. Reason "
    "step by step, then give the answer in a JSON object with `reasoning` and `answer`.",
    "Read the text and answer the question at its end.\n{filler}.\n{filler}.\nWhat does the text say about {a}?",
)  # fmt: skip


def noisy(rng: Random, text: str) -> str:
    """The text with some plain words dropped, or others put in their place. Names, numbers and lists stay."""
    if rng.random() >= NOISY_SHARE:
        return text
    rate = rng.uniform(0.0, DROP_MAX)
    words: list[str] = []
    for word in text.split(" "):
        plain = word.isalpha() and word.islower()
        if plain and rng.random() < rate:
            if rng.random() < 0.5:
                words.append(rng.choice(FILLER))
        else:
            words.append(word)
    return " ".join(words)


def wrapped(rng: Random, text: str) -> str:
    """The text with a greeting before it or thanks behind it, now and then."""
    if rng.random() < WRAPPED_SHARE:
        return f"{rng.choice(OPENERS)} {text}" if rng.random() < 0.5 else f"{text} {rng.choice(CLOSERS)}"
    return text


def conversation(rng: Random, text: str) -> list[Message]:
    """The text as the last user message, sometimes behind a system message or an earlier exchange."""
    messages: list[Message] = []
    if rng.random() < SYSTEM_SHARE:
        messages.append({"role": "system", "content": rng.choice(SYSTEMS)})
    if rng.random() < EARLIER_SHARE:
        messages.append({"role": "user", "content": general(rng, long=False)})
        messages.append({"role": "assistant", "content": _filler(rng, 4, 20) + "."})
    return [*messages, {"role": "user", "content": text}]


def general(rng: Random, long: bool) -> str:
    """A question of none of the arena's kinds: a line, or with `long` a story, a program or an equation."""
    a, b = rng.sample(TOPICS, 2)
    x, y = rng.sample("abcdknpqxyz", 2)
    slots = {f"n{i}": str(rng.randint(2, 10 ** rng.randint(1, 4))) for i in (1, 2, 3)}
    text = rng.choice(LONG if long else SHORT)
    while "{filler}" in text:
        text = text.replace("{filler}", _filler(rng, 3, 90).capitalize(), 1)
    return text.format(a=a, b=b, x=x, y=y, who=rng.choice(("Sam", "Lucy", "Tom", "Nina", "Raj")), **slots)


def _filler(rng: Random, low: int, high: int) -> str:
    return " ".join(rng.choices(FILLER, k=rng.randint(low, high)))
