"""Families of two or three parts, where each part takes another skill and needs the result of the part before."""

from __future__ import annotations

from datetime import date, timedelta
from random import Random

from policy.simulators.arena.families.family import (
    NAMES,
    WORDS,
    Family,
    Part,
    Values,
    as_date,
    draw_date,
    draw_rows,
    numbers,
    phrasings,
    rows,
    spoken,
)


def _lookup(v: Values, _before: str) -> str:
    return rows(v["rows"])[v["thing"]][0]


def _weekday(v: Values, _before: str) -> str:
    return f"{as_date(v['date']):%A}"


def _change(rng: Random) -> dict[str, str]:
    table = draw_rows(rng, 3, 60)
    prices = rows(table)
    thing, count = rng.choice(list(prices)), rng.randint(3, 15)
    paid = int(prices[thing][0]) * count + rng.randint(1, 200)
    return {"rows": table, "thing": thing, "who": rng.choice(NAMES), "n1": str(count), "n2": str(paid)}


def _freight(rng: Random) -> dict[str, str]:
    table = draw_rows(rng, 3, 90)
    return {"rows": table, "thing": rng.choice(list(rows(table)))}


def _pieces(rng: Random) -> dict[str, str]:
    table = draw_rows(rng, 3, 40, n=4)
    return {"rows": table, "thing": rng.choice(list(rows(table))), "n": rng.choice(["4", "5", "10", "20", "25", "50"])}


def _cups(rng: Random) -> dict[str, str]:
    return {"n1": str(rng.randint(3, 60)), "n2": rng.choice(["100", "125", "200", "250", "500"])}


def _day_name(rng: Random) -> dict[str, str]:
    return {"date": spoken(draw_date(rng))}


def _podium(rng: Random) -> dict[str, str]:
    return {"nums": ", ".join(map(str, rng.sample(range(5, 99), 6)))}


def _mirror_sort(rng: Random) -> dict[str, str]:
    return {"words": ", ".join(rng.sample(WORDS, 3))}


def _rent(rng: Random) -> dict[str, str]:
    start = draw_date(rng)
    end = start + timedelta(days=rng.randint(9, 90))
    return {"who": rng.choice(NAMES), "date1": spoken(start), "date2": spoken(end), "n": str(rng.randint(3, 40))}


def _launch(rng: Random) -> dict[str, str]:
    goods = [row.split(": ")[0] for row in draw_rows(rng, 3, 60, n=3).split("; ")]
    table = "; ".join(f"{good}: {spoken(draw_date(rng))}" for good in goods)
    return {"rows": table, "thing": rng.choice(goods), "n": str(rng.randint(5, 120))}


def _last_word(rng: Random) -> dict[str, str]:
    return {"words": ", ".join(rng.sample(WORDS, 5))}


def _voyage(rng: Random) -> dict[str, str]:
    return {"who": rng.choice(NAMES), "date": spoken(draw_date(rng)), "n": str(24 * rng.randint(3, 60))}


def _later(day: str, days: str) -> str:
    return (as_date(day) + timedelta(days=int(days))).isoformat()


