"""Families that one competent worker solves in one call: two of each of the six everyday skills."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from random import Random

from policy.simulators.arena.families.family import (
    NAMES,
    THINGS,
    UNITS,
    WORDS,
    Family,
    Kind,
    Part,
    Values,
    as_date,
    draw_date,
    draw_rows,
    factor,
    numbers,
    phrasings,
    rows,
    spoken,
)


def _crates(rng: Random) -> dict[str, str]:
    size, count = rng.randint(6, 48), rng.randint(5, 40)
    lost = rng.randint(1, size * count // 2)
    return {
        "who": rng.choice(NAMES),
        "thing": rng.choice(THINGS),
        "n1": str(size),
        "n2": str(count),
        "n3": str(lost),
    }


def _shares(rng: Random) -> dict[str, str]:
    friends, each = rng.randint(3, 12), rng.randint(8, 60)
    first = rng.randint(2, friends * each - 2)
    return {"who": rng.choice(NAMES), "n1": str(first), "n2": str(friends * each - first), "n3": str(friends)}


def _convert(rng: Random) -> dict[str, str]:
    big, small, _ = rng.choice(UNITS)
    return {"n1": str(rng.randint(2, 90)), "unit1": big, "unit2": small}


def _mixed(rng: Random) -> dict[str, str]:
    big, small, count = rng.choice(UNITS)
    return {"n1": str(rng.randint(2, 40)), "unit1": big, "n2": str(rng.randint(1, count - 1)), "unit2": small}


def _deadline(rng: Random) -> dict[str, str]:
    return {"who": rng.choice(NAMES), "date": spoken(draw_date(rng)), "n": str(rng.randint(9, 200))}


def _gap(rng: Random) -> dict[str, str]:
    start = draw_date(rng)
    return {"date1": spoken(start), "date2": spoken(start + timedelta(days=rng.randint(12, 400)))}


def _cell(rng: Random) -> dict[str, str]:
    table = draw_rows(rng, 3, 99, columns=2)
    return {"rows": table, "thing": rng.choice(list(rows(table)))}


def _highest(rng: Random) -> dict[str, str]:
    return {"rows": draw_rows(rng, 3, 99, columns=2)}


def _backwards(rng: Random) -> dict[str, str]:
    return {"word": rng.choice(WORDS)}


def _swap(rng: Random) -> dict[str, str]:
    word = rng.choice(WORDS)
    old = rng.choice(word)
    return {"word": word, "letter1": old, "letter2": rng.choice([c for c in "aeioumnst" if c != old])}


def _sorting(rng: Random) -> dict[str, str]:
    return {"nums": ", ".join(map(str, rng.sample(range(2, 99), 6)))}


def _evens(rng: Random) -> dict[str, str]:
    numbers = [2 * n for n in rng.sample(range(1, 49), 3)] + [2 * n + 1 for n in rng.sample(range(1, 49), 3)]
    rng.shuffle(numbers)
    return {"nums": ", ".join(map(str, numbers))}


def _one(skill: str, kind: Kind, solve: Callable[[Values], str]) -> tuple[Part, ...]:
    return (Part(skill, kind, lambda v, _before: solve(v)),)


FAMILIES = (
    Family(
        "crates",
        "single",
        _crates,
        _one("arithmetic", "number", lambda v: str(int(v["n1"]) * int(v["n2"]) - int(v["n3"]))),
        phrasings(
            "Each crate holds {n1} {thing}. {who} fills {n2} crates and then gives away {n3} {thing}. How many {thing} "
            "does {who} still have?",
            "{who} packs {n2} boxes with {n1} {thing} in each box. Later {n3} {thing} are sold. How many {thing} are "
            "left?",
            "There are {n2} shelves and every shelf carries {n1} {thing}. If {who} takes {n3} {thing} home, what is "
            "the number that stays?",
        ),
        phrasings(
            "Before the trip {who} had {n2} full bags with {n1} {thing} in every bag, but {n3} {thing} got lost on "
            "the way. Work out how many remain.",
            "{n1} {thing} go into one tray. After {n2} trays were filled, {who} threw {n3} {thing} out. State the "
            "count that was kept.",
        ),
    ),
    Family(
        "shares",
        "single",
        _shares,
        _one("arithmetic", "number", lambda v: str((int(v["n1"]) + int(v["n2"])) // int(v["n3"]))),
        phrasings(
            "{who} earns {n1} coins on Monday and {n2} coins on Tuesday, then shares all the coins equally among {n3} "
            "friends. How many coins does each friend get?",
            "A team of {n3} people splits {n1} coins from {who} and {n2} coins from the bank in equal parts. How many "
            "coins is one part?",
            "{who} won {n1} points and then {n2} points more. The sum is divided evenly over {n3} rounds. How many "
            "points is that for each round?",
        ),
        phrasings(
            "With {n1} coins in one jar and {n2} coins in another, {who} makes {n3} equal piles out of everything. How "
            "big is a pile?",
            "{n3} helpers of {who} are paid the same. The money is {n1} coins plus {n2} coins. What does one helper "
            "receive?",
        ),
    ),
    Family(
        "convert",
        "single",
        _convert,
        _one("units", "number", lambda v: str(int(v["n1"]) * factor(v["unit1"], v["unit2"]))),
        phrasings(
            "Please convert {n1} {unit1} to {unit2}. Only the number in {unit2} is needed, no other words.",
            "A label says {n1} {unit1}, but the form wants {unit2}. What number should be written on the form?",
            "How many {unit2} are there in {n1} {unit1}? Give the amount as a plain number.",
        ),
        phrasings(
            "My notes give a value of {n1} {unit1}. Express the same amount in {unit2} for the report, as a number.",
            "Someone asked for {n1} {unit1} but our scale only shows {unit2}. Which value should it show?",
        ),
    ),
    Family(
        "mixed",
        "single",
        _mixed,
        _one("units", "number", lambda v: str(int(v["n1"]) * factor(v["unit1"], v["unit2"]) + int(v["n2"]))),
        phrasings(
            "Something measures {n1} {unit1} and {n2} {unit2}. What is this in {unit2} alone, as a number?",
            "Write {n1} {unit1} plus {n2} {unit2} as {unit2} only. A plain number is enough here.",
            "The sign reads {n1} {unit1} {n2} {unit2}. Turn the whole amount into {unit2} and give the number.",
        ),
        phrasings(
            "We noted {n1} {unit1} together with {n2} {unit2}. If you had to use just {unit2}, what would the figure "
            "be?",
            "Put {n1} {unit1} and another {n2} {unit2} into one figure counted in {unit2}, and tell me that figure.",
        ),
    ),
    Family(
        "deadline",
        "single",
        _deadline,
        _one("dates", "date", lambda v: (as_date(v["date"]) + timedelta(days=int(v["n"]))).isoformat()),
        phrasings(
            "{who} starts a course on {date} and it ends {n} days later. On which day does it end? Write it as "
            "YYYY-MM-DD.",
            "An order from {date} must be paid within {n} days by {who}. What is the last day, in the form YYYY-MM-DD?",
            "Counting {n} days forward from {date}, when does {who} come back? Use the form YYYY-MM-DD.",
        ),
        phrasings(
            "The lease of {who} began on {date} and runs for {n} days. Name its final day like YYYY-MM-DD.",
            "Exactly {n} days after {date}, {who} will open a shop. Which day is that? Use YYYY-MM-DD please.",
        ),
    ),
    Family(
        "gap",
        "single",
        _gap,
        _one("dates", "number", lambda v: str((as_date(v["date2"]) - as_date(v["date1"])).days)),
        phrasings(
            "How many days pass from {date1} until {date2}? Give the number of days and nothing else.",
            "A ship left on {date1} and arrived on {date2}. For how many days was it out at sea?",
            "The work began on {date1}. It was done on {date2}. How many days lie between the two?",
        ),
        phrasings(
            "Someone slept badly since {date1} and got better on {date2}. Tell me the length of that time in days.",
            "Between {date1} and {date2} the road was closed. What is the length of the closing, counted in days?",
        ),
    ),
    Family(
        "cell",
        "single",
        _cell,
        _one("tables", "number", lambda v: rows(v["rows"])[v["thing"]][1]),
        phrasings(
            "This list gives price and stock of each good: {rows}. What is the stock of {thing}?",
            "Read the store sheet with price first and stock second: {rows}. Find the stock figure of {thing}.",
            "In our sheet each good has its price and then its stock: {rows}. How much stock has {thing}?",
        ),
        phrasings(
            "Below, the first figure is the price and the second is what we hold: {rows}. What do we hold of {thing}?",
            "Goods with price, then stock, are kept as {rows}. Please report the second figure for {thing}.",
        ),
    ),
    Family(
        "highest",
        "single",
        _highest,
        _one("tables", "good", lambda v: max(rows(v["rows"]).items(), key=lambda row: int(row[1][0]))[0]),
        phrasings(
            "This list gives price and stock of each good: {rows}. Which good has the highest price?",
            "Read the store sheet with price first and stock second: {rows}. Name the good with the top price.",
            "In our sheet each good has its price and then its stock: {rows}. Which one is the most costly?",
        ),
        phrasings(
            "Below, the first figure is the price and the second is what we hold: {rows}. What good is the dearest?",
            "Goods with price, then stock, are kept as {rows}. Please report which of them has the largest price.",
        ),
    ),
    Family(
        "backwards",
        "single",
        _backwards,
        _one("strings", "word", lambda v: v["word"][::-1].upper()),
        phrasings(
            'Take the word "{word}", turn its letters around so that the last comes first, and write it in capitals.',
            'Spell "{word}" from its end to its start, using capital letters only, with no blanks between them.',
            'Please write the word "{word}" backwards in capital letters. Give me just the new word.',
        ),
        phrasings(
            'If you look at the sign "{word}" in a mirror, the letters come in the opposite order. Print that in '
            "capitals.",
            'Read "{word}" from right to left and put down what you get, all letters as capitals.',
        ),
    ),
    Family(
        "swap",
        "single",
        _swap,
        _one("strings", "word", lambda v: v["word"].replace(v["letter1"], v["letter2"])),
        phrasings(
            'In the word "{word}" replace every letter {letter1} by the letter {letter2}. What is the new word?',
            'Change each "{letter1}" in "{word}" into "{letter2}" and leave the other letters alone. Write the result.',
            'Somebody typed "{word}" but each {letter1} should have been {letter2}. Write the word as it should be.',
        ),
        phrasings(
            'Wherever "{word}" has the letter {letter1}, put the letter {letter2} in its place. Which word comes out?',
            'My keyboard prints {letter2} when I press {letter1}. I type "{word}". Tell me what shows up on screen.',
        ),
    ),
    Family(
        "sorting",
        "single",
        _sorting,
        _one("lists", "list", lambda v: ", ".join(map(str, sorted(numbers(v["nums"]), reverse=True)))),
        phrasings(
            "Put these numbers in order from large to small: {nums}. Separate them with commas in your reply.",
            "Sort the values {nums} so that the biggest comes first. Reply with the values, separated by commas.",
            "Here are some scores: {nums}. List them all again from best to worst, with commas between.",
        ),
        phrasings(
            "We have to rank {nums} so that the values fall from left to right. Write the ranking with commas.",
            "Given {nums}, arrange the figures in falling order and send them back, commas in between.",
        ),
    ),
    Family(
        "evens",
        "single",
        _evens,
        _one("lists", "list", lambda v: ", ".join(str(n) for n in numbers(v["nums"]) if n % 2 == 0)),
        phrasings(
            "From the numbers {nums} keep only the even ones, in the same order, and drop the odd ones. Use commas.",
            "Which of the values {nums} are even? Keep their order and write them with commas between.",
            "Drop all odd numbers from {nums} and write what is left, in the order given, with commas.",
        ),
        phrasings(
            "Go through {nums} and pick every number that two divides. Do not change the order; use commas.",
            "After the odd entries are struck out of {nums}, what does the list look like? Write it with commas.",
        ),
    ),
)
