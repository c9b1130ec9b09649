"""Families that one call seldom gets right: puzzles (vote over several solvers) and records (draft, then review)."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise, permutations
from random import Random

from policy.simulators.arena.families.family import (
    GOODS,
    NAMES,
    SURNAMES,
    Family,
    Part,
    Values,
    as_date,
    draw_date,
    phrasings,
    spoken,
)


def _race(rng: Random) -> dict[str, str]:
    order = rng.sample(NAMES, 5)
    pairs = list(pairwise(order))
    rng.shuffle(pairs)
    facts = [f"{a} beat {b}" if rng.random() < 0.5 else f"{b} lost to {a}" for a, b in pairs]
    return {"names": ", ".join(sorted(order)), "facts": ", ".join(facts)}


def race_order(v: Values, _before: str = "") -> str:
    """The one finishing order that fits all facts. Raises ValueError unless there is exactly one."""
    return _only_order(v["names"], v["facts"])


@lru_cache(maxsize=4096)
def _only_order(all_names: str, facts: str) -> str:
    names = all_names.split(", ")
    if len(names) > 6:
        raise ValueError("more than six runners")
    before: list[tuple[str, str]] = []
    for fact in facts.split(", "):
        a, _, b = fact.partition(" beat ")
        winner, loser = (a, b) if b else tuple(reversed(fact.split(" lost to ")))
        before.append((winner, loser))
    fits = [p for p in permutations(names) if all(p.index(w) < p.index(x) for w, x in before)]
    if len(fits) != 1:
        raise ValueError("the facts do not fix one order")
    return ", ".join(fits[0])


def _riddle(rng: Random) -> dict[str, str]:
    divisor, modulus = rng.choice([(3, 7), (4, 7), (5, 7), (3, 11), (4, 9), (5, 9), (7, 9), (5, 11)])
    return {
        "n1": str(rng.randint(20, 400)),
        "n2": str(divisor),
        "n3": str(rng.randint(1, modulus - 1)),
        "n4": str(modulus),
    }


def riddle_number(v: Values, _before: str = "") -> str:
    """The least number above n1 that n2 divides and that leaves n3 when divided by n4. Raises ValueError."""
    start, divisor, rest, modulus = (int(v[key]) for key in ("n1", "n2", "n3", "n4"))
    if not (0 < divisor < 100 and 0 < modulus < 100):
        raise ValueError("divisors must lie between 1 and 99")
    for number in range(start + 1, start + divisor * modulus + 1):
        if number % divisor == 0 and number % modulus == rest:
            return str(number)
    raise ValueError("no number fits")


def _bill(rng: Random) -> dict[str, str]:
    return {
        "who1": rng.choice(NAMES),
        "who2": rng.choice(SURNAMES),
        "date": spoken(draw_date(rng)),
        "n": str(rng.randint(120, 99_000)),
    }


def bill_record(v: Values, _before: str = "") -> str:
    """`STONE, A. | 2024-03-12 | 12.50`: surname and initial, day, amount in coins from hundredths."""
    cents = int(v["n"])
    return f"{v['who2'].upper()}, {v['who1'][0]}. | {as_date(v['date']).isoformat()} | {cents // 100}.{cents % 100:02d}"


def _stock(rng: Random) -> dict[str, str]:
    return {"thing": rng.choice(GOODS), "n1": str(rng.randint(1, 99)), "n2": str(rng.randint(105, 9_900))}


def stock_record(v: Values, _before: str = "") -> str:
    """`PLUM | 0042 | 12.50`: name in capitals, count in four digits, price in coins from hundredths."""
    cents = int(v["n2"])
    return f"{v['thing'].upper()} | {int(v['n1']):04d} | {cents // 100}.{cents % 100:02d}"


FAMILIES = (
    Family(
        "race",
        "vote",
        _race,
        (Part("logic", "order", race_order),),
        phrasings(
            "{names} ran a race and nobody tied. We know: {facts}. Who came first, second and so on? Give the full "
            "order.",
            "In a swim meet with {names} the judges noted: {facts}. List all swimmers from winner to last.",
            "These facts are true of a contest among {names}: {facts}. Work out the final order of all of them.",
        ),
        phrasings(
            "After the bike tour of {names} we only heard that {facts}. Rebuild the ranking from the first to the "
            "slowest.",
            "{names} played until all had a place of their own. Reports say {facts}. How does the ranking read?",
        ),
    ),
    Family(
        "riddle",
        "vote",
        _riddle,
        (Part("logic", "number", riddle_number),),
        phrasings(
            "I think of the smallest number above {n1} that can be divided by {n2} and leaves {n3} when divided by "
            "{n4}. Which number is it?",
            "Find the first number greater than {n1} which is a multiple of {n2} and has remainder {n3} after division "
            "by {n4}.",
            "A secret number is larger than {n1}. It is a multiple of {n2}, and it leaves {n3} over {n4}. What is the "
            "least such number?",
        ),
        phrasings(
            "My locker code is the lowest value past {n1} that {n2} divides and that gives remainder {n3} with {n4}. "
            "What is my code?",
            "Going up from {n1}, stop at the first multiple of {n2} for which dividing by {n4} leaves {n3}. Where do "
            "you stop?",
        ),
    ),
    Family(
        "bill",
        "check",
        _bill,
        (Part("format", "record", bill_record),),
        phrasings(
            "Write this bill as one line, SURNAME, I. | YYYY-MM-DD | 0.00: {who1} {who2} must pay {n} cents by {date}.",
            "Make a ledger line like SURNAME, I. | YYYY-MM-DD | 0.00 from this note: on {date}, {who1} {who2} owes {n} "
            "cents.",
        ),
        phrasings(
            "Our books need the pattern SURNAME, I. | YYYY-MM-DD | 0.00. Fill it for {who1} {who2}, who paid {n} cents "
            "on {date}.",
        ),
    ),
    Family(
        "stock",
        "check",
        _stock,
        (Part("format", "record", stock_record),),
        phrasings(
            "Write one stock line in the style NAME | 0000 | 0.00 for {n1} bags of {thing} at {n2} cents each.",
            "Fill the label NAME | 0000 | 0.00: the good is {thing}, there are {n1} of them, and one costs {n2} cents.",
        ),
        phrasings(
            "The printer takes NAME | 0000 | 0.00 only. Send it {thing}, with a count of {n1}, priced at {n2} cents.",
        ),
    ),
)
