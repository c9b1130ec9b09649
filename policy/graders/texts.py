r"""Graders of a final answer: exact, numeric, choice. Pure and total over replies; none of them guesses.

The answer is what `core/loop/replies/answers.py` extracts, so that a vote counts what a grader compares. Known traps,
each with a test: `$18.90`, `\boxed{…}`, `1,234`, `12{,}345`, `−3`, `3/4` and `\frac{3}{4}`, `50\%`, `(B) Paris`, "B or
C", the article in "A dog".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from gateway.core.loop.replies.answers import extract_answer, normalise
from policy.graders.base import BadReference, Judged, fields, shorten

# ---------------------------------------------------------------- exact

EXACT_WANTED = 'the right answer as text, or a list of right answers, e.g. ["NYC", "New York City"]'


def exact_reference(reference: object) -> frozenset[str]:
    """Normalised right answers. Raises BadReference."""
    references = reference if isinstance(reference, list | tuple) else [reference]
    texts = [text for text in references if isinstance(text, str) and text.strip()]
    if not texts or len(texts) != len(references):
        raise BadReference(f"exact needs {EXACT_WANTED}")
    return frozenset(normalise(_boxed(text)) for text in texts)


def _boxed(text: str) -> str:
    return extract_answer(text) if text.strip().startswith("\\boxed{") else text


def exact(right: frozenset[str], reply: str) -> Judged:
    """1 where the reply's final answer is one of the right ones, case, quotes, currency and separators aside."""
    answer = extract_answer(reply)
    return float(normalise(answer) in right), f"answered `{shorten(answer)}`"


# ---------------------------------------------------------------- numeric

NUMERIC_WANTED = 'a number ("18.90", "3/4") or {"value": "3.14159", "abs_tol": 0.001, "rel_tol": 0}'
_NUMBER = r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][+-]?\d{1,3})?|[+-]?\.\d+(?:[eE][+-]?\d{1,3})?"
_FRACTION = re.compile(rf"(?<![\w.,^])(?P<top>{_NUMBER})\s*/\s*(?P<bottom>\d+(?:\.\d+)?)(?![\d/]|\.\d)")
_LATEX_FRACTION = re.compile(r"([+-]?)\\[dt]?frac\{([+-]?\d+)\}\{(\d+)\}")
_SIMPLE = re.compile(rf"(?<![\w.,^])(?:{_NUMBER})(?![\d]|[.,]\d)")
_TOLERANCE_MAX = 1e12
_ANSWER_CHARS_MAX = 1_000  # a number is shorter; bounds the patterns' work


@dataclass(frozen=True, slots=True)
class NumericReference:
    """The right number and how near is near enough: |x − value| ≤ max(abs_tol, rel_tol·|value|)."""

    value: Fraction
    abs_tol: Fraction
    rel_tol: Fraction


def numeric_reference(reference: object) -> NumericReference:
    """Raises BadReference."""
    values = fields(reference, ("value", "abs_tol", "rel_tol"), NUMERIC_WANTED)
    value = values.get("value")
    text = str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else ""
    numbers = numbers_in(text) if len(text) <= _ANSWER_CHARS_MAX else []
    if len(set(numbers)) != 1:
        raise BadReference(f"numeric needs {NUMERIC_WANTED}")
    return NumericReference(numbers[0], _tolerance(values, "abs_tol"), _tolerance(values, "rel_tol"))


def _tolerance(values: Mapping[str, object], key: str) -> Fraction:
    value = values.get(key, 0)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= _TOLERANCE_MAX:
        raise BadReference(f"`{key}` must be a number ≥ 0")
    return Fraction(str(value))


def numbers_in(text: str) -> list[Fraction]:
    """Every number a text states, in order, exactly. A fraction is one number; `1.2.3` and `18,90` are none, for they
    may mean two things."""
    text = text.replace("−", "-").replace("{,}", ",").replace("\\$", "$")
    text = re.sub(r"\\[,!;: ]|(?<=\d)[\u00a0\u2009\u202f](?=\d{3}(?!\d))", "", text)
    text = _LATEX_FRACTION.sub(lambda m: f" {m[1]}{m[2]}/{m[3]} ", text)
    text = re.sub(r"([+-])\s*[$€£]\s*", r"\1", text)
    numbers: list[tuple[int, Fraction]] = []

    def take(match: re.Match[str]) -> str:
        bottom = Fraction(match["bottom"])
        if bottom:
            numbers.append((match.start(), _plain(match["top"]) / bottom))
        return " " * len(match[0])

    rest = _FRACTION.sub(take, text)
    numbers += [(match.start(), _plain(match[0])) for match in _SIMPLE.finditer(rest)]
    return [number for _, number in sorted(numbers, key=lambda item: item[0])]


