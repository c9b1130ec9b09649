"""More ways to ask what the arena asks, for training only: a kind of question is not to be known by two sentences.

The arena's workers cannot read these; labels come from the question as the arena wrote it. Three things make wording
vary: some twenty sentences for each kind of question, other words for the plain ones in them, and words that are lost
(`questions.noisy`). No sentence shares four words in a row with a held-out phrasing of the arena, before or after its
words are exchanged (tests/policy/test_warmstart.py holds that).
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from policy.simulators.arena.families.phrasing import Values
from policy.simulators.arena.families.tasks import Problem, understand
from policy.start.synthetic.wordings_chain import CHAINS
from policy.start.synthetic.wordings_hard import DOUBLE, HARD
from policy.start.synthetic.wordings_single import SINGLES

MORE: Mapping[str, tuple[str, ...]] = {**SINGLES, **CHAINS, **HARD}
EXCHANGED_SHARE = 0.6  # of reworded questions have some of their plain words exchanged
EXCHANGED_MAX = 0.6  # of the words that have others, at most
# One group a line: words that may stand for each other in a question. Grammar may suffer; the kind of question may not.
GROUPS = tuple(
    tuple(line.split())
    for line in """
        biggest greatest highest maximum
        smallest least lowest minimum tiniest
        total sum altogether overall combined
        add sum total combine join
        how what which
        many much
        give tell say name state show print report return write put provide
        find determine compute calculate work get search deduce
        backwards reversed reverse mirrored inverted flipped
        reverse flip mirror invert turn
        capitals uppercase caps
        letters characters signs
        sort order arrange rank organise line
        sorted ordered arranged ranked
        alphabetical alphabet lexical dictionary
        remain stay rest left remaining over
        list table sheet record register catalogue overview chart
        price cost rate tariff
        stock supply inventory quantity amount
        pays gives hands spends
        buys takes wants purchases orders
        coins euros dollars money
        begins starts opens commences
        ends stops closes finishes
        last final
        first leading
        order sequence ranking
        pieces parts bits chunks sections lengths
        cut split divide slice chop
        fill pour serve
        cups mugs jars bottles bowls portions
        weight mass load
        convert change turn translate transform
        number figure value amount count
        numbers values figures entries
        replace substitute exchange swap change
        word term string
        remove drop discard delete erase
        keep retain save
        each every
        equally evenly fairly alike
        later after past
        need want require
        remainder rest
        divided split
        greater larger higher bigger more
        line row entry record
        style form format shape layout template
        please kindly
        know learn see
        won beat
        questions problems tasks exercises
        answer reply respond
        answers results replies solutions
        both two
        makes gives yields
        long far
        house shop store market
        people persons guests friends children workers
        box crate case carton bag
        sold spent used lost
        trip journey way travel
    """.strip().splitlines()
)
OTHERS: Mapping[str, tuple[str, ...]] = {
    word: tuple({other: None for group in GROUPS if word in group for other in group if other != word})
    for word in sorted({word for group in GROUPS for word in group})
}


def reworded(rng: Random, text: str) -> str:
    """An arena question asked in some other way that means the same; a text of no known kind stays as it is."""
    problem = understand(text)
    if problem is None:
        return text
    if problem.parts:
        first, second = (_written(rng, part) for part in problem.parts[:2])
        return rng.choice(DOUBLE).format(a=first, b=second)
    return _written(rng, problem)


def _written(rng: Random, problem: Problem) -> str:
    values: Values = problem.slots
    family = problem.family
    if family is None:
        return ""
    own = [phrasing.pattern for phrasing in family.train]
    return exchanged(rng, rng.choice([*own, *MORE[family.name]])).format_map(values)


def exchanged(rng: Random, pattern: str) -> str:
    """The sentence with some of its plain words exchanged for others of their group; slots and signs stay."""
    if rng.random() >= EXCHANGED_SHARE:
        return pattern
    rate = rng.uniform(0.0, EXCHANGED_MAX)
    return " ".join(_other(rng, word) if rng.random() < rate else word for word in pattern.split(" "))


def _other(rng: Random, word: str) -> str:
    plain = word.rstrip(".,?:;")
    others = OTHERS.get(plain)
    return rng.choice(others) + word[len(plain) :] if others else word
