"""What a task of any kind is, and short answers: arithmetic with the result in the forms that models write it in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from random import Random
from typing import Any

Form = Callable[[Fraction], str]
OFF = (Fraction(1), Fraction(-1), Fraction(10), Fraction(-10), Fraction(1, 2), Fraction(2))


@dataclass(frozen=True, slots=True)
class WorkTask:
    """One task. `grader` and `reference`: the grader of policy/graders that judges replies, and what it compares with.
    `reply`: a right reply, or a wrong one, in words that are drawn."""

    id: str
    kind: str
    text: str
    grader: str
    reference: Any
    reply: Callable[[bool, Random], str]


def short_task(number: int, seed: int) -> WorkTask:
    """One arithmetic question. Wrong replies are off by a common slip or by a drawn amount."""
    draw = Random(f"{seed} short {number}")
    text, value = draw.choice((_product, _share, _metres, _mean))(draw)
    slips = [value + draw.choice(OFF), value + Fraction(draw.randint(2, 90))]

    def reply(right: bool, words: Random) -> str:
        return _worked(value if right else words.choice(slips), words)

    return WorkTask(f"short-{number}", "short", text, "numeric", str(value), reply)


def _product(draw: Random) -> tuple[str, Fraction]:
    a, b, c = draw.randint(101, 989), draw.randint(12, 89), draw.randint(11, 999)
    return f"What is {a} times {b}, less {c}? Give the number.", Fraction(a * b - c)


def _share(draw: Random) -> tuple[str, Fraction]:
    over, of = draw.choice((4, 5, 8, 16)), draw.randint(11, 399)
    part = draw.randint(1, over - 1)
    return f"How much is {part}/{over} of {of}? Give the exact number.", Fraction(part * of, over)


def _metres(draw: Random) -> tuple[str, Fraction]:
    tenths, metres = draw.randint(11, 199), draw.randint(15, 985)
    question = f"A road of {tenths / 10:g} km is followed by a path of {metres} m. How many metres is that in all?"
    return question, Fraction(tenths * 100 + metres)


def _mean(draw: Random) -> tuple[str, Fraction]:
    values = [draw.randint(10, 500) for _ in range(4)]
    return f"What is the mean of {', '.join(map(str, values))}? Give the exact number.", Fraction(sum(values), 4)


def _decimal(value: Fraction) -> str:
    return f"{float(value):.4f}".rstrip("0").rstrip(".")


def _thousands(value: Fraction) -> str:
    return f"{int(value):,}" if value.denominator == 1 else _decimal(value)


def _ratio(value: Fraction) -> str:
    return str(value)  # 75/4


FORMS: tuple[Form, ...] = (_decimal, _thousands, _ratio)
ENDS = ("Answer: {}", "The answer is {}.", r"\boxed{{{}}}", "**{}**", "<answer>{}</answer>")


def _worked(value: Fraction, words: Random) -> str:
    opening = words.choice(("Let me work it out step by step.", "First the parts, then the whole.", "A short sum."))
    return f"{opening}\n\n{words.choice(ENDS).format(words.choice(FORMS)(value))}"