def _plain(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))


def numeric(right: NumericReference, reply: str) -> Judged:
    """1 where the final answer states one number, near enough to the right one. After the last `=` or `≈` only; several
    different numbers are no answer; `%` and units do not scale."""
    answer = extract_answer(reply)
    if len(answer) > _ANSWER_CHARS_MAX:
        return 0.0, "the final answer is too long to be a number"
    stated = set(numbers_in(re.split(r"[=≈]", answer)[-1]))
    if len(stated) != 1:
        return 0.0, f"{'several numbers' if stated else 'no number'} in `{shorten(answer)}`"
    off = abs(stated.pop() - right.value)
    return float(off <= max(right.abs_tol, right.rel_tol * abs(right.value))), f"answered `{shorten(answer)}`"


# ---------------------------------------------------------------- choice

CHOICE_WANTED = 'the letter of the right option ("B") or {"answer": "B", "options": {"A": "Rome", "B": "Paris"}}'
_LETTER = re.compile(
    r"""(?i:(?:the\s+)?(?:option|choice|answer)\s+)?
    (?: [(\[](?P<bracketed>[A-Ja-j])[)\]]               # (B) Paris
      | (?P<marked>[A-Ja-j])(?:[)\]]|[.:;](?=\s|$)|$)    # B) Paris, b. Paris, b
      | (?P<led>[A-J])(?=\s*[,/&-]|\s)                    # B because it is
    )(?P<after>.*)""",
    re.VERBOSE | re.DOTALL,
)
_ANOTHER = re.compile(r"\s*(?:and|or|/|&|,)\s*[(\[]?[A-J](?:\W|$)")
_CONNECTIVE = re.compile(r"\s*(?:[,–—-]|\((?![A-J]\))|(?:because|since|as|is|was|for)\b)")


@dataclass(frozen=True, slots=True)
class ChoiceReference:
    """The right letter, and the options' texts, normalised, where they are known."""

    answer: str
    options: Mapping[str, str]


def choice_reference(reference: object) -> ChoiceReference:
    """Raises BadReference."""
    values = fields(reference, ("answer", "options"), CHOICE_WANTED)
    letter, options = values.get("answer"), values.get("options", {})
    if not isinstance(letter, str) or not re.fullmatch(r"\(?[A-Ja-j]\)?", letter.strip()):
        raise BadReference(f"choice needs {CHOICE_WANTED}")
    named = isinstance(options, Mapping) and all(
        isinstance(key, str) and re.fullmatch("[A-Ja-j]", key) and isinstance(text, str) and text.strip()
        for key, text in options.items()
    )
    texts = {key.upper(): normalise(text) for key, text in options.items()} if named else {}
    answer = letter.strip("() ").upper()
    if not named or len(set(texts.values())) != len(texts) or (texts and answer not in texts):
        raise BadReference(f"`options` must name each option once, the right one among them; give {CHOICE_WANTED}")
    return ChoiceReference(answer, texts)


def choice(right: ChoiceReference, reply: str) -> Judged:
    """1 where the final answer names the right option and no other, by letter or by its text."""
    answer = extract_answer(reply)
    letter = _letter(answer) or _by_text(answer, right.options)
    return float(letter == right.answer), f"chose {letter or 'nothing'} in `{shorten(answer)}`"


def _letter(answer: str) -> str | None:
    match = _LETTER.match(re.sub(r"[*_`$\"']|\\text|\\mathrm|[{}]", "", answer).strip())
    if match is None or _ANOTHER.match(match["after"]):
        return None
    led = match["led"]
    if led == "I" or (led == "A" and not _CONNECTIVE.match(match["after"])):
        return None  # "I think", "A dog": words, not options
    return str(match["bracketed"] or match["marked"] or led).upper()


def _by_text(answer: str, options: Mapping[str, str]) -> str | None:
    answer_text = normalise(answer.strip("*_` "))
    return next((letter for letter, text in options.items() if text == answer_text), None)
