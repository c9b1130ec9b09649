"""Long prose: a briefing from notes. A right one has every note's figure and no other; a wrong one leaves one out or
gets one wrong. `is_faithful` is the truth, read from the texts alone; the scripted judge reads them the same way."""

from __future__ import annotations

import re
from random import Random

from bench.work.tasks import WorkTask

RUBRIC = "Every figure of the notes is in the briefing, and no other figure is."
NOTES: dict[str, tuple[str, str, str]] = {  # label → how a briefing puts it
    "residents": (
        "The place counts {} residents at the last survey.",
        "By the last survey {} people live here, most of them close to the river.",
        "With {} residents it is neither a village any more nor quite a city.",
    ),
    "homes": (
        "They live in {} homes, many of them terraced.",
        "There are {} homes, and the older streets are the sought-after ones.",
        "The register of buildings lists {} homes.",
    ),
    "schools' pupils": (
        "The schools teach {} pupils between them.",
        "Some {} pupils go to school here every morning, and the buses are planned around them.",
        "School rolls add up to {} pupils.",
    ),
    "buses a day": (
        "On a working day {} buses leave the station.",
        "The timetable has {} buses a day, which is more than the neighbours can say.",
        "Buses are the usual way to work, with {} departures a day.",
    ),
    "trees": (
        "The parks department looks after {} trees.",
        "Visitors remark on the trees, of which the town counts {}.",
        "A census of trees, finished in spring, came to {}.",
    ),
    "litres of water a day": (
        "The waterworks deliver {} litres a day, with room to spare in a wet year.",
        "Demand for water stands at {} litres a day.",
        "Pipes and pumps are built for more than the {} litres a day that are used.",
    ),
    "tonnes of waste a year": (
        "Each year {} tonnes of waste are collected, a good part of it for reuse.",
        "Waste comes to {} tonnes a year, a figure that has hardly moved.",
        "The depot weighs in {} tonnes of waste a year.",
    ),
    "euros for roads": (
        "The budget sets {} euros aside for roads.",
        "For roads the council has voted {} euros, to be spent before winter.",
        "Repairs to roads have a budget of {} euros.",
    ),
}
TITLES = ("Where the town stands", "A briefing for new members", "The town in figures", "What to know before the vote")
FILLERS = (
    "None of this is new to people who have lived here for long, but it is worth setting down in one place.",
    "Whoever walks from the station to the market sees most of it within a quarter of an hour.",
    "The committee asked for plain language, and this paragraph tries to keep to that.",
    "Neighbouring towns have taken other decisions, for reasons of their own.",
    "It would be wrong to read too much into a single season, so the trend is left to a later paper.",
    "Much depends on how the next years go, and nobody here claims to know that.",
    "The old quarter keeps its shape, and newer streets have grown around it in rings.",
    "Several of these matters come before the council again in autumn, when the accounts are closed.",
    "People who moved here lately tend to name the market and the river as their reasons.",
    "A good deal of the work is done by volunteers, whose hours appear in none of the books.",
)
ENDS = (
    "I hope this briefing is useful.",
    "More detail can be had from the offices named in the annex.",
    "That is where things stand.",
    "Let me know if a shorter version is needed.",
)
NAMES = ("Alder", "Birk", "Carrow", "Dunn", "Esk", "Farrow", "Glen", "Holm")
PLACES = ("bridge", "ford", "haven", "mouth", "stead", "wick")
_FIGURE = re.compile(r"\d[\d,]*\d|\d")
_NOTE = re.compile(r"^- (.+): ([\d,]+)$", re.MULTILINE)


def prose_task(number: int, seed: int) -> WorkTask:
    """One briefing about a town that nobody knows."""
    draw = Random(f"{seed} prose {number}")
    town = draw.choice(NAMES) + draw.choice(PLACES)
    values = draw.sample(range(1_200, 98_000), len(NOTES))
    figures = {label: f"{value:,}" for label, value in zip(NOTES, values, strict=True)}
    notes = "\n".join(f"- {label}: {figure}" for label, figure in figures.items())
    text = (
        f"Write a briefing about {town} for new members of its council, in several paragraphs of plain prose. Use all "
        f"of these notes, and no other figures:\n\n{notes}"
    )

    def reply(right: bool, words: Random) -> str:
        return _briefing(town, figures if right else _spoilt(figures, words), words)

    return WorkTask(f"prose-{number}", "prose", text, "judge", {"question": text, "rubric": RUBRIC}, reply)


def _spoilt(figures: dict[str, str], words: Random) -> dict[str, str]:
    """The figures with one of them left out or changed."""
    label = words.choice(sorted(figures))
    others = {name: figure for name, figure in figures.items() if name != label}
    changed = f"{int(figures[label].replace(',', '')) + words.randint(3, 900):,}"
    return others if words.random() < 0.5 else {**others, label: changed}


def _briefing(town: str, figures: dict[str, str], words: Random) -> str:
    sentences = [words.choice(NOTES[label]).format(figure) for label, figure in figures.items()]
    words.shuffle(sentences)
    fillers = words.sample(FILLERS, 7)
    parts = [f"{words.choice(TITLES)}: {town}", fillers[0]]
    parts += [" ".join([fillers[at + 1], *sentences[at::3], fillers[at + 4]]) for at in range(3)]
    return "\n\n".join([*parts, words.choice(ENDS)])


def is_faithful(request: str, reply: str) -> bool:
    """Whether a briefing has exactly the figures of the request's notes."""
    noted = {figure for _, figure in _NOTE.findall(request)}
    return bool(noted) and noted == figures_of(reply)


def figures_of(text: str) -> set[str]:
    """The figures that a text states."""
    return set(_FIGURE.findall(text))