FAMILIES = (
    Family(
        "change",
        "chain",
        _change,
        (
            Part("tables", "number", _lookup),
            Part("arithmetic", "number", lambda v, price: str(int(v["n2"]) - int(v["n1"]) * int(price))),
        ),
        phrasings(
            "Prices in coins: {rows}. {who} buys {n1} bags of {thing} and pays with {n2} coins. How many coins come "
            "back?",
            "With the price sheet {rows}, how much change does {who} get for {n1} bags of {thing} when handing over "
            "{n2} coins?",
        ),
        phrasings(
            "{who} hands {n2} coins to the clerk for {n1} bags of {thing}. The board says {rows}. Tell me the change.",
        ),
    ),
    Family(
        "freight",
        "chain",
        _freight,
        (
            Part("tables", "number", _lookup),
            Part("units", "number", lambda _v, weight: str(int(weight) * 1000)),
        ),
        phrasings(
            "Weights in kilograms: {rows}. What does {thing} weigh in grams? Give the number of grams.",
            "The freight list is in kilograms: {rows}. State the weight of {thing} in grams for the label.",
        ),
        phrasings(
            "Our scale printed these kilograms: {rows}. The customs form wants {thing} in grams; which number goes in?",
        ),
    ),
    Family(
        "pieces",
        "chain",
        _pieces,
        (
            Part("tables", "number", _lookup),
            Part("units", "number", lambda _v, length: str(int(length) * 100)),
            Part("arithmetic", "number", lambda v, length: str(int(length) // int(v["n"]))),
        ),
        phrasings(
            "Tape in metres for each box: {rows}. The tape for {thing} is cut into pieces of {n} centimetres. How many "
            "pieces does that make?",
            "We have tape, in metres: {rows}. If the tape of {thing} is cut every {n} centimetres, how many pieces are "
            "there?",
        ),
        phrasings(
            "Rolls of tape hold these metres: {rows}. Count the strips of {n} centimetres that the roll of {thing} "
            "gives.",
        ),
    ),
    Family(
        "cups",
        "chain",
        _cups,
        (
            Part("units", "number", lambda v, _before: str(int(v["n1"]) * 1000)),
            Part("arithmetic", "number", lambda v, volume: str(int(volume) // int(v["n2"]))),
        ),
        phrasings(
            "A tank holds {n1} litres of juice. How many cups of {n2} millilitres can be filled from the full tank?",
            "From {n1} litres of soup we serve bowls of {n2} millilitres each. How many bowls is that in all?",
        ),
        phrasings(
            "The barrel has {n1} litres inside and one glass takes {n2} millilitres. How many glasses until it is "
            "empty?",
        ),
    ),
    Family(
        "day name",
        "chain",
        _day_name,
        (
            Part("dates", "weekday", _weekday),
            Part("strings", "word", lambda _v, day: day[::-1].upper()),
        ),
        phrasings(
            "Find the day of the week of {date}. Then write the name of that day backwards in capital letters.",
            "On what day of the week falls {date}? Give its name with the letters turned around, in capitals.",
        ),
        phrasings(
            "Which weekday was {date}? Read its name from right to left and print that in capitals, please.",
        ),
    ),
    Family(
        "podium",
        "chain",
        _podium,
        (
            Part("lists", "list", lambda v, _before: ", ".join(map(str, sorted(numbers(v["nums"]), reverse=True)[:3]))),
            Part("arithmetic", "number", lambda _v, top: str(sum(numbers(top)))),
        ),
        phrasings(
            "Pick the three largest of the numbers {nums} and then add them up. What is the sum?",
            "The scores are {nums}. Only the best three count. What do these three give together?",
        ),
        phrasings(
            "Out of {nums}, leave everything but the three top values aside and tell me the total of those three.",
        ),
    ),
    Family(
        "mirror sort",
        "chain",
        _mirror_sort,
        (
            Part("strings", "words", lambda v, _before: ", ".join(word[::-1] for word in v["words"].split(", "))),
            Part("lists", "words", lambda _v, words: ", ".join(sorted(words.split(", ")))),
        ),
        phrasings(
            "Write each of the words {words} backwards. Then put the new words in the order of the alphabet, with "
            "commas.",
            "Turn around the letters of each word in {words}, then sort what you get from a to z, with commas.",
        ),
        phrasings(
            "For {words}, read every word from its end, and line the results up by the alphabet, commas in between.",
        ),
    ),
    Family(
        "rent",
        "chain",
        _rent,
        (
            Part("dates", "number", lambda v, _before: str((as_date(v["date2"]) - as_date(v["date1"])).days)),
            Part("arithmetic", "number", lambda v, days: str(int(days) * int(v["n"]))),
        ),
        phrasings(
            "{who} rents a boat from {date1} until {date2} and pays {n} coins a day. What is the price in all?",
            "A room costs {n} coins for each day. {who} stays from {date1} to {date2}. How many coins is that?",
        ),
        phrasings(
            "Parking costs {n} coins daily. The car of {who} stood there between {date1} and {date2}. What is the "
            "bill?",
        ),
    ),
    Family(
        "launch",
        "chain",
        _launch,
        (
            Part("tables", "date", lambda v, _before: date.isoformat(as_date(_lookup(v, "")))),
            Part(
                "dates",
                "date",
                lambda v, day: (date.fromisoformat(day) + timedelta(days=int(v["n"]))).isoformat(),
            ),
        ),
        phrasings(
            "Packing days: {rows}. The good {thing} keeps for {n} days after packing. When is it bad (YYYY-MM-DD)?",
            "We packed on these days: {rows}. Add {n} days to the day of {thing} and write it as YYYY-MM-DD.",
        ),
        phrasings(
            "The log of packing reads {rows}. A check is due {n} days after that of {thing}: on what day (YYYY-MM-DD)?",
        ),
    ),
    Family(
        "last word",
        "chain",
        _last_word,
        (
            Part("lists", "word", lambda v, _before: sorted(v["words"].split(", "))[-1]),
            Part("strings", "word", lambda _v, word: word[::-1].upper()),
        ),
        phrasings(
            "Sort {words} by the alphabet and take the last word. Write that word backwards in capital letters.",
            "Among the words {words}, find the one that comes last from a to z, and spell it backwards in capitals.",
        ),
        phrasings(
            "In a dictionary, one of {words} stands behind all the others. Print it from right to left, in capitals.",
        ),
    ),
    Family(
        "voyage",
        "chain",
        _voyage,
        (
            Part("units", "number", lambda v, _before: str(int(v["n"]) // 24)),
            Part("dates", "date", lambda v, days: _later(v["date"], days)),
        ),
        phrasings(
            "{who} leaves on {date} and travels for {n} hours without a stop. On which day does the trip end "
            "(YYYY-MM-DD)?",
            "A test starts on {date} and takes {n} hours. On what day can {who} stop it? Write it as YYYY-MM-DD.",
        ),
        phrasings(
            "The glue of {who} needs {n} hours to dry and was put on at noon of {date}. When is it dry (YYYY-MM-DD)?",
        ),
    ),
)
